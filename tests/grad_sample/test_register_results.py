"""Rules of functions with several results: None first, in the middle and last, nests, a named tuple."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.errors import UncapturedUseError
from fastdp.grad_sample import custom_rule_calls
from fastdp.grad_sample import custom_rules as rules

from ..cases import P, net
from ..truth import compare

B, T, D = 3, 5, 8


class Pair(NamedTuple):
    first: Any
    second: Any


def parts(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sinh(x * w), torch.cos(x * w)


FORMS = {
    "first": (lambda y, z: (None, y, z), lambda o: (o[1], o[2]), 3),
    "middle": (lambda y, z: (y, None, z), lambda o: (o[0], o[2]), 3),
    "last": (lambda y, z: (y, z, None), lambda o: (o[0], o[1]), 3),
    "all around": (lambda y, z: (None, y, None, z, None), lambda o: (o[1], o[3]), 5),
    "list": (lambda y, z: [y, None, z], lambda o: (o[0], o[2]), 3),
    "nested": (lambda y, z: (None, (y, [None, {"z": z, "none": None}])), lambda o: (o[1][0], o[1][1][1]["z"]), 5),
    "named": (lambda y, z: Pair(y, (None, z)), lambda o: (o.first, o.second[1]), 3),
    "ordered": (lambda y, z: OrderedDict(a=y, b=None, c=z, d="text"), lambda o: (o["a"], o["c"]), 4),
}


def registered_as(form: str) -> tuple[Any, Any, int]:
    build, take, leaves = FORMS[form]

    @torch.overrides.wrap_torch_function(lambda x, w: (x, w))
    def function(x: Tensor, w: Tensor) -> Any:
        return build(*parts(x, w))

    return function, take, leaves


@pytest.fixture(autouse=True)
def clean() -> Any:
    yield
    custom_rule_calls._CHECKED.clear()


def model_of(function: Any, take: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(2)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y, z = take(function(m.a(x), m.w))
        return m.b(y + 2 * z).tanh()

    return net(forward, torch.randn(B, T, D), a=nn.Linear(D, D), w=P(D), b=nn.Linear(D, 4))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["rule", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_exact(form: str, how: str, frozen: bool) -> None:
    function, take, leaves = registered_as(form)

    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        x, w = call.args
        assert len(call.grads) == leaves
        gy, gz = [g for g in call.grads if g is not None]  # in order, whatever stands between
        return {w: ((gy * torch.cosh(x * w) - gz * torch.sin(x * w)) * x).flatten(1, -2).sum(1)}

    fastdp.register_rule(function)(rule if how == "rule" else None)
    model, xs, losses = model_of(function, take)
    model.a.requires_grad_(not frozen)  # without, the data asks for no gradient
    assert compare(model, xs, losses).worst < 1e-5
    rules.unregister_rule(function)


class Chunked(torch.autograd.Function):
    """As chunked losses do: the loss of each sample, nothing, and a figure that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        count = (x > 0).flatten(1).sum(1)
        ctx.mark_non_differentiable(count)
        return None, torch.sinh(x * w), count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        slope = grads[1] * torch.cosh(x * w)
        return slope * w, (slope * x).flatten(0, -2).sum(0)


def chunked_rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
    x, w = call.args
    assert call.grads[0] is None and call.grads[1] is not None
    return {w: (call.grads[1] * torch.cosh(x * w) * x).flatten(1, -2).sum(1)}


def grad_rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
    x, w = call.args
    return {w: (call.grad * torch.cosh(x * w) * x).flatten(1, -2).sum(1)}


@pytest.mark.parametrize("how", [chunked_rule, None])
def test_an_autograd_function_with_none_and_a_count(how: Any) -> None:
    fastdp.register_rule(Chunked)(how)
    torch.manual_seed(2)
    model, xs, losses = net(lambda m, x: m.b(Chunked.apply(m.a(x), m.w)[1]).tanh(), torch.randn(B, T, D),
                            a=nn.Linear(D, D), w=P(D), b=nn.Linear(D, 4))  # fmt: skip
    assert compare(model, xs, losses).worst < 1e-5
    rules.unregister_rule(Chunked)


def test_grad_is_the_only_result_s() -> None:
    @torch.overrides.wrap_torch_function(lambda x, w: (x, w))
    def function(x: Tensor, w: Tensor) -> Any:
        return None, torch.sinh(x * w)

    fastdp.register_rule(function)(grad_rule)
    assert compare(*model_of(function, lambda o: (o[1], torch.zeros_like(o[1])))).worst < 1e-5
    rules.unregister_rule(function)


@pytest.mark.parametrize("form", ["rule", "none"])
def test_under_checkpointing(form: str) -> None:
    from torch.utils.checkpoint import checkpoint

    function, take, _ = registered_as("middle")

    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        x, w = call.args
        gy, _, gz = call.grads
        return {w: ((gy * torch.cosh(x * w) - gz * torch.sin(x * w)) * x).flatten(1, -2).sum(1)}

    fastdp.register_rule(function)(rule if form == "rule" else None)
    torch.manual_seed(2)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y, z = checkpoint(lambda h: take(function(m.a(h), m.w)), x, use_reentrant=False)
        return m.b(y + 2 * z).tanh()

    assert compare(*net(forward, torch.randn(B, T, D), a=nn.Linear(D, D), w=P(D), b=nn.Linear(D, 4))).worst < 1e-5
    rules.unregister_rule(function)


@pytest.mark.parametrize(
    "extra, said", [(lambda y: (y, 3.0), "a float among its results"), (lambda y: None, "no tens")]
)
def test_numbers_and_nothing_are_refused_by_name(extra: Any, said: str) -> None:
    @torch.overrides.wrap_torch_function(lambda x, w: (x, w))
    def odd(x: Tensor, w: Tensor) -> Any:
        return extra(x * w)

    fastdp.register_rule(odd)(None)
    model, xs, _ = model_of(odd, lambda o: (o[0], o[0]))
    fastdp.PerSampleGradients(model)
    with pytest.raises(UncapturedUseError, match=f"odd.*{said}"):
        model(*xs)
    rules.unregister_rule(odd)


def test_named_results_of_torch_keep_their_names() -> None:
    @torch.overrides.wrap_torch_function(lambda x, w: (x, w))
    def ordered(x: Tensor, w: Tensor) -> Any:
        return (x * w).sort(-1)

    fastdp.register_rule(ordered)(None)
    assert compare(*model_of(ordered, lambda o: (o.values, o[0]))).worst < 1e-5
    rules.unregister_rule(ordered)
