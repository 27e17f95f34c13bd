"""Repeated steps, whose calls, layouts and backward are known from the steps before, some of them by C++: each step is
exact, and whatever may change between two calls of one kind is looked at again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp import PerSampleGradients
from fastdp.engine import capture
from fastdp.engine.repeated_backward import Like
from fastdp.grad_sample.parameter_use import Stored

from .. import cases
from ..routes import forced
from ..truth import assert_step, norms_of, truth

B, T, D = 4, 4, 6  # the batch and the sequence of one size, on purpose
Way = Callable[[Any, Tensor], Tensor]


class Layers(nn.Module):
    """A few layers, used as `way` says."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.mixed = way, False
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.norm, self.conv, self.other = nn.LayerNorm(D), nn.Conv1d(T, T, 3, padding=1), nn.Conv1d(T, T, 3)
        self.alike = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D), nn.GroupNorm(2, T), nn.GroupNorm(2, T)])
        self.scale = nn.Parameter(torch.rand(D))
        self.register_buffer("table", torch.linspace(0, 1, B + 2))
        self.plain = [torch.linspace(0, 1, B + 2)]

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).mean(1)


def data(size: int = B) -> Tensor:
    return torch.randn(size, T, D)


@pytest.mark.parametrize("name", cases.CASES)
def test_every_kind_of_use_in_three_steps(name: str) -> None:
    model, batch, loss = cases.build(name)
    exact = norms_of(truth(model, batch, loss))
    engine = PerSampleGradients(model)

    def step() -> None:
        loss(model, batch).mean().backward()
        torch.testing.assert_close(engine.norms().double(), exact, rtol=1e-5, atol=0)

    step()
    step()
    assert not tensors_in_cycles(step), "memory is held until Python looks for cycles"


def tensors_in_cycles(call: Callable[[], None]) -> list[tuple[int, ...]]:
    """The shapes of tensors that only the garbage collector frees after a call."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        call()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [tuple(each.shape) for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def test_layers_of_many_numbers_hold_their_data_no_longer_than_their_rows_need() -> None:
    """The third backward repeats the second, and keeps rows of layer norms, not what they were computed from."""
    given, held = list[weakref.ref[torch.UntypedStorage]](), list[int]()

    def forward(m: Any, x: Tensor) -> Tensor:
        given.clear()
        x = m.begin(x)
        x.register_hook(lambda grad: held.append(sum(each() is not None for each in given)))
        for layer, norm in zip(m.layers, m.norms, strict=True):
            x = F.gelu(layer(x))
            with torch._C.DisableTorchFunction():  # or it would be seen to leave torch, and be held for that
                given.append(weakref.ref(x.untyped_storage()))
            x = norm(x)
        return x

    layers, norms = (
        [kind(*sizes) for _ in range(3)] for kind, sizes in ((nn.Linear, (256, 256)), (nn.LayerNorm, (256,)))
    )
    parts = {"begin": nn.Linear(256, 256), "layers": nn.ModuleList(layers), "norms": nn.ModuleList(norms)}
    engine = PerSampleGradients(cases.base.Net(forward, **parts))
    for _ in range(4):
        engine.model(torch.randn(8, 64, 256)).pow(3).mean().backward()
        engine.clipped_sum(engine.norms())
    assert held == [0] * 4


# --------------------------------------------------------------------------- the same program in every step


def plainly(m: Layers, x: Tensor) -> Tensor:
    return m.b(F.dropout(torch.relu(m.norm(m.a(x))), 0.0))


def relu_in_place(m: Layers, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x).relu_()).relu_())


def written_views(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    part = h[..., 2:]
    part.mul_(3)
    return m.c(torch.cat([h[..., :2] * 2, part], -1))


def written_result(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    h.add_(1.0).mul_(h.detach().sign())
    return m.c(h)


def numbers_set(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    h.data = torch.tanh(h.data)
    return m.c(h)


def twice(m: Layers, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.b(m.a(x))))


def norms(m: Layers, x: Tensor) -> Tensor:
    h = m.norm(m.a(x))
    return m.norm(m.conv(h) * m.scale) + m.scale


def equal_norms(m: Layers, x: Tensor) -> Tensor:
    """Whose rows are computed together."""
    for norm in m.alike:
        rows = x.flatten(0, 1) if isinstance(norm, nn.LayerNorm) else x
        x = norm(torch.sin(rows) * 2).view(x.shape)
    return x


def hooked(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    h.register_hook(lambda g: None)
    return m.c(torch.relu(h))


def two_paths(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    return torch.cat([m.c(h), h.abs()], -1)


def one_parameter_twice(m: Layers, x: Tensor) -> Tensor:
    return m.c(F.layer_norm(m.a(x), (D,), m.scale, m.scale))


WAYS = (plainly, relu_in_place, written_views, written_result, numbers_set, twice, norms, equal_norms, hooked,
        two_paths, one_parameter_twice)  # fmt: skip


@pytest.mark.parametrize("tracked", [False, True], ids=["data", "input that requires grad"])
@pytest.mark.parametrize("way", WAYS)
def test_exact_in_every_step(way: Way, tracked: bool) -> None:
    engine, plain = PerSampleGradients(Layers(way).double()), Layers(way).double()
    for _ in range(4):
        x = data().double().requires_grad_(tracked)
        assert_step(engine, x, losses, rtol=1e-6)
        if tracked:
            (want,) = torch.autograd.grad(losses(plain, x).mean(), x)
            torch.testing.assert_close(x.grad, want)


def test_the_second_step_asks_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, asked = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Flatten(), nn.Linear(T * D, 3)), data(), []
    PerSampleGradients(model)
    propagate = capture.propagate
    monkeypatch.setattr(capture, "propagate", lambda call: (asked.append(call.name), propagate(call))[1])
    losses(model, x).mean().backward()
    first = len(asked)
    losses(model, x).mean().backward()
    assert first > 0 and len(asked) == first
    losses(model, x[:3]).mean().backward()  # another batch is another kind
    assert len(asked) == 2 * first


def test_steps_are_those_of_uses_recorded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after some private steps, with noise."""

    def trained() -> list[Tensor]:
        model = Layers(norms)
        optimizer = fastdp.DPAdamW(
            model, lr=0.1, noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=B, seed=0
        )
        torch.manual_seed(1)
        for _ in range(5):
            losses(model, data()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.detach()
        return [p.detach() for p in model.parameters()]

    fast = trained()
    monkeypatch.setattr("fastdp.engine.backward.like", lambda *given: None)
    for a, b in zip(fast, trained(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def convolved(m: Layers, x: Tensor) -> Tensor:
    return m.b(m.norm(m.other(m.conv(m.a(x)).tanh())[..., :1] * m.scale))


def test_layers_of_stored_gradients_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact in every step; and so is another way, taken after some."""
    found: list[Any] = []
    repeated = Like.gradients
    monkeypatch.setattr(Like, "gradients", lambda *given: found.append(repeated(*given)) or found[-1])
    engine = PerSampleGradients(Layers(convolved).double())
    with forced("materialise"):
        for number in range(7):
            engine.model.way = two_paths if number == 4 else convolved
            assert_step(engine, data().double(), losses, rtol=1e-6)
            stored = [use.operand.shape for use in engine._last().uses if isinstance(use, Stored)]
            assert (engine.model.conv.weight.shape in stored) != (number == 4)
    assert len(found) == 3  # as the third, the fourth, and the seventh
