"""Samples with a gradient as small as is wanted."""

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
        raise Lacking("a label cannot be right")
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f" or np.asarray(y).dtype.kind not in "iu":
        raise Lacking("inputs are no numbers, or labels no classes")
    found: list[tuple[float, Batch]] = []
    for scale in (1.0, 10.0, 100.0):
        scaled = x * np.asarray(scale, x.dtype)
        logits = probe.outputs(scaled)
        if logits.ndim != 2:
            raise Lacking("needs logits [B, K] of predict()")
        sure = np.sort(logits, 1)[:, -1] - np.sort(logits, 1)[:, -2]
        k = int(np.argmin(np.abs(sure - 8.0)))  # a gradient of some ten thousandths
        label = logits.argmax(1)[[k]].astype(np.asarray(y).dtype)
        found.append((abs(float(sure[k]) - 8.0), (scaled[[k]], label)))
    return [min(found, key=lambda item: item[0])[1]]


__all__ = ["confident", "weak"]
