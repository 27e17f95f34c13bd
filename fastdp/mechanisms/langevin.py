"""DP-SGD with a clipping norm that never acts, as a sampler: at which temperature it samples.

Let U be the sum of the N records' losses, and of N weight_decay |theta|^2 / 2 for the optimizer's weight decay. With a
mean loss, batches of B samples in expectation, and no gradient above R, a step of DP-SGD without momentum is

    theta <- theta - (lr / N) (estimate of the gradient of U) + (lr sigma R / B) x,    x standard normal.

Langevin dynamics with the step h at the temperature T is theta <- theta - h grad U + sqrt(2 h T) x, whose stationary
density tends to exp(-U / T) as h tends to 0. So h = lr / N, and 2 h T = (lr sigma R / B)^2 gives

    T = lr N (sigma R / B)^2 / 2.

With momentum m, the displacement keeps the share m at each step. That is stochastic gradient Hamiltonian Monte Carlo
with friction 1 - m, whose noise has the variance 2 (1 - m) h T, so that T is 1 / (1 - m) times as large.

If the losses are negative logarithms of likelihoods and the weight decay is that of the prior's, T = 1 samples the
posterior. The noise of sampling batches comes on top, unless every batch is the whole data, and so does an error of the
step: for a curvature a of U, without momentum and in whole batches, the variance is T / (a (1 - h a / 2)).

Source: Welling and Teh 2011, Bayesian learning via stochastic gradient Langevin dynamics; Chen et al. 2014, Stochastic
gradient Hamiltonian Monte Carlo; Bu et al. 2023 (arXiv 2106.07830), section 4.5.
"""

from __future__ import annotations

import math

from ..errors import StepError
from ..optim.private_optimizer import PrivateOptimizer


def temperature(
    *, lr: float, noise_multiplier: float, max_grad_norm: float, batch_size: float, records: int, momentum: float = 0.0
) -> float:
    """Return the temperature at which DP-SGD samples exp(-U / T), if no gradient is clipped.

    Args:
        lr: the learning rate.
        noise_multiplier: sigma.
        max_grad_norm: the clipping norm R of the whole gradient.
        batch_size: the expected number of samples of a batch.
        records: the number N of records.
        momentum: torch.optim.SGD's, without dampening and without Nesterov's.

    Raises:
        ValueError: if an argument is out of range.

    >>> round(temperature(lr=0.1, noise_multiplier=1.0, max_grad_norm=10.0, batch_size=50, records=500), 6)
    1.0
    """
    _check(lr, max_grad_norm, batch_size, records, momentum)
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be 0 or larger and finite, not {noise_multiplier!r}")
    return lr * records * (noise_multiplier * max_grad_norm / batch_size) ** 2 / (2 * (1 - momentum))


def noise_multiplier_for_temperature(
    temperature: float, *, lr: float, max_grad_norm: float, batch_size: float, records: int, momentum: float = 0.0
) -> float:
    """Return the noise multiplier at which DP-SGD samples at a temperature: the inverse of `temperature`.

    Raises ValueError if an argument is out of range.
    """
    _check(lr, max_grad_norm, batch_size, records, momentum)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or larger and finite, not {temperature!r}")
    return math.sqrt(2 * (1 - momentum) * temperature / (lr * records)) * batch_size / max_grad_norm


def check_unclipped(optimizer: PrivateOptimizer) -> None:
    """Raise StepError if a sample of the last backward was clipped, since the optimizer then samples something else.

    Call it after each backward, while a sampler is developed. Whether it raises depends on the data without noise, and
    epsilon does not account for that: a run that is stopped by it, or tuned by it, tells of the data. Choose a clipping
    norm that is a bound known beforehand.
    """
    norms = optimizer.norms
    clipping = optimizer._attached().clipping
    if optimizer._attached().quantile is not None:
        raise StepError('clipping="adaptive" changes the noise from step to step: a sampler needs a fixed norm')
    if clipping.clipping not in ("local", "global"):
        raise StepError(f"clipping={clipping.clipping!r} changes every gradient: a sampler needs 'local' or 'global'")
    bounds = {group.name: group.max_grad_norm for group in clipping.groups}
    each = norms if isinstance(norms, dict) else {clipping.groups[0].name: norms}
    over = {name: int((~(own <= bounds[name])).sum()) for name, own in each.items()}
    if any(over.values()):
        name = max(over, key=lambda key: over[key])
        raise StepError(
            f"{over[name]} of {len(each[name])} samples have a gradient norm above {bounds[name]:g} (group '{name}'): "
            "clipped DP-SGD does not sample exp(-U / T). Take a larger max_grad_norm, with the noise multiplier that "
            "noise_multiplier_for_temperature gives for it"
        )


def _check(lr: float, max_grad_norm: float, batch_size: float, records: int, momentum: float) -> None:
    for name, value in (("lr", lr), ("max_grad_norm", max_grad_norm), ("batch_size", batch_size), ("records", records)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, not {value!r}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), not {momentum!r}")
    if batch_size > records:
        raise ValueError(f"batch_size={batch_size} is more than the {records} records")
