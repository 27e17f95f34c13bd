"""Rules that are wrong in one place only: for one sample, one parameter, one option, one type, one memory layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastdp
from fastdp.errors import FastDPError, UncapturedUseError
from fastdp.grad_sample import custom_rule_calls
from fastdp.grad_sample import custom_rules as rules

from ..cases import Net, P, square
from ..truth import compare

B, T, D = 5, 3, 6


@torch.overrides.wrap_torch_function(lambda x, w, b, cubed=False: (x, w, b))
def curve(x: Tensor, w: Tensor, b: Tensor, cubed: bool = False) -> Tensor:
    """[N, T, D], [D], [D] -> [N, T, D]"""
    y = x * w + b
    return y.pow(3) if cubed else y.square()


Gradients = dict[Tensor, Tensor]


def right(call: fastdp.RuleCall) -> Gradients:
    x, w, b = call.args[:3]
    y = x * w + b
    g = call.grad * (3 * y.square() if call.kwargs.get("cubed") else 2 * y)
    return {w: (g * x).flatten(1, -2).sum(1), b: g.flatten(1, -2).sum(1)}


def wrong_where(condition: Callable[[fastdp.RuleCall], bool], parameter: int = 1) -> Callable[[Any], Gradients]:
    def rule(call: fastdp.RuleCall) -> Gradients:
        found = right(call)
        if condition(call):
            found[call.args[parameter]] = found[call.args[parameter]] / 2
        return found

    return rule


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    rules.unregister_rule(curve)
    custom_rule_calls._CHECKED.clear()


def model(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(lambda m, x: curve(x, m.w, m.b, **m.options), w=P(D), b=P(D), options=options)


def backward(model: Net, x: Tensor) -> None:
    square(model, x).mean().backward()


def test_a_right_rule_passes() -> None:
    fastdp.register_rule(curve)(right)
    for options in ({}, {"cubed": True}):
        assert compare(model(**options), (torch.randn(B, T, D),), square).worst < 1e-5


def test_samples_between_the_first_and_the_last_are_swapped() -> None:
    def rule(call: fastdp.RuleCall) -> Gradients:
        order = torch.arange(call.batch)
        if call.batch == B:
            order[1:3] = torch.tensor([2, 1])
        return {w: g[order] for w, g in right(call).items()}

    fastdp.register_rule(curve)(rule)
    net = model()
    fastdp.PerSampleGradients(net)
    with pytest.raises(UncapturedUseError, match="all samples together differ"):
        backward(net, torch.randn(B, T, D))


def test_the_other_parameter_of_two_once_it_is_trained() -> None:
    fastdp.register_rule(curve)(wrong_where(lambda call: True, parameter=2))
    net = model()
    net.b.requires_grad_(False)
    fastdp.PerSampleGradients(net)
    backward(net, torch.randn(B, T, D))
    net.b.requires_grad_(True)
    with pytest.raises(UncapturedUseError, match="for 'b' and sample"):
        backward(net, torch.randn(B, T, D))


def test_an_option_met_later() -> None:
    fastdp.register_rule(curve)(wrong_where(lambda call: call.kwargs.get("cubed", False)))
    net = model()
    fastdp.PerSampleGradients(net)
    backward(net, torch.randn(B, T, D))
    net.options["cubed"] = True
    with pytest.raises(UncapturedUseError, match="for 'w' and sample"):
        backward(net, torch.randn(B, T, D))


def test_a_type_met_later() -> None:
    """Numbers come as float32; a rule may still know the parameter's own type."""
    net = model()
    fastdp.register_rule(curve)(wrong_where(lambda call: net.w.dtype == torch.float64))
    fastdp.PerSampleGradients(net)
    backward(net, torch.randn(B, T, D))
    net.double()
    with pytest.raises(UncapturedUseError, match="for 'w' and sample"):
        backward(net, torch.randn(B, T, D))


def test_a_memory_layout_met_later() -> None:
    fastdp.register_rule(curve)(wrong_where(lambda call: not call.args[0].is_contiguous()))
    net = model()
    fastdp.PerSampleGradients(net)
    backward(net, torch.randn(B, T, D))
    with pytest.raises(UncapturedUseError, match="for 'w' and sample"):
        backward(net, torch.randn(B, D, T).mT)


def _raising(call: fastdp.RuleCall) -> Gradients:
    raise IndexError("no such row")


def _writing(call: fastdp.RuleCall) -> Gradients:
    call.grad.mul_(2)
    return {w: g / 2 for w, g in right(call).items()}


@pytest.mark.parametrize(("rule", "message"), [(_raising, "raised IndexError: no such row"), (_writing, "on copies")])
def test_a_rule_that_raises_or_writes_is_named(rule: Any, message: str) -> None:
    fastdp.register_rule(curve)(rule)
    net = model()
    fastdp.PerSampleGradients(net)
    with pytest.raises(UncapturedUseError, match=rf"rule '{rule.__name__}'.*curve\(\) in module 'Net'.*{message}"):
        backward(net, torch.randn(B, T, D))


@torch.overrides.wrap_torch_function(lambda x, w, by_size=False: (x, w))
def scaled(x: Tensor, w: Tensor, by_size: bool = False) -> Tensor:
    return x * w * (len(x) if by_size else 1)


def test_an_option_by_which_an_unknown_function_depends_on_the_batch() -> None:
    """Functions without a rule are run on one sample alone and compared, again for other options."""
    net = Net(lambda m, x: scaled(m.a(x), m.w, by_size=m.by_size), a=torch.nn.Linear(D, D), w=P(D), by_size=False)
    fastdp.PerSampleGradients(net)
    backward(net, torch.randn(B, T, D))
    net.by_size = True
    with pytest.raises(FastDPError, match="scaled"):
        backward(net, torch.randn(B, T, D))
