"""Where models come from: wrappers, parametrizations, copies, other devices. Exact or refused.

What computes out of torch's sight is in test_sources_functions; what needs transformers, peft or accelerate in
test_sources_libraries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import Tensor, nn

import fastdp
from fastdp.errors import ParameterError, UncapturedUseError

from ..cases import P, net, square
from ..truth import compare, norms_of, truth

B, T, D = 3, 5, 8
TOLERANCE = 1e-5
Step = Callable[[nn.Module, Any], None]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 4))


def norms_alone(model: nn.Module, x: Tensor) -> Tensor:
    """Truth for models that cannot be copied: plain autograd in their own type, one sample at a time."""
    rows = [torch.autograd.grad(square(model, x[i : i + 1]).sum(), list(model.parameters())) for i in range(len(x))]
    return torch.stack([torch.stack([g.double().square().sum() for g in row]).sum().sqrt() for row in rows])


def norms_of_engine(model: nn.Module, x: Tensor, losses: Callable[[nn.Module, Tensor], Tensor] = square) -> Tensor:
    engine = fastdp.PerSampleGradients(model)
    try:
        losses(model, x).mean().backward()
        return engine.norms().double()
    finally:
        engine.detach()
        model.zero_grad()


# --------------------------------------------------------------------------- parametrizations and pruning


def spectral_old(layer: nn.Module) -> nn.Module:
    return nn.utils.spectral_norm(layer, n_power_iterations=300)


def spectral_new(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(layer, n_power_iterations=300)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("normed", [spectral_old, spectral_new])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(D, D), lambda: nn.Conv1d(D, 6, 3)], ids=["linear", "conv"])
def test_spectral_norm(
    layer: Callable[[], nn.Module], normed: Callable[[nn.Module], nn.Module], training: bool
) -> None:
    """Its power iteration moves buffers, but by the weights alone; run to its end here, for the truth to see it too."""
    torch.manual_seed(0)
    model = nn.Sequential(normed(layer()), nn.Tanh()).train()
    x = torch.randn((B, D, 7) if isinstance(model[0], nn.Conv1d) else (B, T, D))
    with torch.no_grad():
        for _ in range(5):
            model(x)
    assert compare(model.train(training), x, square).worst < TOLERANCE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("root", [False, True])
def test_the_old_weight_norm(root: bool) -> None:
    layer = nn.utils.weight_norm(nn.Linear(D, D))
    model, x = layer if root else nn.Sequential(layer, nn.Tanh()), torch.randn(B, T, D)
    torch.testing.assert_close(norms_of_engine(model, x), norms_alone(model, x), rtol=TOLERANCE, atol=0)


def test_pruned() -> None:
    model, x = mlp(), torch.randn(B, D)
    prune.random_unstructured(model[0], "weight", 0.4)
    prune.ln_structured(model[0], "weight", 0.2, 2, 0)
    prune.l1_unstructured(model[2], "bias", 2)
    torch.testing.assert_close(norms_of_engine(model, x), norms_alone(model, x), rtol=TOLERANCE, atol=0)


# --------------------------------------------------------------------------- functional_call


@pytest.mark.parametrize("kind", ["derived", "foreign", "foreign parameters"])
def test_functional_call_with_other_tensors_is_refused(kind: str) -> None:
    model = mlp()
    make = {"derived": lambda p: 2 * p, "foreign": lambda p: torch.randn(p.shape, requires_grad=True),
            "foreign parameters": lambda p: nn.Parameter(torch.randn(p.shape))}[kind]  # fmt: skip
    others = {name: make(p) for name, p in model.named_parameters()}
    engine = fastdp.PerSampleGradients(model)
    loss = torch.func.functional_call(model, others, (torch.randn(B, D),)).square().mean()
    with pytest.raises(UncapturedUseError, match="functional_call"):
        loss.backward()
    engine.detach()
    assert compare(model, torch.randn(B, D), square).worst < TOLERANCE, "the model must come back whole"


def test_functional_call_within_a_forward() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        scaled = {name: p * m.s for name, p in m.a.named_parameters()}
        return torch.func.functional_call(m.a, scaled, (x,)).tanh()

    assert compare(*net(forward, torch.randn(B, T, D), a=nn.Linear(D, 4), s=P(1))).worst < TOLERANCE
    frozen = nn.Linear(D, 4).requires_grad_(False)  # a hyper-network
    other = lambda m, x: torch.func.functional_call(m.a, {"weight": m.u @ m.v, "bias": m.b}, (x,)).tanh()
    assert compare(*net(other, torch.randn(B, T, D), a=frozen, u=P(4, 2), v=P(2, D), b=P(4))).worst < TOLERANCE


# --------------------------------------------------------------------------- types and memory formats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models(dtype: torch.dtype) -> None:
    """Against the truth in float64, no worse than plain PyTorch in 16 bits (by the norms, four times)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).to(dtype)
    x = torch.randn(B, T, D).to(dtype)
    exact, plain = norms_of(truth(model, x, square)), norms_of(truth(model, x, square, double=False))
    off = (norms_of_engine(model, x) - exact).abs()
    assert bool((off <= 4 * (plain - exact).abs().max() + 1e-5 * exact).all())


# --------------------------------------------------------------------------- lazy, added, replaced, removed


def test_lazy_modules_materialised_after_the_optimizer_was_made() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyConv1d(6, 3), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(B, D, 7)
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=1e9, expected_batch_size=B)
    square(model, x).mean().backward()
    plain = copy.deepcopy(model)
    found = optimizer.norms
    optimizer.step()
    torch.testing.assert_close(found.double(), norms_of(truth(plain, x, square)), rtol=TOLERANCE, atol=0)
    square(plain, x).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q - q.grad, rtol=1e-5, atol=1e-6)


def _weight_norm(m: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(m[2])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "added": lambda m: m.append(nn.Linear(4, 4)),
    "module replaced": lambda m: m.__setitem__(2, nn.Linear(D, 4)),
    "parameter replaced": lambda m: setattr(m[2], "weight", nn.Parameter(torch.randn(4, D))),
    "parametrized": _weight_norm,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changed_after_the_optimizer_was_made(name: str) -> None:
    model, x = mlp(), torch.randn(B, D)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B)
    CHANGES[name](model)
    before = optimizer.history
    with pytest.raises(ParameterError, match="make a new"):
        square(model, x).mean().backward()
        optimizer.step()
    assert optimizer.history == before
    optimizer.detach()
    renewed = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B)
    square(model, x).mean().backward()
    renewed.step()


# --------------------------------------------------------------------------- copies


# --------------------------------------------------------------------------- several devices and processes


def test_parameters_without_values_are_refused() -> None:
    model = mlp()
    model[2].to("meta")
    with pytest.raises(ParameterError, match=r"'2\.weight', '2\.bias'.*meta"):
        fastdp.PerSampleGradients(model)
    model[2].requires_grad_(False)
    fastdp.PerSampleGradients(model)
