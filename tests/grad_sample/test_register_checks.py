"""Rules that are wrong, always or in one place only (a sample, a parameter, an option, a type, a layout): refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.errors import FastDPError, UncapturedUseError
from fastdp.grad_sample import custom_rule_calls
from fastdp.grad_sample import custom_rules as rules

from ..cases import Net, P, square
from ..truth import compare

B, T, D = 5, 3, 6
Gradients = dict[Tensor, Tensor]


@torch.overrides.wrap_torch_function(lambda x, w, b, cubed=False: (x, w, b))
def curve(x: Tensor, w: Tensor, b: Tensor, cubed: bool = False) -> Tensor:
    """[N, T, D], [D], [D] -> [N, T, D]"""
    y = x * w + b
    return y.pow(3) if cubed else y.square()


def right(call: fastdp.RuleCall) -> Gradients:
    x, w, b = call.args[:3]
    y = x * w + b
    g = call.grad * (3 * y.square() if call.kwargs.get("cubed") else 2 * y)
    return {w: (g * x).flatten(1, -2).sum(1), b: g.flatten(1, -2).sum(1)}


def altered(
    change: Callable[[Tensor], Tensor], where: Callable[[fastdp.RuleCall], bool] = lambda call: True, parameter: int = 1
) -> Callable[[Any], Gradients]:
    def rule(call: fastdp.RuleCall) -> Gradients:
        found = right(call)
        if where(call):
            found[call.args[parameter]] = change(found[call.args[parameter]])
        return found

    return rule


def half(g: Tensor) -> Tensor:
    return g / 2


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    rules.unregister_rule(curve)
    custom_rule_calls._CHECKED.clear()


def model(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(lambda m, x: curve(x, m.w, m.b, **m.options), w=P(D), b=P(D), options=options)


def backward(model: nn.Module, x: Tensor) -> None:
    square(model, x).mean().backward()


def test_a_right_rule_passes() -> None:
    fastdp.register_rule(curve)(right)
    for options in ({}, {"cubed": True}):
        assert compare(model(**options), (torch.randn(B, T, D),), square).worst < 1e-5


def raising(call: fastdp.RuleCall) -> Gradients:
    raise IndexError("no such row")


def writing(call: fastdp.RuleCall) -> Gradients:
    call.grad.mul_(2)
    return {w: half(g) for w, g in right(call).items()}


DIFFERS = r"differs from autograd's"
WRONG = {
    "no dict": (lambda call: call.grad.flatten(1, -2).sum(1), "must return a dict"),
    "nothing": (lambda call: {}, r"no gradient for 'w'"),
    "of the batch": (altered(lambda g: g.sum(0)), r"they must be \(5, 6\)"),
    "half": (altered(half), DIFFERS),
    "a little off": (altered(lambda g: g * 1.001), DIFFERS),
    "zero": (altered(torch.zeros_like), DIFFERS),
    "samples reversed": (altered(lambda g: g.flip(0)), DIFFERS),
    "two in the middle swapped": (altered(lambda g: g[[0, 2, 1, 3, 4]], lambda call: call.batch == B),
                                  "all samples together differ"),
    "mixing": (altered(lambda g: g + 0 * g.mean()), "NaN in sample 0"),
    "raising": (raising, "raised IndexError: no such row"),
    "writing": (writing, "on copies"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_named(name: str) -> None:
    rule, message = WRONG[name]
    fastdp.register_rule(curve)(rule)
    net = model()
    fastdp.PerSampleGradients(net)
    for _ in range(2):  # not only the first time
        with pytest.raises(UncapturedUseError, match=message) as problem:
            backward(net, torch.randn(B, T, D))
        assert f"rule '{rule.__name__}'" in str(problem.value) and "curve() in module 'Net'" in str(problem.value)


LATER = {  # the rule, what is done before a second step meets its error, and the parameter
    "an option": (altered(half, lambda call: call.kwargs.get("cubed", False)),
                  lambda net: net.options.update(cubed=True), "w"),
    # numbers come as float32; a rule may still know the parameter's own type
    "a type": (altered(half, lambda call: IN_USE[0].w.dtype == torch.float64), lambda net: net.double(), "w"),
    "a memory layout": (altered(half, lambda call: not call.args[0].is_contiguous()), lambda net: None, "w"),
    "another parameter": (altered(half, parameter=2), lambda net: net.b.requires_grad_(True), "b"),
}  # fmt: skip
IN_USE: list[Net] = []


@pytest.mark.parametrize("name", LATER)
def test_what_is_met_later(name: str) -> None:
    rule, change, parameter = LATER[name]
    net = model()
    IN_USE[:] = [net]
    net.b.requires_grad_(parameter != "b")
    fastdp.register_rule(curve)(rule)
    fastdp.PerSampleGradients(net)
    backward(net, torch.randn(B, T, D))
    change(net)
    with pytest.raises(UncapturedUseError, match=f"for '{parameter}' and sample"):
        backward(net, torch.randn(B, D, T).mT)


def test_the_check_is_not_fooled_by_an_empty_gradient_or_made_every_step() -> None:
    calls = []

    def rule(call: fastdp.RuleCall) -> Gradients:
        calls.append(call.batch)
        return right(call)

    fastdp.register_rule(curve)(rule)
    net, x, counts = model(), torch.randn(B, T, D), []
    fastdp.PerSampleGradients(net)
    for batch in (x, x, torch.cat([x, x])):
        (0 * square(net, batch)).mean().backward()
        counts.append(len(calls))
        calls.clear()
    assert counts[0] > counts[1] == counts[2] == 1  # another batch size is no other kind of call


def test_a_check_without_a_gradient_shows_nothing_and_is_made_again() -> None:
    fastdp.register_rule(curve)(altered(half))
    net = model()
    fastdp.PerSampleGradients(net)
    with torch.no_grad():
        net.b.zero_()
    net(torch.zeros(B, T, D)).sum((1, 2)).mean().backward()  # half of zero is right
    with pytest.raises(UncapturedUseError, match="differs"):
        net(torch.ones(B, T, D))


# ---------------------------------------------------------------------- functions without a rule


def own(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.overrides.wrap_torch_function(lambda x, w, **options: (x, w))(function)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).flatten(0, -2).sum(0)


@own
def scaled(x: Tensor, w: Tensor, by_size: bool = False) -> Tensor:
    return x * w * (len(x) if by_size else 1)


@own
def needs_all(x: Tensor, w: Tensor) -> Tensor:
    if len(x) != B:
        raise ValueError("five rows, please")
    return x * w


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            Scale.apply,
            r"'1\.w' .* in module '1', without grad, as in .* torch.autograd.Function \(which fastdp.register_rule",
        ),
        (needs_all, r"needs_all\(\) in module '1' .*'1.w'.*register_rule"),
    ],
)
def test_parameter_function_module_and_remedy_are_named(function: Any, message: str) -> None:
    inner = Net(lambda m, x: function(x, m.w), w=P(D))
    net = nn.Sequential(nn.Linear(D, D), inner, nn.Linear(D, 2))
    fastdp.PerSampleGradients(net)
    with pytest.raises(UncapturedUseError, match=message):
        backward(net, torch.randn(B, D))


def test_an_option_by_which_an_unknown_function_depends_on_the_batch() -> None:
    """Functions without a rule are run on one sample alone and compared, again for other options."""
    net = Net(lambda m, x: scaled(m.a(x), m.w, by_size=m.by_size), a=nn.Linear(D, D), w=P(D), by_size=False)
    fastdp.PerSampleGradients(net)
    backward(net, torch.randn(B, T, D))
    net.by_size = True
    with pytest.raises(FastDPError, match="scaled"):
        backward(net, torch.randn(B, T, D))
