"""verify says which parameters it could not test because nothing reached them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fastdp import verify


def test_parameters_behind_zeros_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batch = (torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1])
    whole = verify(model, loss, batch)
    assert whole.ok and whole.untested == [] and "not tested" not in str(whole)
    nn.init.zeros_(model[2].weight)
    found = verify(model, loss, batch)
    assert found.ok and found.untested == ["0.weight", "0.bias"]
    assert "not tested: 2 of 4 parameters" in str(found) and "0.weight" in str(found)
