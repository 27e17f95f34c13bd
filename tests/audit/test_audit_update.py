"""Momentum of every kind, and RMSprop: an audit follows what an optimizer makes of the sums, and alarms at none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastdp
from fastdp.audit import TESTS, AuditError, TorchTrainable, audit
from fastdp.audit.measure import Probe
from fastdp.audit.update import Update, gain, update

from .audit_hand import LR, Hand, Job, make_batch, small

pytestmark = pytest.mark.slow  # `make test-all` runs it


class Nesterov(Hand):
    def update(self, job: Job, gradient: Tensor) -> Tensor:
        job.m = 0.9 * job.m + gradient
        return job.flat - LR * (gradient + 0.9 * job.m)


class Dampened(Hand):
    """As torch.optim.SGD: the first step is not dampened."""

    def update(self, job: Job, gradient: Tensor) -> Tensor:
        job.m = gradient if job.steps == 1 else 0.9 * job.m + 0.5 * gradient
        return job.flat - LR * job.m


class Averaged(Hand):
    def update(self, job: Job, gradient: Tensor) -> Tensor:
        job.m = 0.8 * job.m + 0.2 * gradient
        return job.flat - LR * job.m


def ours(kind: Any = fastdp.DPSGD, lr: float = LR, said: str = "sgd", **options: Any) -> Callable[[], Any]:
    def optimizer(model: Any, *, clipping_norm: float, noise_multiplier: float, expected_batch_size: float,
                  seed: int) -> Any:  # fmt: skip
        return kind(model, lr=lr, max_grad_norm=clipping_norm, noise_multiplier=noise_multiplier,
                    expected_batch_size=expected_batch_size, seed=seed, **options)  # fmt: skip

    return lambda: TorchTrainable(small, optimizer, F.cross_entropy, make_batch=make_batch,
                                  loss_kind="cross_entropy", learning_rate=lr, optimizer=said)  # fmt: skip


MADE: dict[str, tuple[Callable[[], Any], str, float]] = {
    "Nesterov by hand": (Nesterov, "nesterov", 1.9),
    "dampened by hand": (Dampened, "momentum", 1.0),
    "averaged by hand": (Averaged, "momentum", 0.2),
    "fastdp, Nesterov": (ours(momentum=0.9, nesterov=True), "nesterov", 1.9),
    "fastdp, Nesterov at a half": (ours(momentum=0.5, nesterov=True), "nesterov", 1.5),
    "fastdp, dampened": (ours(momentum=0.9, dampening=0.5), "momentum", 1.0),
    "fastdp, momentum and weight decay": (ours(momentum=0.5, weight_decay=0.01), "momentum", 1.0),
    "fastdp, RMSprop": (ours(fastdp.DPRMSprop, 0.01, "adam"), "plain", 1.0),
    "fastdp, AdamW": (ours(fastdp.DPAdamW, 0.01, "adam", weight_decay=0.1), "adam", 1.0),
    "fastdp, Adam at a half": (ours(fastdp.DPAdam, 0.01, "adam", betas=(0.5, 0.9)), "adam", 1.0),
}


@pytest.mark.parametrize("name", MADE)
def test_a_right_update_is_recognised_and_passes(name: str) -> None:
    make, kind, first = MADE[name]
    for seed in (0, 1):
        found = update(Probe(make(), seed))
        assert found.kind == kind and found.first == pytest.approx(first, abs=2e-3), found
    names = list(TESTS)[list(MADE).index(name) % 2 :: 2]  # by turns, as for other right steps
    report = audit(make(), names, seed=0)
    assert not report.bugs, str(report)
    assert {f.name for f in report.untested} <= {"noise_once", "poisson_sampling", "accountant"}, str(report)


@pytest.mark.parametrize("kind", [Nesterov, Dampened])
def test_less_noise_or_more_of_a_sample_shows_under_momentum(kind: Any) -> None:
    class LessNoise(kind):
        def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
            return 0.9 * super().noise(job, c, sigma, generator, size, parts)

    class MoreOfASample(kind):
        def factors(self, norms: Tensor, c: float) -> Tensor:
            return super().factors(norms, 1.05 * c)

    assert audit(LessNoise(), ["noise_distribution"], seed=1).bugs
    assert audit(MoreOfASample(), ["sensitivity"], seed=1).bugs


def test_moves_are_undone() -> None:
    noise = np.random.default_rng(0).normal(size=(50, 3))
    for known in (
        Update("momentum", 0.9, 1.0, 0.5),
        Update("nesterov", 0.9, 1.9),
        Update("adam", 0.9),
        Update("plain"),
    ):
        np.testing.assert_allclose(known.undone(known.weights(50) @ noise), noise, atol=1e-9)
    buffer, moves = torch.zeros(3).double(), []
    for number, row in enumerate(torch.from_numpy(noise)):
        buffer = row if number == 0 else 0.9 * buffer + 0.5 * row
        moves.append(buffer.numpy())
    np.testing.assert_allclose(Update("momentum", 0.9, 1.0, 0.5).undone(np.stack(moves)), noise, atol=1e-9)


def test_a_step_of_adam_that_is_said_to_be_of_sgd_is_refused_with_the_remedy() -> None:
    with pytest.raises(AuditError, match='Say optimizer="adam"'):
        audit(ours(fastdp.DPAdam, 0.01)())
    with pytest.raises(AuditError, match='Say optimizer="adam"'):
        audit(ours(fastdp.DPRMSprop, 0.01)())


def test_the_gain_is_of_what_a_step_makes_of_a_gradient() -> None:
    assert gain(Probe(Nesterov(), 3)) == pytest.approx(1.9 * LR, rel=2e-3)
    assert gain(Probe(Hand(), 3)) == LR
