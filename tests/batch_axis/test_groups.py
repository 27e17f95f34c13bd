"""Records of one person as one sample: norms, clipped sums and gradients against persons alone, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp import PerSampleGradients
from fastdp.batch_axis.row_groups import numbers_of
from fastdp.errors import VerificationError
from fastdp.grad_sample.planner import Planner

from .. import cases
from ..truth import Comparison, Loss, norms_of, size, truth

TOLERANCE = 1e-5
# keys of records, repeated over the batch: two persons in turns, one with most records, persons in no order, one person
PATTERNS = {"turns": "abab", "most": "abbb", "mixed": "abcab", "pairs": "aabb", "one": "a"}


def keys_of(pattern: str, records: int) -> list[str]:
    return list((pattern * records)[:records])


def by_person(rows: dict[str, Tensor], keys: list[str]) -> dict[str, Tensor]:
    """Gradients by record -> their sums by person."""
    numbers = torch.tensor(numbers_of(keys)[0])
    count = int(numbers.max()) + 1
    return {n: torch.stack([g[numbers == person].sum(0) for person in range(count)]) for n, g in rows.items()}


def compare(model: nn.Module, batch: object, losses: Loss, keys: list[str], mean: bool = True, **options) -> Comparison:
    exact = by_person(truth(model, batch, losses), keys)
    norms = norms_of(exact)
    factors = (norms.median() / norms).clamp(max=1)
    engine = PerSampleGradients(model, loss_reduction="mean" if mean else "sum", **options)
    try:
        engine.group_by(keys)
        found = losses(model, batch)
        (found.mean() if mean else found.sum()).backward()
        ours, summed, rows = engine.norms().double(), engine.clipped_sum(factors.float()), engine.materialize()
    finally:
        engine.detach()
        model.zero_grad()
    assert ours.shape == norms.shape and set(summed) == set(exact) == set(rows)
    want = {n: torch.einsum("b,b...->...", factors, g) for n, g in exact.items()}
    wrong = sum(float((summed[n].double() - t).square().sum()) for n, t in want.items()) ** 0.5
    each = max(float((rows[n].double() - g).reshape(len(g), -1).norm(dim=1).max()) for n, g in exact.items())
    return Comparison(
        float(((ours - norms).abs() / norms).max()),
        wrong / sum(float(t.square().sum()) for t in want.values()) ** 0.5,
        each / float(norms.mean()),
        float(((norms - ours) / norms).max()),
        [],
    )


@pytest.mark.parametrize("number", range(len(cases.CASES)))
def test_every_kind_of_use(number: int) -> None:
    model, batch, losses = cases.build(list(cases.CASES)[number])
    pattern = list(PATTERNS.values())[number % len(PATTERNS)]
    assert compare(model, batch, losses, keys_of(pattern, size(batch)), mean=number % 2 == 0).worst < TOLERANCE


# --------------------------------------------------------------------------- routes and rooms of the engine


class Tokens(nn.Module):
    """A table that is also the head, blocks with a convolution, loops over samples, checkpoints."""

    def __init__(self, loop: bool = False, checkpointed: str = "") -> None:
        super().__init__()
        self.table, self.norm, self.inner = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.conv, self.up, self.loop, self.checkpointed = (
            nn.Conv1d(6, 6, 3, padding=1),
            nn.Linear(6, 6),
            loop,
            checkpointed,
        )

    def block(self, x: Tensor) -> Tensor:
        y = self.conv(self.norm(x).mT).mT
        if self.loop:
            return x + torch.stack([self.inner(row).tanh() for row in y])
        return x + self.up(self.inner(y).tanh())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.checkpointed:
            x = checkpoint(self.block, x, use_reentrant=self.checkpointed == "reentrant")
        else:
            x = self.block(x)
        return F.linear(x, self.table.weight)


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).mT, (ids + 1) % 11, reduction="none").mean(1)


def tokens(records: int = 7) -> Tensor:
    return torch.randint(0, 11, (records, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("routes", [("gram", "gram"), ("direct", "direct"), ("materialise", "direct")], ids="gdm")
@pytest.mark.parametrize("checkpointed", ["", "reentrant", "not reentrant"])
def test_routes_tied_tables_and_checkpoints(monkeypatch, pattern: str, routes: tuple[str, str], checkpointed: str):
    monkeypatch.setattr(Planner, "fastest", lambda *_: routes)
    materialises = "fastdp.grad_sample.planner.Planner.materialises"
    monkeypatch.setattr(materialises, lambda self, s, replaced, d, short: routes[0][0] == "m")
    torch.manual_seed(0)
    keys = keys_of(PATTERNS[pattern], 7)
    assert compare(Tokens(checkpointed=checkpointed), tokens(), token_losses, keys).worst < TOLERANCE


@pytest.mark.parametrize("pattern", PATTERNS)
def test_loops_over_records(pattern: str) -> None:
    torch.manual_seed(0)
    assert compare(Tokens(loop=True), tokens(), token_losses, keys_of(PATTERNS[pattern], 7)).worst < TOLERANCE


class Deep(nn.Module):
    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6)) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


@pytest.mark.parametrize("pattern", PATTERNS)
def test_two_backwards_under_a_memory_budget(pattern: str) -> None:
    torch.manual_seed(0)
    model, x, keys = Deep(), torch.randn(7, 4, 6), keys_of(PATTERNS[pattern], 7)
    losses = lambda model, x: model(x).square().sum((1, 2))
    assert compare(model, x, losses, keys, memory_budget=1).worst < TOLERANCE
    engine = PerSampleGradients(model, memory_budget=1)
    engine.group_by(keys)
    losses(model, x).mean().backward()
    assert f"{len(set(keys))} groups of 7 records" in engine.explain() and "two backwards" in engine.explain()


def test_compiled() -> None:
    torch.manual_seed(0)
    plain, x = Deep(checkpointed=False), torch.randn(6, 4, 6)
    model = copy.deepcopy(plain)
    model.compile(backend="aot_eager")
    engine = PerSampleGradients(model)
    for keys in ("aabcca", "abcdef", "aaabcb"):
        exact = norms_of(by_person(truth(plain, x, lambda m, x: m(x).square().sum((1, 2))), list(keys)))
        engine.group_by(list(keys))
        model(x).square().sum((1, 2)).mean().backward()
        torch.testing.assert_close(engine.norms().double(), exact, rtol=1e-5, atol=0)
    engine.detach()
    torch._dynamo.reset()


# --------------------------------------------------------------------------- verify


def mixed_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().flatten(1).sum(1)


def test_verify_by_person() -> None:
    report = fastdp.verify(mixed_model(0), squares, torch.randn(12, 2, 5), group_by=list("aabbbcadeeef"), samples=4)
    assert report.ok and report.samples == 4
    assert fastdp.verify(mixed_model(0), squares, torch.randn(6, 2, 5), group_by=[3, 3, 1, 1, 2, 1]).samples == 3
    with pytest.raises(ValueError, match="2 keys for a batch of 6"):
        fastdp.verify(mixed_model(0), squares, torch.randn(6, 2, 5), group_by=[1, 2])


def test_a_loss_may_combine_the_records_of_a_person_but_not_of_two() -> None:
    x, keys = torch.randn(6, 2, 5), [0, 0, 0, 1, 1, 1]
    variance = lambda out: ((out - out.mean(0)) ** 2).sum()
    pairs = lambda model, batch: sum(variance(part) for part in model(batch).split(3))
    assert fastdp.verify(mixed_model(0), pairs, x, group_by=keys, loss_reduction="sum").ok
    with pytest.raises(VerificationError, match="depends on other samples"):
        fastdp.verify(mixed_model(0), lambda model, x: variance(model(x)), x, group_by=keys, loss_reduction="sum")
