"""What `verify` counts as an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fastdp
from fastdp.errors import VerificationError


def test_samples_that_cancel_are_exact():
    """Two labels on like inputs, as a new head has them at the start: the sum is rounding, each gradient is not."""
    torch.manual_seed(0)
    body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    torch.nn.init.normal_(head.weight, std=1e-6)
    torch.nn.init.zeros_(head.bias)
    model = torch.nn.Sequential(body, torch.nn.Tanh(), head)
    x = torch.randn(1, 8).expand(4, 8) + 1e-6 * torch.randn(4, 8)
    loss = lambda m, batch: F.cross_entropy(m(batch[0]), batch[1])
    report = fastdp.verify(model, loss, (x, torch.tensor([0, 1, 0, 1])))
    assert report.sum_error < 1e-5 and report.norm_error < 1e-5
    with pytest.raises(VerificationError):  # and what is wrong is still found
        fastdp.verify(model, lambda m, b: loss(m, b) * 1.001, (x, torch.tensor([0, 1, 0, 1])), loss_reduction="sum")
