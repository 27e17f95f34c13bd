"""The replayed private step against the eager one, bit by bit, with the same seed; and what it refuses."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import fastdp
from fastdp.errors import FastDPError, VerificationError

B = 6


class Net(nn.Module):
    """Layers of several kinds, and a forward to choose."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head, self.drop = nn.Linear(8, 3), nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(8))
        self.own, self.count, self.calls = forward, 0, list[int]()
        self.register_buffer("seen", torch.zeros(()))

    def body(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.size(1)))
        x = x + self.drop(torch.tanh(self.two(F.gelu(self.one(self.norm(x))))))
        return x * self.scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids).mean(1)) if self.own is None else self.own(self, ids)


def losses(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids), labels, reduction="none")


def batch(seed: int, size: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (size, 5), generator=generator), torch.randint(0, 3, (size,), generator=generator)


def pair(make: Callable[[], nn.Module] = Net, base: str = "DPAdamW", **options: Any) -> list[Any]:
    """Two equal models and optimizers with the same noise."""
    options = {
        "lr": 0.05,
        "noise_multiplier": 0.7,
        "max_grad_norm": 0.5,
        "expected_batch_size": B,
        "seed": 5,
        **options,
    }
    return [(model, getattr(fastdp, base)(model, **options)) for model in (make(), make())]


def eagerly(model: nn.Module, optimizer: Any, data: tuple[Tensor, ...], loss_fn: Any = losses) -> Tensor:
    each = loss_fn(model, *data)
    total = each.mean() if optimizer._privacy.loss_reduction == "mean" else each.sum()
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return total.detach()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [m for _ in range(3) for m in (nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def pictures(seed: int, size: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 6, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


OPTIONS: dict[str, dict[str, Any]] = {
    "local": {},
    "a function": dict(clipping=lambda norms: 0.5 / (norms + 1)),
    "layerwise": dict(style="layerwise"),
    "sum": dict(loss_reduction="sum"),
    "in two passes": dict(base="DPRMSprop"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_twenty_steps_are_bit_equal(name: str) -> None:
    """New data, and changes of lr, noise and clipping on the way."""
    (one, first), (two, second) = pair(**OPTIONS[name])
    step = second.graphed(losses, batch(99))
    for k in range(20):
        for optimizer in (first, second):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + k)
            optimizer.noise_multiplier = 0.7 + 0.1 * (k % 3)
            if k == 10 and name in ("local", "layerwise", "sum"):
                optimizer.set_clipping("automatic" if name == "local" else None, 0.3)
        assert torch.equal(eagerly(one, first, batch(k)), step(*batch(k)))
        for a, b in zip(
            *[o.norms.values() if isinstance(o.norms, dict) else [o.norms] for o in (first, second)], strict=True
        ):
            assert torch.equal(a, b)
        assert_equal(one, two)
    assert (step.replayed, step.eager) == (20, 0)
    assert first.history == second.history and first.nonfinite_samples == second.nonfinite_samples == 0
    assert second.explain().count("\n") > len(list(two.parameters()))  # the routes of a replay are known


@pytest.mark.parametrize("sizes", [None, (2, 6, 8)])
def test_convolutions_and_padding(sizes: tuple[int, ...] | None) -> None:
    """Batches of other sizes are padded, of which nothing is read: the sums are those of the samples alone."""
    (one, first), (two, second) = pair(conv_net, "DPSGD", noise_multiplier=0.0)
    step = second.graphed(losses, pictures(99), sizes)
    for k, size in enumerate((6, 5, 1, 2, 6)):
        a, b = eagerly(one, first, pictures(k, size)), step(*pictures(k, size))
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(first.norms, second.norms)
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    assert step.replayed == 5


@pytest.mark.parametrize(("physical", "verify_every"), [(None, 0), (3, 1)])
def test_a_poisson_loader(physical: int | None, verify_every: int) -> None:
    """Physical batches add up, empty ones are noise alone, and the ledger is the same."""
    data = TensorDataset(*batch(7, 30))
    models, histories = [], []
    for graphed in (False, True):
        model = Net()
        optimizer = fastdp.DPSGD(model, lr=0.05, noise_multiplier=0.7, max_grad_norm=0.5, seed=5)
        step = optimizer.graphed(losses, batch(99), sizes=(2, 4, 12), verify_every=verify_every) if graphed else None
        loader = fastdp.poisson_loader(data, sample_rate=0.08, steps=12, seed=3, max_physical_batch_size=physical)
        sizes = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for ids, labels in loader:
                sizes.append(len(ids))
                if step is not None:
                    step(ids, labels)
                else:
                    eagerly(model, optimizer, (ids, labels))
        models.append(model)
        histories.append(optimizer.history)
        assert min(sizes) == 0 and (step is None or step.eager == 0)
    assert histories[0] == histories[1] == [(0.7, 0.08, 12)]
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # products of more rows round otherwise


def test_the_recording_leaves_no_trace() -> None:
    """No random number, no gradient, no step, no changed buffer."""
    model = Net(dropout=0.4)
    optimizer = fastdp.DPAdamW(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=B)
    torch.manual_seed(3)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.graphed(losses, batch(1))
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert (states[2] == numpy.random.get_state()[1]).all()
    assert optimizer.history == [] and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(FastDPError, match="without a backward"):
        optimizer.step()


def test_autocast_and_checkpointing() -> None:
    def blocks(m: Any, ids: Tensor) -> Tensor:
        return m.head(checkpoint(m.body, ids, use_reentrant=False).mean(1))

    def cast(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model, ids, labels)

    for make, loss_fn in ((lambda: Net(blocks), losses), (Net, cast)):
        (one, first), (two, second) = pair(make)
        step = second.graphed(loss_fn, batch(99))
        for k in range(3):
            assert torch.equal(eagerly(one, first, batch(k), loss_fn), step(*batch(k)))
        assert_equal(one, two)
        assert step.eager == 0


# --------------------------------------------------------------------------- what changes


def moved(m: Any) -> None:
    m.one.weight.data = m.one.weight.data.clone() * 2


def test_branches_on_numbers_are_seen() -> None:
    """A batch that the model's Python takes another way goes through Python, and is right."""

    def forward(m: Any, ids: Tensor) -> Tensor:
        out = m.head(m.body(ids).mean(1))
        return out * 2 if bool((ids == 0).any()) else out

    (one, first), (two, second) = pair(lambda: Net(forward))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = second.graphed(losses, (batch(99)[0].clamp(min=1), batch(99)[1]))
        for k in range(6):
            ids, labels = batch(k)
            data = (ids.clamp(min=1) if k % 2 else torch.cat([torch.zeros_like(ids[:, :1]), ids[:, 1:]], 1)), labels
            assert torch.equal(eagerly(one, first, data), step(*data))
            assert_equal(one, two)
    assert (step.replayed, step.eager) == (3, 3) and list(step.reasons) == [
        "Python decides by the numbers of this batch another way"
    ]


def test_verify_every_finds_what_changes_unseen() -> None:
    """An attribute that the loss takes, which no argument shows."""
    (_, _), (model, optimizer) = pair()
    factor = [1.0]
    step = optimizer.graphed(lambda m, *data: losses(m, *data) * factor[0], batch(1), verify_every=3)
    for k in range(4):
        step(*batch(k))
    factor[0] = 2.0
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(VerificationError, match="norms, .*embed.weight"):
        for k in range(3):
            before = [p.clone() for p in model.parameters()]
            step(*batch(k))
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)
