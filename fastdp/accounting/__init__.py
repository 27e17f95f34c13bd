"""The privacy spent, computed by the accountants of Opacus: PRV, RDP and GDP.

The neighbouring relation is the addition or removal of one sample, with Poisson sampling at the stated rate.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import AccountingError
from ..utils.number_checks import check_whole
from .noise_search import smallest_noise

ACCOUNTANTS = ("prv", "rdp", "gdp")
# A run of equal steps: (noise multiplier, sample rate, steps). Where batches have a largest size, a fourth number is
# the probability, at each step, that a sample was cut to it (`fastdp.sampling.truncation`).
Run = tuple[float, float | None, int] | tuple[float, float | None, int, float]
History = list[Run]


def check_accountant(name: str) -> str:
    """Return the name of an accountant. Raises AccountingError if there is no such accountant."""
    if name not in ACCOUNTANTS:
        raise AccountingError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {name!r}")
    return name


def default_delta(samples: float) -> float:
    """Return 1 / (10 n) for n samples (records, or persons), rounded down to one digit: 7,000 -> 1e-05.

    A mechanism that publishes each sample in full with this probability would reveal a tenth of one on average.
    """
    value = 1 / (10 * max(samples, 1))
    power = math.floor(math.log10(value))
    return float(f"{math.floor(value / 10**power + 1e-9)}e{power}")


def delta_problem(delta: float, samples: float, unit: str = "record") -> str:
    """Return what is wrong with this delta for this many samples (records or persons), or "".

    At delta = 1 / n, a mechanism that publishes one random sample in full counts as private.
    """
    if not samples or delta * samples < 1 - 1e-9:
        return ""
    return f"delta={delta:g} is not below 1/{samples:.6g}: publishing a random {unit} in full would satisfy it"


def warn_of_delta(delta: float, samples: float | None, stacklevel: int = 3) -> None:
    """Warn of an epsilon at a delta that means nothing.

    Args:
        delta: the delta of the guarantee.
        samples: the number of samples, or None if it is not known.
        stacklevel: as of warnings.warn.
    """
    known = samples is not None
    samples = 10 if samples is None else samples  # fewer than that nobody trains on
    if delta < 1 and (problem := delta_problem(delta, samples, "sample")):
        if not known:
            problem = (
                f"delta={delta:g} is too large: publishing one sample of {math.ceil(1 / delta)} in full satisfies it"
            )
        warnings.warn(f"{problem}. Ask for epsilon at {default_delta(samples):g} or less", stacklevel=stacklevel)


def epsilon_of(history: History, delta: float, accountant: str = "prv") -> float:
    """Compute the epsilon at delta of runs of (noise multiplier, sample rate, steps).

    Where samples were cut to a largest size, the accountant is given delta - (1 + exp(epsilon)) * p, in which p is the
    probability that any sample of the run was cut: until then, the run is one of Poisson sampling.

    Args:
        history: the runs. Without runs, epsilon is 0; a run without noise makes it infinite. A fourth number is the
            `fastdp.sampling.truncation` of a step.
        delta: in (0, 1).
        accountant: "prv" (exact to 0.01), "rdp" (an upper bound) or "gdp" (an approximation: a warning says if it is
            too small).

    Raises:
        AccountingError: if delta, the accountant or a sample rate is missing or invalid, or GDP has no epsilon.

    Source: PRV, Gopi et al. 2021 (arXiv 2106.02848); RDP, Mironov 2017 (arXiv 1702.07476); GDP, Bu et al. 2020 (arXiv
    1911.11607); truncation, Chua et al. 2024 (arXiv 2411.04205).
    """
    found = epsilon_by(history, delta, accountant)
    if accountant == "gdp" and 0 < found < math.inf and (exact := epsilon_by(history, delta, "prv")) > found + 0.01:
        warnings.warn(
            f"GDP's approximation says epsilon {found:.3g}, which is too small here: PRV, which is exact to 0.01, says "
            f"{exact:.3g}. Take accountant='prv' for a guarantee",
            stacklevel=2,
        )
    return found


def epsilon_by(history: History, delta: float, accountant: str) -> float:
    """`epsilon_of`, without a word on how good the accountant is."""
    check_accountant(accountant)
    if not 0 < delta < 1:
        raise AccountingError(f"delta must lie in (0, 1), not {delta!r}")
    runs: list[tuple[float, float, int]] = []
    truncated = 0.0  # the probability that any sample was cut, by the union bound
    for run in history:
        sigma, rate, steps = run[:3]
        if rate is None:
            raise AccountingError(
                "the sample rate of the steps is not known: give sample_rate= to the optimizer or to its epsilon(), or "
                "train with fastdp.poisson_loader, which tells it"
            )
        check_options(float(sigma), None, float(rate), 0.0)
        if not 0 <= sigma < math.inf:
            raise AccountingError(f"noise_multiplier must be a number of at least 0, not {sigma!r}")
        if isinstance(steps, str | bool) or not steps >= 0 or steps % 1:
            raise AccountingError(f"steps must be a whole number of at least 0, not {steps!r}: round a part of one up")
        truncated += steps * truncation_in(run)
        runs.append((float(sigma), float(rate), int(steps)))
    runs = [run for run in runs if run[2]]
    if not runs:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in runs):
        return math.inf
    epsilon, slack = 0.0, 1e-6
    for _ in range(_ROUNDS):  # until it is enough for the delta that it leaves; each round's is larger
        left = delta - (1 + math.exp(min(epsilon, 700.0))) * truncated
        if left <= 0:
            return math.inf
        found = max(0.0, _of_noisy_runs(accountant, runs, left))  # at a large delta theirs may be below 0: none
        if not truncated or found <= epsilon:
            return found if not truncated else epsilon
        epsilon, slack = found * (1 + slack), slack * 4
    return math.inf


_ROUNDS = 20


def truncation_in(run: Run) -> float:
    """Return the truncation of the steps of a run; 0 where samples have no largest size.

    Raises AccountingError if it is no probability.
    """
    chance = run[3] if len(run) > 3 else 0.0
    if not 0 <= chance <= 1:
        raise AccountingError(f"the truncation of a step is a probability, not {chance!r}")
    return chance


def _of_noisy_runs(accountant: str, runs: list[tuple[float, float, int]], delta: float) -> float:
    """The accountant's epsilon of runs that all have noise."""
    if accountant == "gdp":
        return _gdp(runs, delta)
    composed = _composed(runs)
    bound = _by_opacus("rdp", composed, delta)
    if accountant == "rdp" or bound > PRV_REACH:
        return bound
    try:
        found = _by_opacus("prv", composed, delta)
    except (RuntimeError, ValueError, MemoryError) as problem:  # its numbers run out: RDP bounds epsilon as well
        found = bound
        warnings.warn(f"PRV accounting failed ({str(problem)[:80]}); epsilon is RDP's, which is larger", stacklevel=4)
    # PRV's grid ends near 700: there it says too little, or that there is no bound
    return found if found < PRV_LIMIT else bound


def _composed(runs: Sequence[tuple[float, float, int]]) -> tuple[tuple[float, float, int], ...]:
    """The same steps, a run for each kind. Steps on all samples are one Gaussian mechanism (Dong et al. 2019, arXiv
    1905.02383, corollary 3.3)."""
    steps, mu = Counter[tuple[float, float]](), 0.0
    for sigma, rate, count in runs:
        if rate == 1:
            mu = math.hypot(mu, math.sqrt(count) / sigma)
        else:
            steps[sigma, rate] += count
    return (*((*kind, count) for kind, count in steps.items()), *([(1 / mu, 1.0, 1)] if mu else []))


PRV_LIMIT = 500.0
PRV_REACH = 2 * PRV_LIMIT  # RDP's bound above which PRV's grid takes gigabytes, and tells nothing


@functools.lru_cache(maxsize=1024)  # clients of one federation, and each round's optimizers, ask the same again
def _by_opacus(name: str, runs: tuple[tuple[float, float, int], ...], delta: float) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # RDP's about its range of orders
        return (_rdp if name == "rdp" else _prv)(runs, delta)


def _rdp(runs: Sequence[tuple[float, float, int]], delta: float) -> float:
    """What Opacus's RDPAccountant says, whose time goes into each kind of step's RDP."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import rdp

    orders = tuple(RDPAccountant.DEFAULT_ALPHAS)
    spent = sum(np.array(rdp_of_step(sigma, rate, orders)) * steps for sigma, rate, steps in runs)
    return float(rdp.get_privacy_spent(orders=list(orders), rdp=spent, delta=delta)[0])


@functools.lru_cache(maxsize=1024)
def rdp_of_step(sigma: float, rate: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """The RDP of one step at these orders, as Opacus computes it."""
    from opacus.accountants.analysis import rdp

    return tuple(rdp.compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=list(orders)))


def _prv(runs: Sequence[tuple[float, float, int]], delta: float) -> float:
    """What Opacus's PRVAccountant says: epsilon's upper bound, within an error of 0.01."""
    from opacus.accountants.analysis import prv

    error, small, steps = 0.01, delta / 1000, [run[2] for run in runs]
    each = [_rdp([(sigma, rate, 1)], small / (8 * sum(steps))) for sigma, rate, _ in runs]
    reach = max(_rdp(runs, small / 4), *each, error) + 3  # of the grid (Gopi et al. 2021, remark 5.6)
    grid = prv.Domain.create_aligned(-reach, reach, error / np.sqrt(sum(steps) * np.log(12 / small) / 2))
    losses = [prv.PoissonSubsampledGaussianPRV(rate, sigma) for sigma, rate, _ in runs]
    on_grid = [
        prv.discretize(prv.TruncatedPrivacyRandomVariable(loss, grid.t_min, grid.t_max), grid) for loss in losses
    ]
    return float(prv.compose_heterogeneous(on_grid, steps).compute_epsilon(delta, small, error)[2])


def _gdp(runs: list[tuple[float, float, int]], delta: float) -> float:
    """mu = q sqrt(T (exp(1 / sigma^2) - 1)) (Bu et al. 2020, central limit theorem); runs are composed by squares."""
    from opacus.accountants.analysis import gdp

    mus = [gdp.compute_mu_poisson(steps=steps, noise_multiplier=sigma, sample_rate=rate) for sigma, rate, steps in runs]
    mu = math.sqrt(sum(float(mu) ** 2 for mu in mus))
    if float(gdp.delta_eps_mu(eps=0.0, mu=mu)) <= delta:
        return 0.0
    try:
        return float(gdp.eps_from_mu(mu=mu, delta=delta))
    except ValueError:
        raise AccountingError(
            f"GDP accounting has no epsilon here (mu = {mu:.3g} at delta {delta:g}): use accountant='prv'"
        ) from None


def steps_per_epoch(sample_rate: float) -> int:
    """Return the number of steps that sample each record once in expectation: ceil(1 / sample_rate).

    It is exact if 1 / sample_rate is whole. Raises AccountingError if the rate is not in (0, 1].
    """
    if not 0 < sample_rate <= 1:
        raise AccountingError(f"sample_rate must lie in (0, 1], not {sample_rate!r}")
    inverse = 1 / sample_rate
    nearest = round(inverse)
    return nearest if abs(inverse - nearest) < 1e-9 * inverse else math.ceil(inverse)


def noise_multiplier_for(
    *,
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int | None = None,
    epochs: float | None = None,
    accountant: str = "prv",
    tolerance: float = 0.01,
    truncation: float = 0.0,
    history: History | None = None,
) -> float:
    """Find the smallest noise multiplier that spends at most target_epsilon, up to the tolerance.

    Args:
        target_epsilon: positive and finite; for "prv" at least 0.05.
        delta: in (0, 1). A warning says so if delta is at least 1 / records whatever the number of records is: a batch
            of one record has the rate 1 / records.
        sample_rate: the rate of Poisson sampling, in (0, 1].
        steps: the number of steps. Give either steps or epochs.
        epochs: the number of epochs of ceil(1 / sample_rate) steps each.
        accountant: "prv", "rdp" or "gdp".
        tolerance: how far epsilon may stay below target_epsilon.
        truncation: the probability that a step's sample is cut to a largest size (`fastdp.sampling.truncation`).
        history: the runs of steps that were made before, which count, too (`optimizer.history`).

    Returns:
        The noise multiplier sigma, in units of the sensitivity.

    Raises:
        AccountingError: if an argument is invalid, or no multiplier below 1e4 suffices.
    """
    check_accountant(accountant)
    if 0 < sample_rate <= delta < 1:
        warnings.warn(
            f"delta={delta:g} is not below the sample rate {sample_rate:g}, so not below 1/records: publishing a "
            "random record in full would satisfy it. Take one well below 1/records",
            stacklevel=2,
        )
    if (steps is None) == (epochs is None):
        raise AccountingError("give either steps= or epochs=")
    if not target_epsilon > 0 or not math.isfinite(target_epsilon):
        raise AccountingError(f"target_epsilon must be positive and finite, not {target_epsilon!r}")
    if epochs is not None:
        steps = math.ceil(epochs * steps_per_epoch(sample_rate))
    assert steps is not None
    steps_per_epoch(sample_rate)  # checks the rate
    check_whole(error=AccountingError, steps=steps)
    if accountant == "prv" and target_epsilon < 0.05:
        raise AccountingError("PRV accounting is exact to 0.01: for an epsilon below 0.05 use accountant='rdp'")

    before = list(history or ())
    if before and (gone := epsilon_by(before, delta, accountant)) >= target_epsilon:
        raise AccountingError(
            f"the budget is spent: the steps so far have epsilon {gone:.4g} at delta {delta:g}, which leaves none of "
            f"target_epsilon={target_epsilon:g} for {steps} more: take a larger one"
        )

    def spent(sigma: float) -> float:
        try:
            return epsilon_by([*before, (sigma, sample_rate, steps, truncation)], delta, accountant)
        except AccountingError:  # GDP has no number for so little noise: too much is spent
            if accountant != "gdp":
                raise
            return math.inf

    start = 1.0
    if accountant == "prv":  # slow: begin where the fast accountant, whose epsilon is larger, meets the target
        # RDP has orders to a limit: small epsilons are beyond it. What there is to warn of was said above
        with contextlib.suppress(AccountingError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = noise_multiplier_for(
                target_epsilon=target_epsilon, delta=delta, sample_rate=sample_rate, steps=steps, accountant="rdp",
                truncation=truncation, history=history,
            )  # fmt: skip
    if not tolerance > 0:
        raise AccountingError(f"tolerance must be above 0, not {tolerance!r}")
    precision = tolerance * min(1.0, target_epsilon) / 10
    found = smallest_noise(spent, target_epsilon, start=start, precision=precision, nearest=1e-4, most=1e4)
    if found is None:
        raise AccountingError(
            f"epsilon {target_epsilon} at delta {delta} needs a noise multiplier above 1e4 at sample rate "
            f"{sample_rate} and {steps} steps ({accountant}); take fewer steps, a lower rate or a larger delta"
            + ", or a larger max_batch_size of the loader"
            * bool(truncation)
        )
    return found


def check_options(noise_multiplier: Any, expected_batch_size: Any, sample_rate: Any, gamma: Any) -> None:
    """Raises ValueError or AccountingError if one is no number, or out of range."""
    for name, value in (("noise_multiplier", noise_multiplier), ("expected_batch_size", expected_batch_size),
                        ("sample_rate", sample_rate), ("gamma", gamma)):  # fmt: skip
        if not isinstance(value, int | float) and not (
            value is None and name in ("expected_batch_size", "sample_rate")
        ):
            raise ValueError(f"{name} must be a number, not {value!r}")
    if expected_batch_size is not None and not 0 < expected_batch_size < float("inf"):
        raise ValueError(f"expected_batch_size must be positive, not {expected_batch_size!r}")
    if sample_rate is not None and not 0 < sample_rate <= 1:
        raise AccountingError(f"sample_rate must lie in (0, 1], not {sample_rate!r}")
