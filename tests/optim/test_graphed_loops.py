"""Replayed steps in loops of other make: by their backward, by a loss with a backward, for batches of many shapes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fastdp

from .test_graphed import B, Net, assert_equal, batch, eagerly, losses, pair

pytestmark = pytest.mark.slow  # `make test-all` runs it


@pytest.mark.parametrize("way", ["backward", "loss"])
def test_a_loop_with_a_step_of_its_own(way: str) -> None:
    (one, first), (two, second) = pair()
    step = second.graphed(losses, batch(99), sizes=(4, B))
    for number, size in enumerate((B, 5, 3, B, B + 2, 2)):  # one of them goes through Python
        a = eagerly(one, first, batch(number, size))
        if way == "backward":
            b = step.backward(*batch(number, size))
            assert not b.requires_grad
        else:
            b = step.loss(*batch(number, size))
            b.backward()
        assert not torch.equal(two.head.weight, one.head.weight)  # the step is still to be made
        second.step()
        second.zero_grad()
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
            q.data.copy_(p)  # Adam magnifies the rounding of padded sums
    assert (step.replayed, step.eager) == (5, 1)
    assert first.history == second.history == [(0.7, None, 6)]


# --------------------------------------------------------------------------- of many shapes


def texts(seed: int, length: int, size: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (size, length), generator=generator), torch.randint(0, 3, (size,), generator=generator)


def test_the_order_of_a_batch_s_parts_is_part_of_its_shape() -> None:
    """A loss may go by it."""

    def joined(model: Any, parts: dict[str, Tensor]) -> Tensor:
        x, y = parts.values()
        return losses(model, x, y)

    (one, first), (two, second) = pair()
    step = second.graphed(joined, sizes=(B,))
    for number in range(5):
        x, y = texts(number, 4)
        given = ({"x": x, "labels": y},)
        assert torch.equal(eagerly(one, first, given, joined), step(*given))
    assert_equal(one, two)
    assert step.replayed == 4


def test_every_shape_is_recorded_when_it_comes_again() -> None:
    (one, first), (two, second) = pair()
    step = second.graphed(losses, sizes=(B,))
    lengths = [3, 5, 3, 5, 3, 2, 5, 2, 2, 5]
    for number, length in enumerate(lengths):
        a, b = eagerly(one, first, texts(number, length)), step(*texts(number, length))
        assert torch.equal(a, b)
    assert_equal(one, two)
    assert (step.replayed, step.eager) == (len(lengths) - 3, 3)
    assert step.reasons == {"a shape that was not met before, or not often": 3}


def test_work_of_a_replay_is_not_taken_for_the_loss_of_a_loaders_batch() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(50, 16), nn.Linear(16, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return self.layer(self.words(ids)).tanh() @ self.words.weight.T

    optimizer = fastdp.DPSGD(Tied(), lr=0.1, noise_multiplier=1.0, max_grad_norm=0.5)
    step = optimizer.graphed(
        lambda model, ids: fastdp.losses.causal_lm_loss(model(ids), ids, reduction="none"), sizes=(4,)
    )
    data = TensorDataset(torch.randint(0, 50, (40, 12)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for (ids,) in fastdp.poisson_loader(data, sample_rate=0.1, steps=12, seed=3, max_physical_batch_size=4):
            step(ids)
    assert step.replayed > 5


@pytest.mark.parametrize("shapes", [True, False])
def test_within_a_logical_batch(shapes: bool) -> None:
    """Recorded between two physical batches, in the middle of a logical one, and with empty ones."""
    data, models = TensorDataset(*batch(7, 40)), []
    for graphed in (False, True):
        model = Net()
        optimizer = fastdp.DPSGD(model, lr=0.05, noise_multiplier=0.7, max_grad_norm=0.5, seed=5)
        step = optimizer.graphed(losses, sizes=(3,)) if shapes else optimizer.graphed(losses, batch(99), sizes=(3,))
        loader = fastdp.poisson_loader(data, sample_rate=0.1, steps=12, seed=3, max_physical_batch_size=3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number, (ids, labels) in enumerate(loader):
                if number == 5:
                    model.one.train(False)  # recorded again
                if graphed:
                    step(ids, labels)
                else:
                    eagerly(model, optimizer, (ids, labels))
        assert optimizer.history == [(0.7, 0.1, 12)]
        models.append(model)
        assert not graphed or step.replayed > 5
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------- Lightning
