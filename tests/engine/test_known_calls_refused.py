"""What couples samples is refused in known calls too: what a reviewer found who compared them with those of Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastdp
from fastdp.engine.call_cache import Memo
from fastdp.errors import SampleMixingError

from .test_known_calls import B, Block, D, check, engine_of, pytestmark, step  # noqa: F401


class Odd(Block):
    """Does something in the middle of its forward that leaves what torch sees."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.what(self.first(x)))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "tolist", "backward"])
def test_what_left_torch_in_a_known_call_is_watched(kind: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call does beside its result, it does each time: a batch that mixes samples later is refused."""
    mixing = [False]

    def of_numpy(h: Tensor) -> Tensor:
        numbers = h.detach().numpy()
        if mixing[0]:
            numbers -= numbers.mean(0)
        return h

    def of_list(h: Tensor) -> Tensor:
        numbers = torch.tensor(h.tolist())
        return h - numbers.mean(0) if mixing[0] else h

    def of_backward(h: Tensor) -> Tensor:
        leaf = torch.zeros(D, requires_grad=True)
        (h.detach() * leaf).backward(gradient=h.detach())
        return h + leaf.grad if mixing[0] else h

    if not at_once:
        monkeypatch.setattr(Memo, "calls_of", lambda *given: None)
    model, x = Odd({"numpy": of_numpy, "tolist": of_list, "backward": of_backward}[kind]), torch.randn(B, D)
    engine = engine_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step(model, x)
            assert engine.norms().isfinite().all()
        mixing[0] = True
        with pytest.raises(SampleMixingError):
            step(model, x)


def test_numbers_set_in_every_step_stay_the_samples() -> None:
    def what(h: Tensor) -> Tensor:
        h.data = torch.tanh(h.data)
        return h

    model, x = Odd(what), torch.randn(B, D)
    engine, norms = engine_of(model), []
    for _ in range(3):
        step(model, x)
        norms.append(engine.norms())
    assert torch.equal(norms[0], norms[2])


def test_a_list_that_holds_itself_is_an_error_of_python() -> None:
    def what(h: Tensor) -> Tensor:
        pads: list[Any] = [0, 0]
        pads.append(pads)
        with pytest.raises(RecursionError):
            F.pad(h, pads)
        return h

    model, x = Odd(what), torch.randn(B, D)
    engine = engine_of(model)
    for _ in range(2):
        step(model, x)
        assert engine.norms().isfinite().all()


def test_constants_of_unseen_origin_are_no_tables() -> None:
    """What is made of a table is noted, also where the same was made of another tensor of its shape before."""

    class Tables(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, B + 2))
            self.plain = [torch.linspace(0, 1, B + 2)]

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            other, table = self.plain[0] * 2, self.table * 2
            return self.second(h * table[1 : 1 + len(h), None]) + 0 * other[0]

    model, x = Tables(), torch.randn(B, D)
    engine_of(model)
    for _ in range(3):
        with pytest.raises(SampleMixingError):
            step(model, x)


def times_refused(model: Block) -> int:
    """In six steps of batches of four sizes: a number that follows the size is warned of before that is certain."""
    engine_of(model)
    refused = 0
    for size in (4, 6, 4, 6, 5, 7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                step(model, torch.randn(size, D))
            except SampleMixingError:
                refused += 1
    return refused


def test_numbers_of_sizes_are_seen_in_known_calls() -> None:
    def of_tensors(h: Tensor) -> Tensor:
        return h * torch.tensor(0.5) * torch.tensor(1 / len(h))

    assert times_refused(Odd(of_tensors)) >= 3


def test_a_factor_of_a_parameter_that_is_a_size_is_judged() -> None:
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.add(self.first(x), self.norm.bias, alpha=len(x)))

    assert times_refused(Scaled()) >= 3


def test_rules_that_change_are_asked_again() -> None:
    from fastdp.grad_sample.rules import USE_RULES

    model, x, asked = Block(), torch.randn(B, D), []
    engine = engine_of(model)
    for _ in range(3):
        check(engine, model, x)
    rule = USE_RULES[F.linear]
    try:
        USE_RULES[F.linear] = lambda *given: asked.append(1) or rule(*given)  # type: ignore[func-returns-value]
        check(engine, model, x)
    finally:
        USE_RULES[F.linear] = rule
    assert asked == [1, 1]


def test_calls_are_known_after_memory_of_constants_became_data() -> None:
    """In a process where some program has written data into a constant."""
    from fastdp.batch_axis.tensor_notes import HOLDING

    HOLDING.turn += 1
    model, x = Block(), torch.randn(B, D)
    engine = engine_of(model)
    for _ in range(3):
        check(engine, model, x)
    assert len(engine._forward.memo.captures) == 3  # type: ignore[attr-defined]


def test_a_backward_within_a_hook_is_refused() -> None:
    model, x = Block(), torch.randn(B, D)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=B)
    kept: list[Tensor] = []
    model.first.register_forward_hook(lambda module, given, out: kept.append(out))
    out = model(x)
    done: list[bool] = []

    def hook(grad: Tensor) -> None:
        if not done:
            done.append(True)
            with torch.enable_grad():
                (out.mean(0) ** 2).sum().backward(retain_graph=True)

    kept[0].register_hook(hook)
    with pytest.raises(fastdp.errors.FastDPError):
        out.square().mean().backward(retain_graph=True)
    assert not optimizer._privacy.busy
