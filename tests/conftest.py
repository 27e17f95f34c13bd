"""Settings of all tests. Routes do not depend on what this machine's clock says. Without a GPU Triton's kernels run in
its interpreter, which must be chosen before the first one is defined."""

import gc
import getpass
import os
import random
import secrets
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.cuda.random
import torch.mtia
import torch.xpu.random

os.environ["FASTDP_CALIBRATE"] = "0"
if not torch.cuda.is_available():
    # torch.manual_seed would keep the stack as text for the seeds of devices that are not here: 1 ms a seed
    for device in (torch.cuda.random, torch.xpu.random, torch.mtia):
        device._lazy_call = lambda call, **kinds: None  # type: ignore[union-attr]
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS gives equal bits, whatever the stream

from fastdp.batch_axis import current_batch, inputs
from fastdp.engine import later_copies, loss_tracking

from .compiled_models import fresh  # noqa: F401  (a fixture)
from .data.skipping import silent  # noqa: F401  (a fixture)
from .interpreted import patch_once_a_launch

patch_once_a_launch()
SELDOM = (7_000, 20, 20)  # ten times as seldom as is usual: a tenth of the tests' time went into collections
MANY = 50_000  # objects


def pytest_collection_finish(session: Any) -> None:
    """What was imported stays: without it each gc.collect() of a test takes 0.4 s."""
    gc.set_threshold(*SELDOM)
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def imported_stays() -> Iterator[None]:
    """What the tests of a file imported, as well: 130,000 objects with torch's compiler."""
    yield
    if len(gc.get_objects()) > MANY:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests, and processes that they start, leave behind lies in pytest's folder, of which it keeps three. What
    torch compiled stays where it is, for the next run."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("scratch"))


def pytest_unconfigure(config: Any) -> None:
    """What was imported may go, as libraries expect at the end."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test draws the same in every run, and something else than the others: its name is the seed, of keys as well. No
    loop over a loader, no output and no marked rows are left from the test before: an error's traceback keeps them
    until garbage is collected."""
    current_batch.ACTIVE.clear()
    inputs._marked.clear()
    later_copies.forget()
    loss_tracking.stop()
    seed = zlib.crc32(request.node.nodeid.encode())
    draw = random.Random(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(secrets, "randbits", draw.getrandbits)
    monkeypatch.setattr(secrets, "token_bytes", lambda count=32: draw.randbytes(count))
    monkeypatch.setattr(secrets, "token_hex", lambda count=32: draw.randbytes(count).hex())
