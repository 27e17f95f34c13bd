"""Samples of which something is known: a small gradient, the gradient's norm, every label, the contribution alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import numpy as np

from .measure import Probe
from .trainable import Array, AuditError, Batch, Lacking, is_floats, pick

LEAST, MOST = 24, 64  # samples of all labels
TIMES = (1.0, -1.0, 0.0, 10.0, -100.0, 0.1)  # of labels that are numbers


def weak(probe: Probe, share: float, number: int = 0) -> Batch:
    """One sample whose gradient is about that share of an ordinary one: its label is nearly what the model predicts.

    Raises Lacking where the trainable says nothing of its outputs or loss.
    """
    x, nothing = probe.without_gradient(1, number)
    y = probe.data(1, number)[1]
    if probe.loss_kind == "cross_entropy" and np.ndim(y) == 1:
        y = np.eye(nothing.shape[1])[np.asarray(y)]
    return x, probe.labels_like((1 - share) * np.asarray(nothing, float) + share * np.asarray(y, float))


def confident(probe: Probe, number: int = 0) -> Batch:
    """A sample that the model is sure of, with the label that it predicts: a small gradient without soft labels."""
    x, y = probe.data(16, number)
    if probe.loss_kind != "cross_entropy" or not is_floats(x) or np.asarray(y).dtype.kind not in "iu":
        raise Lacking("needs inputs that are numbers, and classes, so that a label can be right")
    scaled = np.concatenate([x * np.asarray(scale, x.dtype) for scale in (1.0, 10.0, 100.0)])
    logits = probe.logits(scaled)
    ordered = np.sort(logits, 1)
    size = np.linalg.norm(np.asarray(scaled, float).reshape(len(scaled), -1), axis=1)
    small = ordered[:, -1] - ordered[:, -2] - np.log(1 + size)  # of the gradient: minus its logarithm
    k = int(np.argmin(np.abs(small - 8.0)))  # some ten thousandths
    return scaled[[k]], logits.argmax(1)[[k]].astype(np.asarray(y).dtype)


@functools.lru_cache(maxsize=4)
def ordinary_norm(probe: Probe) -> float | None:
    """Norm of an ordinary sample's gradient, from where its step stops growing with C; None where it does not."""
    return gradient_norm(probe, probe.data(1, 17))


def gradient_norm(probe: Probe, sample: Batch) -> float | None:
    """Norm of a sample's gradient, or None: with normalised clipping, or no clipping, no C exceeds it visibly."""
    if probe.optimizer != "sgd" or not probe.answers_to_norm or probe.learning_rate is None:
        return None
    top, higher = (probe.contribution(sample, norm) for norm in (1e6, 1e8))
    if not np.isfinite(higher) or top <= 10 * probe.resolution or abs(higher / top - 1) > 0.01:
        return None
    return top / probe.learning_rate


def steady(probe: Probe, share: float) -> tuple[float, Batch]:
    """(C, sample) for runs of several steps: what the sample contributes hardly changes with the weights.

    An ordinary sample that is clipped far; where samples count whole or not at all, one that does not count.
    """
    if probe.regime.kind != "linear":
        return probe.regime.norm / 3, probe.strong  # far enough below its gradient, which moves with the weights
    typical = ordinary_norm(probe)
    return min(share * probe.regime.norm, typical / 20 if typical is not None else np.inf), probe.data(1, 317)


def labelled(probe: Probe) -> list[tuple[str, Batch]]:
    """(what it is, sample) of 24 samples: every class is the label of one (of more than 64 classes, of 64 by chance).

    Labels that are numbers come in several sizes and of both signs; other labels as make_batch() gives them.
    """
    y = probe.data(256, 405)[1]
    classes = np.unique(y) if isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype.kind in "iu" else np.zeros(0, int)
    size = max(LEAST, min(MOST, len(classes)))
    x, y = probe.data(size, 401)
    words = [f"ordinary sample {k}" for k in range(size)]
    if len(classes):
        y = np.resize(np.random.default_rng(probe.seed + 403).permutation(classes), size)
        words = [f"label {label}" for label in y]
    elif is_floats(y) and probe.loss_kind == "mse":
        times = np.resize(TIMES, size).astype(y.dtype)
        y = y * times.reshape(-1, *[1] * (y.ndim - 1))
        words = [f"a label times {factor:g}" for factor in times]
    return [(words[k], pick((x, y), [k])) for k in range(size)]


@functools.lru_cache(maxsize=4)
def alone(probe: Probe) -> tuple[float, list[tuple[str, Batch, Array]]]:
    """(C, [(what it is, sample, its contribution [P])]), C far below their gradients; the first step's gain is in it.

    Samples that the script does not take, or that make the parameters infinite, are left out.
    """
    norm, _ = steady(probe, 0.1 if probe.optimizer == "sgd" else 0.25)
    found = []
    for what, sample in labelled(probe):
        with taken_or_not():
            change = probe.summed(sample, norm)
            if np.isfinite(change).all():
                found.append((what, sample, change))
    return norm, found


@contextlib.contextmanager
def taken_or_not() -> Iterator[None]:
    """A sample or batch that the script may not take (soft labels, none, its own shapes): its errors pass."""
    try:
        yield
    except Lacking:
        pass
    except AuditError:
        raise
    except Exception:  # noqa: BLE001  (whatever the script raises)
        pass
