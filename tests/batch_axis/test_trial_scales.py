"""Functions that are asked by value: at several sizes of numbers, as a threshold may lie beyond those of N(0, 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdp.errors import SampleMixingError

from ..removal import Between, of_rows

B, D = 5, 4


@torch.library.custom_op("fastdp_tests::bounded", mutates_args=())
def bounded(x: Tensor, largest: float, smallest: float) -> Tensor:
    """Scales all rows by their common size, where it is out of bounds."""
    size = x.abs().amax()
    if size > largest or size < smallest:
        return x / size
    return x.clone()


@bounded.register_fake
def _(x: Tensor, largest: float, smallest: float) -> Tensor:
    return torch.empty_like(x)


bounded.register_autograd(lambda ctx, grad: (grad, None, None))


@torch.library.custom_op("fastdp_tests::tied", mutates_args=())
def tied(x: Tensor) -> Tensor:
    """The number of zeros in a column, where there is one."""
    return x + (x == 0).sum(0).to(x.dtype)


@tied.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


tied.register_autograd(lambda ctx, grad: grad)

MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "renorm of large numbers": lambda m, h: torch.renorm(h * 50, 2, 1, 10.0),
    "renorm by keyword": lambda m, h: torch.renorm(h * 50, p=2, dim=1, maxnorm=10.0),
    "renorm in place": lambda m, h: (h * 50).renorm_(2, 1, 10.0),
    "a largest size": lambda m, h: bounded(h * 500, 100.0, 0.0),
    "a smallest size": lambda m, h: bounded(h / 500, 1e9, 0.1),
    "ties": lambda m, h: tied(h.relu()),
    "quantile": lambda m, h: h - torch.quantile(h, 0.5, dim=0, keepdim=True),
    "kthvalue": lambda m, h: h - h.kthvalue(2, 0, keepdim=True).values,
    "histogram": lambda m, h: h * torch.histogram(h.detach(), D).hist,
    "msort": lambda m, h: torch.msort(h),
}


@pytest.mark.parametrize("name", MIXING)
def test_couplings_beyond_a_threshold_are_refused(name: str) -> None:
    torch.manual_seed(0)
    model, x = Between(MIXING[name]), torch.randn(B, D)
    for _ in range(2):  # an answer that is no is given again
        with pytest.raises(SampleMixingError):
            of_rows(model, x)


def test_renorm_of_each_sample_is_exact() -> None:
    model = Between(lambda m, h: torch.renorm(h * 50, 2, 0, 10.0) + h.renorm(1, 0, 0.1))
    assert of_rows(model, torch.randn(B, D)) < 1.0001


def test_functions_with_thresholds_of_their_own_go_on() -> None:
    model = Between(
        lambda m, h: F.threshold(h, 0.5, 0.0) + F.hardtanh(h * 30) + h.topk(D, 1).values + h.mode(1, True)[0]
    )
    assert of_rows(model, torch.randn(B, D)) < 1.0001
