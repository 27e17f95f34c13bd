"""What the first step costs: whether a call couples samples is asked with few numbers, whatever the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import SampleMixingError

WORDS, B, T = 20_011, 8, 16


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "the batch is rolled": lambda h: torch.cat([h, h.roll(1, 0)], -1),
    "samples are sorted": lambda h: h.sort(0).values,
    "the largest of the batch": lambda h: h - h.amax(0, keepdim=True),
    "norms over the batch": lambda h: h / h.norm(dim=0, keepdim=True),
    "a mirror": lambda h: F.pad(h.movedim(0, -1), (1, 1), mode="circular")[..., 2:].movedim(-1, 0),
    "by place": lambda h: torch.einsum("btv,b->btv", h, torch.arange(float(len(h)))),
    "einsum over samples": lambda h: torch.einsum("btv,ctv->btv", h, h),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("long", [7, 9_001])
def test_what_couples_samples_is_refused_at_any_length(name: str, long: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, long)

        def forward(self, x: Tensor) -> Tensor:
            return COUPLED[name](self.layer(x))

    model = Model()
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        model(torch.randn(B, 2, 3)).square().flatten(1).mean(1).mean().backward()


@torch.library.custom_op("fastdp_tests::next_if_long", mutates_args=())
def next_if_long(x: Tensor) -> Tensor:
    return x.roll(1, 0) if x.size(-1) > 1000 else x.clone()


def test_a_users_operator_is_asked_at_its_own_size() -> None:
    """Whatever it does may depend on sizes."""
    torch.library.register_autograd("fastdp_tests::next_if_long", lambda ctx, g: g.roll(-1, 0))
    torch.library.register_fake("fastdp_tests::next_if_long", lambda x: torch.empty_like(x))
    model = nn.Linear(3, 9_001)
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        next_if_long(model(torch.randn(B, 2, 3))).square().flatten(1).mean(1).mean().backward()
