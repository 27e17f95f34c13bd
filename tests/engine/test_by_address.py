"""A whole step as on a GPU, in Triton's interpreter: layers of equal shape go in one launch each for norms and sums,
found by their addresses; norms and sums are float64's, and data goes with the last sum."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.engine import foreach
from fastdp.engine.foreach import Abreast
from fastdp.grad_sample.linear import Many, Matmul

from ..ops.by_triton import launches, serve_by_triton
from ..routes import forced
from ..truth import norms_of, truth

pytest.importorskip("triton")
from fastdp.kernels import common, many

B, LAYERS, D = 3, 4, 16
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_triton(monkeypatch)


class Net(nn.Module):
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


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float().mT, ids.roll(1, 1), reduction="none").mean(1)


def batch(t: int = 16, size: int = B, seed: int = 0) -> Tensor:
    return torch.randint(0, 19, (size, t), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("t", [16, 37])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("route", ["gram", "direct"])
def test_norms_and_sums_of_float32(route: str, norm: type[nn.Module], t: int) -> None:
    model, ids = Net(norm), batch(t)
    exact, factors = truth(model, ids, losses), torch.tensor([0.3, 0.0, 1.7])
    engine = fastdp.PerSampleGradients(model)
    with forced(route):
        losses(model, ids).mean().backward()
        norms = engine.norms()
        sums = engine.clipped_sum(factors)
    torch.testing.assert_close(norms.double(), norms_of(exact), rtol=1e-5, atol=0)
    assert bool((norms.double() >= norms_of(exact) * (1 - 1e-6)).all())
    for name, total in sums.items():
        want = torch.einsum("b,b...->...", factors.double(), exact[name])
        torch.testing.assert_close(total.double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_sums_of_bfloat16(tied: bool) -> None:
    """Against the same step by the reference: the forward's rounding is in both."""
    model, ids, factors = Net(tied=tied).to(torch.bfloat16), batch(), torch.tensor([0.3, 0.0, 1.7])
    found = []
    for backend in ("auto", "reference"):
        engine = fastdp.PerSampleGradients(model)
        losses(model, ids).mean().backward()
        with fastdp.ops.registry.forced(backend):
            found.append((engine.norms(), engine.clipped_sum(factors)))
        engine.detach()
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-5, atol=0)
    for name, total in found[0][1].items():
        torch.testing.assert_close(total, found[1][1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_launch_for_all_layers_of_a_shape(dtype: torch.dtype) -> None:
    """Norms: one for `up`, one for `down`, and what is left: the head, the table, and the bundle of small gradients."""
    model, ids = Net(tied=False).to(dtype), batch(48)
    engine = fastdp.PerSampleGradients(model)
    with forced("gram"):
        losses(model, ids).mean().backward()
        with launches() as found:
            engine.norms()
    assert found["gram_kernel"] == 3 and found["square_kernel"] == 2, dict(found)
    made = [each.one for each in next(iter(engine._last()._bundles.values())) if isinstance(each, Abreast)]
    assert [type(one) for one in made] == [Many, Many]
    with launches() as found:
        engine.clipped_sum(torch.ones(B))
    assert found["clipped_kernel"] == (3 if dtype == torch.bfloat16 else 0), "by cuBLAS where nothing is rounded"
    assert found["weighted_kernel"] == 1


@pytest.mark.parametrize("budget", [None, 1 << 30])
def test_an_odd_vocabulary_is_filled_up_once(budget: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the logits' gradient, with columns of zeros, takes its place for the norm and for the sum; under a
    budget parts of it are copied for each."""
    made = []
    monkeypatch.setattr(common, "F", SimpleNamespace(pad=lambda x, by: made.append(x.shape) or F.pad(x, by)))
    model, ids = Net(tied=False).to(torch.bfloat16), batch()
    engine = fastdp.PerSampleGradients(model, memory_budget=budget)
    with forced("gram"):
        z = model(ids).float().flatten(0, 1)  # whose gradient lies row by row
        F.cross_entropy(z, ids.roll(1, 1).flatten(), reduction="none").view(B, -1).mean(1).mean().backward()
        norms, sums = engine.norms(), engine.clipped_sum(torch.ones(B))
    assert made == [(B, 16, 19)] * (1 if budget is None else 2)
    head = next(use for use in engine._last()._uses if isinstance(use, Matmul) and use.operand is model.head.weight)
    assert head.g.shape == (B, 16, 19) and head.per_sample(0, B).shape == (B, 19, D)
    assert (head.filled is None) == (budget is not None)
    exact = torch.einsum("bto,bti->oi", head.g.double(), head.a.double()) * B
    assert sums["head.weight"].shape == (19, D) and sums["head.weight"].is_contiguous()
    torch.testing.assert_close(sums["head.weight"].double(), exact, rtol=1e-4, atol=1e-6)
    assert bool(norms.isfinite().all())


def test_stored_gradients_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too large for the bundle of small ones: one launch for each shape, and none of them twice."""
    monkeypatch.setattr(foreach, "SMALL", 40)
    monkeypatch.setattr(Matmul, "abreast_limit", 0)  # none is too small to be stored
    model, ids, factors = Net(tied=False), batch(), torch.tensor([0.3, 0.0, 1.7])
    exact = truth(model, ids, losses)
    engine = fastdp.PerSampleGradients(model)
    with forced("materialise"):
        losses(model, ids).mean().backward()
        with launches() as found:
            norms = engine.norms()
            sums = engine.clipped_sum(factors)
    # `up` and `down`, the head, the table, the bundle
    assert found["square_kernel"] == 5 and found["weighted_kernel"] == 4, dict(found)
    torch.testing.assert_close(norms.double(), norms_of(exact), rtol=1e-5, atol=0)
    assert len(sums) == len(exact)
    for name, total in sums.items():
        want = torch.einsum("b,b...->...", factors.double(), exact[name])
        torch.testing.assert_close(total.double(), want, rtol=1e-4, atol=1e-6)


def test_data_goes_with_the_last_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch took is dropped before the next: only sums stand beside what is still to come."""
    monkeypatch.setattr(many, "MOST", 2 * 4 * 2 * D * D)  # two layers a launch
    model, ids = Net(tied=False).to(torch.bfloat16), batch(48)
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


def test_steps_are_those_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    first, ids = Net(), batch()
    second = copy.deepcopy(first)
    for model, backend in ((first, "auto"), (second, "reference")):
        optimizer = fastdp.DPSGD(model, lr=0.5, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B)
        for _ in range(2):
            with fastdp.ops.registry.forced(backend):
                losses(model, ids).mean().backward()
                optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_replayed_steps_find_layers_by_address_too() -> None:
    """What a replay gives is not joined either, whatever its size."""
    models = [Net(tied=False) for _ in range(2)]
    optimizers = [
        fastdp.DPSGD(m, lr=0.5, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B) for m in models
    ]
    with forced("gram"):
        replayed = optimizers[1].graphed(lambda model, ids: losses(model, ids), (batch(),))
        for seed in range(2):
            losses(models[0], batch(seed=seed)).mean().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            with launches() as found:
                replayed(batch(seed=seed))
            assert found["gram_kernel"] == 3 and replayed.replayed == seed + 1, dict(found)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
