"""What a replayed step refuses: by name, and the optimizer goes on as before."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import FastDPError, GraphError
from fastdp.losses import DPLoss

from .test_graphed import B, Net, batch, eagerly, losses, pair


def counting(m: Any, ids: Tensor) -> Tensor:
    m.count += 1
    return m.head(m.body(ids).mean(1)) * m.count


def buffered(m: Any, ids: Tensor) -> Tensor:
    m.seen += 1
    return m.head(m.body(ids).mean(1))


def by_numpy(m: Any, ids: Tensor) -> Tensor:
    return m.head(m.body(ids).mean(1)) * float((ids.numpy() ** 3).mean())


def by_item(m: Any, ids: Tensor) -> Tensor:
    return m.head(m.body(ids).mean(1)) * (1 + ids[0, 0].item())


def by_random(m: Any, ids: Tensor) -> Tensor:
    return m.head(m.body(ids).mean(1)) * (2.0 if random.random() > 2 else 1.0)


def from_numpy(m: Any, ids: Tensor) -> Tensor:
    return m.head(m.body(ids).mean(1)) + torch.from_numpy((ids.numpy() * 0 + 1).astype("float32"))[:, :3]


def checkpointed(m: Any, ids: Tensor) -> Tensor:
    m.drop.p = 0.5
    return m.head(checkpoint(m.body, ids, use_reentrant=False).mean(1))


def weight_normed(m: Any, ids: Tensor) -> Tensor:
    return F.linear(m.body(ids).mean(1), m.head.weight / m.head.weight.norm())


def averaging(m: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        m.average.lerp_(m.head.weight, 0.5)
    return m.head(m.body(ids).mean(1)) + F.linear(m.body(ids).mean(1), m.average).detach()


def averaging_data(m: Any, ids: Tensor) -> Tensor:
    m.average.data = m.average.data * 0.5 + m.head.weight.data * 0.5
    return m.head(m.body(ids).mean(1)) + F.linear(m.body(ids).mean(1), m.average).detach()


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a counter": (counting, "changes its 'count' each time"),
    "a buffer": (buffered, "add_\\(\\) writes to 'seen' in the forward"),
    "an average of weights": (averaging, "lerp_\\(\\) writes to 'average' in the forward"),
    "an average that is given": (averaging_data, "other memory is given to 'average' in the forward"),
    "numpy": (by_numpy, r"numpy\(\) gives numbers of the batch to Python \(test_graphed_refused.py, line \d+\)"),
    "a number": (by_item, "not the same for two batches of one size: (mul|Python)"),
    "Python's random": (by_random, "numbers of Python's random"),
    "dropout that is drawn again": (checkpointed, "set back, as checkpointing does"),
    "a weight norm": (weight_normed, "made of parameters by other functions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_is_refused(name: str) -> None:
    """By name, and the optimizer goes on as before."""
    forward, message = REFUSED[name]
    model = Net(forward)
    model.average = nn.Parameter(torch.ones_like(model.head.weight), requires_grad=False)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=B)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(GraphError, match=message):
            optimizer.graphed(losses, batch(1))
        assert float(model.seen) == 0 and bool((model.average == 1).all()) and optimizer.history == []
        eagerly(model, optimizer, batch(2))
    assert len(optimizer.history) == 1


def test_losses_and_batches_of_another_form() -> None:
    (_, _), (model, optimizer) = pair()
    with pytest.raises(GraphError, match=r"must return the loss of each sample, \[6\]; it returned shape \(\)"):
        optimizer.graphed(lambda m, *data: losses(m, *data).mean(), batch(1))
    with pytest.raises(GraphError, match="row for each sample"):
        optimizer.graphed(losses, ())
    with pytest.raises(ValueError, match="sizes must be whole numbers"):
        optimizer.graphed(losses, batch(1), sizes=(0, 4))
    outer = torch.randn(B, 3)
    with pytest.raises(GraphError, match=r"takes a tensor of shape \(6, 3\) that is neither of its batch"):
        optimizer.graphed(lambda m, ids, labels: F.cross_entropy(m(ids) + outer, labels, reduction="none"), batch(1))
    step = optimizer.graphed(losses, batch(1))
    with pytest.raises(GraphError, match="other parts than the example"):
        step(batch(1)[0])
    with pytest.raises(GraphError, match="one for each sample"):
        step(batch(1)[0], batch(1, 3)[1])
    with pytest.warns(UserWarning, match=r"of shape \(6, 4\)"):
        step(batch(1)[0][:, :4], batch(1)[1])
    optimizer.group_by([0, 0, 1, 1, 2, 3])
    with pytest.raises(GraphError, match="group_by"):
        step(*batch(1))
    model = Net()
    kept = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=B, memory_budget=10**9
    )
    with pytest.raises(GraphError, match="memory_budget"):
        kept.graphed(losses, batch(1))
    optimizer.detach()
    with pytest.raises(FastDPError, match="detached"):
        step(*batch(1))


def test_what_is_trained_beside_the_model_is_refused() -> None:
    """Its gradients would not be computed, without a word."""
    (_, _), (model, optimizer) = pair()
    temperature = torch.ones((), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(GraphError, match="none of the model's parameters"):
            optimizer.graphed(lambda m, *data: losses(m, *data) * temperature, batch(1))
    part = Net()
    options = dict(lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=B)
    half = fastdp.DPSGD(part, params=part.one.parameters(), **options)
    with pytest.raises(GraphError, match="are not this optimizer's"):
        half.graphed(losses, batch(1))
    loss = DPLoss(model, threshold=0, beta=1.0, layers=["one"])
    with pytest.raises(GraphError, match="a DPLoss weighs its terms by its epoch"):
        optimizer.graphed(lambda m, ids, labels: loss(m(ids), labels, reduction="none"), batch(1))
    loss.remove()
    step = optimizer.graphed(losses, batch(1))
    with pytest.raises(GraphError, match="requires grad"):
        step(batch(1)[0], batch(1)[1].float().requires_grad_())
