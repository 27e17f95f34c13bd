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
