"""Every operator by every backend: on the small inputs that users' kernels are compared on, and in torch's registry."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdp import ops
from fastdp.ops.common import DTYPES, bytes_of
from fastdp.ops.registry import OPERATORS
from fastdp.ops.kernel_inputs import trials

from . import backends

pytestmark = pytest.mark.slow  # `make test-all` runs it

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", [*backends.CPU, *backends.TRITON[:1]], indirect=True)
@pytest.mark.parametrize("name", list(OPERATORS))
def test_what_serves_passes_the_comparison_with_the_reference(backend: str, name: str) -> None:
    """Strided memory, one position, odd sizes, dropped samples of NaN, `out`, and what is left in arguments."""
    kinds = [dtype for dtype in DTYPES if not backend.startswith("Triton") or dtype != torch.float64]
    ops.check_kernel(name, device="cpu", dtypes=kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(OPERATORS))
def test_it_is_registered_soundly(name: str, dtype: torch.dtype) -> None:
    operator = OPERATORS[name]
    overload = getattr(getattr(torch.ops.fastdp, operator.packet), operator.overload)
    for trial in list(trials(name, CPU, dtype))[:2]:
        torch.library.opcheck(overload, trial.args, trial.kwargs)


TENSORS = {
    "strided": torch.arange(6).view(2, 3)[:, ::2],
    "one with a stride": torch.arange(6)[::6],
    "one of a column": torch.arange(8).view(4, 2)[:1, 0],
    "a number": torch.tensor(3.5),
    "none": torch.empty(0),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "truth values": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_are_those_of_numpy(name: str) -> None:
    assert bytes_of(TENSORS[name]) == np.ascontiguousarray(TENSORS[name].resolve_conj().numpy()).tobytes()
    short = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert bytes_of(short) == short.view(torch.int16).numpy().tobytes()


def test_one_code_for_each_type_in_python_and_in_c() -> None:
    """C++ and CUDA take types as numbers: of csrc/dtypes.h, which no other header repeats."""
    root = Path(__file__).parent.parent.parent / "csrc"
    found = re.findall(r"FASTDP_(\w+) = (\d+)", (root / "dtypes.h").read_text())
    assert {name.lower(): int(code) for name, code in found} == {
        str(dtype).removeprefix("torch."): code for dtype, code in DTYPES.items()
    }
    for path in (*root.rglob("*.h"), *root.rglob("*.cuh")):
        assert path.name == "dtypes.h" or not re.search(r"enum \{[^}]*FLOAT(32|16)", path.read_text()), path
