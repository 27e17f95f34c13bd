"""Known calls (`csrc/python/known_calls.cpp`) are those of Python: the same signatures, layouts and norms."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.batch_axis.layout import layout_on
from fastdp.engine.call_cache import Memo
from fastdp.engine.capture import _CaptureMode
from fastdp.engine.known_calls import MISSED
from fastdp.ops.registry import native
from fastdp.utils.pytree import tensors_in

from .. import cases
from ..batch_axis.test_numbers_of_sizes import warned

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


def rows_of(x: Tensor) -> int:
    return x.shape[0]


class Looking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten() if rows_of(x) > 99 else x


def test_a_size_that_other_code_was_told_is_of_whoever_asks_for_it_again() -> None:
    """By the same function; what the same code asks again in one forward is not noted anew."""
    looking = Looking()
    assert not warned(lambda m, h: len(looking(h)) and 1.0, [7])
    assert warned(lambda m, h: (looking(h), rows_of(h))[1], [7])
