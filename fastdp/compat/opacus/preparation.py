"""What make_private asks of modules and loaders."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, Sampler

from ...data.weighted_samplers import REMEDY, sampler_of, uneven
from ...distributed.sharded import is_sharded, to_parts
from .distributed import DifferentiallyPrivateDistributedDataParallel
from .grad_sample import AbstractGradSampleModule


@contextlib.contextmanager
def or_as_it_was(hooks: Any, given: Any) -> Iterator[None]:
    """Where what is within fails, take the hooks off the user's module again (unless he gave them)."""
    try:
        yield
    except Exception:
        if hooks is not given:
            hooks.cleanup()
        raise


def is_distributed(module: Any, grad_sample_mode: str = "hooks") -> bool:
    """Whether the module trains in a process group. What fully_shard has cut is left in its parts by this.

    Raises NotImplementedError if it is wrapped in another way, or in one that the mode does not know.
    """
    plain = module._module if isinstance(module, AbstractGradSampleModule) else module
    if is_sharded(plain):
        if grad_sample_mode != "ghost_fsdp":
            raise NotImplementedError(
                f"grad_sample_mode {grad_sample_mode!r} takes whole modules, and fully_shard has cut this one "
                f"({type(plain).__name__}): take grad_sample_mode='ghost_fsdp'"
            )
        to_parts(plain)
        return True
    if isinstance(plain, DistributedDataParallel):
        raise NotImplementedError(
            f"{type(plain).__name__} is not supported by make_private: give each process the whole module in "
            "fastdp.compat.opacus.distributed.DifferentiallyPrivateDistributedDataParallel, or a part of it by "
            "FSDP2Wrapper and grad_sample_mode='ghost_fsdp'."
        )
    return isinstance(plain, DifferentiallyPrivateDistributedDataParallel)


def check_parameters(module: Any, optimizer: Any) -> None:
    """Raises ValueError if the optimizer has a parameter that is not the module's."""
    known = {id(p) for p in module.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "Module parameters are different than optimizer Parameters. Make the optimizer of this very module's "
            "parameters; if FSDP2Wrapper or fully_shard has cut it, after that and before any forward."
        )


def sample_rate_of(data_loader: Any) -> float:
    """The rate that is accounted for: at which the loader or its batch sampler says that it samples, else 1 / len.

    Where a pass draws more records than there are (with replacement) 1 / len is the part of a pass, and of the records
    a batch takes so many times as much. Raises ValueError where some records are drawn more often than others.
    """
    for part in (data_loader, getattr(data_loader, "batch_sampler", None)):
        if isinstance(rate := getattr(part, "sample_rate", None), float | int):
            return float(rate)
    if why := uneven(sampler_of(data_loader), records_of(data_loader) or 0):
        raise ValueError(f"{why}, so no sample rate is that of every record, and epsilon would be too small. {REMEDY}")
    rate, sampler = 1 / len(data_loader), getattr(data_loader, "sampler", None)
    if not isinstance(sampler, Sampler) or not isinstance(data_loader.batch_sampler, BatchSampler):
        return rate
    return min(1.0, rate * max(1.0, len(sampler) / len(data_loader.dataset)))  # type: ignore[arg-type]


def records_of(holder: Any) -> int | None:
    """How many records the data set of a loader or an engine has; None where they cannot be counted."""
    try:
        return len(holder.dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def expected_batch_size_of(data_loader: Any, sample_rate: float, distributed: bool = False) -> float:
    """len(dataset) * rate, rounded down but for the rounding of floating point; at least 1. distributed: its share."""
    whole = max(1, int(len(data_loader.dataset) * sample_rate * (1 + 1e-12)))
    return whole / torch.distributed.get_world_size() if distributed else whole


_OPTIMIZERS: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()  # of each module


def note_optimizer(hooks: Any, made: Any) -> None:
    """Warn if the module already has another private optimizer."""
    others = _OPTIMIZERS.setdefault(hooks, weakref.WeakSet())
    if len(others):
        warnings.warn(
            "this module has another private optimizer: if both step on the same batch, its samples are released "
            "twice, which is accounted as if two batches had been drawn, and epsilon is understated. Use one optimizer "
            "with parameter groups, or delete the other.",
            stacklevel=3,
        )
    others.add(made)
