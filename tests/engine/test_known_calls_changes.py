"""Repeated steps between which something changes: another way through the same shapes, other memory, an error."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastdp import PerSampleGradients
from fastdp.errors import SampleMixingError, StepError
from fastdp.grad_sample.captured_call import Context

from ..truth import assert_step
from .test_known_calls import D, Layers, T, Way, data, losses, plainly, two_paths


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
    """The same, in another thread; the memory is freed before, and so was a view of it."""
    h = m.a(x).tanh()
    h.flatten(1).relu()

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
