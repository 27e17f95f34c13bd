"""Models of 16 bits and of float64, autocast, and another default type of torch: by each model's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp

from .. import cases
from ..truth import as_double, norms_of, truth

NAMES = (
    "linear_3d_bias matmul_right addmm_conv1d_hf conv2d_padding embedding_repeated layer_norm_both class_token "
    "layer_scale mha_self_batch_first slices tied_embedding_head shared_layer"
).split()
BY_NAME = pytest.mark.parametrize("name", NAMES)


def floats(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    return type(batch)(floats(b, dtype) for b in batch)


def error(rows: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    scale = float(norms_of(exact).mean())
    return max(float((rows[n].double() - g).reshape(len(g), -1).norm(dim=1).max()) for n, g in exact.items()) / scale


def autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@pytest.mark.parametrize("mode", ["bfloat16 model", "bfloat16 autocast", "float16 model"])
@BY_NAME
def test_sixteen_bits(name: str, mode: str) -> None:
    """Errors are no larger than four times PyTorch's own in the same type."""
    model, batch, losses = cases.build(name)
    exact = truth(model, batch, losses)
    if mode.endswith("model"):
        dtype = getattr(torch, mode.split()[0])
        model, batch = model.to(dtype), floats(batch, dtype)

    def run(m: nn.Module, b: Any) -> Tensor:
        with autocast(mode.endswith("autocast")):
            return losses(m, b)

    plain = error(truth(model, batch, run, double=False), exact)
    engine = fastdp.PerSampleGradients(model)
    run(model, batch).float().mean().backward()
    rows = engine.materialize()
    assert all(g.dtype == torch.float32 for g in rows.values()) and error(rows, exact) <= 4 * plain + 1e-5
    # norms and sums are those of the very gradients, in float32
    own, factors = norms_of({n: g.double() for n, g in rows.items()}), torch.rand(cases.B) + 0.5
    assert torch.allclose(engine.norms().double(), own, rtol=2e-2 if name == "slices" else 1e-4)
    for n, total in engine.clipped_sum(factors).items():
        want = torch.einsum("b,b...->...", factors.double(), rows[n].double())
        assert torch.allclose(total.double(), want, rtol=2e-2, atol=2e-3 * float(own.max())), n


def test_float64_stays_float64() -> None:
    model, batch, losses = cases.build("encoder_layer_True_False")
    exact = truth(model, batch, losses)
    engine = fastdp.PerSampleGradients(model.double())
    losses(model, as_double(batch)).mean().backward()
    assert error(engine.materialize(), exact) < 1e-13
    assert all(t.dtype == torch.float64 for t in engine.clipped_sum(torch.ones(cases.B)).values())


def test_float64_parameters_cast_before_their_use() -> None:
    """As norms do that compute in float32: the sums are of the parameter's type again."""
    torch.manual_seed(0)
    model = cases.Net(
        lambda m, x: (m.a(x) * (1 + m.scale.float()).double()) * m.own.float(),
        a=nn.Linear(6, 4), scale=cases.P(4), own=cases.P(4),
    ).double()  # fmt: skip
    x = torch.randn(5, 6, dtype=torch.float64)
    engine = fastdp.PerSampleGradients(model)
    cases.square(model, x).mean().backward()
    sums = engine.clipped_sum(torch.ones(5))
    engine.detach()
    wanted = torch.autograd.grad(cases.square(model, x).sum(), list(model.parameters()))
    for total, g in zip(sums.values(), wanted, strict=True):
        torch.testing.assert_close(total, g, rtol=1e-5, atol=1e-7)


def test_bfloat16_contribution_stays_within_the_bound() -> None:
    """A weight cast within the forward: autograd would round the clipped sum to bfloat16."""
    model = cases.Net(
        lambda m, x: nn.functional.linear(x, m.w.to(torch.bfloat16).t()[:5]).float(),
        w=nn.Parameter(torch.randn(6, 8).T.contiguous()),
    )
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=1.0, loss_reduction="sum")
    for seed in range(20):
        torch.manual_seed(seed)
        (100 * model(torch.randn(1, 5, 8).to(torch.bfloat16))).square().sum().backward()
        optimizer.step()
        assert float(model.w.grad.double().norm()) <= 1.0
        optimizer.zero_grad()


def norms_and_sums(name: str, inside: bool | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """inside: whether backward runs within autocast, as the forward did; None: no autocast."""
    model, batch, losses = cases.build(name)
    engine = fastdp.PerSampleGradients(model)
    with autocast(inside is not None):
        loss = losses(model, batch).float().mean()
    with autocast(bool(inside)):
        loss.backward()
        norms = engine.norms()
        found = norms, engine.clipped_sum((1 / norms).clamp(max=1))
    engine.detach()
    return found


@BY_NAME
def test_backward_within_autocast_changes_nothing(name: str) -> None:
    """Autocast turns float32 products into 16 bits; norms and sums are taken without it."""
    (norms, sums), (norms_inside, sums_inside) = (norms_and_sums(name, inside) for inside in (False, True))
    # the input gradients that backward itself computes may be rounded in another order
    torch.testing.assert_close(norms_inside, norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(sums_inside, sums, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- another default type, the model's stays


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", [*NAMES, "group_norm", "lstm_plain", "conv2d_large_image", "encoder_layer_True_False"])
def test_norms_and_sums(name: str, default: torch.dtype) -> None:
    """Native kernels wrote float32 into memory of the default's size."""
    torch.set_default_dtype(torch.float32)
    model, batch, losses = cases.build(name)
    found = []
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        engine = fastdp.PerSampleGradients(model)
        losses(model, batch).mean().backward()
        found.append((engine.norms(), engine.clipped_sum(torch.linspace(0.2, 1, cases.B, dtype=torch.float32))))
        engine.detach()
    (norms, sums), (other, others) = found
    assert other.dtype == torch.float32 and [t.dtype for t in others.values()] == [t.dtype for t in sums.values()]
    if default == torch.float64:
        torch.testing.assert_close(other, norms, rtol=1e-4, atol=1e-6)
        for key, total in sums.items():
            assert float((others[key] - total).norm()) < 1e-4 * max(float(total.norm()), 1e-6), key


@pytest.mark.parametrize("make", [fastdp.DPSGD, fastdp.DPAdamW])
def test_steps(make: type, default: torch.dtype) -> None:
    def trained(dtype: torch.dtype) -> list[Tensor]:
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        parts = [nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 8), nn.LayerNorm(8)]
        model, x = nn.Sequential(*parts), torch.randn(6, 3, 6, 6)
        torch.set_default_dtype(dtype)
        optimizer = make(model, lr=0.01, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=6)
        for _ in range(2):
            model(x).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(trained(default), trained(torch.float32))
