"""How a step answers: changes of the parameters, the sample with a large gradient, the samples with none, and the
clipping norms at which the answer is proportional to the norm."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import softmax

from .trainable import (
    Array,
    AuditError,
    Batch,
    Lacking,
    Outcome,
    Trainable,
    batch_of,
    check_outcome,
    check_trainable,
    count,
    is_floats,
    optional,
    pick,
)

NORMS = tuple(10.0**k for k in range(-12, 7))  # far below Adam's eps, to above every gradient
NOTHING = 1e-15  # C beside which weight decay is all that a step does
FIXED = 0.05  # largest departure of a sum from one that a fixed number divides
ALPHA = 100.0  # how much larger than ordinary the labels of a large gradient are
LINEAR = 0.03  # largest departure from proportionality
SHARE = 0.03  # of the parameters' norm: largest change of a step that is measured


class Regime(NamedTuple):
    """Where a step answers in proportion to C.

    kind: "linear": the change of a sample's step is proportional to C at `norm` and below; "switched": a sample counts
    whole or not at all (global clipping), and not at `norm`; "flat": C has no effect; "other": none of these.
    """

    kind: str
    norm: float
    norms: list[float]
    changes: list[float]


class Probe:
    """A trainable with one seed for its weights; every measurement begins at the same fresh model."""

    def __init__(self, trainable: Trainable, seed: int = 0) -> None:
        self.trainable, self.seed = check_trainable(trainable), seed
        self.steps = 0  # training steps so far
        self.optimizer = str(getattr(trainable, "optimizer", None) or "sgd")
        self.learning_rate: float | None = getattr(trainable, "learning_rate", None)
        self.loss_kind: str | None = getattr(trainable, "loss_kind", None)

    # ------------------------------------------------------------------ runs

    def run(self, model: Any, batches: Sequence[Batch], norm: float, sigma: float, seed: int) -> Outcome:
        """Train a model on the batches. The steps are counted."""
        self.steps += len(batches)
        with np.errstate(all="ignore"):
            return check_outcome(
                self.trainable.run(model, batches, clipping_norm=norm, noise_multiplier=sigma, seed=seed)
            )

    def outcome(self, batches: Sequence[Batch], norm: float, sigma: float = 0.0, seed: int = 1) -> Outcome:
        """Train a fresh model on the batches; the noise's seed is this one, in a range of the probe's own."""
        return self.run(self.trainable.build(self.seed), batches, norm, sigma, self.noise_seed(seed))

    def noise_seed(self, number: int) -> int:
        """Seeds of noise that audits of other seeds do not use."""
        return 7919 * self.seed + number

    def repeats(self, least: int, values: int) -> int:
        """So many seeds of noise that all parameters together show at least so many values of it (64 at most)."""
        return max(least, min(64, -(-values // self.start.size)))

    def change(self, batches: Sequence[Batch], norm: float, sigma: float = 0.0, seed: int = 1) -> Array:
        """Change of the parameters [P] over the batches, one step each; may hold infinities."""
        with np.errstate(all="ignore"):
            return self.outcome(batches, norm, sigma, seed).parameters - self.start  # type: ignore[no-any-return]

    def summed(self, batch: Batch, norm: float) -> Array:
        """Change by one step without noise, times what the sum was divided by: proportional to the clipped sum."""
        return (self.change([batch], norm) - self.drift) * self.divisor(count(batch[1]))

    def contribution(self, batch: Batch, norm: float) -> float:
        """Norm of `summed`."""
        return float(np.linalg.norm(self.summed(batch, norm)))

    @cached_property
    def start(self) -> Array:
        """Parameters of the fresh model."""
        first, second = (self.outcome([], 1.0).parameters for _ in range(2))
        if not np.array_equal(first, second):
            raise AuditError(
                "build() gave different weights for the same seed: seed everything that draws them (in PyTorch "
                "torch.manual_seed(seed) before the model is made)"
            )
        if not np.isfinite(first).all():
            raise AuditError("the parameters of the fresh model are not all finite")
        return first

    @cached_property
    def drift(self) -> Array:
        """What a step does to the parameters whatever the data say: weight decay. Zeros where data say something."""
        one, other = (self.change([self.data(1, k)], NOTHING) for k in (107, 109))
        size = float(np.linalg.norm(one))
        common = self.resolution < size and float(np.linalg.norm(one - other)) <= 1e-3 * size + self.resolution
        return one if common else np.zeros_like(one)

    def check_steps(self) -> None:
        """Raises AuditError where a step does not train a fresh model on the batch that it is given."""
        found = [self.change([self.data(2, number)], 1.0) for number in (113, 127, 131)]
        if not np.array_equal(self.outcome([], 1.0).parameters, self.start):
            raise AuditError(
                "build() does not give a fresh model: after a step, a new one of the same seed has other weights. Make "
                "it anew (or copy it) in build()"
            )
        if max(float(np.linalg.norm(change)) for change in found) <= self.resolution:
            return  # said with more reason where C is looked at
        if all(np.array_equal(change, found[0], equal_nan=True) for change in found[1:]):
            raise AuditError(
                "without noise the step is the same whatever batch it is given: does run() train on the batches that "
                "it is handed, or on data of its own?"
            )

    # ------------------------------------------------------------------ constants

    @cached_property
    def expected_batch_size(self) -> float | None:
        """What divides every sum: what the trainable says, or what a sample among ones of no gradient shows; None if
        the batch's own size does. (A sum divided by 1, which a clipped mean would look like, must be said.)"""
        if (given := getattr(self.trainable, "expected_batch_size", None)) is not None:
            return float(given)
        with contextlib.suppress(Exception):  # Lacking, or a script that takes no such labels
            if self.optimizer == "sgd" and self.regime.kind == "linear":
                norm, among = self.regime.norm, self.together([self.strong, self.without_gradient(3, 401)])
                one, four = (np.linalg.norm(self.change([b], norm) - self.drift) for b in (self.strong, among))
                number = self.rate * norm / float(one)
                return number if abs(four / one - 1) < FIXED and number > 1 + FIXED else None
        return None

    def divisor(self, size: int) -> float:
        """What the clipped sum of a batch of that size is divided by."""
        return float(self.expected_batch_size or max(size, 1))

    @property
    def rate(self) -> float:
        """Change of the parameters over the gradient, by a step without momentum. Raises Lacking where unknown."""
        rate = float(optional(self.trainable, "learning_rate", "to compare a step with C itself"))
        if self.optimizer == "adam":
            return rate / float(getattr(self.trainable, "adam_eps", None) or 1e-8)
        return rate

    @cached_property
    def precision(self) -> float:
        """Relative rounding of the parameters, told from the digits that they use."""
        single = self.start.astype(np.float32)
        if not np.array_equal(single.astype(float), self.start):
            return 2.0**-53
        return 2.0**-9 if not (single.view(np.uint32) & 0xFFFF).any() else 2.0**-24

    @property
    def resolution(self) -> float:
        """Norm of a change that rounding alone can make."""
        return self.precision * float(np.linalg.norm(self.start)) + 1e-300

    # ------------------------------------------------------------------ samples

    def data(self, size: int, number: int = 0) -> Batch:
        """Ordinary samples; another number gives others."""
        make = optional(self.trainable, "make_batch", "for samples to train on")
        x, y = make(self.seed * 1009 + number, size)
        if count(x) != size or count(y) != size:
            raise AuditError(f"make_batch(seed, {size}) gave {count(x)} inputs and {count(y)} labels, not {size} each")
        return x, y

    def outputs(self, x: Any) -> Array:
        """Outputs [B, ...] of the fresh model."""
        predict = optional(self.trainable, "predict", "for outputs of the model")
        found = np.asarray(predict(self.trainable.build(self.seed), x), dtype=float)
        if found.ndim == 0 or len(found) != count(x):
            raise AuditError(f"predict() gave an array of shape {found.shape} for {count(x)} samples")
        return found

    def logits(self, x: Any, model: Any = None) -> Array:
        """What the loss is of: logits [B, K], or numbers for "mse". Raises Lacking where that is unknown."""
        predict, kind = (optional(self.trainable, name, "for samples whose gradient is known")
                         for name in ("predict", "loss_kind"))  # fmt: skip
        found = self.outputs(x) if model is None else np.asarray(predict(model, x), dtype=float)
        if kind != "mse" and found.ndim != 2:
            raise Lacking(f"needs logits [B, K] of predict(), not {found.shape}")
        return found

    def labels_like(self, value: Array) -> Array:
        """Labels that are numbers: of the shape and kind that make_batch() gives, if it gives numbers."""
        _, y = self.data(1)
        floats = is_floats(y)
        value = value.astype(y.dtype if floats else np.float32)
        return value.reshape(len(value), *y.shape[1:]) if floats and self.loss_kind == "mse" else value

    def without_gradient(self, size: int, number: int = 0, model: Any = None) -> Batch:
        """Samples whose gradient is zero at the fresh model: labels are what it predicts. Raises Lacking."""
        x = self.data(size, number)[0]
        outputs = self.logits(x, model)
        return x, self.labels_like(outputs if self.loss_kind == "mse" else softmax(outputs, 1))

    @cached_property
    def strong(self) -> Batch:
        """One sample with a gradient as large as can be had, by its labels or else by its inputs."""
        for make in (self._by_labels, self.by_wrong_label, self._by_inputs):
            with contextlib.suppress(Exception):  # a script that takes no such labels
                candidate = make()
                sizes = [np.linalg.norm(self.change([candidate], norm)) for norm in (1.0, 1e6)]
                if any(math.isfinite(size) and size > self.resolution for size in sizes):
                    return candidate
        return self.data(1)

    def _by_labels(self) -> Batch:
        x, _ = self.data(1)
        outputs = self.logits(x)
        if self.loss_kind == "mse":
            return x, self.labels_like(-ALPHA * np.where(np.abs(outputs) < 0.1, 0.1, outputs))
        return x, self.labels_like(ALPHA * np.eye(outputs.shape[1])[outputs.argmin(1)])

    def by_wrong_label(self) -> Batch:
        """A sample whose label is the class that the model finds least likely. Raises Lacking without classes."""
        x, y = self.data(1)
        if self.loss_kind != "cross_entropy":
            raise Lacking("needs classes, so that a label can be wrong")
        return x, self.logits(x).argmin(1).astype(np.asarray(y).dtype)

    def _by_inputs(self) -> Batch:
        x, y = self.data(1)
        if not is_floats(x):
            raise Lacking("inputs are no numbers")
        return x * np.asarray(ALPHA, x.dtype), y

    def together(self, batches: Sequence[Batch]) -> Batch:
        """One batch of several; classes become soft labels where one of them has those."""
        soft = [y for _, y in batches if is_floats(y) and y.ndim == 2]
        if self.loss_kind != "cross_entropy" or not soft:
            return batch_of(batches)
        table = np.eye(soft[0].shape[1], dtype=np.float32)
        return batch_of([(x, y if np.ndim(y) == 2 else table[np.asarray(y)]) for x, y in batches])

    # ------------------------------------------------------------------ the answer to C

    def answers(self, batch: Batch, norms: Sequence[float] = NORMS) -> list[tuple[float, float, float]]:
        """(norm, size of the change, loss) for each clipping norm, where finite."""
        found = []
        for norm in norms:
            outcome = self.outcome([batch], norm)
            with np.errstate(all="ignore"):
                size = float(np.linalg.norm(outcome.parameters - self.start - self.drift))
            if math.isfinite(size):
                found.append((norm, size, outcome.loss))
        if len(found) < 3:
            raise AuditError("a step without noise makes the parameters infinite or NaN at nearly every clipping norm")
        return found

    @cached_property
    def regime(self) -> Regime:
        """The clipping norms to test at, from the strong sample's answers."""
        norms, sizes, _ = (list(column) for column in zip(*self.answers(self.strong), strict=True))
        largest, least = max(sizes), self.resolution
        if largest <= least:
            raise AuditError(
                "a step without noise changes no parameter at any clipping norm: is the step taken on the model whose "
                "parameters run() returns? A learning rate that begins at 0 does this, too: give a constant one"
            )
        if sizes[0] > 0.01 * largest:
            return Regime("flat", norms[-1], norms, sizes)
        # rounding cannot make two ratios of ten in a row
        tenfold = [False, *(abs(b / max(a, 1e-300) / 10 - 1) < LINEAR for a, b in zip(sizes, sizes[1:], strict=False))]
        fits = [k for k in range(1, len(norms)) if tenfold[k] and (sizes[k] > 100 * least or tenfold[k - 1])]
        small = [k for k in fits if sizes[k] <= SHARE * float(np.linalg.norm(self.start))]
        if fits:
            return Regime("linear", norms[max(small, default=min(fits))], norms, sizes)
        first = next(k for k, size in enumerate(sizes) if size > 10 * least)
        if all(abs(size / largest - 1) < LINEAR for size in sizes[first:]):
            return Regime("switched", self._threshold(norms[first - 1], norms[first], sizes[first]), norms, sizes)
        return Regime("other", norms[first], norms, sizes)

    def _threshold(self, low: float, high: float, size: float) -> float:
        """A norm a little below the strong sample's gradient, at which it (each layer of it) does not count."""
        for _ in range(4):
            middle = math.sqrt(low * high)
            counts = np.linalg.norm(self.change([self.strong], middle) - self.drift) > 0.001 * size
            low, high = (low, middle) if counts else (middle, high)
        return low

    @property
    def answers_to_norm(self) -> bool:
        """Whether contributions are proportional to C, or samples count whole or not at all."""
        return self.regime.kind in ("linear", "switched")

    @property
    def usual_norm(self) -> float:
        """The regime's C, for batches: of Adam, where it is linear in the mean of 8 samples, too, whatever divides
        their sum. Where no C clips a sample, 1."""
        shared = self.divisor(8) / self.divisor(1) / 8 if self.optimizer == "adam" else 1.0
        return self.regime.norm * shared if self.answers_to_norm else 1.0

    def clipped_norm(self, purpose: str) -> float:
        """A clipping norm at which samples are clipped. Raises Lacking where there is none."""
        if self.regime.kind == "flat":
            raise Lacking(f"{purpose}: the step does not depend on C at all (see no_clipping)")
        if self.regime.kind == "other":
            raise Lacking(
                f"{purpose}: the step is nowhere seen to be proportional to C, not even far below the gradient's norm. "
                "Where rounding hides it, a larger learning rate or float64 for the audit shows it"
            )
        return self.usual_norm

    def check_sums(self) -> None:
        """Raises Lacking where changes tell nothing of sums: of steps that draw random numbers beside the noise, and of
        an Adam that is nowhere linear."""
        one, other = (self.change([self.data(2, 113)], 1.0, 0.0, seed) for seed in (1, 2))
        if float(np.linalg.norm(one - other)) > 4 * self.resolution:
            raise Lacking(
                "needs a step that is the same for each seed where there is no noise: turn augmentation, and dropout "
                "by function, off for the audit (see uncalibrated_noise)"
            )
        if self.optimizer == "adam" and self.regime.kind == "other":
            self.clipped_norm("needs a step in which Adam is linear")


def copies(sample: Batch, times: int) -> Batch:
    """A batch of the same sample, several times."""
    return pick(sample, np.zeros(times, int))
