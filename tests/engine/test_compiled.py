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

import fastdp
from fastdp import PerSampleGradients

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

pytestmark = pytest.mark.usefixtures("fresh")


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


def test_the_update_is_that_of_the_plain_model() -> None:
    plain, batch = build("language")
    models = [copy.deepcopy(plain), torch.compile(copy.deepcopy(plain), backend="eager")]
    options: dict[str, Any] = dict(lr=0.1, noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=B)
    optimizers = [fastdp.DPSGD(model, **options) for model in models]
    for _ in range(4):
        x = batch()
        for model, optimizer in zip(models, optimizers, strict=True):
            losses(model, x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_several_forwards_before_one_backward() -> None:
    plain, batch = build("language")
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    engine = PerSampleGradients(model)

    def twice(m: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return losses(m, pair[0]) + 2 * losses(m, pair[1])

    for _ in range(3):
        assert_exact(engine, model, plain, (batch(), batch()), twice)


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


def test_autocast_outside_and_inside() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
            self.scale = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = self.first(x * (1 + self.scale))
            return self.second(self.norm(torch.tanh(y).float()))

    torch.manual_seed(0)
    plain = Mixed()
    model, eager = torch.compile(copy.deepcopy(plain), backend="eager"), copy.deepcopy(plain)
    engines = [PerSampleGradients(m) for m in (model, eager)]
    for outside in (False, False, True, True, False):
        x = rows()
        for m in (model, eager):
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


def test_checkpointing_around_and_inside() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Language):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids) + self.positions
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return F.linear(self.norm(x), self.tokens.weight)

    torch.manual_seed(0)
    plain = Checkpointed(2)
    for way in (in_place("eager"), parts("eager")):
        model = way(copy.deepcopy(plain))
        engine = PerSampleGradients(model)
        for _ in range(3):
            assert_exact(engine, model, plain, tokens())


def test_compiled_within_compiled() -> None:
    plain, batch = build("language")
    model = copy.deepcopy(plain)
    model.blocks[0].compile(backend="eager")
    model = torch.compile(model, backend="eager")
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, batch())


def test_parameters_added_in_place() -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(D, D), nn.Parameter(torch.randn(D))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y += self.shift
            return torch.tanh(y)

    torch.manual_seed(0)
    plain = Adding()
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    engine = PerSampleGradients(model)
    for _ in range(3):
        assert_exact(engine, model, plain, rows())


def test_samples_in_the_second_dimension_and_a_mask() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [T, B, D], [T, B]
            y = self.a(x).masked_fill(~mask.unsqueeze(-1), 0.0)
            return self.b(torch.tanh(y)).sum(0)

    torch.manual_seed(0)
    plain = Masked()
    model = torch.compile(copy.deepcopy(plain), backend="eager")
    engine = PerSampleGradients(model, batch_first=False)

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return m(*(t.transpose(0, 1) for t in batch)).square().sum(1)

    for _ in range(3):
        assert_exact(engine, model, plain, (rows(), torch.rand(rows().shape[:2]) > 0.3), loss)
