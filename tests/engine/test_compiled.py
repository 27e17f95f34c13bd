"""torch.compile before the private optimizer: exact, whatever was compiled, and by compiled code where it can be.

Most tests use backends without code generation, which see the same graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastdp import PerSampleGradients

from ..cases import Net, P
from ..compiled_models import (
    MODELS,
    B,
    D,
    Language,
    Way,
    assert_exact,
    build,
    in_place,
    losses,
    parts,
    rows,
    tokens,
    whole,
)
from ..truth import norms_of, truth

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh")]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("way,backend", [(whole, "aot_eager"), (in_place, "eager"), (parts, "eager")])
def test_exact(name: str, way: Callable[..., Way], backend: str, ran: dict[str, int]) -> None:
    """Three steps: interpreted, compiling, compiled; eval mode and no_grad between; all gone after detach."""
    plain, batch = build(name, **({"layers": 2} if way is parts and name == "language" else {}))
    model = way(backend)(copy.deepcopy(plain))
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, batch())
        with torch.no_grad():
            x = batch()
            torch.testing.assert_close(model.eval()(x), plain(x))
            model.train()
    engine.detach()
    x = batch()
    losses(model, x).mean().backward()
    losses(plain, x).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    if name != "broken":
        assert ran["compiled"] >= 2 * ran["interpreted"] > 0


@pytest.mark.parametrize("name", ["language", "images"])
def test_exact_by_generated_code(name: str, ran: dict[str, int]) -> None:
    plain, batch = build(name)
    model = torch.compile(copy.deepcopy(plain))
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, batch())
    assert ran == {"interpreted": 1, "compiled": 2}


def test_batches_of_many_sizes(ran: dict[str, int]) -> None:
    """As Poisson sampling gives them: code is compiled for any size, each size is interpreted once."""
    plain, batch = build("language")
    model = in_place("eager")(copy.deepcopy(plain))
    engine = PerSampleGradients(model)
    for size in (4, 3, 6, 1, 4, 3, 6, 5, 1, 6, 5):
        assert_exact(engine, model, plain, batch(size))
    assert ran["compiled"] >= 5
    model(batch(0)).square().sum().backward()
    assert engine.norms().shape == (0,)


def test_frozen_and_thawed() -> None:
    """What is trained may change between steps."""
    plain, batch = build("language")
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    engine = PerSampleGradients(model)
    for frozen in (False, False, True, True, False):
        for m in (plain, model):
            m.blocks.requires_grad_(not frozen)
        assert_exact(engine, model, plain, batch())


@pytest.mark.parametrize("way", [lambda model: model, whole("eager")])
def test_tied_after_the_first_steps(way: Way) -> None:
    """One parameter in two places counts once, in eager mode too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    model = copy.deepcopy(plain)
    run = way(model)
    engine = PerSampleGradients(run)
    for step in range(4):
        if step == 2:
            for m in (plain, model):
                m[2].weight = m[0].weight
        x = rows()
        exact = norms_of(truth(plain, x, losses))
        losses(run, x).mean().backward()
        torch.testing.assert_close(engine.norms().double(), exact, rtol=1e-5, atol=0)


def autocast_inside(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.first(x * (1 + m.scale))
    return m.second(m.norm(torch.tanh(y).float()))


def test_autocast_outside_and_inside() -> None:
    torch.manual_seed(0)
    eager = Net(autocast_inside, first=nn.Linear(D, D), second=nn.Linear(D, D), norm=nn.LayerNorm(D), scale=P(D))
    models = [torch.compile(copy.deepcopy(eager), backend="eager"), eager]
    engines = [PerSampleGradients(m) for m in models]
    for outside in (False, False, True, True, False):
        x = rows()
        for m in models:
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                losses(m, x).float().mean().backward()
        torch.testing.assert_close(engines[0].norms(), engines[1].norms(), rtol=1e-3, atol=0)


def test_dropout_is_random(ran: dict[str, int]) -> None:
    """Other numbers every step, and the gradient of what the forward really did."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, 2))
    model = torch.compile(plain, backend="inductor")
    engine = PerSampleGradients(model)
    x, found = torch.randn(B, D), []
    for _ in range(4):
        out = model(x)
        out.sum(1).mean().backward()
        found.append(out.detach())
        per_sample = engine.materialize()["_orig_mod.2.weight"]  # [B, 2, D]: what came out of the dropout
        torch.testing.assert_close(plain[2](per_sample[:, 0].detach()), out.detach(), rtol=1e-5, atol=1e-6)
    assert ran["compiled"] == 3
    assert all(not torch.equal(a, b) for k, a in enumerate(found) for b in found[:k])


# --------------------------------------------------------------------------- programs


class Checkpointed(Language):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.linear(self.norm(x), self.tokens.weight)


def added_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    y += m.shift
    return torch.tanh(y)


def masked(m: Any, x: Tensor, mask: Tensor) -> Tensor:  # [T, B, D], [T, B]
    y = m.a(x).masked_fill(~mask.unsqueeze(-1), 0.0)
    return m.b(torch.tanh(y)).sum(0)


def time_first(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return m(*(t.transpose(0, 1) for t in batch)).square().sum(1)


def two_forwards(m: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    return losses(m, pair[0]) + 2 * losses(m, pair[1])


def block_and_whole(model: nn.Module) -> nn.Module:
    model.blocks[0].compile(backend="eager")  # type: ignore[index, operator, union-attr]
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def language(layers: int = 2) -> nn.Module:
    return Language(layers)


PROGRAMS: dict[str, tuple[Way, Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "checkpointing around": (in_place("eager"), lambda: Checkpointed(2), tokens, losses),
    "checkpointing inside": (parts("eager"), lambda: Checkpointed(2), tokens, losses),
    "two forwards": (whole("eager"), language, lambda: (tokens(), tokens()), two_forwards),
    "compiled within compiled": (block_and_whole, language, tokens, losses),
    "added in place": (whole("eager"), lambda: Net(added_in_place, linear=nn.Linear(D, D), shift=P(D)), rows, losses),
    "time first": (whole("eager"), lambda: Net(masked, a=nn.Linear(D, D), b=nn.Linear(D, 2)),
                   lambda: (rows(), torch.rand(rows().shape[:2]) > 0.3), time_first),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_exact_programs(name: str) -> None:
    way, make, batch, loss = PROGRAMS[name]
    torch.manual_seed(0)
    plain = make()
    model = way(copy.deepcopy(plain))
    engine = PerSampleGradients(model, batch_first=name != "time first")
    for _ in range(3):
        assert_exact(engine, model, plain, batch(), loss)
