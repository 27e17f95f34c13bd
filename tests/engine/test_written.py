"""What is written, hooked or asked for between forward and backward: exact, or refused, as plain autograd would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import ParameterError, SampleMixingError, StepError, UncapturedUseError

from ..cases import Net, P, square
from ..truth import assert_refused, assert_step, compare

B, D = 4, 6

# each uses m.p after a layer, in a way whose backward needs its numbers; x is positive
READERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Parameter]]] = {
    "linear": (lambda m, x: F.linear(m.a(x), m.p), lambda: P(D, D)),
    "convolution": (lambda m, x: F.conv1d(m.a(x).unsqueeze(1), m.p).flatten(1), lambda: P(2, 1, 3)),
    "layer norm": (lambda m, x: F.layer_norm(m.a(x), (D,), m.p), lambda: P(D)),
    "group norm": (lambda m, x: F.group_norm(m.a(x), 2, m.p), lambda: P(D)),
    "divided by it": (lambda m, x: m.a(x).detach() / m.p, lambda: P(D)),
    "a power, by the generic rule": (lambda m, x: m.a(x).abs().detach().pow(m.p), lambda: P(D)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_parameter_written_to_before_backward(name: str) -> None:
    function, make = READERS[name]
    torch.manual_seed(0)
    model, x = Net(function, a=nn.Linear(D, D), p=make()), torch.rand(B, D)
    assert compare(model, (x,), square).worst < 1e-5 if name != "convolution" else True
    engine = fastdp.PerSampleGradients(model)
    loss = square(model, x).mean()
    with torch.no_grad():
        model.p.mul_(0.5)
    with pytest.raises(StepError, match="written to"):
        loss.backward()
    square(model, x).mean().backward()  # and the engine is whole
    assert engine.norms().shape == (B,)


def test_a_parameter_written_to_where_nothing_reads_it() -> None:
    """Plain autograd allows that, and so do we: the gradient of a table does not depend on the table."""
    model = Net(lambda m, ids: m.e(ids).sum(1), e=nn.Embedding(7, D))
    engine = fastdp.PerSampleGradients(model)
    loss = square(model, torch.randint(0, 7, (B, 3))).mean()
    with torch.no_grad():
        model.e.weight.mul_(0.5)
    loss.backward()
    assert engine.norms().shape == (B,)


@pytest.mark.parametrize("steps", [1, 3], ids=["the first step", "one like the step before"])
def test_an_input_written_to_before_the_norms_are_taken(steps: int) -> None:
    model, x = nn.Linear(D, 2), torch.randn(B, D)
    engine = fastdp.PerSampleGradients(model)
    for _ in range(steps):
        model(x).square().sum(1).mean().backward()
    engine.norms()
    x.zero_()
    for ask in (engine.norms, engine.materialize, lambda: engine.clipped_sum(torch.ones(B))):
        with pytest.raises(StepError, match="in place"):
            ask()  # type: ignore[operator]


def test_a_hook_that_writes_into_a_gradient_that_is_held() -> None:
    model = Net(lambda m, x: hooked(m.a(x)) + m.p, a=nn.Linear(D, D), p=P(1, D))

    def hooked(y: Tensor) -> Tensor:
        y.register_hook(lambda g: g.mul_(0.3))
        return y

    assert_refused(model, torch.randn(B, D), square, "a hook", SampleMixingError)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(kind: str) -> None:
    """They would mask or scale gradients, and are never called."""
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2))
    engine = fastdp.PerSampleGradients(model)
    handle = getattr(model[1].weight, kind)(lambda g: None)
    with pytest.raises(ParameterError, match=r"1\.weight.*hooks"):
        model(torch.randn(B, D))
    handle.remove()
    model(torch.randn(B, D)).square().sum(1).mean().backward()
    assert engine.norms().shape == (B,)


@pytest.mark.parametrize("derive", [lambda w: w.t(), lambda w: w * 2, lambda w: w.abs()])
def test_hooks_on_tensors_made_of_parameters_are_refused(derive: Callable[[Tensor], Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = derive(m.w)
        w.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return x @ w

    assert_refused(Net(forward, w=P(D, D)), torch.randn(B, D), square, "'w'", UncapturedUseError)


# --------------------------------------------------------------------------- gradients of other tensors only


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """FGSM: the model's own gradient decides the input."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    return model((x + 0.1 * grad.sign()).detach()).square().sum(1)


def test_the_gradient_of_an_input_is_no_contribution() -> None:
    torch.manual_seed(0)
    engine = fastdp.PerSampleGradients(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)))
    for _ in range(2):
        assert_step(engine, torch.randn(B, D), adversarial)
    assert all(p.grad is None for p in engine.model.parameters())


def test_backward_to_inputs_then_to_parameters() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(D, 2), torch.randn(B, D, requires_grad=True)
    engine = fastdp.PerSampleGradients(model)
    loss = model(x).square().sum(1).mean()
    loss.backward(inputs=[x], retain_graph=True)
    with pytest.raises(StepError, match="no backward yet"):
        engine.norms()
    loss.backward()
    found = engine.norms()
    model(x).square().sum(1).mean().backward()
    assert torch.equal(found, engine.norms())


# --------------------------------------------------------------------------- numbers that are not real, shapes of 0

COMPLEX = {
    "matmul": lambda m, x: (torch.complex(x, 2 * x) @ torch.complex(m.w, m.v)).abs(),
    "linear": lambda m, x: F.linear(torch.complex(x, 2 * x), torch.view_as_complex(torch.stack([m.w, m.v], -1))).abs(),
    "scale": lambda m, x: (torch.complex(x, 2 * x).unsqueeze(-1) * torch.complex(m.w, m.v)[0, :1]).abs(),
    "added": lambda m, x: (torch.complex(x, 2 * x) + torch.complex(m.w, m.v)[0]).abs(),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_weights_made_of_real_parameters(name: str) -> None:
    torch.manual_seed(0)
    assert compare(Net(COMPLEX[name], w=P(D, D), v=P(D, D)), (torch.randn(B, D),), square).worst < 1e-5


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (D, 0)])
def test_layers_without_inputs_or_outputs(inputs: int, outputs: int) -> None:
    layer = nn.Linear(D, 3)
    layer.weight = nn.Parameter(torch.randn(outputs, inputs))
    layer.bias = nn.Parameter(torch.randn(outputs))
    model = Net(lambda m, x: m.a(x[:, :inputs]).sum(1, keepdim=True) + m.p, a=layer, p=P(2))
    assert compare(model, (torch.randn(B, D),), square).norms < 1e-5


# --------------------------------------------------------------------------- bags


@pytest.mark.parametrize("order", ["as the batch", "turned round", "by column"])
def test_bags_whose_ids_were_reordered(order: str) -> None:
    def forward(m: Any, ids: Tensor) -> Tensor:
        flat = {"as the batch": ids, "turned round": ids.flip(0), "by column": ids.t()}[order].flatten()
        return m.e(flat, torch.arange(0, flat.numel(), 3))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, ids = Net(forward, e=nn.EmbeddingBag(7, D)), torch.randint(0, 7, (3, 3))
    if order == "as the batch":
        assert compare(model, (ids,), square).worst < 1e-5
        return
    assert_refused(model, ids, square, "bag", SampleMixingError)


@pytest.mark.parametrize(("number", "starts"), [(12, [0, 2, 2, 9]), (11, [0, 0, 3, 11]), (4, [0, 0, 1, 4])])
def test_bags_of_any_length_given_with_the_batch(number: int, starts: list[int]) -> None:
    torch.manual_seed(0)
    model, ids = nn.EmbeddingBag(7, D), torch.randint(0, 7, (number,))
    engine = fastdp.PerSampleGradients(model, batch_size=4)
    model(ids, torch.tensor(starts)).square().sum(1).mean().backward()
    found = engine.norms()
    engine.detach()
    for b, (start, end) in enumerate(zip(starts, [*starts[1:], number], strict=True)):
        model.zero_grad()
        model(ids[start:end], torch.tensor([0])).square().sum().backward()
        assert torch.allclose(found[b], model.weight.grad.norm(), rtol=1e-5)  # type: ignore[union-attr]


def test_a_gradient_that_torch_cannot_give_for_one_sample_names_the_parameter() -> None:
    """scatter of a row for every sample: torch's own backward fails where there are more rows than indices."""

    def forward(m: Any, ids: Tensor) -> Tensor:
        return torch.zeros(len(ids), 7).scatter(1, ids, m.p.expand(len(ids), 3))

    ids = torch.stack([torch.randperm(7)[:3] for _ in range(B)])
    assert_refused(Net(forward, p=P(3)), ids, square, "scatter.*'p'", UncapturedUseError)
