"""Detects samplers that draw some records more often than others: no sample rate, and no epsilon, holds for these."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from ..utils.random_generators import RandomNumbers, kept_by

EVEN = (SequentialSampler, RandomSampler, DistributedSampler)  # (of draws with replacement each may be any record)
REMEDY = (
    "Draw all records alike (shuffle=True, or Poisson sampling, which epsilon is exact for), and give rare classes "
    "their weight in the loss: (F.cross_entropy(out, y, reduction='none') * weight[y]).mean(), with weights that are "
    "written down beforehand, not counted in the private labels"
)


def sampler_of(loader: Any) -> Any:
    """What chooses a DataLoader's records (or a batch sampler's): its sampler, or a batch sampler of its own kind."""
    batches = loader if isinstance(loader, Sampler) else getattr(loader, "batch_sampler", None)
    if batches is None:
        return getattr(loader, "sampler", None)
    return batches.sampler if type(batches) is BatchSampler else batches


def says_its_rate(sampler: Any) -> bool:
    """Whether it is a Poisson sampler, or cuts the batches of one."""
    return any(hasattr(each, "sample_rate") for each in (sampler, getattr(sampler, "sampler", None)))


def uneven(sampler: Any, records: int) -> str:
    """Why a sampler draws some of so many records more often than others; "" if it does not, as far as can be told.

    A sampler of an unknown class is asked for one pass, and numbers of draws that differ by more than chance makes of
    them tell. All generators of random numbers stand afterwards as they did.
    """
    name = type(sampler).__name__
    if isinstance(sampler, WeightedRandomSampler):
        weights = torch.as_tensor(sampler.weights, dtype=torch.float64)
        if not weights.numel() or bool((weights == weights[0]).all()):
            return ""
        return f"{name} draws one record {weights.max() / weights.mean():.3g} times as often as records on average"
    if sampler is None or type(sampler) in EVEN or says_its_rate(sampler) or not hasattr(type(sampler), "__iter__"):
        return ""
    before = RandomNumbers(set(), kept_by(sampler))
    try:
        drawn = list(itertools.islice(_indices(copy.copy(sampler)), records))
    except Exception:  # noqa: BLE001  (of a sampler that needs what only its own loop has)
        return ""
    finally:
        before.put_back()
    times = np.unique(np.asarray(drawn, dtype=np.int64), return_counts=True)[1]
    if len(times) < 2:
        return ""
    # chi-squared, which of even draws is at most about the number of records (those that were not drawn are left out)
    spread = float(((times - times.mean()) ** 2).sum() / times.mean())
    if spread < len(times) - 1 + 6 * (2 * (len(times) - 1)) ** 0.5:
        return ""
    of_mean = f"one {times.max()} times in a pass, on average {times.mean():.2g} times"
    return f"{name} draws some records more often than others ({of_mean})"


def _indices(sampler: Any) -> Any:
    for item in sampler:
        yield from map(int, item) if isinstance(item, list | tuple) else (int(item),)
