"""A process that dies: between its backward and its step, or once all have agreed and before the sums are there."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from fastdp.distributed.reduce import Reduction
from fastdp.errors import StepError

from .models import adamw, batch, build, loss_of
from .sharded import sharded


def _dies(rank: int, agreed: bool) -> float:
    model = build()
    ledger = Path(tempfile.mkdtemp()) / "ledger"
    optimizer = adamw(model, ledger=ledger)
    loss_of(model, batch(rank, 2)).backward()
    optimizer.step()
    before, key = [p.detach().clone() for p in model.parameters()], optimizer.noise_state()
    loss_of(model, batch(rank, 2)).backward()
    if rank == 1 and agreed:
        Reduction.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(StepError, match="a process is gone.*Nothing of this step was released here"):
        optimizer.step()
    assert optimizer.history == [(1.0, 0.1, 1)] and optimizer.noise_state() == key
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert ledger.read_bytes().count(b"\n") == 1 + 2  # the first rank wrote the step ahead, before it agreed to it
    with pytest.raises(StepError, match="stopped"):  # the same noise is never drawn on other sums
        loss_of(model, batch(rank, 2)).backward()
    return time.monotonic() - begun


def before_the_step(rank: int, world: int) -> float:
    return _dies(rank, agreed=False)


def within_the_step(rank: int, world: int) -> float:
    return _dies(rank, agreed=True)


def sharded_before_a_forward(rank: int, world: int) -> float:
    """The others' forward raises torch's own error, as the parts do not come; nothing is released."""
    model = sharded(build())
    optimizer = adamw(model)
    loss_of(model, batch(rank, 2)).backward()
    optimizer.step()
    before = [p.to_local().detach().clone() for p in model.parameters()]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        loss_of(model, batch(rank, 2)).backward()
    with pytest.raises(StepError):
        optimizer.step()
    assert optimizer.history == [(1.0, 0.1, 1)]
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before, strict=True))
    return time.monotonic() - begun


CASES = {"before_the_step": before_the_step, "within_the_step": within_the_step}
CASES["sharded_before_a_forward"] = sharded_before_a_forward
