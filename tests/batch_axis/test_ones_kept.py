"""Ones of the shape of a batch may be kept as a constant for later ones; data that was written to them may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fastdp.errors import SampleMixingError

from ..programs_by_hand import C, run
from .test_kept_states import keeping


def once(make):
    """What is made of the first batch alone, and kept."""
    return lambda h, kept: make(h.detach()) if kept is None else kept


def ones(write):
    """Ones, in the shape of the first batch, to which data is written."""

    def made(h):
        found = torch.ones_like(h)
        write(found, h)
        return found

    return once(made)


@pytest.mark.parametrize("make", [torch.ones_like, torch.zeros_like])
def test_ones_of_the_shape_of_data_may_be_kept(make: Callable[..., torch.Tensor]) -> None:
    """A constant by place in later batches, as one that torch.ones(h.shape) makes."""
    assert len(run(keeping(lambda h, kept: h * (1 + kept), once(make)), sizes=(6, 6, 6, 6))) == 4


SIZED_BY_DATA = {
    "some rows": lambda h: torch.ones_like(h[h[:, 0] > 0]),
    "the longest": lambda h: torch.ones_like(nn.utils.rnn.pad_sequence([row[row > 0] for row in h], batch_first=True)),
}


@pytest.mark.parametrize("name", SIZED_BY_DATA)
def test_ones_as_many_as_data_says_are_a_state(name: str) -> None:
    with pytest.raises(SampleMixingError, match="earlier batch"):
        run(keeping(lambda h, kept: h * kept.sum(), once(SIZED_BY_DATA[name])), sizes=(6, 6, 6))


DATA_IN_A_SHAPE = {
    "written over": ones(lambda made, h: made.copy_(h)),
    "in place": ones(lambda made, h: made.mul_(h)),
    "through .data": ones(lambda made, h: made.data.copy_(h)),
    "through .data, by a parameter": ones(lambda made, h: made.data.addcmul_(h, torch.ones(h.size(1)))),
    "through a view": ones(lambda made, h: made.detach().view(-1)[:2].copy_(h[0, :2])),
    "through parts": ones(lambda made, h: made.data.split(1, 1)[0].copy_(h[:, :1])),
    "as out=": ones(lambda made, h: torch.mul(h, 2, out=made)),
    "added": once(lambda h: torch.ones_like(h) + h),
    "a count": once(lambda h: torch.ones_like(h[h[:, 0] > 0]).sum()),
    "filled with a number read": once(lambda h: torch.ones_like(h) * h.mean().item()),
    "a later batch's": lambda h, kept: torch.ones_like(h) if kept is None else kept.data.copy_(h).add(0),
}


@pytest.mark.filterwarnings("ignore::fastdp.errors.BatchReadWarning")
@pytest.mark.parametrize("name", DATA_IN_A_SHAPE)
def test_data_in_what_was_made_of_a_shape_is_a_state(name: str) -> None:
    with pytest.raises(SampleMixingError, match="earlier batch"):
        run(keeping(lambda h, kept: h * kept, DATA_IN_A_SHAPE[name]), sizes=(6, 6, 6))


def test_weights_of_the_losses_that_a_later_batch_fills_out_of_sight() -> None:
    """Ones when they were made, and in the batch after that."""
    kept = []

    def loss(out, labels):
        losses = out.square().sum(1)
        kept.extend([] if kept else [torch.ones_like(losses)])
        found = (losses * kept[0].clone()).mean()
        if len(kept) > 1:
            kept[0].data.copy_(5 * losses.detach())
        kept.append(None)
        return found

    with pytest.raises(SampleMixingError, match="earlier batch"):
        run(lambda m, h: h, loss, sizes=(6, 6, 6, 6))


@pytest.mark.parametrize("use", [torch.clone, lambda c: (c / 0.1).softmax(0), lambda c: 1 + c, torch.exp])
def test_a_constant_of_the_loss_that_holds_outputs_out_of_sight(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    centre = torch.zeros(C)

    def loss(out, labels):
        found = (out - use(centre)).square().sum(1).mean()
        centre.data.mul_(0.5).add_(out.detach().mean(0))
        return found

    with pytest.raises(SampleMixingError, match="earlier batch|along the batch"):
        run(lambda m, h: h, loss, sizes=(6, 6, 6))
