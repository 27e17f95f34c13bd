"""Samples of every label, every step of a run, batches of every size, pairs of draws: right steps are right there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastdp.audit import audit
from fastdp.audit.measure import Probe
from fastdp.audit.noise_settings import wrong_size
from fastdp.audit.reference_samples import alone, labelled
from fastdp.audit.sampling import following, links
from fastdp.audit.step_contributions import APART, AT_THE_END, moving, off_at_the_end, walked

from . import audit_right as right
from .audit_hand import FEATURES, Hand, Job

pytestmark = pytest.mark.slow  # `make test-all` runs it

STEADY = ("by hand", "by hand, Adam", "expected batch size", "momentum", "weight decay", "regression", "automatic",
          "large inputs", "a loop with a momentum of its own", "eight parameters", "bare")  # fmt: skip


@pytest.mark.parametrize("name", STEADY)
def test_steps_of_a_right_loop_are_what_samples_contribute_alone(name: str) -> None:
    probe = Probe(right.HAND[name](), 5)
    steps = walked(probe)
    assert len(steps) == 48 and 4 <= sum(not step.samples for step in steps) <= 24
    assert max(step.apart for step in steps) < 0.6 * APART[probe.optimizer]
    if name != "bare":
        assert max(step.share for step in [*steps, *moving(probe)]) < 1.001
    at_the_end = off_at_the_end(probe)
    assert at_the_end is None or at_the_end < 0.5 * AT_THE_END


def test_samples_that_count_whole_or_not_are_followed_at_a_large_c_only() -> None:
    probe = Probe(right.HAND["global"](), 5)
    assert not walked(probe) and off_at_the_end(probe) is None
    assert len(moving(probe)) == 48 and max(step.share for step in moving(probe)) <= 1


class Many(Hand):
    """A hundred classes, of which the data have ten."""

    make_model = staticmethod(lambda: nn.Linear(FEATURES, 100))

    def make_batch(self, seed: int, size: int) -> tuple[Any, Any]:
        x, y = super().make_batch(seed, size)
        return x, y + np.arange(size) % 7


def test_every_class_is_looked_at() -> None:
    assert {int(y[0]) for _, (_, y) in labelled(Probe(Hand(), 1))} == {0, 1, 2, 3}
    first, second = ({int(y[0]) for _, (_, y) in labelled(Probe(Many(), seed))} for seed in (1, 2))
    assert len(first) == len(second) == 64 and first != second and max(first | second) > 50
    labels = [float(y.flat[np.abs(y).argmax()]) for _, (_, y) in labelled(Probe(right.HAND["regression"](), 1))]
    assert min(labels) < -20 and max(labels) > 2 and 0.0 in labels, labels
    assert len(alone(Probe(right.HAND["bare"](), 1))[1]) == 24


def test_a_loop_that_takes_no_soft_labels_is_tested_for_sensitivity() -> None:
    class Hard(Hand):
        def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
            assert y.dtype == torch.int64
            return super().clipped_sum(job, x, y, c)

    assert audit(Hard(), ["sensitivity"], seed=1)["sensitivity"].verdict == "ok"


def test_noise_is_of_one_size_on_batches_of_every_size() -> None:
    for name in ("by hand", "by hand, Adam", "sum", "fastdp, local, flat"):
        assert wrong_size(Probe(right.RIGHT[name](), 4)) == ""


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_independent_draws_are_not_doubted_more_often_than_is_said(rate: float) -> None:
    found = []
    for seed in range(60):
        draw = np.random.default_rng(seed)
        batches = [np.flatnonzero(draw.random(240) < rate) for _ in range(240)]
        sizes = np.array([len(batch) for batch in batches]) - 240 * rate
        found.append([*(p for _, p, _ in links(batches, 240, rate)), following(sizes, 240 * rate * (1 - rate))])
    assert np.min(found) > 1e-4 and (np.asarray(found) < 0.1).mean(0).max() < 0.25
