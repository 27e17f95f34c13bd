"""Steps as "Finding private bugs" takes them: a warmed-up start, one step without more, and the change in loss.

The paper's first two tests look at Loss(model after the step) - Loss(model before it), and need nothing of a script but
its losses. fastdp's own tests (`clipping`, `minibatch`, `noise`) look at the parameters instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .finding import BUG, OK, UNDECIDED
from .measure import Probe, softmax
from .trainable import AuditError, Batch, Lacking, count, optional

RIGHT, WRONG = 0.01, 0.99  # p-values of "slope 0": below, the dependence is there; above, it is not
WARM_UP = 5  # steps of Adam before the one that is looked at, whose first moves all parameters equally far
WARM_NORM = 1.0  # C of those; the paper gives none


def loss_of(probe: Probe, model: Any, batch: Batch) -> float:
    """The script's loss of a model on a batch; computed from its outputs where the trainable gives no loss_of."""
    own = getattr(probe.trainable, "loss_of", None)
    if own is not None:
        return float(own(model, batch))
    kind = optional(probe.trainable, "loss_kind", "or loss_of, for the change in loss")
    outputs = np.asarray(optional(probe.trainable, "predict", "or loss_of, for the change in loss")(model, batch[0]))
    y = np.asarray(batch[1])
    if kind == "mse":
        return float(np.mean((outputs.astype(float) - y.reshape(outputs.shape)) ** 2))
    if outputs.ndim != 2:
        raise Lacking(f"needs logits [B, K] of predict() for the change in loss, not {outputs.shape}")
    shifted = outputs.astype(float) - outputs.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    soft = y if y.ndim == 2 else np.eye(outputs.shape[1])[y]
    return float(-(soft * logs).sum(1).mean())


def warm_batches(probe: Probe, asked: int | None, sgd: int, size: int, trial: int = 0) -> list[Batch]:
    """Batches of the warm-up steps: as many as are asked for, or else the paper's.

    sgd: how many for SGD; none without retune().
    """
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 0):
        raise AuditError(f"warm_up must be a number of steps, 0 or more, not {asked!r}")
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
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError):
        raise AuditError(f"{name} must be a list of numbers, not {values!r}") from None
    if len(set(found)) < least:
        raise AuditError(f"{name} needs at least {least} different values, not {len(set(found))}")
    if not all(math.isfinite(value) and value > 0 for value in found):
        raise AuditError(f"{name} must be positive and finite, not {found}")
    return found


def synthesized(probe: Probe, most: int, alpha: float, warm: Sequence[Batch]) -> tuple[Batch, Batch]:
    """(most - 1 samples without gradient, one of a large gradient) at the model after the warm-up steps.

    The first have the labels that the model predicts, the other -alpha times its output. For cross-entropy these are
    the probabilities and the logits: with y = -alpha * probabilities, the gradient of softmax cross-entropy is
    sum(y) p - y = 0.
    """
    kind, predict = (
        optional(probe.trainable, name, "for samples whose gradient is zero") for name in ("loss_kind", "predict")
    )
    model = begun(probe, warm, WARM_NORM)
    (x, y), (one, of_one) = probe.data(max(most - 1, 1), 3), probe.data(1)
    still, strong = (np.asarray(predict(model, inputs), dtype=float) for inputs in (x, one))
    if kind != "mse" and still.ndim != 2:
        raise Lacking(f"needs logits [B, K] of predict() for samples without gradient, not {still.shape}")
    none = probe.labels_like(x, still if kind == "mse" else softmax(still))
    large = probe.labels_like(one, -alpha * strong)
    if kind == "mse":
        none, large = none.reshape(np.shape(y)), large.reshape(np.shape(of_one))
    return (x, none), (one, large)


def judged(p: float, what: str, on: str, bug: str) -> tuple[str, str]:
    """The paper's verdict, and its sentence."""
    if p < RIGHT:
        return OK, f"It is certain that {what} depends on {on} (p = {p:.2g})."
    if p > WRONG:
        return BUG, f"Nothing speaks for a dependence of {what} on {on} (p = {p:.3g}): {bug}."
    return UNDECIDED, f"Whether {what} depends on {on} is not decided (p = {p:.2g}, neither below 0.01 nor above 0.99)."
