"""Check a model, a loss and records: is fastdp's result equal to that of one sample at a time?

The check also finds gradients of a sample that depend on other samples, which no clipping can make private.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import nested_tensors
from ..batch_axis.row_groups import numbers_of
from ..data.loader import PoissonLoader
from ..engine import loss_tracking
from ..engine.module_hooks import hook_of
from ..errors import BatchLayoutError, FastDPError, SampleMixingError, StepError, UncapturedUseError, VerificationError
from ..optim.verification_record import forget_verified, note_verified
from ..utils.keyword_arguments import named
from ..utils.random_generators import devices_of
from .collating import collated
from .examination import Examination
from .execution import Loss
from .padding import judge_padding
from .records import Records, alike, drawn_of, fetched, records_of
from .report import VerifyReport
from .state import Standing

__all__ = ["VerifyReport", "verify"]

_DROPOUT = (nn.modules.dropout._DropoutNd,)
_LARGEST = 8  # times as many samples as are compared may stand in the largest batch, unless sizes are given
_REFUSED = (SampleMixingError, UncapturedUseError, BatchLayoutError, StepError)  # findings, not misuse


class MixingFound(VerificationError, SampleMixingError):
    """The engine refused the program during verification, because it combines samples."""


def _beside_an_engine(function: Callable[..., VerifyReport]) -> Callable[..., VerifyReport]:
    """Within the function, that of a private optimizer is off the model, and afterwards it is on it as before."""

    @functools.wraps(function)
    def call(model: nn.Module, loss_fn: Loss, *args: Any, **options: Any) -> VerifyReport:
        if str(getattr(loss_fn, "__module__", "")).startswith("torch.nn."):
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            raise TypeError(
                f"loss_fn is called with the model and a batch, and {name} takes outputs and targets: give "
                f"lambda model, batch: {name}(model(batch[0]), batch[1]), or what your training computes"
            )
        hook = hook_of(model) if isinstance(model, nn.Module) else None
        forward = None if hook is None else hook.engine
        if forward is None:
            return function(model, loss_fn, *args, **options)
        forward.take_off()
        try:
            return function(model, loss_fn, *args, **options)
        finally:
            forward.attach()

    return call


@named
@_beside_an_engine
def verify(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    *,
    params: Iterable[Tensor] | None = None,
    loss_reduction: str = "mean",
    tolerance: float | None = None,
    samples: int = 8,
    group_by: Any = None,
    raise_on_failure: bool = True,
    batch_sizes: Sequence[int] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
    batch_first: bool = True,
    batch_size: int | None = None,
    rows_per_sample: int = 1,
    memory_budget: int | None = None,
) -> VerifyReport:
    """Compare norms and clipped sums with one-sample backwards, in batches of several sizes and with other samples.

    A model with dropout is examined with dropout off and on. Random numbers (dropout, drop path, noise) are drawn
    sample by sample while the model runs, so that a sample draws the same numbers alone and among others. If that is
    impossible, the report says what was not judged.

    Args:
        model: the model as it will be trained, in training mode if it will be. It is returned to its previous state.
        loss_fn: loss_fn(model, batch) -> the loss that will be trained, a scalar or one loss per sample [B].
        batch: tensors with samples along the first dimension, in any nest of tuples, lists and dicts, best with more
            samples than `samples`; or a Dataset or DataLoader, from which records are drawn; or, with collate_fn, any
            sequence of records.
        params: the parameters to check (default: all that require grad).
        loss_reduction: "mean" or "sum", as for the optimizer.
        tolerance: the largest relative error (default: 1e-4, or 5e-2 for 16-bit models). If a float32 model fails the
            default, verify also computes it in float64, with parameters and buffers swapped in the meantime. The model
            passes if float64 does, and if float32 is at most 4 times as far off as plain torch's float32 is.
        samples: the number of samples to compare with one-sample backwards. If there are more, verify draws samples
            with different labels and lengths.
        group_by: a key for each record; all records with the same key are one sample (a person).
        raise_on_failure: False returns the report with its `problem` instead of raising an error.
        batch_sizes: the sizes of further batches of these samples to examine (default: 1, 2, one sample less, more than
            twice as many, and all samples in the batch up to 8 times `samples`).
        collate_fn: makes a batch of a list of records. It runs for every batch that is examined, including batches of
            one record, so that verify finds padding that counts. If it draws random numbers, it runs once for all.
        seed: the seed of what verify draws, and of the program's random numbers.
        batch_first: as batch_size, rows_per_sample and memory_budget an argument of PerSampleGradients.
        batch_size: the number of samples of the batch, if the inputs do not show it.
        rows_per_sample: k, if k consecutive rows of the inputs are one sample.
        memory_budget: the bytes that may be held during backward.

    Returns:
        A VerifyReport.

    Raises:
        VerificationError: if a norm, a sum or a dependence between samples is wrong. The error names the module or the
            loss if it can.
        FastDPError: the engine's own errors, if it refuses the model.
        ValueError: if there are fewer than two samples.
        TypeError: if loss_fn is a loss of outputs and targets.
    """
    options = {
        "batch_first": batch_first, "batch_size": batch_size, "rows_per_sample": rows_per_sample,
        "memory_budget": memory_budget,
    }  # fmt: skip
    try:
        pool, total, once = _pool(model, batch, group_by, collate_fn, samples, seed, options)
    except SampleMixingError as error:  # of collate_fn
        forget_verified(model)
        if raise_on_failure:
            raise
        return VerifyReport.failed(samples, tolerance or 0.0, str(error))
    if pool.samples < 2:
        raise ValueError("verify needs a batch of at least two samples")
    judged = tolerance is None
    if tolerance is None:
        half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
        tolerance = 5e-2 if half else 1e-4
    followed = loss_tracking.set_aside()  # of a forward before, whose backward has not come
    standing = Standing(model, loss_fn, pool.batch)
    refusal: FastDPError | None = None
    try:
        standing.look(lambda: loss_fn(model, pool.batch))
        standing.clear_grads()
        chosen = None if params is None else list(params)
        work = Examination(model, loss_fn, chosen, loss_reduction, tolerance, judged, options, seed, standing.averages)
        pool = work.in_rows(pool)
        base = drawn_of(pool, samples, seed)
        work.choose(pool, base, _sizes(len(base), pool.samples, batch_sizes))
        report = _looks(work, model)
        judge_padding(work, report, once)
    except _REFUSED as error:
        refusal = error
        problem = f"the engine refuses this program ({type(error).__name__}): {error}{_of_one_record(pool.batch)}"
        report = VerifyReport.failed(min(samples, pool.samples), tolerance, problem)
    finally:
        standing.put_back()
        loss_tracking.take_up(followed)
    report.looked_at.insert(0, _records_seen(pool, report.samples, total))
    report.not_looked_at += _not_looked_at(model, work.base if report.ok else None)
    if report.ok:
        work.harmless()
        note_verified(model, "; ".join(report.looked_at))
        return report
    forget_verified(model)
    if not raise_on_failure:
        return report
    if isinstance(refusal, SampleMixingError):
        raise MixingFound(str(report), refusal.mixed) from refusal
    if refusal is not None:
        raise refusal
    raise VerificationError(str(report))


def _looks(work: Examination, model: nn.Module) -> VerifyReport:
    """Examine the model with its dropout modules off, and then as they are."""
    dropout = [module for module in model.modules() if isinstance(module, _DROPOUT) and module.training]
    for module in dropout:
        module.training = False
    first = work.examine("dropout off" if dropout else "")
    for module in dropout:
        module.training = True
    report = first.report
    report.problem = f"not judged: {first.unjudged}" if first.unjudged else report.problem
    if not dropout or report.problem:
        return report
    second = work.examine("dropout on, a sample with the same masks alone as in a batch")
    if second.unjudged:  # what there is without dropout is exact
        report.not_looked_at.append(f"dropout on: {second.unjudged}")
        warnings.warn(
            f"fastdp.verify: exact with dropout off; with dropout on it could not be judged: {second.unjudged}",
            stacklevel=4,
        )
        return report
    report.join(second.report)
    return report


def _pool(model: nn.Module, batch: Any, group_by: Any, collate_fn: Callable[[list[Any]], Any] | None, samples: int,
          seed: int, options: dict[str, Any]) -> tuple[Records, int, str]:  # fmt: skip
    """The records to choose from, the number that they were drawn from, and, if collate_fn runs only once, why."""
    numbers = None if group_by is None else numbers_of(group_by)[0]
    if isinstance(batch, PoissonLoader):
        if batch.sampler.grouping is not None and group_by is None:
            raise ValueError("the poisson_loader groups records: give verify their keys as well, group_by=")
        batch = batch.loader
    rows = int(options.get("rows_per_sample", 1))
    found = fetched(batch, collate_fn, samples * rows, numbers, seed)
    if found is not None:
        device = next(iter(devices_of(model)), torch.device("cpu"))
        pool, why = collated(found.items, found.collate, found.numbers, group_by is not None, device, rows)
        return pool, found.total, why
    pool = records_of(batch, numbers, group_by is not None)
    return pool, len(pool.numbers), ""


def _sizes(count: int, pool: int, asked: Sequence[int] | None) -> list[int]:
    if asked is not None:
        if any(size < 1 for size in asked):
            raise ValueError(f"batch_sizes must be at least 1, not {list(asked)}")
        return list(asked)
    sizes = {1, 2, count - 1, 2 * count + 1, min(pool, _LARGEST * count)}
    return sorted(size for size in sizes if size > 0 and size != count)


def _of_one_record(batch: Any) -> str:
    """What to say where a batch may be one record: its label is a number, or its numbers are a vector."""
    leaves = nested_tensors(batch)
    label = any(not (t.dim() or t.is_floating_point()) for t in leaves)
    if not label and (any(t.dim() > 1 for t in leaves) or not any(t.is_floating_point() for t in leaves)):
        return ""
    return " (If the batch is one record: verify needs a row for each of at least two, as data[:8] has.)"


def _records_seen(pool: Records, compared: int, total: int) -> str:
    what = "samples (groups of records)" if pool.grouped or pool.rows > 1 else "records"
    there = pool.samples if pool.grouped or pool.rows > 1 else total
    return f"all {compared} {what}" if compared >= there else f"{compared} of {there} {what}, drawn"


def _not_looked_at(model: nn.Module, base: Records | None) -> list[str]:
    found = ["other records, batch sizes and random outcomes than these, and what the program keeps from step to step"]
    if not any(module.training for module in model.modules()):
        found.append("training mode: the model is in eval mode")
    same = [] if base is None else alike(base)
    if same:
        found.append(f"what other values of {', '.join(same[:5])} would do: all records looked at have the same there")
    return found
