"""Steps as "Finding private bugs" takes them: a warmed-up start, one step without more, and the change in loss.

The paper's first two tests look at Loss(model after the step) - Loss(model before it), and need nothing of a script but
its losses. fastdp's own tests (`clipping`, `minibatch`, `noise`) look at the parameters instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import log_softmax

from .finding import BUG, OK, UNDECIDED
from .measure import Probe
from .trainable import AuditError, Batch, count, optional

RIGHT, WRONG = 0.01, 0.99  # p-values of "slope 0": below, the dependence is there; above, it is not
WARM_UP = 5  # steps of Adam before the one that is looked at, whose first moves all parameters equally far
WARM_NORM = 1.0  # C of those; the paper gives none


def loss_of(probe: Probe, model: Any, batch: Batch) -> float:
    """The script's loss of a model on a batch; computed from its outputs where the trainable gives no loss_of."""
    own = getattr(probe.trainable, "loss_of", None)
    if own is not None:
        return float(own(model, batch))
    outputs, y = probe.logits(batch[0], model), np.asarray(batch[1])
    if probe.loss_kind == "mse":
        return float(np.mean((outputs - y.reshape(outputs.shape)) ** 2))
    soft = y if y.ndim == 2 else np.eye(outputs.shape[1])[y]
    return float(-(soft * log_softmax(outputs, 1)).sum(1).mean())


def warm_batches(probe: Probe, asked: int | None, sgd: int, size: int, trial: int = 0) -> list[Batch]:
    """Batches of the warm-up steps: as many as are asked for, or else the paper's.

    sgd: how many for SGD; none without retune().
    """
    if asked is None and probe.optimizer == "adam":
        asked = WARM_UP
    elif asked is None:
        asked = sgd if getattr(probe.trainable, "retune", None) is not None else 0
    return [probe.data(size, 401 + 50 * trial + k) for k in range(asked)]


def begun(probe: Probe, warm: Sequence[Batch], norm: float, sigma: float = 0.0, size: int = 1, seed: int = 1) -> Any:
    """A model after the warm-up steps (no noise, C = 1), whose next step has this C, sigma and batch size."""
    model, noise = probe.trainable.build(probe.seed), probe.noise_seed(seed)
    if warm:
        retune = optional(
            probe.trainable, "retune",
            "to change C and sigma after the warm-up steps, with the optimizer's state kept",
        )  # fmt: skip
        probe.run(model, warm, WARM_NORM, 0.0, noise)
        retune(model, clipping_norm=norm, noise_multiplier=sigma, batch_size=size, seed=noise)
    return model


def change_in_loss(
    probe: Probe, batch: Batch, norm: float, sigma: float = 0.0, *, warm: Sequence[Batch] = (),
    on: Batch | None = None, seed: int = 1,
) -> tuple[float, float]:  # fmt: skip
    """(change in loss by one step on the batch, loss before it), both on `on` (default: that batch)."""
    model = begun(probe, warm, norm, sigma, count(batch[1]), seed)
    where = batch if on is None else on
    before = loss_of(probe, model, where)
    probe.run(model, [batch], norm, sigma, probe.noise_seed(seed))
    return loss_of(probe, model, where) - before, before


def rounding(probe: Probe, loss: float) -> float:
    """What rounding alone may do to a difference of two losses of this size."""
    return 4 * probe.precision * max(abs(loss), 1.0)


def positive(name: str, values: Any, least: int) -> list[float]:
    """Check clipping norms, noise multipliers or sizes that were given: positive, finite, at least so many."""
    found = sorted({float(value) for value in values})
    if len(found) < least:
        raise AuditError(f"{name} needs at least {least} different values, not {len(found)}")
    if not all(math.isfinite(value) and value > 0 for value in found):
        raise AuditError(f"{name} must be positive and finite, not {found}")
    return found


def synthesized(probe: Probe, most: int, alpha: float, warm: Sequence[Batch]) -> tuple[Batch, Batch]:
    """(most - 1 samples without gradient, one of a large gradient) at the model after the warm-up steps.

    The first have the labels that the model predicts, the other -alpha times its output. For cross-entropy these are
    the probabilities and the logits: with y = -alpha * probabilities, the gradient of softmax cross-entropy is
    sum(y) p - y = 0.
    """
    model, one = begun(probe, warm, WARM_NORM), probe.data(1)[0]
    large = probe.labels_like(-alpha * probe.logits(one, model))
    return probe.without_gradient(max(most - 1, 1), 3, model), (one, large)


def judged(p: float, what: str, on: str, bug: str) -> tuple[str, str]:
    """The paper's verdict, and its sentence."""
    if p < RIGHT:
        return OK, f"It is certain that {what} depends on {on} (p = {p:.2g})."
    if p > WRONG:
        return BUG, f"Nothing speaks for a dependence of {what} on {on} (p = {p:.3g}): {bug}."
    return UNDECIDED, f"Whether {what} depends on {on} is not decided (p = {p:.2g}, neither below 0.01 nor above 0.99)."
