"""Custom rules: exact where they are right, loud where they are wrong, and the document's examples, run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.errors import BatchLayoutError, SampleMixingError, UncapturedUseError
from fastdp.grad_sample import custom_rule_calls
from fastdp.grad_sample import custom_rules as rules

from ..cases import Net, P, net, square
from ..truth import compare

B, T, D = 3, 5, 8
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "rules.md"


def two_tensors(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x, w


@torch.overrides.wrap_torch_function(two_tensors)
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
    rules.unregister_rule(bend, bend_op, Bend)
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


WRONG = {
    "no dict": (lambda call: call.grad.flatten(1, -2).sum(1), "must return a dict"),
    "nothing": (lambda call: {}, r"no gradient for 'w'"),
    "of the batch": (lambda call: {call.args[1]: bend_rule(call)[call.args[1]].sum(0)}, r"they must be \(3, 8\)"),
    "half": (lambda call: {call.args[1]: bend_rule(call)[call.args[1]] / 2}, r"differs from autograd's"),
    "a little off": (lambda call: {call.args[1]: bend_rule(call)[call.args[1]] * 1.001}, r"differs from autograd's"),
    "zero": (lambda call: {call.args[1]: torch.zeros(call.batch, D)}, r"differs from autograd's"),
    "samples swapped": (lambda call: {call.args[1]: bend_rule(call)[call.args[1]].flip(0)}, r"differs from autograd's"),
    "mixing": (lambda call: {call.args[1]: bend_rule(call)[call.args[1]] + 0 * call.grad.mean()}, "NaN in sample 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_named(name: str) -> None:
    rule, message = WRONG[name]
    fastdp.register_rule(bend)(rule)
    model, batch, losses = layer(bend, B, T, D)
    fastdp.PerSampleGradients(model)
    for _ in range(2):  # not only the first time
        with pytest.raises(UncapturedUseError, match=message) as problem:
            losses(model, batch).mean().backward()
        assert "rule '<lambda>'" in str(problem.value) and "bend() in module 'Net'" in str(problem.value)


def test_the_check_is_not_fooled_by_an_empty_gradient_or_made_every_step() -> None:
    calls = []

    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        calls.append(call.batch)
        return bend_rule(call)

    fastdp.register_rule(bend)(rule)
    model, (x,), losses = layer(bend, B, T, D)
    fastdp.PerSampleGradients(model)
    counts = []
    for batch in (x, x, torch.cat([x, x])):
        (0 * losses(model, (batch,))).mean().backward()
        counts.append(len(calls))
        calls.clear()
    assert counts[0] > counts[1] == counts[2] == 1  # another batch size is no other kind of call


def test_a_check_without_a_gradient_shows_nothing_and_is_made_again() -> None:
    fastdp.register_rule(bend)(lambda call: {call.args[1]: bend_rule(call)[call.args[1]] / 2})
    model = Net(lambda m, x: bend(x, m.w), w=P(D))
    fastdp.PerSampleGradients(model)
    model(torch.zeros(B, T, D)).sum((1, 2)).mean().backward()  # half of zero is right
    with pytest.raises(UncapturedUseError, match="differs"):
        model(torch.ones(B, T, D))


def test_a_part_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a constant was made for the batch, which the rule then sees whole."""
    monkeypatch.setattr(custom_rule_calls, "KEPT_BYTES", 0)

    @torch.overrides.wrap_torch_function(lambda x, w, mask: (x, w))
    def masked(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return torch.sinh(x * w) * mask

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


def test_unseen_functions_name_parameter_function_module_and_remedy() -> None:
    inner = Net(lambda m, x: Bend.apply(x, m.w), w=P(D))
    model = nn.Sequential(nn.Linear(D, D), inner, nn.Linear(D, 2))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(
        UncapturedUseError, match=r"'1\.w' .* in module '1', in the forward of Bend.*register_rule\(Bend\)"
    ):
        model(torch.randn(B, D)).square().sum(1).mean().backward()
    engine.detach()


def test_functions_without_a_sample_alone_name_the_parameter() -> None:
    @torch.overrides.wrap_torch_function(two_tensors)
    def needs_all(x: Tensor, w: Tensor) -> Tensor:
        if len(x) != B:
            raise ValueError("three rows, please")
        return x * w

    model = Net(lambda m, x: needs_all(m.a(x), m.w), a=nn.Linear(D, D), w=P(D))
    fastdp.PerSampleGradients(model)
    with pytest.raises(UncapturedUseError, match=r"needs_all\(\) in module 'Net' .*'w'.*register_rule"):
        model(torch.randn(B, D)).square().sum(1).mean().backward()


def test_like_tells_where_the_samples_lie_and_is_checked() -> None:
    @torch.overrides.wrap_torch_function(two_tensors)
    def turned(x: Tensor, w: Tensor) -> Tensor:
        """Through NumPy, which meta tensors cannot follow: [N, T, D] -> [N, D, T]"""
        return torch.stack([row.t() for row in x * torch.as_tensor(w.tolist())[0] * 0 + x * w])

    def rule(call: fastdp.RuleCall) -> dict[Tensor, Tensor]:
        x, w = call.args
        return {w: (call.grad.mT * x).flatten(1, -2).sum(1)}

    def build(shape: tuple[int, ...]) -> Any:
        torch.manual_seed(0)
        return net(lambda m, x: turned(m.a(x), m.w).tanh(), torch.randn(shape), a=nn.Linear(D, D), w=P(D))

    fastdp.register_rule(turned)(rule)
    with pytest.raises((BatchLayoutError, SampleMixingError)):
        compare(*build((B, B, D)))
    fastdp.register_rule(turned, like=0)(rule)
    assert compare(*build((B, B, D))).worst < 1e-5

    @torch.overrides.wrap_torch_function(two_tensors)
    def mixed(x: Tensor, w: Tensor) -> Tensor:
        return (x - x.mean(0)) * w

    fastdp.register_rule(mixed, like=0)(lambda call: {call.args[1]: (call.grad * call.args[0]).flatten(1, -2).sum(1)})
    with pytest.raises(SampleMixingError, match="mixed"):
        compare(*layer(mixed, B, T, D))


def test_what_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="plain Python function"):
        fastdp.register_rule(two_tensors)
    with pytest.raises(ValueError, match="rule for linear"):
        fastdp.register_rule(torch.nn.functional.linear)
    with pytest.raises(ValueError, match="writes into"):
        fastdp.register_rule(torch.Tensor.lerp_)
    with pytest.raises(TypeError, match="no torch.autograd.Function"):
        fastdp.register_rule(nn.Linear)
    with pytest.raises(TypeError, match="takes the function"):
        fastdp.register_rule()
    with pytest.raises(TypeError, match="a rule is"):
        fastdp.register_rule(bend)(3)


def test_unregistered_is_as_before() -> None:
    own = Bend.__dict__.get("apply")
    fastdp.register_rule(Bend)(bend_rule)
    x, w = torch.randn(B, D, requires_grad=True), P(D)
    Bend.apply(x, w).sum().backward()  # outside of fastdp nothing changes
    assert w.grad is not None
    rules.unregister_rule(Bend)
    assert Bend.__dict__.get("apply") is own and not any("bend" in str(f).lower() for f in rules._OURS)


def test_the_documents_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    scope: dict[str, Any] = {"__name__": "rules"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/rules.md, block {number}", "exec"), scope)
    assert scope["report"].ok
    scale = scope["Scale"]
    found = compare(*net(lambda m, x: scale.apply(m.a(x), m.w).tanh(), torch.randn(B, T, D), a=nn.Linear(D, D), w=P(D)))
    assert found.worst < 1e-5
    rules.unregister_rule(scope["hinge"], scale)
