"""What operators share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastdp.ops.common import bytes_of

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
    tensor = TENSORS[name]
    assert bytes_of(tensor) == np.ascontiguousarray(tensor.resolve_conj().numpy()).tobytes()


def test_bytes_of_bfloat16() -> None:
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert bytes_of(tensor) == tensor.view(torch.int16).numpy().tobytes()
