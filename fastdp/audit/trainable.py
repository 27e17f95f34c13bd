"""What is audited: a training step of any framework, behind one small protocol.

Nothing here imports torch, so a step of JAX or of a remote service is audited in the same way as a step of PyTorch.
Batches are pairs (inputs, labels) of numpy arrays with samples along the first dimension; `fastdp.audit.torch_step`
turns them into tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np

from ..errors import FastDPError

Array = np.ndarray[Any, Any]
Batch = tuple[Any, Any]


class AuditError(FastDPError):
    """The audit cannot run: the step is missing, returns something wrong, or is not deterministic."""


class Lacking(AuditError):
    """One test needs something that this trainable does not offer; the test is then reported as not tested."""


class Outcome(NamedTuple):
    """The result of a run."""

    loss: float  # mean loss of the last batch after training; nan where no batch was given
    parameters: Array  # float64 [P]: all trained parameters, flat, always in the same order


@runtime_checkable
class Trainable(Protocol):
    """A training step under audit. The two methods below are all that it must have.

    The optional attributes and methods follow, each with its purpose. A test that lacks one says so.

    make_batch(seed, size) -> (x, y)   ordinary data, numpy arrays [size, ...]; every test needs it
    predict(model, x) -> [size, K]     outputs of the model as its loss sees them, for samples of zero gradient
    loss_kind                          "cross_entropy" (predict returns logits; labels int [B], or soft [B, K]) or "mse"
    optimizer                          "sgd" (default) or "adam"
    learning_rate                      for comparisons with C itself, and not only with other runs; Adam needs it
    adam_eps                           Adam's eps, default 1e-8: far below it, a step of Adam is linear in the gradient
    expected_batch_size                the divisor of the sum; 1: a sum; None (default): the size of the given batch
                                       (all batches of a run have one size, except empty ones)
    parameter_names                    [(name, number of elements)] in the order of Outcome.parameters, for sentences
    run_parts(model, batches, *, clipping_norm, noise_multiplier, seed) -> Outcome
                                       like run, but each logical batch is a list of physical batches (accumulated
                                       micro-batches, or the shares of workers)
    trajectory(model, batches, *, clipping_norm, noise_multiplier, seed) -> [steps, P], or None
                                       like run, with the parameters after every step; without it, later steps of a
                                       run are not looked at one by one
    loss_of(model, batch) -> float     the script's loss, for the paper's change in loss; else of predict and loss_kind
    retune(model, *, clipping_norm, noise_multiplier, batch_size, seed)
                                       from the next step on, the model trains with these, and its optimizer keeps its
                                       state: for the paper's tests, which warm a model up first
    state(model) -> [S]                whatever else is released with the parameters: buffers, frozen weights
    sample(records, steps, seed) -> [indices of step 1, indices of step 2, ...]
                                       the batches that the script's loader draws; with sample_rate, the accounted rate
    take_share(rank, ranks)            of several processes: of each batch, train on rows rank, rank + ranks, ... only
    history(model) -> [(noise multiplier, sample rate, steps)]
                                       what the accountant has counted on a model after run()
    """

    def build(self, seed: int) -> Any:
        """Return a fresh model with its optimizer's state; equal seeds give equal weights."""

    def run(
        self, model: Any, batches: Sequence[Batch], *, clipping_norm: float, noise_multiplier: float, seed: int
    ) -> Outcome:
        """Train the model, with one step per batch. Without batches, only read the parameters.

        seed is the seed of the noise.
        """


def optional(trainable: Any, name: str, purpose: str) -> Any:
    """An optional attribute or method. Raises Lacking, naming it and what it is needed for."""
    found = getattr(trainable, name, None)
    if found is None:
        raise Lacking(f"needs {name} of the trainable, {purpose}")
    return found


def check_trainable(trainable: Any) -> Trainable:
    """Raise AuditError if this is not a Trainable, or the value of an attribute is invalid."""
    for name in ("build", "run"):
        if not callable(getattr(trainable, name, None)):
            raise AuditError(
                f"{type(trainable).__name__} is no Trainable: it has no method {name}(). See fastdp.audit.Trainable; "
                "fastdp.audit.TorchTrainable wraps a PyTorch script."
            )
    for name, known in (("optimizer", ("sgd", "adam")), ("loss_kind", ("cross_entropy", "mse"))):
        value = getattr(trainable, name, None)
        if value is not None and value not in known:
            raise AuditError(f"{name} of the trainable must be one of {', '.join(known)}, not {value!r}")
    for name in ("learning_rate", "expected_batch_size", "adam_eps"):
        value = getattr(trainable, name, None)
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise AuditError(f"{name} of the trainable must be a positive number, not {value!r}")
    return cast(Trainable, trainable)


def check_outcome(found: Any) -> Outcome:
    """Return the outcome with float64 parameters. Raises AuditError if run() returned something else."""
    try:
        loss, parameters = found
        flat = np.array(parameters, dtype=np.float64)  # a copy: the script may go on with its own
        loss = float(loss)
    except (TypeError, ValueError) as problem:
        raise AuditError(
            f"run() must return Outcome(loss, parameters), a number and a flat array, not {type(found).__name__} "
            f"({str(problem)[:80]})"
        ) from None
    if flat.ndim != 1 or not flat.size:
        raise AuditError(f"run() must return the parameters as one flat array [P], not one of shape {flat.shape}")
    return Outcome(loss, flat)


# ---------------------------------------------------------------------- batches


def mapped(function: Callable[..., Any], *parts: Any) -> Any:
    """The function of the arrays of one or several inputs or labels: arrays, or tuples, lists and dicts of them."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: mapped(function, *(part[name] for part in parts)) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(mapped(function, *(part[place] for part in parts)) for place in range(len(first)))
    return function(*parts)


def rows(part: Any, chosen: Any) -> Any:
    """Samples of inputs or labels, chosen by an index array or slice."""
    return mapped(lambda array: np.asarray(array)[chosen], part)


def joined(parts: Sequence[Any]) -> Any:
    """Inputs, or labels, of several batches as those of one."""
    return mapped(lambda *arrays: np.concatenate([np.asarray(array) for array in arrays]), *parts)


def is_floats(part: Any) -> bool:
    """Whether inputs or labels are one array of numbers, which can be scaled."""
    return isinstance(part, np.ndarray) and part.dtype.kind == "f"


def count(part: Any) -> int:
    """How many samples inputs or labels have."""
    if isinstance(part, dict):
        return count(next(iter(part.values())))
    return count(part[0]) if isinstance(part, tuple | list) else len(part)


def batch_of(batches: Sequence[Batch]) -> Batch:
    """One batch of all samples of several."""
    return joined([x for x, _ in batches]), joined([y for _, y in batches])


def pick(batch: Batch, chosen: Any) -> Batch:
    """Some samples of a batch."""
    return rows(batch[0], chosen), rows(batch[1], chosen)
