"""How a step answers: changes of the parameters, the sample with a large gradient, the samples with none, and the
clipping norms at which the answer is proportional to the norm."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

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
    rows,
)

NORMS = tuple(10.0**k for k in range(-12, 7))  # far below Adam's eps, to above every gradient
Result = TypeVar("Result")
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
        self.counted: Callable[[int], None] | None = None  # is told of that number whenever it grows
        self.memo: dict[Any, Any] = {}  # of `remembered`: what several tests look at

    # ------------------------------------------------------------------ runs

    def run(self, model: Any, batches: Sequence[Batch], norm: float, sigma: float, seed: int) -> Outcome:
        """Train a model on the batches. The steps are counted."""
        self.count(len(batches))
        with np.errstate(all="ignore"):
            return check_outcome(
                self.trainable.run(model, batches, clipping_norm=norm, noise_multiplier=sigma, seed=seed)
            )

    def count(self, steps: int) -> None:
        """So many more training steps are made."""
        self.steps += steps
        if self.counted is not None:
            self.counted(self.steps)

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
        one, other = (self.change([self.data(1, k)], min(NORMS)) for k in (107, 109))
        size = float(np.linalg.norm(one))
        common = self.resolution < size and float(np.linalg.norm(one - other)) <= 1e-3 * size + self.resolution
        return one if common else np.zeros_like(one)

    def check_steps(self) -> None:
        """Raises AuditError where a step does not train a fresh model on the batch that it is given."""
        batches = [self.data(2, number) for number in (113, 127, 131)]
        found = [self.change([batch], 1.0) for batch in batches]
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

    def divisor(self, size: int) -> float:
        """What the clipped sum of a batch of that size is divided by."""
        fixed = getattr(self.trainable, "expected_batch_size", None)
        return float(fixed) if fixed is not None else float(max(size, 1))

    @property
    def follows_batch(self) -> bool:
        """Whether the sum is divided by the size of the batch."""
        return getattr(self.trainable, "expected_batch_size", None) is None

    @property
    def optimizer(self) -> str:
        return str(getattr(self.trainable, "optimizer", None) or "sgd")

    @property
    def gain(self) -> float:
        """Change of the parameters over the gradient that the optimizer is handed. Raises Lacking where unknown."""
        rate = float(optional(self.trainable, "learning_rate", "to compare a step with C itself"))
        if self.optimizer == "adam":
            return rate / float(getattr(self.trainable, "adam_eps", None) or 1e-8)
        return rate

    @property
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
        """Outputs [B, K] of the fresh model."""
        predict = optional(self.trainable, "predict", "for samples whose gradient is zero")
        found = np.asarray(predict(self.trainable.build(self.seed), x), dtype=float)
        if found.ndim == 0 or len(found) != count(x):
            raise AuditError(f"predict() gave an array of shape {found.shape} for {count(x)} samples")
        return found

    def labels_like(self, x: Any, value: Array) -> Array:
        single = rows(self.data(1)[1], slice(None))
        kind = single.dtype if isinstance(single, np.ndarray) and single.dtype.kind == "f" else np.dtype(np.float32)
        return value.astype(kind)

    def without_gradient(self, size: int, number: int = 0) -> Batch:
        """Samples whose gradient is zero at the fresh model: labels are what it predicts. Raises Lacking."""
        kind = optional(self.trainable, "loss_kind", "for samples whose gradient is zero")
        x, y = self.data(size, number)
        outputs = self.outputs(x)
        if kind == "mse":
            return x, self.labels_like(x, outputs).reshape(np.shape(y))
        if outputs.ndim != 2:
            raise Lacking(f"needs logits [B, K] of predict() for samples without gradient, not {outputs.shape}")
        return x, self.labels_like(x, softmax(outputs))

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
        x, y = self.data(1)
        outputs = self.outputs(x)
        if self.trainable.loss_kind == "mse":  # type: ignore[attr-defined]
            away = np.where(np.abs(outputs) < 0.1, 0.1, outputs)
            return x, self.labels_like(x, -ALPHA * away).reshape(np.shape(y))
        return x, self.labels_like(x, ALPHA * np.eye(outputs.shape[1])[outputs.argmin(1)])

    def by_wrong_label(self) -> Batch:
        x, y = self.data(1)
        if self.trainable.loss_kind != "cross_entropy":  # type: ignore[attr-defined]
            raise Lacking("needs classes, so that a label can be wrong")
        return x, self.outputs(x).argmin(1).astype(np.asarray(y).dtype)

    def _by_inputs(self) -> Batch:
        x, y = self.data(1)
        if not is_floats(x):
            raise Lacking("inputs are no numbers")
        return x * np.asarray(ALPHA, x.dtype), y

    def together(self, batches: Sequence[Batch]) -> Batch:
        """One batch of several; classes become soft labels where one of them has those."""
        soft = [np.ndim(y) == 2 and np.asarray(y).dtype.kind == "f" for _, y in batches if not isinstance(y, dict)]
        if not any(soft) or all(soft) or getattr(self.trainable, "loss_kind", None) != "cross_entropy":
            return batch_of(batches)
        classes = next(np.shape(y)[1] for _, y in batches if np.ndim(y) == 2)
        made = [(x, y if np.ndim(y) == 2 else np.eye(classes, dtype=np.float32)[np.asarray(y)]) for x, y in batches]
        return batch_of(made)

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
        found = self.answers(self.strong)
        return self._judge([norm for norm, _, _ in found], [size for _, size, _ in found])

    @property
    def answers_to_norm(self) -> bool:
        """Whether contributions are proportional to C, or samples count whole or not at all."""
        return self.regime.kind in ("linear", "switched")

    @property
    def usual_norm(self) -> float:
        """The regime's C; where no C clips a sample, 1."""
        return self.regime.norm if self.answers_to_norm else 1.0

    def _judge(self, norms: list[float], sizes: list[float]) -> Regime:
        largest, least = max(sizes), self.resolution
        if largest <= least:
            raise AuditError(
                "a step without noise changes no parameter at any clipping norm: is the step taken on the model whose "
                "parameters run() returns?"
            )
        if sizes[0] > 0.01 * largest:
            return Regime("flat", norms[-1], norms, sizes)
        limit = SHARE * float(np.linalg.norm(self.start))
        # rounding cannot make two ratios of ten in a row
        tenfold = [False, *(abs(b / max(a, 1e-300) / 10 - 1) < LINEAR for a, b in zip(sizes, sizes[1:], strict=False))]
        fits = [
            k for k in range(1, len(norms))
            if tenfold[k] and (sizes[k] > 100 * least or tenfold[k - 1])
        ]  # fmt: skip
        small = [k for k in fits if sizes[k] <= limit]
        if fits:
            return Regime("linear", norms[max(small) if small else min(fits)], norms, sizes)
        first = next(k for k, size in enumerate(sizes) if size > 10 * least)
        if all(abs(size / largest - 1) < LINEAR for size in sizes[first:]):
            return Regime("switched", self._threshold(norms[first - 1], norms[first], sizes[first]), norms, sizes)
        return Regime("other", norms[first], norms, sizes)

    def _threshold(self, low: float, high: float, size: float) -> float:
        """A norm a little below the strong sample's gradient, at which it (each layer of it) does not count."""
        for _ in range(4):
            middle = math.sqrt(low * high)
            if np.linalg.norm(self.change([self.strong], middle) - self.drift) > 0.001 * size:
                high = middle
            else:
                low = middle
        return low

    def clipped_norm(self, purpose: str) -> float:
        """A clipping norm at which samples are clipped. Raises Lacking where there is none."""
        regime = self.regime
        if regime.kind == "flat":
            raise Lacking(f"{purpose}: the step does not depend on C at all (see no_clipping)")
        if regime.kind == "other":
            raise Lacking(
                f"{purpose}: the step is nowhere seen to be proportional to C, not even far below the gradient's norm. "
                "Where rounding hides it, a larger learning rate or float64 for the audit shows it"
            )
        return regime.norm


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """A measurement of a probe (and of hashable arguments) that is made once for each probe."""

    @functools.wraps(function)
    def measured(probe: Probe, *args: Any) -> Result:
        key = function.__qualname__, *args
        if key not in probe.memo:
            probe.memo[key] = function(probe, *args)
        return probe.memo[key]  # type: ignore[no-any-return]

    return measured


def softmax(logits: Array) -> Array:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)  # type: ignore[no-any-return]


def copies(sample: Batch, times: int) -> Batch:
    """A batch of the same sample, several times."""
    return pick(sample, np.zeros(times, int))
