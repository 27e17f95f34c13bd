"""fastdp.audit of DP-FTRL: steps that each begin a tree pass, and steps whose noise is left out or too small fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdp.audit import TorchTrainable, assert_private, audit
from fastdp.mechanisms import DPFTRL, ftrl_loader
from fastdp.mechanisms.tree import TreeNoise

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LR = 0.1
TESTS = ("no_clipping", "minibatch_clipping", "sensitivity", "noise_distribution", "noise_scale")


def train(model: nn.Module, batches: Any, *, clipping_norm: float, noise_multiplier: float, **_: Any) -> None:
    """A pass of one step for each batch, so that every step is a tree of its own: no noise of one is in another."""
    for x, y in batches:
        optimizer = DPFTRL(model, lr=LR, noise_multiplier=noise_multiplier, max_grad_norm=clipping_norm)
        for inputs, labels in ftrl_loader(list(zip(x, y, strict=True)), batch_size=len(y)):
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.detach()


def batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, 12, generator=draw), torch.randint(4, (size,), generator=draw)


def subject() -> TorchTrainable:
    return TorchTrainable(
        lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)), train=train, loss=F.cross_entropy,
        make_batch=batch, loss_kind="cross_entropy", learning_rate=LR, seeded=False,
    )  # fmt: skip


def test_a_step_that_begins_a_tree_passes() -> None:
    assert_private(subject(), TESTS)


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_noise_that_is_left_out_or_too_small_fails(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TreeNoise._draw
    monkeypatch.setattr(TreeNoise, "_draw", lambda *arguments: right(*arguments).mul_(share))
    report = audit(subject(), ["noise_scale"])
    assert not report.ok and report["noise_scale"] in report.bugs
