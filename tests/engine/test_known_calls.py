"""Repeated steps, whose calls, layouts and backward are known from the steps before, some of them by C++: each step is
exact, and whatever may change between two calls of one kind is looked at again."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp import PerSampleGradients
from fastdp.engine import capture
from fastdp.engine.repeated_backward import Like
from fastdp.errors import SampleMixingError, StepError
from fastdp.grad_sample.captured_call import Context
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


# --------------------------------------------------------------------------- what changes between steps


def cut_off(m: Layers, x: Tensor) -> Tensor:
    """The same calls from the end on, and then none."""
    return m.b(F.dropout(torch.relu(m.norm(m.a(x)).detach().requires_grad_()), 0.0))


def time_first(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x).tanh().transpose(0, 1) * torch.linspace(0.5, 1.5, T).view(T, 1, 1)
    return m.b(h.transpose(0, 1))


def by_rows(m: Layers, x: Tensor) -> Tensor:
    return m.b(m.a(x).tanh().flatten(0, 1).view(len(x), T, D))


def attention(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x).tanh()
    return m.b(F.scaled_dot_product_attention(h, h, h))


def alike(m: Layers, x: Tensor) -> Tensor:
    return m.b(m.a(x).tanh() * torch.full((len(x), 1, 1), 2.0))


def other_module(m: Layers, x: Tensor) -> Tensor:
    return m.c(m.a(x).tanh())


def convolutions(first: int) -> Way:
    def way(m: Layers, x: Tensor) -> Tensor:
        made = ((m.conv, first), (m.other, 3 - first))
        return sum(F.conv1d(x, c.weight, padding=d, dilation=d).tanh() for c, d in made)  # type: ignore[return-value]

    return way


def without_grad_before(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.b(m.a(x))
    return plainly(m, x)


def checkpointed(m: Layers, x: Tensor) -> Tensor:
    return checkpoint(lambda x: plainly(m, x), x, use_reentrant=False)  # type: ignore[no-any-return]


def again(m: Layers, x: Tensor) -> Tensor:
    return checkpoint(lambda h: plainly(m, h), m.c(x), use_reentrant=True)  # type: ignore[no-any-return]


def swapped(m: Layers) -> None:
    m.a.weight, m.b.weight = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))


BETWEEN: dict[str, Callable[[Layers], Any]] = {
    "bias frozen": lambda m: m.a.bias.requires_grad_(False),
    "bias thawed": lambda m: m.a.bias.requires_grad_(True),
    "weights moved": lambda m: m.b.weight.data.mul_(2),
    "another constant": lambda m: setattr(m.norm, "eps", 0.5),
    "parameters swapped": swapped,
}


def test_what_changes_between_steps_is_seen() -> None:
    engine = PerSampleGradients(Layers(plainly))
    for change in BETWEEN.values():
        change(engine.model)
        for _ in range(3):
            assert_step(engine, data(), losses)


def test_another_way_through_the_same_shapes() -> None:
    engine = PerSampleGradients(Layers(plainly))
    one, other = convolutions(1), convolutions(2)
    for way in (plainly, cut_off, plainly, time_first, by_rows, attention, alike, other_module, one, one, other, other,
                one, without_grad_before, checkpointed, again, time_first, plainly, by_rows):  # fmt: skip
        engine.model.way = way
        for _ in range(2):
            assert_step(engine, data(), losses)


def test_other_sizes_losses_and_frozen_layers_are_recorded_anew() -> None:
    model = Layers(lambda m, x: torch.cat([m.c(h := m.norm(m.a(x))), m.b(h)], -1)).double()

    def half(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[..., :D].square().flatten(1).mean(1)

    engine = PerSampleGradients(model)
    kinds = ((4, losses, 0), (4, losses, 0), (4, half, 0), (2, losses, 0), (4, losses, 1), (4, losses, 1), (1, half, 0))
    for size, loss, frozen in (*kinds, (4, losses, 0), (6, losses, 0), (2, losses, 0)):
        model.b.weight.requires_grad_(not frozen)
        assert_step(engine, data(size).double(), loss, rtol=1e-6)


def test_autocast_is_part_of_a_known_call() -> None:
    engine = PerSampleGradients(Layers(two_paths))
    x, found = data(), {}
    for cast in (False, True, False, True, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out = engine.model(x)
        assert out.dtype == (torch.bfloat16 if cast else torch.float32)
        out.float().square().flatten(1).mean(1).mean().backward()
        rows = engine.materialize()
        for name, first in found.setdefault(cast, rows).items():
            torch.testing.assert_close(rows[name], first, rtol=1e-6, atol=1e-7)


def moved(m: Layers, x: Tensor) -> Tensor:
    """Data takes other memory, in which samples are mixed."""
    h = m.a(x).tanh()
    if m.mixed:
        h.data = h.detach() - h.detach().mean(0)
    return m.b(h)


def moved_beneath(m: Layers, x: Tensor) -> Tensor:
    """The same, out of torch functions' sight."""
    h = m.a(x).tanh()
    if m.mixed:
        with torch._C.DisableTorchFunction():
            h.data = h.data.flip(0)
    return m.b(h)


def moved_elsewhere(m: Layers, x: Tensor) -> Tensor:
    """The same, in another thread; the memory is freed before."""
    h = m.a(x).tanh()

    def move() -> None:
        flipped = h.data.flip(0)
        h.data = torch.empty(0)
        h.data = flipped.clone()

    if m.mixed:
        thread = threading.Thread(target=move)
        thread.start()
        thread.join()
    return m.b(h)


@pytest.mark.parametrize("way", [moved, moved_beneath, moved_elsewhere])
def test_data_that_takes_other_memory_in_a_later_step_is_refused(way: Way) -> None:
    engine = PerSampleGradients(Layers(way))
    for _ in range(4):
        assert_step(engine, data(), losses)
    engine.model.mixed = True
    with pytest.raises(SampleMixingError):
        losses(engine.model, data()).mean().backward()


def test_gradients_that_are_written_to_once_they_were_taken_are_refused() -> None:
    engine, kept = PerSampleGradients(Layers(plainly)), []

    def hooked_late(m: Layers, x: Tensor) -> Tensor:
        first = m.a(x)
        second = m.b(first.tanh())
        if m.mixed:
            second.register_hook(kept.append)
            first.register_hook(lambda g: [kept[-1].mul_(2)] and None)
        return m.c(second.tanh())

    engine.model.way = hooked_late
    for number in range(6):
        engine.model.mixed = number == 4
        if not engine.model.mixed:
            assert_step(engine, data(), losses)
            continue
        with pytest.raises(StepError, match="written to in place"):
            losses(engine.model, data()).mean().backward()


def test_a_backward_that_fails_midway_leaves_nothing_for_the_next_one() -> None:
    engine = PerSampleGradients(Layers(plainly))

    def fails(grad: Tensor) -> None:
        raise KeyError("midway")

    def contexts() -> int:
        gc.collect()
        return sum(isinstance(each, Context) for each in gc.get_objects())

    found = list[int]()
    for _ in range(3):
        for _ in range(3):
            assert_step(engine, data(), losses)
        found.append(contexts())
        handle = engine.model.a.register_forward_hook(lambda m, args, out: out.register_hook(fails) and None)
        with pytest.raises(KeyError):
            losses(engine.model, data()).mean().backward()
        handle.remove()
    assert found == sorted(found, reverse=True)  # (what other tests have left may go, too)


def test_rules_that_change_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastdp.grad_sample.rules import USE_RULES

    engine, rule, asked = PerSampleGradients(Layers(plainly)), USE_RULES[F.linear], []
    for _ in range(3):
        assert_step(engine, data(), losses)
    monkeypatch.setitem(USE_RULES, F.linear, lambda *given: asked.append(1) or rule(*given))
    losses(engine.model, data()).mean().backward()
    assert asked == [1, 1]
