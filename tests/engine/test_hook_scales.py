"""Hooks that are not linear in the scale of gradients: refused under a mean loss, right under a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import SampleMixingError

from .test_activation_hooks import BEFORE, FULL, Net, changing, check_right, hooked, in_place, on_tensor

BATCH = 6


def filled(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Written into a tensor of zeros, row by row of columns."""

    def hook(grad: Tensor) -> Tensor:
        out = torch.zeros_like(grad)
        out[:, 1:] = change(grad)[:, 1:]
        return out

    return hook


BENT: dict[str, Callable[[Tensor], Any]] = {
    "one length": lambda g: F.normalize(g, dim=-1) * 0.1,
    "signs": lambda g: g.sign() * 0.1,
    "added": lambda g: g + 0.1,
    "noise": lambda g: g + 0.1 * torch.randn_like(g),
    "clamp": lambda g: g.clamp(-0.1, 0.1),
    "clamp that does nothing yet": lambda g: g.clamp(-1e3, 1e3),
    "clipped rows": lambda g: g * (0.1 / g.norm(dim=1, keepdim=True)).clamp(max=1),
    "squares": lambda g: g * g.abs(),
    "in place": in_place(lambda g: g.clamp_(-0.1, 0.1)),
    "a column in place": in_place(lambda g: g[:, 0].clamp_(max=0.1)),
    "filled": filled(lambda g: g.tanh()),
    "below a threshold": lambda g: g.masked_fill(g.abs() < 1e-3, 0.0),
    "a constant activation": lambda g: g + 0.1 * torch.ones_like(g),
}
STRAIGHT: dict[str, Callable[[Tensor], Any]] = {
    "half": lambda g: g * 0.5,
    "reversed": lambda g: -0.3 * g,
    "without nan": lambda g: torch.nan_to_num(g),
    "masked": lambda g: g * (torch.arange(g.size(1)) > 2),
    "positive": lambda g: g.clamp(min=0),
    "above a part of the largest": lambda g: g * (g.abs() > 0.1 * g.abs().amax(1, keepdim=True)),
    "without its mean": lambda g: g - g.mean(1, keepdim=True),
    "another direction": lambda g: g.norm(dim=1, keepdim=True) * F.normalize(g, dim=1).roll(1, 1),
    "centred by length": lambda g: g / (g.norm(dim=1, keepdim=True) + 1e-12) * g.abs().sum(1, keepdim=True),
    "in place": in_place(lambda g: g.mul_(0.5)),
    "a column": in_place(lambda g: g[:, 0].zero_()),
    "filled": filled(lambda g: g * 2),
    "dropout": lambda g: F.dropout(g, 0.5),
    "zeros": lambda g: torch.zeros_like(g),
}


def train(build: Callable[[], nn.Module], reduction: str = "mean", inputs: float = 3.0) -> Tensor:
    torch.manual_seed(0)
    x = inputs * torch.randn(BATCH, 5)
    engine = fastdp.PerSampleGradients(model := build(), loss_reduction=reduction)
    losses = model(x).square().sum(1)
    try:
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        return engine.norms()
    finally:
        engine.detach()


@pytest.mark.parametrize("name", BENT)
def test_refused_under_a_mean(name: str) -> None:
    with pytest.raises(SampleMixingError, match="loss_reduction='sum'"):
        train(lambda: Net(on_tensor(BENT[name])))


@pytest.mark.parametrize("name", [name for name in BENT if name != "noise"])
def test_right_under_a_sum(name: str) -> None:
    check_right(lambda: Net(on_tensor(BENT[name])))


@pytest.mark.parametrize("inputs", [3.0, 1e-4, 1e4, 0.0])
@pytest.mark.parametrize("name", STRAIGHT)
def test_in_proportion_goes_on_working(name: str, inputs: float) -> None:
    mean, total = (train(lambda: Net(on_tensor(STRAIGHT[name])), kind, inputs) for kind in ("mean", "sum"))
    torch.testing.assert_close(mean, total, rtol=1e-4, atol=1e-12)


def test_hooks_on_modules() -> None:
    for register in (FULL, BEFORE):
        for name in ("signs", "clamp"):
            bent = hooked(register, changing(BENT[name]))
            with pytest.raises(SampleMixingError, match="hook on a module.*linear"):
                train(bent)
            train(bent, "sum")
        train(hooked(register, changing(STRAIGHT["reversed"])))


def test_hooks_on_outputs_and_on_sums() -> None:
    model, size = Net(), 4
    engine = fastdp.PerSampleGradients(model)
    out = model(torch.randn(size, 5))
    out.register_hook(BENT["clamp"])
    with pytest.raises(SampleMixingError, match="linear"):
        out.square().sum(1).mean().backward()
    total = model(torch.randn(size, 5)).square().sum()
    total.register_hook(lambda g: g.clamp(max=0.2))
    with pytest.raises(SampleMixingError, match="linear"):
        (total / size).backward()
    loss = model(torch.randn(size, 5)).square().sum(1).mean()
    loss.register_hook(lambda g: g.clamp(max=0.5))  # the gradient of the loss is 1, however many there are
    loss.backward()
    assert engine.norms().shape == (size,)


def test_a_hook_is_called_once() -> None:
    seen: list[float] = []

    def hook(grad: Tensor) -> Tensor:
        seen.append(float(grad.shape[0]))
        return -grad

    train(lambda: Net(on_tensor(hook)))
    assert seen == [BATCH]


def test_of_sixteen_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for hook, refused in ((BENT["signs"], True), (STRAIGHT["half"], False)):
            engine = fastdp.PerSampleGradients(model := Net(on_tensor(hook)).to(dtype))
            loss = model(torch.randn(BATCH, 5).to(dtype)).square().sum(1).mean()
            if refused:
                with pytest.raises(SampleMixingError, match="linear"):
                    loss.backward()
            else:
                loss.backward()
                assert engine.norms().shape == (BATCH,)
            engine.detach()


def test_gradients_that_are_no_numbers() -> None:
    def hook(grad: Tensor) -> Tensor:
        return torch.nan_to_num(grad, 0.0, 0.0, 0.0)

    engine = fastdp.PerSampleGradients(model := Net(on_tensor(hook)))
    x = torch.randn(BATCH, 5)
    x[2] = float("nan")
    model(x).square().sum(1).mean().backward()
    assert engine.norms().shape == (BATCH,)
