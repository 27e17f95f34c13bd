"""What `verify` counts as an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.errors import VerificationError
from fastdp.gradients import Gradients


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


@pytest.mark.parametrize("part", ["norm_sq", "clipped_sum"])
def test_the_routes_that_training_takes_are_compared(monkeypatch, part):
    """Not only the per-sample gradients themselves, which training never forms."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    batch = (torch.randn(4, 6), torch.randint(0, 2, (4,)))

    def loss(m, b):
        return F.cross_entropy(m(b[0]), b[1])

    assert fastdp.verify(model, loss, batch).ok
    right = getattr(Gradients, part)

    def wrong(self, *args, **kwargs):
        found = right(self, *args, **kwargs)
        return found * 0.98 if part == "norm_sq" else {key: total * 1.01 for key, total in found.items()}

    monkeypatch.setattr(Gradients, part, wrong)
    with pytest.raises(fastdp.errors.VerificationError, match="wrong per-sample gradients"):
        fastdp.verify(model, loss, batch)
