"""Samples of which the gradient's norm is known, or is as small as is wanted."""

from __future__ import annotations

import numpy as np

from .measure import Probe
from .trainable import Batch, Lacking


def weak(probe: Probe, share: float, number: int = 0) -> Batch:
    """One sample whose gradient is about that share of an ordinary one: its label is nearly what the model predicts.

    Raises Lacking where the trainable says nothing of its outputs or loss.
    """
    x, nothing = probe.without_gradient(1, number)
    y = probe.data(1, number)[1]
    if not share:
        return x, nothing
    if np.shape(y) != np.shape(nothing):
        if np.ndim(nothing) != 2 or np.ndim(y) != 1:
            raise Lacking("needs labels that can be mixed")
        y = np.eye(np.shape(nothing)[1])[np.asarray(y)]
    return x, probe.labels_like(x, (1 - share) * np.asarray(nothing, float) + share * np.asarray(y, float))


def confident(probe: Probe, number: int = 0) -> list[Batch]:
    """Samples that the model is sure of, with the label that it predicts: small gradients without soft labels."""
    x, y = probe.data(16, number)
    if getattr(probe.trainable, "loss_kind", None) != "cross_entropy":
        raise Lacking("needs classes, so that a label can be right")
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f" or np.asarray(y).dtype.kind not in "iu":
        raise Lacking("inputs are no numbers, or labels no classes")
    found: list[tuple[float, Batch]] = []
    for scale in (1.0, 10.0, 100.0):
        scaled = x * np.asarray(scale, x.dtype)
        logits = probe.outputs(scaled)
        if logits.ndim != 2:
            raise Lacking("needs logits [B, K] of predict()")
        ordered = np.sort(logits, 1)
        size = np.linalg.norm(np.asarray(scaled, float).reshape(len(scaled), -1), axis=1)
        small = ordered[:, -1] - ordered[:, -2] - np.log(1 + size)  # of the gradient: minus its logarithm
        k = int(np.argmin(np.abs(small - 8.0)))  # some ten thousandths
        label = logits.argmax(1)[[k]].astype(np.asarray(y).dtype)
        found.append((abs(float(small[k]) - 8.0), (scaled[[k]], label)))
    return [min(found, key=lambda item: item[0])[1]]


def ordinary_norm(probe: Probe) -> float | None:
    """Norm of an ordinary sample's gradient, from where its step stops growing with C; None where it does not."""
    if "ordinary" not in probe.memo:
        probe.memo["ordinary"] = gradient_norm(probe, probe.data(1, 17))
    return probe.memo["ordinary"]  # type: ignore[no-any-return]


def gradient_norm(probe: Probe, sample: Batch) -> float | None:
    """Norm of a sample's gradient, or None: with normalised clipping, or no clipping, no C exceeds it visibly."""
    if probe.optimizer != "sgd" or probe.regime.kind not in ("linear", "switched"):
        return None
    top, higher = (float(np.linalg.norm(probe.summed(sample, norm))) for norm in (1e6, 1e8))
    if not np.isfinite(higher) or top <= 10 * probe.resolution or abs(higher / top - 1) > 0.01:
        return None
    return top / per_norm(probe)


def per_norm(probe: Probe) -> float:
    """Change of the parameters by a gradient of norm 1, times the divisor: the learning rate, or else measured."""
    regime, rate = probe.regime, getattr(probe.trainable, "learning_rate", None)
    if rate is None and regime.kind == "linear":
        return regime.changes[regime.norms.index(regime.norm)] * probe.divisor(1) / regime.norm
    return float(rate or 1.0)


def steady(probe: Probe, share: float) -> tuple[float, Batch]:
    """(C, sample) for runs of several steps: what the sample contributes hardly changes with the weights.

    An ordinary sample that is clipped far; where samples count whole or not at all, one that does not count.
    """
    regime = probe.regime
    if regime.kind != "linear":
        return regime.norm / 3, probe.strong  # far enough below its gradient, which moves with the weights
    typical = ordinary_norm(probe)
    return min(share * regime.norm, typical / 20 if typical is not None else np.inf), probe.data(1, 317)
