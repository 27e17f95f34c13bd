"""Runs the tests on one Trainable, and says what keeps it from being measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..utils.formatting import nearest
from .accountant import accountant, empty_batch
from .accumulation import noise_once
from .batch_independence import per_sample_independence
from .canaries import epsilon_bound
from .clipping import no_clipping
from .distribution import noise_distribution, noise_scale
from .finding import BUG, Finding, not_tested
from .measure import NORMS, Probe
from .minibatch import minibatch_clipping
from .noise import uncalibrated_noise
from .noise_independence import noise_independence
from .paper import (
    paper_minibatch_clipping,
    paper_no_clipping,
    paper_noise_distribution,
    paper_uncalibrated_noise,
)
from .report import Report
from .samples import batch_statistics, nan_sample
from .sampling import poisson_sampling
from .sensitivity import sensitivity
from .trainable import AuditError, Trainable

Test = Callable[..., Finding]
COUPLED = "batch_statistics"

TESTS: dict[str, Test] = {
    test.__name__: test
    for test in (
        no_clipping, minibatch_clipping, uncalibrated_noise,  # the paper's
        sensitivity, per_sample_independence, batch_statistics, nan_sample,  # of a sample
        noise_distribution, noise_scale, noise_independence, noise_once,  # of the noise
        poisson_sampling, empty_batch, accountant, epsilon_bound,  # of the guarantee
    )
}  # fmt: skip

PAPER: dict[str, Test] = {
    test.__name__: test
    for test in (
        paper_no_clipping, paper_minibatch_clipping, paper_uncalibrated_noise, paper_noise_distribution,
    )
}  # fmt: skip
STATISTICS: dict[str, dict[str, Test]] = {"fastdp": TESTS, "paper": PAPER, "both": {**TESTS, **PAPER}}


def audit(
    trainable: Trainable,
    tests: Iterable[str] | None = None,
    *,
    skip: Iterable[str] = (),
    seed: int = 0,
    options: dict[str, dict[str, Any]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    statistics: str = "fastdp",
) -> Report:
    """Run tests on a training step.

    If the script raises an error in one test only, that test is "not tested".

    Args:
        trainable: a `fastdp.audit.Trainable`.
        tests: names of tests (default: all of the statistics).
        skip: names to leave out.
        seed: the seed of the weights and the data.
        options: arguments of single tests by name, such as {"epsilon_bound": {"runs": 8}}.
        progress: a function that is called before each test with its name, its number and the number of tests.
        statistics: which tests: "fastdp" (`TESTS`), "paper" (those of *Finding private bugs* as it describes them), or
            "both".

    Returns:
        A Report.

    Raises:
        AuditError: if nothing can be measured: weights differ for equal seeds, run() returns something wrong, or a step
            changes nothing.
    """
    if statistics not in STATISTICS:
        raise AuditError(f"statistics must be one of {', '.join(STATISTICS)}, not {statistics!r}")
    known = STATISTICS[statistics]
    chosen = list(tests) if tests is not None else list(known)
    for name in (*chosen, *skip, *(options or {})):
        if name not in known:
            where = f" of statistics={statistics!r}" if name in STATISTICS["both"] else nearest(name, list(known))
            raise AuditError(f"there is no test {name!r}{where} (there are {', '.join(known)})")
    chosen = [name for name in chosen if name not in set(skip)]
    probe = Probe(trainable, seed)
    report = Report(subject=type(trainable).__name__, seed=seed)
    coupled = _can_be_measured(probe)
    if coupled:
        report.findings = [not_tested(name, "the step fails on one sample") for name in chosen if name != COUPLED]
        report.findings.append(Finding(COUPLED, BUG, coupled))
        return report
    for number, name in enumerate(chosen):
        if progress is not None:
            progress(name, number, len(chosen))
        report.findings.append(_one(name, probe, **(options or {}).get(name, {})))
    return report


def _can_be_measured(probe: Probe) -> str:
    """Raises AuditError where no test can be run, with the script's own error as its cause.

    Returns what is wrong with a step that works on several samples and fails on one; else nothing.
    """
    try:
        probe.data(1)
        probe.check_steps()
        assert probe.regime
        _is_what_it_says(probe)
    except (AuditError, KeyboardInterrupt):
        raise
    except Exception as problem:
        if _works_on_many(probe):
            return (
                f"The step works on 8 samples and fails on one ({type(problem).__name__}: {str(problem)[:150]}): a "
                "layer takes statistics over the batch (BatchNorm in training mode). There is then no per-sample "
                "gradient, and nothing else can be tested; use GroupNorm or LayerNorm."
            )
        raise AuditError(
            f"the training step fails on one sample without noise ({type(problem).__name__}: {str(problem)[:300]})"
        ) from problem
    return ""


def _is_what_it_says(probe: Probe) -> None:
    """Raises AuditError where an optimizer that is said to be SGD takes steps as Adam does."""
    if probe.optimizer != "sgd":
        return
    one, other = (probe.change([sample], max(NORMS)) - probe.drift for sample in (probe.strong, probe.data(1, 17)))
    moved = np.abs(one) > 1e-3 * np.abs(one).max()  # C is above the gradients
    both = moved & (np.abs(other) > 1e-3 * np.abs(other).max())  # a ReLU's units may be dead for one of them
    far = np.median(np.abs(one[moved]))
    alike = np.abs(np.abs(np.stack([one, other])[:, both]) / far - 1) < 1e-2
    opposed = np.abs(one - other).max() > 1e-3 * np.abs(one).max()  # some go the other way
    if opposed and both.sum() >= max(8, 0.2 * moved.size) and alike.mean() > 0.9:
        raise AuditError(
            "a step moves every parameter equally far, whatever its gradient is: this is no SGD. Say "
            'optimizer="adam" to the trainable where it is Adam, AdamW or RMSprop; audit other optimizers with SGD in '
            "their place"
        )


def _works_on_many(probe: Probe) -> bool:
    try:
        return bool(np.isfinite(probe.change([probe.data(8)], 1.0)).all())
    except Exception:  # noqa: BLE001  (the first error is the one that is told)
        return False


def _one(name: str, probe: Probe, **options: Any) -> Finding:
    """Run one test. Its finding says what it lacks, or which error the script raised."""
    begun = time.perf_counter()
    try:
        finding = STATISTICS["both"][name](probe, **options)
    except AuditError as problem:  # what it lacks, too
        finding = not_tested(name, str(problem))
    except Exception as problem:  # noqa: BLE001  (whatever the script raises)
        finding = not_tested(name, f"the script raised {type(problem).__name__}: {str(problem)[:300]}")
    finding.seconds = time.perf_counter() - begun
    return finding


def assert_private(trainable: Trainable, tests: Iterable[str] | None = None, **options: Any) -> Report:
    """Audit a training step in a test suite, and raise AssertionError with the report if a bug is found.

    If `tests` is given, each of them must have run and decided; otherwise, tests that lack something are skipped. The
    other arguments are those of `audit`.
    """
    named = None if tests is None else list(tests)
    report = audit(trainable, named, **options)
    if not report.ok or (named is not None and (report.untested or report.undecided)):
        raise AssertionError(f"not private as far as tests can tell\n{report}")
    return report
