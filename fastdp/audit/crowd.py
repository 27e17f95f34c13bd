"""Samples of all labels that there are, and what each contributes by itself."""

from __future__ import annotations

import contextlib

import numpy as np

from .known import steady
from .measure import Probe
from .trainable import Array, AuditError, Batch, Lacking, pick, rows

LEAST, MOST = 24, 64  # samples
TIMES = (1.0, -1.0, 0.0, 10.0, -100.0, 0.1)  # of labels that are numbers


def crowd(probe: Probe) -> list[tuple[str, Batch]]:
    """(what it is, sample) of 24 samples: every class is the label of one (of more than 64 classes, of 64 by chance).

    Labels that are numbers come in several sizes and of both signs; other labels as make_batch() gives them.
    """
    if "crowd" not in probe.memo:
        probe.memo["crowd"] = _made(probe)
    return probe.memo["crowd"]  # type: ignore[no-any-return]


def _made(probe: Probe) -> list[tuple[str, Batch]]:
    classes = _classes(probe)
    size = LEAST if classes is None else max(LEAST, min(MOST, len(classes)))
    x, y = probe.data(size, 401)
    if classes is not None:
        given = classes[np.random.default_rng(probe.seed + 403).permutation(len(classes))]
        return [(f"label {given[k % len(given)]}",
                 (rows(x, [k]), np.asarray(y)[[k]] * 0 + given[k % len(given)])) for k in range(size)]  # fmt: skip
    if isinstance(y, np.ndarray) and y.dtype.kind == "f" and getattr(probe.trainable, "loss_kind", "") == "mse":
        times = [TIMES[k % len(TIMES)] for k in range(size)]
        return [(f"a label times {times[k]:g}",
                 (rows(x, [k]), y[[k]] * np.asarray(times[k], y.dtype))) for k in range(size)]  # fmt: skip
    return [(f"ordinary sample {k}", pick((x, y), [k])) for k in range(size)]


def _classes(probe: Probe) -> Array | None:
    """All classes [K]: those that the model has outputs for, or else those that make_batch() gives."""
    y = probe.data(256, 405)[1]
    if not isinstance(y, np.ndarray) or y.ndim != 1 or y.dtype.kind not in "iu":
        return None
    given = np.unique(y)
    if getattr(probe.trainable, "loss_kind", None) == "cross_entropy" and given.min() >= 0:
        with contextlib.suppress(Lacking):
            outputs = probe.outputs(probe.data(1, 405)[0])
            if outputs.ndim == 2 and outputs.shape[1] > given.max():
                return np.arange(outputs.shape[1])
    return given


def alone(probe: Probe) -> tuple[float, list[tuple[str, Batch, Array]]]:
    """(C, [(what it is, sample, its contribution [P])]), C far below their gradients; the first step's gain is in it.

    Samples that the script does not take, or that make the parameters infinite, are left out.
    """
    if "alone" not in probe.memo:
        norm, _ = steady(probe, 0.1 if probe.optimizer == "sgd" else 0.25)
        found = []
        for what, sample in crowd(probe):
            try:
                change = probe.summed(sample, norm)
            except AuditError:
                raise
            except Exception:  # noqa: BLE001  (a label that the script does not take)
                continue
            if np.isfinite(change).all():
                found.append((what, sample, change))
        probe.memo["alone"] = norm, found
    return probe.memo["alone"]  # type: ignore[no-any-return]
