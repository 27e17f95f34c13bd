"""Custom rules: exact for every kind of function and every form of its results, and the document's examples, run."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import BatchLayoutError, SampleMixingError, UncapturedUseError
from fastdp.grad_sample import custom_rule_calls, custom_rules

from ..cases import Net, P, net, square
from ..truth import compare

B, T, D = 3, 5, 8
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "rules.md"


def own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a user's own, which asks its first two tensors who computes it."""
    return torch.overrides.wrap_torch_function(lambda x, w, *rest, **options: (x, w))(function)


@own
def bend(x: Tensor, w: Tensor) -> Tensor:
    """[N, ..., D], [D] -> [N, ..., D]"""
    return torch.sinh(x * w)


def bend_rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
    x, w = call.args
    return {w: (call.grad * torch.cosh(x * w) * x).flatten(1, -2).sum(1)}


@torch.library.custom_op("fastdp_tests::bend", mutates_args=())
def bend_op(x: Tensor, w: Tensor) -> Tensor:
    return torch.sinh(x * w)


def _bend_back(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    slope = g * torch.cosh(x * w)
    return slope * w, (slope * x).flatten(0, -2).sum(0)


bend_op.register_autograd(_bend_back, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Bend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.sinh(x * w)

    backward = staticmethod(_bend_back)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    custom_rules.unregister_rule(bend, bend_op, Bend)
    custom_rule_calls._CHECKED.clear()


def layer(function: Any, *shape: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(2)
    return net(lambda m, x: m.b(function(m.a(x), m.w)).tanh(), torch.randn(shape), a=nn.Linear(D, D), w=P(D),
               b=nn.Linear(D, 4))  # fmt: skip


FUNCTIONS = {
    "wrapped": (bend, bend),
    "custom_op": (bend_op, bend_op),
    "packet": (torch.ops.fastdp_tests.bend, torch.ops.fastdp_tests.bend),
    "overload": (torch.ops.fastdp_tests.bend.default, bend_op),
    "autograd function": (Bend, lambda x, w: Bend.apply(x, w)),
    "its apply": (Bend.apply, lambda x, w: Bend.apply(x, w)),
}


@pytest.mark.parametrize("shape", [(B, T, D), (B, B, D), (B, D), (1, T, D)], ids=str)
@pytest.mark.parametrize("how", ["rule", "none"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact(name: str, how: str, shape: tuple[int, ...]) -> None:
    function, called = FUNCTIONS[name]
    used = []

    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        used.append(call.batch)
        return bend_rule(call)

    fastdp.register_rule(function)(rule if how == "rule" else None)
    assert compare(*layer(called, *shape)).worst < 1e-5
    assert bool(used) == (how == "rule"), "the rule was not asked"


def test_time_first_derived_and_shared_parameters() -> None:
    fastdp.register_rule(bend)(bend_rule)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        steps = bend(m.a(x).transpose(0, 1), m.w)  # [T, N, D]
        flat = bend(steps.transpose(0, 1).reshape(-1, D), 1 + m.v[0])  # [N * T, D]
        return bend(flat.view(len(x), -1, D), m.w)

    assert compare(*net(forward, torch.randn(B, T, D), a=nn.Linear(D, D), w=P(D), v=P(2, D))).worst < 1e-5


def test_large_gradients_are_asked_for_again_and_sixteen_bits_come_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_rule_calls, "KEPT_BYTES", 0)
    seen = set()

    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        seen.update(t.dtype for t in (*call.args, call.grad))
        return bend_rule(call)

    fastdp.register_rule(bend)(rule)
    assert compare(*layer(bend, B, T, D)).worst < 1e-5
    model, (x,), losses = layer(bend, B, T, D)
    assert compare(model.bfloat16(), (x.bfloat16(),), losses).norms < 0.05 and seen == {torch.float32}


def test_keywords_and_constants() -> None:
    @torch.overrides.wrap_torch_function(lambda x, *, scale, mask: (x, scale))
    def masked(x: Tensor, *, scale: Tensor, mask: Tensor) -> Tensor:
        return x * scale * mask

    @fastdp.register_rule(masked)
    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        scale = call.kwargs["scale"]
        return {scale: (call.grad * call.args[0] * call.kwargs["mask"]).flatten(1, -2).sum(1)}

    mask = torch.rand(T, 1)
    found = compare(*net(lambda m, x: masked(m.a(x), scale=m.w, mask=mask.to(x.dtype)).tanh(), torch.randn(B, T, D),
                         a=nn.Linear(D, D), w=P(D)))  # fmt: skip
    assert found.worst < 1e-5


def test_a_part_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a constant was made for the batch, which the rule then sees whole."""
    monkeypatch.setattr(custom_rule_calls, "KEPT_BYTES", 0)
    masked = own(lambda x, w, mask: torch.sinh(x * w) * mask)
    masked.__name__ = "masked"
    batches = []

    @fastdp.register_rule(bend)
    @fastdp.register_rule(masked)
    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        batches.append(call.batch)
        x, w, *mask = call.args
        grad = call.grad * mask[0].view(call.batch, 1, 1, 1) if mask else call.grad
        return {w: (grad * torch.cosh(x * w) * x).flatten(1, -2).sum(1)}

    mask = torch.tensor([0.5, 1.0, 2.0]).view(B, 1, 1)
    for forward, sizes in ((lambda m, x: bend(x, m.w), {1, 2}), (lambda m, x: masked(x, m.w, mask), {B})):
        model = Net(forward, w=P(D))
        engine = fastdp.PerSampleGradients(model)
        square(model, torch.randn(B, T, D)).mean().backward()
        rows = engine.materialize()["w"]
        batches.clear()
        parts = [engine._last().per_sample(model.w, low, high) for low, high in ((0, 1), (1, 3))]
        torch.testing.assert_close(torch.cat(parts), rows)
        assert set(batches) == sizes


# ---------------------------------------------------------------------- several results


class Pair(NamedTuple):
    first: Any
    second: Any


FORMS = {
    "around": (lambda y, z: (None, y, None, z, None), lambda o: (o[1], o[3]), 5),
    "list": (lambda y, z: [y, None, z], lambda o: (o[0], o[2]), 3),
    "nested": (lambda y, z: (None, (y, [None, {"z": z, "none": None}])), lambda o: (o[1][0], o[1][1][1]["z"]), 5),
    "named": (lambda y, z: Pair(y, (None, z)), lambda o: (o.first, o.second[1]), 3),
    "numbers": (lambda y, z: {"a": y, "c": z, "d": "text"}, lambda o: (o["a"], o["c"]), 3),
}


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", ["rule", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_several_results(form: str, how: str, frozen: bool, again: bool) -> None:
    build, take, leaves = FORMS[form]
    function = own(lambda x, w: build(torch.sinh(x * w), torch.cos(x * w)))

    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        x, w = call.args
        assert len(call.grads) == leaves
        gy, gz = [g for g in call.grads if g is not None]  # in order, whatever stands between
        return {w: ((gy * torch.cosh(x * w) - gz * torch.sin(x * w)) * x).flatten(1, -2).sum(1)}

    def both(x: Tensor, w: Tensor) -> Tensor:
        y, z = take(function(x, w))
        return y + 2 * z

    fastdp.register_rule(function)(rule if how == "rule" else None)
    rerun = lambda x, w: checkpoint(both, x, w, use_reentrant=False)
    model, xs, losses = layer(rerun if again else both, B, T, D)
    model.a.requires_grad_(not frozen)  # without, the data asks for no gradient
    assert compare(model, xs, losses).worst < 1e-5
    custom_rules.unregister_rule(function)


class Chunked(torch.autograd.Function):
    """As chunked losses do: nothing, a value of each sample, and a figure that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        count = (x > 0).flatten(1).sum(1)
        ctx.mark_non_differentiable(count)
        return None, torch.sinh(x * w), count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _bend_back(ctx, grads[1])


def chunked_rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
    x, w = call.args
    assert call.grads[0] is None
    return {w: (call.grads[1] * torch.cosh(x * w) * x).flatten(1, -2).sum(1)}


@pytest.mark.parametrize("how", [chunked_rule, None])
def test_an_autograd_function_with_none_and_a_count(how: Any) -> None:
    fastdp.register_rule(Chunked)(how)
    assert compare(*layer(lambda x, w: Chunked.apply(x, w)[1], B, T, D)).worst < 1e-5
    custom_rules.unregister_rule(Chunked)


@pytest.mark.parametrize(
    "extra, said", [(lambda y: (y, 3.0), "a float among its results"), (lambda y: None, "no tens")]
)
def test_numbers_and_nothing_are_refused_by_name(extra: Any, said: str) -> None:
    odd = own(lambda x, w: extra(x * w))
    fastdp.register_rule(odd)(None)
    model, xs, _ = layer(lambda x, w: odd(x, w)[0], B, T, D)
    fastdp.PerSampleGradients(model)
    with pytest.raises(UncapturedUseError, match=said):
        model(*xs)
    custom_rules.unregister_rule(odd)


def test_named_results_of_torch_keep_their_names() -> None:
    ordered = own(lambda x, w: (x * w).sort(-1))
    fastdp.register_rule(ordered)(None)
    assert compare(*layer(lambda x, w: ordered(x, w).values, B, T, D)).worst < 1e-5
    custom_rules.unregister_rule(ordered)


# ---------------------------------------------------------------------- where samples lie, and what is registered


def test_like_tells_where_the_samples_lie_and_is_checked() -> None:
    @own
    def turned(x: Tensor, w: Tensor) -> Tensor:
        """Through NumPy, which meta tensors cannot follow: [N, T, D] -> [N, D, T]"""
        return torch.stack([row.t() for row in x * torch.as_tensor(w.tolist())[0] * 0 + x * w])

    @own
    def mixed(x: Tensor, w: Tensor) -> Tensor:
        return (x - x.mean(0)) * w

    def build() -> Any:
        torch.manual_seed(0)
        return net(lambda m, x: turned(m.a(x), m.w).tanh(), torch.randn(B, B, D), a=nn.Linear(D, D), w=P(D))

    rule = lambda call: {call.args[1]: (call.grad.mT * call.args[0]).flatten(1, -2).sum(1)}
    fastdp.register_rule(turned)(rule)
    with pytest.raises((BatchLayoutError, SampleMixingError)):
        compare(*build())
    fastdp.register_rule(turned, like=0)(rule)
    assert compare(*build()).worst < 1e-5
    fastdp.register_rule(mixed, like=0)(lambda call: {call.args[1]: (call.grad * call.args[0]).flatten(1, -2).sum(1)})
    with pytest.raises(SampleMixingError, match="mixed"):
        compare(*layer(mixed, B, T, D))


def test_what_cannot_be_registered() -> None:
    plain = lambda x, w: x * w
    for error, message, function in (
        (TypeError, "plain Python function", plain), (ValueError, "rule for linear", torch.nn.functional.linear),
        (ValueError, "writes into", torch.Tensor.lerp_), (TypeError, "no torch.autograd.Function", nn.Linear),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            fastdp.register_rule(function)
    with pytest.raises(TypeError, match="takes the function"):
        fastdp.register_rule()
    with pytest.raises(TypeError, match="a rule is"):
        fastdp.register_rule(bend)(3)


def test_unregistered_is_as_before() -> None:
    before = Bend.__dict__.get("apply")
    fastdp.register_rule(Bend)(bend_rule)
    x, w = torch.randn(B, D, requires_grad=True), P(D)
    Bend.apply(x, w).sum().backward()  # outside of fastdp nothing changes
    assert w.grad is not None
    custom_rules.unregister_rule(Bend)
    assert Bend.__dict__.get("apply") is before and not any("bend" in str(f).lower() for f in custom_rules._OURS)


def test_functions_of_other_libraries_once_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is registered once, and what a user says of it stays."""
    monkeypatch.setattr(custom_rules, "FUNCTIONS", {"another_library": ("Bend", "OfALaterVersion")})
    monkeypatch.setattr(custom_rules, "_seen", set())
    custom_rules.see_foreign()
    assert not custom_rules.is_registered(Bend)
    monkeypatch.setitem(sys.modules, "another_library", types.SimpleNamespace(Bend=Bend))
    custom_rules.see_foreign()
    assert custom_rules.is_registered(Bend) and custom_rules.is_registered(Bend.apply)
    custom_rules.unregister_rule(Bend)
    custom_rules.see_foreign()
    assert not custom_rules.is_registered(Bend)  # the user's word
    monkeypatch.setattr(custom_rules, "_seen", set())
    fastdp.register_rule(Bend)(bend_rule)
    monkeypatch.setattr(custom_rules, "register_rule", lambda *functions: pytest.fail("the user's rule was replaced"))
    custom_rules.see_foreign()
    assert custom_rules.is_registered(Bend)


def test_the_documents_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    scope: dict[str, Any] = {"__name__": "rules"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/rules.md, block {number}", "exec"), scope)
    assert scope["report"].ok
    scale = scope["Scale"]
    found = compare(*net(lambda m, x: scale.apply(m.a(x), m.w).tanh(), torch.randn(B, T, D), a=nn.Linear(D, D), w=P(D)))
    assert found.worst < 1e-5
    custom_rules.unregister_rule(scope["hinge"], scale)
