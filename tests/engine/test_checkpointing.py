"""Checkpointed regions with calls that keep a graph of their own: exact, and computed once more only."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import UncapturedUseError

from ..cases import Net, square
from ..truth import assert_step


class Region(nn.Module):
    """Calls whose input gradients are autograd's: addmm, products by a parameter, einsum, a matrix from the left."""

    def __init__(self, d: int = 6, t: int = 5) -> None:
        super().__init__()
        self.runs = 0
        self.weight, self.bias = nn.Parameter(torch.randn(d, d)), nn.Parameter(torch.randn(d))
        self.scale, self.heads = nn.Parameter(torch.randn(d)), nn.Parameter(torch.randn(2, d, 3))
        self.left = nn.Parameter(torch.randn(t, t))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(x.shape)
        y = torch.tanh(y * self.scale)
        y = torch.einsum("btd,hde->bthe", y, self.heads).flatten(2)
        return x + (self.left @ y).tanh()


class Model(nn.Module):
    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.region, self.after, self.way = nn.Linear(6, 6), Region(), nn.Linear(6, 2), way

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.way(self.region, self.before(x)))


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum((1, 2))


def offloaded(region: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return region(x)


WAYS = {
    "not reentrant": lambda region, x: checkpoint(region, x, use_reentrant=False),
    "reentrant": lambda region, x: checkpoint(region, x, use_reentrant=True),
    "offloaded": offloaded,
}


@pytest.mark.parametrize(("way", "runs"), [("not reentrant", 2), ("reentrant", 2), ("offloaded", 1)])
def test_exact_and_computed_once_more_only(way: str, runs: int) -> None:
    torch.manual_seed(0)
    engine = fastdp.PerSampleGradients(model := Model(WAYS[way]))
    assert_step(engine, torch.randn(4, 5, 6), losses)
    assert model.region.runs == runs


class RunAgain(torch.autograd.Function):
    """A checkpoint as diffusion models have it: it runs again in backward, and asks for its parameters' gradients."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        with torch.no_grad():
            return function(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_(True)
        with torch.enable_grad():
            out = ctx.function(x.view_as(x))
        return (None, *torch.autograd.grad(out, (x, *ctx.parameters), grad, allow_unused=True))


class Again(nn.Module):
    def __init__(self, given: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.given = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), given

    def forward(self, x: Tensor) -> Tensor:
        return RunAgain.apply(self.run, x, *(self.parameters() if self.given else ()))  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


@pytest.mark.parametrize("layers", [(Again,), (nn.Linear, Again), (Again, Again, nn.Linear), (nn.Linear, Again, Again)])
def test_functions_that_ask_for_their_parameters_in_backward(layers: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Again() if layer is Again else nn.Linear(6, 6) for layer in layers])
    engine = fastdp.PerSampleGradients(model)
    for _ in range(2):
        assert_step(engine, torch.randn(4, 5, 6), losses)


def test_functions_that_do_not_ask_give_their_parameters_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Again(given=False), nn.Linear(6, 2))
    engine = fastdp.PerSampleGradients(model)
    losses(model, torch.randn(4, 5, 6)).mean().backward()
    sums = engine.clipped_sum(torch.ones(4))
    assert not sums["1.up.weight"].any() and sums["0.weight"].any() and sums["2.weight"].any()


class Direct(nn.Module):
    """A region whose own function takes parameters. As many samples as features: saved shapes tell nothing."""

    def __init__(self, region: Callable[[Direct, Tensor], Tensor], reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.weight, self.scale = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.positions = nn.Embedding(9, 1)
        self.region, self.reentrant = region, reentrant

    def again(self, function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool | None = None) -> Tensor:
        how = self.reentrant if reentrant is None else reentrant
        return checkpoint(function, x, use_reentrant=how)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(lambda y: self.region(self, y), self.first(x)) + self.scale.tanh()
        return self.last(y @ self.weight + x)


REGIONS: dict[str, Callable[[Direct, Tensor], Tensor]] = {
    "linear": lambda m, y: nn.functional.linear(y, m.weight).tanh(),
    "products": lambda m, y: (y @ m.weight).tanh() @ m.weight,
    "made of a parameter": lambda m, y: nn.functional.linear(y, m.weight * 2).tanh(),
    "scale of a layer": lambda m, y: m.inner(y) * m.scale,
    "einsum": lambda m, y: torch.einsum("bi,io->bo", y, m.weight).tanh(),
    "nested": lambda m, y: m.again(lambda z: (z @ m.weight).tanh(), y * m.scale) + m.inner(y),
    "nested in the other way": lambda m, y: m.again(lambda z: z @ m.weight, y * m.scale, not m.reentrant) + m.inner(y),
    "positions": lambda m, y: (y + m.positions(torch.arange(6)).squeeze(1)).tanh(),
    "of a layer twice": lambda m, y: m.again(lambda z: m.inner(z).tanh(), y, True) + m.inner(y),
}


def regions(m: Any, x: Tensor) -> Tensor:
    """A region that uses a parameter made of a parameter, and one that calls a layer for each sample."""
    y = checkpoint(lambda y: y * m.scale.exp(), m.first(x), use_reentrant=False)
    z = checkpoint(lambda y: torch.cat([m.inner(row).tanh() for row in y.split(1)]), y, use_reentrant=False)
    return m.last(z)  # type: ignore[no-any-return]


def masked(m: Any, x: Tensor) -> Tensor:
    """A region that writes by a mask of data (experts do)."""
    chosen = x[:, 0] > 0

    def region(h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        out[chosen] = m.inner(h[chosen])
        return out

    return m.last(checkpoint(region, m.first(x), use_reentrant=False))  # type: ignore[no-any-return]


def test_what_is_asked_of_a_write_saves_nothing_for_the_region() -> None:
    torch.manual_seed(0)
    model = Net(masked, **{name: nn.Linear(6, 6) for name in ("first", "inner", "last")})
    assert_step(fastdp.PerSampleGradients(model), torch.randn(5, 6), square)


@pytest.mark.parametrize("forwards", [1, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_regions_of_several_forwards_in_one_loss(frozen: bool, forwards: int) -> None:
    torch.manual_seed(0)
    layers = {name: nn.Linear(6, 6) for name in ("first", "inner", "last")}
    layers["first"].requires_grad_(not frozen)
    model = Net(regions, **layers, scale=nn.Parameter(torch.tensor(0.3)))

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        outs = [model(x * (1 + k)) for k in range(forwards)]
        return (outs[0] - outs[-1] * 2).square().sum(1) + sum(out.sum(1) for out in outs)  # type: ignore[no-any-return]

    assert_step(fastdp.PerSampleGradients(model), torch.randn(5, 6), losses)


@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", REGIONS)
def test_regions_that_take_parameters_themselves(name: str, reentrant: bool, budget: int | None) -> None:
    torch.manual_seed(0)
    engine = fastdp.PerSampleGradients(Direct(REGIONS[name], reentrant), memory_budget=budget)
    assert_step(engine, torch.randn(6, 6), square)


@pytest.mark.parametrize("made", [lambda p: p, lambda p: p * 2], ids=["a parameter", "made of one"])
def test_a_reentrant_region_is_given_no_parameters(made: Callable[[Tensor], Tensor]) -> None:
    """A parameter, or a tensor made of one, among its arguments."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        given = m.first(x), made(m.scale)
        return checkpoint(lambda y, scale: (y * scale).tanh(), *given, use_reentrant=m.reentrant)  # type: ignore[no-any-return]

    model = Net(forward, first=nn.Linear(6, 6), scale=nn.Parameter(torch.randn(6)), reentrant=True)
    engine, x = fastdp.PerSampleGradients(model), torch.randn(5, 6)
    with torch.no_grad():
        model(x)
    with pytest.raises(UncapturedUseError, match="use_reentrant=False"):
        model(x)
    model.reentrant = False
    assert_step(engine, x, square)


# Functions of data [2, 4, 6, 6], the parameters [6, 6], [6] and whole layers: one of each rule
HOLDING: dict[str, Callable[[Direct, Tensor], Tensor]] = {
    "linear": lambda m, h: nn.functional.linear(h, m.weight),
    "bias": lambda m, h: h + m.scale,
    "scale": lambda m, h: m.scale * h,
    "divided": lambda m, h: h / m.scale,
    "product from the left": lambda m, h: m.weight @ h,
    "einsum": lambda m, h: torch.einsum("bcij,jk->bcik", h, m.weight),
    "convolution": lambda m, h: nn.functional.conv2d(h, m.weight[:4, :4, None, None]),
    "layer norm": lambda m, h: nn.functional.layer_norm(h, (6,), m.scale, m.scale),
    "rms norm": lambda m, h: nn.functional.rms_norm(h, (6,), m.scale),
    "group norm": lambda m, h: nn.functional.group_norm(h, 2, m.scale[:4], m.scale[:4]),
    "joined": lambda m, h: torch.cat([h, m.weight.expand(2, 4, 6, 6)], 3)[..., 3:9],
    "attention": lambda m, h: nn.functional.scaled_dot_product_attention(h @ m.weight, h, h + m.scale),
    "generic": lambda m, h: torch.hypot(h, m.scale),
    "generic in place": lambda m, h: h.clone().hypot_(m.scale),
    "generic of several": lambda m, h: torch.addcmul(h, h, m.weight),
    "prelu": lambda m, h: nn.functional.prelu(h, m.scale[:4]),
}


@pytest.mark.parametrize("name", HOLDING)
def test_what_lies_within_a_region_is_held_by_nothing(name: str) -> None:
    """Else checkpointing would save nothing: under it, backward makes the data of captured calls anew."""
    seen: list[weakref.ref[Tensor]] = []

    def region(m: Direct, y: Tensor) -> Tensor:
        h = y.tanh()
        seen.append(weakref.ref(h))
        return HOLDING[name](m, h).tanh()

    torch.manual_seed(0)
    model = Direct(region, reentrant=False)
    fastdp.PerSampleGradients(model)
    out = model(torch.randn(2, 4, 6, 6))
    assert seen[0]() is None
    out.square().sum((1, 2, 3)).mean().backward()
    assert len(seen) == 2  # made anew


def unrolled(m: Any, x: Tensor) -> Tensor:
    def region(h: Tensor) -> Tensor:
        state, rows = torch.zeros(len(h), 2, dtype=h.dtype), []
        for t in range(h.shape[1]):
            state = m.cell(h[:, t], state)
            rows.append(state)
        return torch.stack(rows, 1)

    return m.head(checkpoint(region, m.inp(x), use_reentrant=False).mean(1))  # type: ignore[no-any-return]


def test_a_cell_unrolled_from_a_state_made_in_the_region() -> None:
    """What its weights make of that state alone is computed again when norms are taken, after backward has ended."""
    torch.manual_seed(0)
    model = Net(unrolled, inp=nn.Linear(2, 2), cell=nn.GRUCell(2, 2), head=nn.Linear(2, 3))
    assert_step(fastdp.PerSampleGradients(model), torch.randn(5, 4, 2), square)
