"""Captured calls by autograd's own nodes (`grad_sample.captured_call.Native`), and backwards like the one before
(`engine.repeated_backward`): every step is compared with one sample at a time, those in which all is known, too."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.engine import repeated_backward
from fastdp.errors import StepError
from fastdp.grad_sample.captured_call import Native
from fastdp.ops.registry import native
from fastdp.utils.garbage_collection import MANY

pytestmark = pytest.mark.skipif(isinstance(native(), str), reason="the extension is not built")
B, T, D = 4, 3, 6
Loss = Callable[[nn.Module, Tensor], Tensor]


class Layers(nn.Module):
    """A few layers, used as `way` says."""

    def __init__(self, way: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.norm, self.conv = nn.LayerNorm(D), nn.Conv1d(T, T, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def _relu_in_place(m: Layers, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x).relu_()).relu_())


def _written_views(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    part = h[..., 2:]
    part.mul_(3)
    return m.c(torch.cat([h[..., :2] * 2, part], -1))


def _written_result(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    h.add_(1.0).mul_(h.detach().sign())
    return m.c(h)


def _twice(m: Layers, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.b(m.a(x))))


def _unused(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x)
    m.b(h)
    return m.c(h)


def _transposed(m: Layers, x: Tensor) -> Tensor:
    h = m.a(x).transpose(0, 1).contiguous().transpose(0, 1)
    return m.conv(m.b(h)) @ m.c.weight


def _norms(m: Layers, x: Tensor) -> Tensor:
    h = m.norm(m.a(x))
    return m.norm(m.conv(h) * m.scale) + m.scale


def _hooked(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    h.register_hook(lambda g: g * 0.5)
    return m.c(torch.relu(h))


def _two_paths(m: Layers, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    return torch.cat([m.c(h), h.abs()], -1)


def _detached(m: Layers, x: Tensor) -> Tensor:
    return m.b(m.a(x).detach().requires_grad_()) + m.c(m.a(x).detach())


def _one_parameter_twice(m: Layers, x: Tensor) -> Tensor:
    return m.c(F.layer_norm(m.a(x), (D,), m.scale, m.scale))


WAYS = [
    _relu_in_place, _written_views, _written_result, _twice, _unused, _transposed, _norms, _hooked, _two_paths,
    _detached, _one_parameter_twice,
]  # fmt: skip


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).mean(1)


def truth(model: nn.Module, x: Tensor, loss: Loss = losses) -> dict[str, Tensor]:
    """Per-sample gradients by autograd, one sample at a time."""
    rows: dict[str, list[Tensor]] = {}
    for one in x:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(loss(model, one[None]).sum(), [p for _, p in named], allow_unused=True)
        for (name, p), g in zip(named, found, strict=True):
            rows.setdefault(name, []).append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(each) for name, each in rows.items()}


def check(engine: fastdp.PerSampleGradients, wanted: dict[str, Tensor]) -> None:
    found = engine.materialize()
    assert found.keys() == wanted.keys()
    for name, rows in wanted.items():
        torch.testing.assert_close(found[name], rows, rtol=1e-9, atol=1e-12)
    norms = sum(rows.flatten(1).square().sum(1) for rows in wanted.values()).sqrt()  # type: ignore[union-attr]
    torch.testing.assert_close(engine.norms().double(), norms, rtol=1e-6, atol=0)
    for name, total in engine.clipped_sum(torch.arange(1.0, B + 1)).items():
        wanted_sum = (wanted[name].movedim(0, -1) * torch.arange(1.0, B + 1)).sum(-1)
        torch.testing.assert_close(total.double(), wanted_sum, rtol=1e-5, atol=1e-7)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many native calls recorded, and how many backwards were like the one before."""
    found = {"native": 0, "repeated": 0}

    def count(cls: Any, name: str, key: str) -> None:
        before = getattr(cls, name)

        def counting(self: Any, *given: Any, **options: Any) -> Any:
            found[key] += 1
            return before(self, *given, **options)

        monkeypatch.setattr(cls, name, counting)

    count(Native, "__call__", "native")
    count(repeated_backward.Like, "gradients", "repeated")
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_exact_in_every_step(way: Any, counted: dict[str, int]) -> None:
    model, x = Layers(way).double(), torch.randn(4, B, T, D).double()
    wanted = [truth(model, batch) for batch in x]
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    for batch, rows in zip(x, wanted, strict=True):
        losses(model, batch).sum().backward()
        check(engine, rows)
    assert counted["native"] > 0
    assert counted["repeated"] > 0 or way in (
        _twice,
        _transposed,
        _norms,
        _one_parameter_twice,
    )  # (whose uses are joined)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_input_may_require_grad(way: Any, counted: dict[str, int]) -> None:
    """All captured calls are native then: no node of ours is in the graph."""
    model = Layers(way).double()
    x = torch.randn(B, T, D).double().requires_grad_()
    wanted = truth(model, x.detach())
    grad = torch.autograd.grad(losses(model, x).sum(), x, allow_unused=True)[0]
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    for _ in range(3):
        x.grad = None
        losses(model, x).sum().backward()
        check(engine, wanted)
        assert (x.grad is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(x.grad, grad)
    assert counted["native"] > 0


def test_what_a_convolution_is_told_may_change_between_steps() -> None:
    model, x = Layers(_norms).double(), torch.randn(B, T, D).double()
    model.other, told = nn.Conv1d(T, T, 3).double(), [1]
    model.way = lambda m, x: sum(  # type: ignore[assignment, return-value]
        F.conv1d(x, c.weight, padding=d, dilation=d).tanh() for c, d in ((m.conv, told[0]), (m.other, 3 - told[0]))
    )
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    for told[0] in (1, 1, 2, 2, 1):
        losses(model, x).sum().backward()
        found = engine.materialize()
        plain = copy.deepcopy(model)
        for name, rows in truth(plain, x).items():
            torch.testing.assert_close(found[name], rows, rtol=1e-9, atol=1e-12)


def test_a_hook_takes_no_node_of_the_graph() -> None:
    model, x = Layers(_norms), torch.randn(B, T, D)

    def way(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        out = m.b(h)
        out.register_hook(lambda g: h.grad_fn.register_prehook(lambda gs: (gs[0] * 0.5,)) and None)
        return out

    model.way = way
    fastdp.PerSampleGradients(model, loss_reduction="sum")
    with pytest.raises(StepError, match="takes a node of the graph"):
        losses(model, x).sum().backward()


def test_gradients_of_chosen_tensors_record_nothing(counted: dict[str, int]) -> None:
    model, x = Layers(_norms).double(), torch.randn(B, T, D).double().requires_grad_()
    wanted = truth(model, x.detach())
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    for _ in range(3):
        loss = losses(model, x).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        check(engine, wanted)
    losses(model, x).sum().backward(inputs=[x])
    with pytest.raises(StepError, match="no backward yet"):
        engine.norms()


def test_autocast(counted: dict[str, int]) -> None:
    model, x = Layers(_two_paths), torch.randn(B, T, D)
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")

    def cast(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model, x)

    wanted = None
    for _ in range(3):
        cast(model, x).sum().backward()
        found = engine.materialize()
        wanted = found if wanted is None else wanted  # of the first step, whose nodes are ours
        for name in found:
            assert torch.equal(found[name], wanted[name])
    assert counted["native"] > 0


@pytest.mark.parametrize("what", ["input", "weight"])
def test_writes_between_forward_and_backward_are_errors(what: str) -> None:
    model, x = Layers(_two_paths), torch.randn(B, T, D)
    kept: list[Tensor] = []
    model.way = lambda m, x: m.b(kept[-1]) if kept.append(m.a(x)) is None else x  # type: ignore[func-returns-value]
    fastdp.PerSampleGradients(model, loss_reduction="sum")
    for number in range(4):
        out = losses(model, x).sum()
        if number == 3:
            (kept[-1] if what == "input" else model.b.weight).detach().mul_(2)
            with pytest.raises(RuntimeError, match="inplace|written to"):
                out.backward()
        else:
            out.backward()


def test_tangents_do_not_run_past_parameters() -> None:
    """Forward-mode derivatives through native nodes would miss the parameters' part."""
    model, x = Layers(_relu_in_place), torch.randn(B, T, D)
    fastdp.PerSampleGradients(model, loss_reduction="sum")
    for _ in range(3):
        losses(model, x).sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError):
        model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def test_another_backward_is_recorded_use_by_use(counted: dict[str, int]) -> None:
    """A loss of a part of the model, other batch sizes, frozen parameters: none is taken for the one before."""
    model = Layers(lambda m, x: torch.cat([m.c(h := m.norm(m.a(x))), m.b(h)], -1)).double()

    def half(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[..., :D].square().flatten(1).mean(1)

    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    for size, loss, frozen in ((4, losses, 0), (4, losses, 0), (4, half, 0), (4, losses, 0), (4, losses, 1),
                               (4, losses, 1), (4, half, 0), (4, losses, 0)):  # fmt: skip
        model.b.weight.requires_grad_(not frozen)
        x = torch.randn(size, T, D).double()
        loss(model, x).sum().backward()
        found = engine.materialize()
        other = Layers(model.way).double()
        other.load_state_dict(model.state_dict())
        other.b.weight.requires_grad_(not frozen)
        wanted = truth(other, x, loss)
        for name, rows in wanted.items():
            torch.testing.assert_close(found[name], rows, rtol=1e-9, atol=1e-12)
    assert counted["repeated"] > 0


def test_steps_are_those_of_uses_recorded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after some private steps, with noise, bit by bit."""

    def trained() -> list[Tensor]:
        model = Layers(_norms)
        optimizer = fastdp.DPAdamW(
            model, lr=0.1, noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=B, seed=0
        )
        torch.manual_seed(1)
        for _ in range(5):
            losses(model, torch.randn(B, T, D)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.detach()
        return [p.detach() for p in model.parameters()]

    fast = trained()
    monkeypatch.setattr("fastdp.engine.backward.like", lambda *given: None)
    for a, b in zip(fast, trained(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_collector_waits_in_a_forward_and_only_there() -> None:
    before, seen = gc.get_threshold(), []

    def way(m: Layers, x: Tensor) -> Tensor:
        seen.append(gc.get_threshold()[0])
        if len(seen) == 2:
            raise KeyboardInterrupt
        return m.a(x)

    model = Layers(way)
    fastdp.PerSampleGradients(model, loss_reduction="sum")
    for number in range(3):
        if number == 1:
            with pytest.raises(KeyboardInterrupt):
                model(torch.randn(B, T, D))
        else:
            losses(model, torch.randn(B, T, D)).sum().backward()
        assert gc.get_threshold() == before or number == 1  # what was interrupted ends when the next forward begins
    assert seen == [MANY] * 3
