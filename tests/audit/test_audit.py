"""fastdp.audit on steps that are right, and what it says where it can say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.audit import TESTS, AuditError, Outcome, TorchTrainable, assert_private, audit

from . import audit_right as right
from .audit_hand import Hand, make_batch
from .audit_zoo import PLANTED

pytestmark = pytest.mark.slow  # `make test-all` runs it

NEED = {"bare": {"sensitivity", "batch_statistics", "noise_once", "poisson_sampling", "accountant"},
        "a loop with a momentum of its own": {"noise_once", "poisson_sampling", "accountant"},
        "examples/audit/by_hand.py": {"noise_once"}}  # fmt: skip


@pytest.mark.parametrize("name", right.RIGHT)
def test_a_right_step_passes_every_test(name: str) -> None:
    """Every second test, by turns; all of them, with twenty seeds: `python -m benchmarks.audit`."""
    names = list(TESTS)[list(right.RIGHT).index(name) % 2 :: 2]
    report = audit(right.RIGHT[name](), names, seed=3)
    assert not report.bugs, str(report)
    assert {f.name for f in report.untested} == NEED.get(name, set()) & set(names), str(report)
    assert report.exit_status == 0 and len(report.findings) == len(names)


def test_fastdp_passes_with_the_noise_that_it_releases() -> None:
    """Noise from the operating system: tests without a p-value only, so that no chance decides."""
    names = ["no_clipping", "minibatch_clipping", "uncalibrated_noise", "noise_once", "accountant", "empty_batch"]
    assert_private(right.secure(), names)


def test_opacus_passes_but_for_nan() -> None:
    pytest.importorskip("opacus")
    report = audit(right.opacus(), seed=3)
    assert [f.name for f in report.bugs] == ["nan_sample"] and not report.untested, str(report)
    assert "NaN" in report["nan_sample"].sentence and report.exit_status == 1


def test_findings_say_what_was_measured() -> None:
    report = audit(Hand(), ["no_clipping", "minibatch_clipping", "uncalibrated_noise", "noise_distribution"])
    assert report["no_clipping"].p_value < 0.01 and report["minibatch_clipping"].statistic == pytest.approx(
        -1, abs=0.01
    )
    assert report["minibatch_clipping"].p_value < 1e-6 and report["uncalibrated_noise"].p_value < 1e-4
    assert report["uncalibrated_noise"].statistic == pytest.approx(1, abs=0.1)
    assert report["noise_distribution"].statistic == pytest.approx(1, abs=0.08)
    assert all(f.sentence and f.data and f.verdict == "ok" for f in report.findings)


def test_the_papers_p_values_on_the_papers_bugs() -> None:
    made, _ = PLANTED["mini-batch clipping"]
    assert audit(made(), ["minibatch_clipping"])["minibatch_clipping"].p_value > 0.99
    made, _ = PLANTED["no clipping"]
    assert audit(made(), ["no_clipping"])["no_clipping"].p_value > 0.99
    made, _ = PLANTED["noise not scaled with C"]
    assert audit(made(), ["uncalibrated_noise"])["uncalibrated_noise"].p_value > 0.1


def test_mean_of_the_largest_batch_is_clipped_too() -> None:
    """Mini-batch clipping of a sample hardly above C would look right at B = 100: C is taken below the mean."""
    made, _ = PLANTED["mini-batch clipping"]
    found = audit(made(), ["minibatch_clipping"])["minibatch_clipping"]
    assert found.data["changes"][-1] == pytest.approx(found.data["changes"][0], rel=1e-3)


def test_assert_private_raises_the_report() -> None:
    with pytest.raises(AssertionError, match="no_clipping") as problem:
        assert_private(PLANTED["no clipping"][0](), ["no_clipping"])
    assert "The gradient is not clipped" in str(problem.value)
    with pytest.raises(AssertionError, match="run_parts"):  # named, so it has to be run
        assert_private(right.HAND["bare"](), ["no_clipping", "noise_once"])
    assert_private(right.HAND["bare"](), skip=["epsilon_bound"])


# ---------------------------------------------------------------------- what cannot be measured


class Wrong(Hand):
    def __init__(self, **methods: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__.update(methods)


def shared() -> Any:
    job = Hand().build(0)
    return lambda seed: job


UNMEASURED = {
    "the same seed": lambda: Wrong(build=lambda seed: Hand().build(int(torch.seed() % 1000))),
    "does not give a fresh model": lambda: Wrong(build=shared()),
    "must return Outcome": lambda: Wrong(run=lambda model, batches, **_: None),
    "one flat array": lambda: Wrong(run=lambda model, batches, **_: Outcome(0.0, np.zeros((2, 2)))),
    "changes no parameter": lambda: Wrong(run=lambda model, batches, **_: Outcome(0.0, np.ones(3))),
    "fails on one sample .*ZeroDivisionError": lambda: Wrong(run=lambda model, batches, **_: 1 // 0),
    "2 inputs and 1 labels": lambda: Wrong(make_batch=lambda seed, size: (np.zeros((2, 12)), np.zeros(1, int))),
    "has no method build": object,
    "must be one of sgd, adam": lambda: Wrong(optimizer="lbfgs"),
    "positive number": lambda: Wrong(learning_rate=-1.0),
}


@pytest.mark.parametrize("words", UNMEASURED)
def test_what_cannot_be_measured_is_said(words: str) -> None:
    with pytest.raises(AuditError, match=words):
        audit(UNMEASURED[words]())


def test_a_step_that_ignores_its_batch_is_noticed() -> None:
    own = make_batch(5, 4)
    step = Hand()
    ignoring = Wrong(run=lambda model, batches, **given: step.run(model, [own] * len(batches), **given))
    with pytest.raises(AuditError, match="whatever batch it is given"):
        audit(ignoring)


def test_unknown_tests_are_refused() -> None:
    with pytest.raises(AuditError, match="no test 'clip'"):
        audit(Hand(), ["clip"])


def test_a_script_that_fails_in_one_test_is_not_tested_there() -> None:
    step = Wrong(run_parts=lambda *_, **__: 1 // 0)
    step.run = lambda model, batches, **given: Hand.run(Hand(), model, batches, **given)
    report = audit(step, ["no_clipping", "noise_once"])
    assert report["noise_once"].verdict == "not tested" and "ZeroDivisionError" in report["noise_once"].sentence
    assert report["no_clipping"].verdict == "ok"


# ---------------------------------------------------------------------- PyTorch


def test_torch_trainable_needs_one_way_to_train() -> None:
    with pytest.raises(AuditError, match="either make_optimizer"):
        TorchTrainable(lambda: nn.Linear(2, 2), loss=F.cross_entropy, make_batch=make_batch)
    frozen = TorchTrainable(lambda: nn.Linear(2, 2).requires_grad_(False), train=print, loss=F.cross_entropy,
                            make_batch=make_batch)  # fmt: skip
    with pytest.raises(AuditError, match="without a trainable parameter"):
        frozen.build(0)


def test_batch_norm_that_fails_on_one_sample_is_a_bug_and_not_an_error() -> None:
    def train(model: nn.Module, batches: Any, **_: Any) -> None:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None

    network = lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    report = audit(TorchTrainable(network, train=train, loss=F.cross_entropy, make_batch=make_batch))
    assert [f.name for f in report.bugs] == ["batch_statistics"] and "BatchNorm" in report.bugs[0].sentence
    assert len(report.untested) == len(TESTS) - 1 and report.exit_status == 1


def test_batches_of_dicts_and_dropout() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.drop, self.head = nn.Embedding(9, 6), nn.Dropout(0.5), nn.Linear(6, 3)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            mask = batch["mask"].unsqueeze(2)
            return self.head(self.drop((self.table(batch["ids"]) * mask).sum(1) / mask.sum(1)))

    def batch(seed: int, size: int) -> tuple[Any, Any]:
        draw = np.random.default_rng(seed)
        ids = draw.integers(0, 9, (size, 5))
        return {"ids": ids, "mask": np.ones((size, 5), np.float32)}, draw.integers(0, 3, size)

    import fastdp

    def optimizer(model: nn.Module, *, clipping_norm: float, noise_multiplier: float, expected_batch_size: float,
                  seed: int) -> Any:  # fmt: skip
        return fastdp.DPSGD(model, lr=0.2, max_grad_norm=clipping_norm, noise_multiplier=noise_multiplier,
                            expected_batch_size=expected_batch_size, seed=seed)  # fmt: skip

    step = TorchTrainable(Model, optimizer, F.cross_entropy, make_batch=batch, loss_kind="cross_entropy",
                          learning_rate=0.2)  # fmt: skip
    report = audit(step)
    assert not report.bugs, str(report)
    assert {f.name for f in report.untested} == {"nan_sample", "noise_once", "poisson_sampling", "accountant"}


def test_numbers_come_in_the_models_precision_and_dropout_is_off() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
            self.rest = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(len(x), 2, 6)
            return self.rest(self.attend(x, x, x)[0].mean(1))

    step = TorchTrainable(lambda: Model().double(), train=print, loss=F.cross_entropy, make_batch=make_batch)
    job = step.build(0)
    x, y = step.make_batch(0, 3)
    assert x.dtype == np.float32 and job.tensors((x, y))[0].dtype == torch.float64
    assert job.tensors((x, y))[1].dtype == torch.int64
    np.testing.assert_array_equal(step.predict(job, x), step.predict(job, x))
