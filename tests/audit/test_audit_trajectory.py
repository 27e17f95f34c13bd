"""How an audit reads a model after every step, and the runs of several steps that it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.audit import TorchTrainable
from fastdp.audit.measure import Probe
from fastdp.audit.noise_trajectory import noise_trajectory, response, walker, without_memory
from fastdp.audit.reference_samples import confident, gradient_norm, ordinary_norm, weak
from fastdp.audit.update import echo

from . import audit_right as right
from .audit_hand import Hand, make_batch

LR = 0.1


def loop(order: Callable[[Any], Any]) -> Callable[..., None]:
    """A loop of one's own, one sample a step, which takes its batches as `order` gives them."""

    def train(model: nn.Module, batches: Any, *, clipping_norm: float, noise_multiplier: float, **_: Any) -> None:
        for x, y in order(batches):
            F.cross_entropy(model(x), y).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            with torch.no_grad():
                for p in model.parameters():
                    noise = noise_multiplier * clipping_norm * torch.randn_like(p)
                    p -= LR * (p.grad * (clipping_norm / norm).clamp(max=1) + noise)
                    p.grad = None

    return train


def step(order: Callable[[Any], Any]) -> TorchTrainable:
    return TorchTrainable(lambda: nn.Linear(12, 4), train=loop(order), loss=F.cross_entropy, make_batch=make_batch,
                          loss_kind="cross_entropy", learning_rate=LR)  # fmt: skip


def counted(batches: Any) -> Any:
    assert sum(len(y) for _, y in batches)
    return batches


WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "as they come": (lambda b: b, "trajectory"),
    "with numbers": (lambda b: (x for _, x in enumerate(b)), "trajectory"),
    "by index": (lambda b: (b[k] for k in range(len(b))), "trajectory"),
    "twice": (counted, "trajectory"),
    "all at once": (list, "continued"),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_loop_is_read_after_every_step(name: str) -> None:
    order, way = WAYS[name]
    probe = Probe(step(order), 1)
    found, walk = walker(probe)
    assert found == way and walk is not None
    batches = [probe.data(1, k) for k in range(4)]
    alone = [probe.outcome(batches[:k], 0.1, 0.0).parameters for k in range(1, 5)]
    np.testing.assert_allclose(walk(batches, 0.1, 0.0, 1), alone, atol=1e-6)


def test_a_run_that_leaves_its_model_alone_is_audited_on_fresh_ones() -> None:
    class Pure(Hand):
        def run(self, model: Any, batches: Any, **given: Any) -> Any:
            fresh = self.build(0)
            fresh.flat = model.flat.clone()
            return super().run(fresh, batches, **given)

    path = noise_trajectory(Probe(Pure(), 0))
    assert path.way == "fresh" and len(path.noise) >= 64


def test_a_momentum_is_measured_and_taken_off() -> None:
    probe = Probe(right.HAND["momentum"](), 2)
    lags = response(probe, walker(probe)[1], 3)  # type: ignore[arg-type]
    np.testing.assert_allclose(lags, [0.9, 0.81, 0.729], atol=1e-3)
    np.testing.assert_allclose(echo(probe, 4), [3.439, 2.71, 1.9, 1.0], atol=1e-3)
    noise = np.random.default_rng(0).normal(size=(50, 3))
    moved = np.stack([sum(0.5**k * noise[t - k] for k in range(t + 1)) for t in range(50)])
    np.testing.assert_allclose(without_memory(moved, 0.5 ** np.arange(1.0, 50.0)), noise, atol=1e-9)
    flat = noise_trajectory(probe)
    assert abs(np.corrcoef(flat.noise[1:].ravel(), flat.noise[:-1].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("seed", range(8))
def test_a_sample_that_does_not_count_stays_out_of_later_steps(seed: int) -> None:
    """Global clipping: with C just below its gradient it came in when another had moved the weights."""
    probe = Probe(right.HAND["global"](), seed)
    np.testing.assert_allclose(response(probe, walker(probe)[1], 3), 0, atol=0.02)  # type: ignore[arg-type]
    np.testing.assert_allclose(echo(probe, 4), 1, atol=0.02)


def test_small_gradients_are_as_small_as_is_said() -> None:
    for name in ("by hand", "regression"):
        probe = Probe(right.HAND[name](), 1)
        for share in (1e-2, 1e-4):
            size = gradient_norm(probe, weak(probe, share, 3))
            assert size is not None and 0.05 * share < size / ordinary_norm(probe) < 20 * share
    probe = Probe(right.HAND["eight parameters"](), 1)
    sure = confident(probe, 3)
    assert gradient_norm(probe, sure) < 0.1 * ordinary_norm(probe)  # type: ignore[operator]
    assert ordinary_norm(Probe(right.HAND["automatic"](), 1)) is None
