"""Poisson samples cut to a largest size: how probable that is, and which size makes it harmless.

A step of fixed size, as a recorded step or a compiled kernel has, cannot take a larger batch. Cutting a sample to a
size makes it no Poisson sample, which `fastdp.accounting.epsilon_of` pays for out of delta.
"""

from __future__ import annotations

import math

from ..accounting.runs import most_within
from ..errors import AccountingError

_LEAST = 1e-300


def truncation(samples: int, sample_rate: float, max_batch_size: int) -> float:
    """Compute the probability that a Poisson sample has more than max_batch_size samples.

    It is that of a dataset with one sample more, which a neighbour of this one has.

    Args:
        samples: the number of samples in the dataset: of records, or of persons.
        sample_rate: the rate of Poisson sampling, in (0, 1].
        max_batch_size: the size to which a larger sample is cut.

    Source: Psi(n, b, B) of Chua et al. 2024 (arXiv 2411.04205), section 3.
    """
    from scipy.special import bdtrc

    if max_batch_size > samples:
        return 0.0
    found = float(bdtrc(float(max_batch_size), samples + 1, sample_rate))
    return min(1.0, max(found * (1 + 1e-9), _LEAST))  # never 0, though the number be too small for float64


def max_batch_size_for(
    samples: int, sample_rate: float, steps: int, delta: float, *, epsilon: float = 10.0, share: float = 0.01
) -> int:
    """Find the smallest max_batch_size whose truncation takes at most a share of delta.

    It is samples + 1, which cuts no sample, if every smaller size would take more.

    Args:
        samples: the number of samples in the dataset.
        sample_rate: the rate of Poisson sampling, in (0, 1].
        steps: the number of steps of the run.
        delta: the delta of the guarantee.
        epsilon: the largest epsilon that the run may reach.
        share: the part of delta that the truncation may take.

    Raises:
        AccountingError: if an argument is out of range.
    """
    for name, value, most in (("delta", delta, 1.0), ("share", share, 1.0), ("sample_rate", sample_rate, 1.0 + 1e-12)):
        if not 0 < value < most:
            raise AccountingError(f"{name} must lie between 0 and 1, not {value!r}")
    if samples < 1 or steps < 1 or not 0 <= epsilon < 700:
        raise AccountingError(f"{samples} samples, {steps} steps and epsilon {epsilon!r} are no run")
    most = share * delta / (1 + math.exp(epsilon)) / steps
    return 1 + most_within(samples, lambda size: truncation(samples, sample_rate, size) > most)
