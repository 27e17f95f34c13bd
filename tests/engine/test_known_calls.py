"""Known calls (`csrc/python/known_calls.cpp`) are those of Python: the same signatures, layouts, norms and refusals."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.batch_axis.layout import layout_on
from fastdp.engine.call_cache import Memo
from fastdp.engine.capture import _CaptureMode
from fastdp.engine.known_calls import MISSED
from fastdp.errors import SampleMixingError
from fastdp.ops.registry import native
from fastdp.utils.pytree import tensors_in

from .. import cases

pytestmark = pytest.mark.skipif(isinstance(native(), str), reason="the extension is not built")
B, D = 4, 6


class Seen:
    """What the calls of passes came to."""

    def __init__(self) -> None:
        self.known = self.asked = 0
        self.layouts: list[Any] = []


def _facts(out: Any) -> Any:
    """The layouts of a call's results, without the tensors in them."""
    found = [layout_on(tensor) for tensor in tensors_in(out)]
    return [layout and layout._replace(owner=None, order=None, shifted=None, piece=None) for layout in found]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Counts calls, and compares each signature with that of Python."""
    found, calls_of = Seen(), Memo.calls_of

    def watch(self: Any, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        forward_pass, kwargs = self.forward_pass, kwargs or {}
        looked_at = forward_pass.known_calls is None or forward_pass.watcher is not None or forward_pass.exposed
        mine = MISSED if looked_at else forward_pass.known_calls.signature(func, args, kwargs)
        if mine is not MISSED and type(mine[0]) is not str:  # (of a captured call there is none in Python)
            assert mine == forward_pass.memo.signature(func, args, kwargs, forward_pass.batch, forward_pass.tracked)
        found.asked += 1
        found.known += mine is not MISSED
        known_first = self.__dict__.get("known_first")
        out = (known_first or functools.partial(whole, self))(func, kinds, args, kwargs)
        found.layouts.append(_facts(out))
        return out

    class Watched:
        """Known calls, watched over where they are made."""

        def __init__(self, calls: Any) -> None:
            self.signature, self.calls = calls.signature, calls

        def serve(self, mode: Any) -> None:
            self.calls.serve(mode)
            mode.known_first, mode.__torch_function__ = mode.__torch_function__, types.MethodType(watch, mode)

    def watched(memo: Memo, *given: Any) -> Any:
        calls = calls_of(memo, *given)
        return None if calls is None else Watched(calls)

    whole = _CaptureMode.__torch_function__
    monkeypatch.setattr(Memo, "calls_of", watched)
    monkeypatch.setattr(_CaptureMode, "__torch_function__", lambda self, *call: watch(self, *call)
                        if "known_first" not in self.__dict__ else whole(self, *call))  # fmt: skip
    return found


def steps(model: nn.Module, batch: Any, losses: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Norms of three steps."""
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    for _ in range(3):
        losses(model, batch).sum().backward()
        yield engine.norms()
    engine.detach()


@pytest.mark.parametrize("name", cases.CASES)
def test_as_in_python(name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    fast = list(steps(*cases.build(name)))
    layouts, seen.layouts = seen.layouts, []
    monkeypatch.setattr(Memo, "calls_of", lambda *given: None)
    torch.manual_seed(1)
    slow = list(steps(*cases.build(name)))
    assert layouts == seen.layouts
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)  # (autograd's node may round in another order than ours)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.way = "plain"

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.relu(self.norm(self.first(x))), 0.0)
        if self.way == "mixed":
            h = h - h.mean(0)
        elif self.way == "by place":
            h = h * torch.linspace(0, 1, len(h))[:, None]
        elif self.way == "alike":
            h = h * torch.full((B, 1), 2.0)
        elif self.way == "other module":
            return self.first(h)
        return self.second(h)


def engine_of(model: nn.Module) -> fastdp.PerSampleGradients:
    return fastdp.PerSampleGradients(model, loss_reduction="sum")


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def truth(model: nn.Module, x: Tensor) -> Tensor:
    params = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(model(one[None]).square().sum(), params, allow_unused=True) for one in x]
    return torch.stack([sum(g.square().sum() for g in grads if g is not None) for grads in rows]).sqrt()  # type: ignore


def check(engine: fastdp.PerSampleGradients, model: nn.Module, x: Tensor) -> None:
    step(model, x)
    norms = engine.norms()
    with torch.random.fork_rng():
        other = Block()
    other.load_state_dict(model.state_dict())
    other.way = model.way  # type: ignore[assignment]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.requires_grad_(mine.requires_grad)
    torch.testing.assert_close(norms, truth(other, x), rtol=1e-5, atol=1e-6)


def test_all_calls_of_a_plain_model_are_known(seen: Seen) -> None:
    model, x = Block(), torch.randn(B, D)
    engine = engine_of(model)
    for number in range(3):
        seen.known = seen.asked = 0
        check(engine, model, x)
        assert seen.asked == 5 and (number == 0 or seen.known == 5)


@pytest.mark.parametrize("way", ["mixed", "by place"])
def test_what_couples_samples_is_refused_after_known_steps(way: str) -> None:
    model, x = Block(), torch.randn(B, D)
    engine = engine_of(model)
    for _ in range(3):
        check(engine, model, x)
    for _ in range(2):
        model.way = way
        with pytest.raises(SampleMixingError):
            step(model, x)
        model.way = "plain"
        check(engine, model, x)


def test_what_changes_between_steps_is_seen() -> None:
    model, x = Block(), torch.randn(B, D)
    engine = engine_of(model)

    def frozen(value: bool) -> None:
        model.first.bias.requires_grad_(not value)

    for change in (
        lambda: None, lambda: frozen(True), lambda: frozen(False), lambda: setattr(model, "way", "alike"),
        lambda: setattr(model, "way", "other module"), lambda: setattr(model, "way", "plain"),
        lambda: model.second.weight.data.mul_(2), lambda: setattr(model.norm, "eps", 0.5),
    ):  # fmt: skip
        change()
        for _ in range(2):
            step(model, x)
            params = [p for p in model.parameters() if p.requires_grad]
            found = [engine.materialize()[n] for n, p in model.named_parameters() if p.requires_grad]
            for b, one in enumerate(x):
                with torch.no_grad(), torch.enable_grad():
                    engine_free = torch.autograd.grad(plain(model, one[None]).square().sum(), params, allow_unused=True)
                for rows, grad in zip(found, engine_free, strict=True):
                    torch.testing.assert_close(rows[b], torch.zeros_like(rows[b]) if grad is None else grad)


def plain(model: Block, x: Tensor) -> Tensor:
    """The forward of a model without its hooks."""
    first, second = (lambda h, m=m: F.linear(h, m.weight, m.bias) for m in (model.first, model.second))
    h = F.relu(F.layer_norm(first(x), (D,), model.norm.weight, model.norm.bias, model.norm.eps))
    h = h * 2 if model.way == "alike" else h
    return first(h) if model.way == "other module" else second(h)


def test_a_swapped_parameter_is_another_one() -> None:
    model, x = Block(), torch.randn(B, D)
    engine = engine_of(model)
    for _ in range(3):
        check(engine, model, x)
        for module in (model.first, model.second):
            module.weight = nn.Parameter(torch.randn(D, D))


def test_autocast_is_part_of_a_known_call() -> None:
    model, x = Block(), torch.randn(B, D)
    engine = engine_of(model)
    kinds = set()
    for cast in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out = model(x)
        kinds.add((cast, out.dtype))
        out.float().square().sum().backward()
        assert engine.norms().isfinite().all()
    assert kinds == {(False, torch.float32), (True, torch.bfloat16)}


def test_checkpointing_after_known_steps() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = Block(), torch.randn(B, D, requires_grad=True)
    engine = engine_of(model)
    for reentrant in (None, False, True, None):
        out = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        out.square().sum().backward()
        norms = engine.norms()
        with torch.random.fork_rng():
            other = Block()
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(norms, truth(other, x.detach()), rtol=1e-5, atol=1e-6)


def test_batches_of_other_sizes() -> None:
    model = Block()
    engine = engine_of(model)
    for size in (4, 2, 4, 1, 6, 4, 2):
        check(engine, model, torch.randn(size, D))


def test_a_known_call_keeps_nothing_of_a_step() -> None:
    import gc
    import weakref

    model = Block()
    engine = engine_of(model)
    for _ in range(3):
        x = torch.randn(B, D)
        step(model, x)
        engine.norms()
    gone = weakref.ref(x)
    del x
    step(model, torch.randn(B, D))
    engine.norms()
    gc.collect()
    assert gone() is None


def test_counts_of_objects_stay(seen: Seen) -> None:
    """No reference is lost or kept too often in what counts them by hand."""
    import gc
    import sys

    from fastdp.batch_axis import generations, tensor_notes

    model, x = Block(), torch.randn(B, D)
    engine = engine_of(model)
    watched = [
        None,
        True,
        False,
        MISSED,
        tensor_notes.LAYOUT,
        tensor_notes.MADE,
        F.linear,
        torch.relu,
        D,
        torch.float32,
        nn.Parameter,
    ]
    for _ in range(3):
        check(engine, model, x)
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(50):
        step(model, x)
        engine.norms()
    gc.collect()  # passes refer to each other
    grown = [sys.getrefcount(each) - old for each, old in zip(watched, before, strict=True)]
    assert max(map(abs, grown[3:])) < 40, grown  # of some 250 calls
    assert generations.now() is not None
