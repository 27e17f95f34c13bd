"""Whole steps as on a GPU, in Triton's interpreter: layers of equal shape go in one launch each for norms and sums, and
their data goes with the last sum."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.grad_sample.linear import Many

from ..ops.by_triton import launches, serve_by_triton
from ..routes import forced
from ..truth import assert_step

pytest.importorskip("triton")
from fastdp.kernels import many

B, LAYERS, D = 3, 4, 16
pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_triton(monkeypatch)


class Language(nn.Module):
    """Blocks of a norm and two products, between a table and a head which are one."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(19, D), nn.Linear(D, 19, bias=False)
        self.norms = nn.ModuleList(norm(D) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(D, 2 * D) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(LAYERS))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return self.head(x)


class Images(nn.Module):
    """1 x 1 convolutions between one of 3 x 3 and a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, D, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(D, D, 1, bias=False) for _ in range(3))
        self.deep, self.wide = nn.Conv2d(D, D, 3, padding=1, groups=D), nn.Conv2d(D, 2 * D, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * D, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.wide(torch.tanh(self.deep(x))).mean((2, 3)))


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    if batch.is_floating_point():
        return F.softplus(model(batch).float()).sum(1)
    return F.cross_entropy(model(batch).float().mT, batch.roll(1, 1), reduction="none").mean(1)


def tokens(t: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(0, 19, (B, t), generator=torch.Generator().manual_seed(seed))


def images(side: int) -> Tensor:
    return torch.randn(B, 3, side, side, generator=torch.Generator().manual_seed(1))


def last(value: Any) -> Any:
    return value.to(memory_format=torch.channels_last)


STEPS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "language": lambda: (Language(), tokens()), "language, longer": lambda: (Language(), tokens(37)),
    "RMSNorm": lambda: (Language(nn.RMSNorm), tokens()), "untied": lambda: (Language(tied=False), tokens()),
    "images": lambda: (Images(), images(4)), "images, odd": lambda: (Images(), images(5)),
    "channels last": lambda: (last(Images()), last(images(4))),
    "channels last, odd": lambda: (last(Images()), last(images(5))),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("route", ["gram", "direct"])
def test_norms_and_sums_of_float32(route: str, name: str) -> None:
    model, batch = STEPS[name]()
    with forced(route):
        assert_step(fastdp.PerSampleGradients(model), batch, losses)


@pytest.mark.parametrize("name", ["language", "untied", "images"])
def test_norms_and_sums_of_bfloat16(name: str) -> None:
    """Against the same step by the reference: the forward's rounding is in both."""
    model, batch = STEPS[name]()
    model, batch = model.bfloat16(), batch.bfloat16() if batch.is_floating_point() else batch
    found = []
    for backend in ("auto", "reference"):
        engine = fastdp.PerSampleGradients(model)
        losses(model, batch).mean().backward()
        with fastdp.ops.registry.forced(backend):
            found.append((engine.norms(), engine.clipped_sum(torch.tensor([0.3, 0.0, 1.7]))))
        engine.detach()
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-5, atol=0)
    for name, total in found[0][1].items():
        torch.testing.assert_close(total, found[1][1][name], rtol=1e-4, atol=1e-6)


def launched(model: nn.Module, batch: Tensor, route: str = "gram") -> tuple[dict[str, int], dict[str, int]]:
    """Launches of kernels for the norms, and for the sums."""
    engine = fastdp.PerSampleGradients(model)
    with forced(route):
        losses(model, batch).mean().backward()
        with launches() as norms:
            engine.norms()
        with launches() as sums:
            engine.clipped_sum(torch.ones(B))
    return norms, sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_launch_for_all_layers_of_a_shape(dtype: torch.dtype) -> None:
    """Norms: one for `up`, one for `down`, and what is left: the head, the table, and the bundle of small gradients."""
    norms, sums = launched(Language(tied=False).to(dtype), tokens(48))
    assert norms["gram_kernel"] == 3 and norms["square_kernel"] == 2, norms
    assert sums["clipped_kernel"] == (3 if dtype == torch.bfloat16 else 0), "by cuBLAS where nothing is rounded"
    assert sums["weighted_kernel"] == 1


@pytest.mark.parametrize("name", ["language", "untied", "images"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_factors_of_their_own_go_together(name: str, dtype: torch.dtype) -> None:
    """Layerwise clipping, against the same by the reference; one sample is dropped of some layers."""
    model, batch = STEPS[name]()
    model, batch = model.to(dtype), batch.to(dtype) if batch.is_floating_point() else batch
    layers = list({name.rpartition(".")[0]: None for name, _ in model.named_parameters()})
    groups = [[p for n, p in model.named_parameters() if n.rpartition(".")[0] == layer] for layer in layers]
    factors = torch.rand(len(layers), B)
    factors[::3, 1] = 0
    found = []
    for backend in ("auto", "reference"):
        engine = fastdp.PerSampleGradients(model)
        losses(model, batch).mean().backward()
        gradients = engine._backward.gradients
        with fastdp.ops.registry.forced(backend), torch.no_grad():
            found.append((gradients.norms_sq(groups), gradients.clipped_sums(factors, groups)))
            for group, norms in zip(groups, found[-1][0], strict=True):
                torch.testing.assert_close(gradients.norm_sq(group), norms, rtol=1e-6, atol=0)
        engine.detach()
    torch.testing.assert_close(found[0][0], found[1][0], rtol=4e-5, atol=0)
    for key, total in found[0][1].items():
        torch.testing.assert_close(total, found[1][1][key], rtol=1e-4, atol=1e-6)


def test_data_goes_with_the_last_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch took is dropped before the next: only sums stand beside what is still to come."""
    monkeypatch.setattr(many, "MOST", 2 * 4 * 2 * D * D)  # two layers a launch
    model, ids = Language(tied=False).to(torch.bfloat16), tokens(48)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B)
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    own, launch = Many.__init__, many.clipped._launch

    def noted(self: Many, uses: list) -> None:
        own(self, uses)
        held.extend(weakref.ref(pair[1]) for pair in self._pairs)  # output gradients: nothing else holds them

    def counted(*args: Any) -> None:
        gc.collect()
        alive.append(sum(tensor() is not None for tensor in held))
        launch(*args)

    monkeypatch.setattr(Many, "__init__", noted)
    monkeypatch.setattr(many.clipped, "_launch", counted)
    with forced("gram"):
        losses(model, ids).mean().backward()
        optimizer.step()
    assert alive[:4] == [8, 6, 4, 2], alive


def test_replayed_steps_go_together_too() -> None:
    """What a replay gives is not joined either, whatever its size."""
    models = [Language(tied=False) for _ in range(2)]
    plain, other = (
        fastdp.DPSGD(m, lr=0.5, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B) for m in models
    )
    with forced("gram"):
        replayed = other.graphed(losses, (tokens(),))
        for seed in range(2):
            losses(models[0], tokens(seed=seed)).mean().backward()
            plain.step()
            plain.zero_grad()
            with launches() as found:
                replayed(tokens(seed=seed))
            assert found["gram_kernel"] == 3 and replayed.replayed == seed + 1, dict(found)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


# --------------------------------------------------------------------------- which convolutions are products
