"""Correlated noise of a `DPTrainer`: strategies by name, the loaders that fit, and what it refuses with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..accounting.participation import Participation
from ..mechanisms import (
    Banded,
    Bisr,
    CycleLoader,
    Independent,
    Lambda,
    TreeAggregation,
    cyclic_poisson_loader,
    fixed_order_loader,
)
from ..optim.correlated_noise import check_strategy

SAMPLING = ("fixed_order", "cyclic_poisson")
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "clipping='adaptive'": (
        lambda options: options.clipping == "adaptive",
        "the noise of steps cancels at one clipping norm: take clipping='local'",
    ),
    "group_by": (
        lambda options: options.group_by is not None,
        "a person's records may be in several batches of a cycle. Leave noise out, which protects persons",
    ),
    "sample_rate": (
        lambda options: options.sample_rate is not None,
        "batches have per_device_train_batch_size x gradient_accumulation_steps x processes records: leave it out",
    ),
    "repeat_lost_steps": (
        lambda options: options.repeat_lost_steps,
        "its log does not hold blocks of noise. Leave it out: a run that resumes begins a block, and lost steps count",
    ),
    "sampling": (
        lambda options: options.sampling not in (None, *SAMPLING),
        f"noise takes {' or '.join(map(repr, SAMPLING))}; leave noise out for Poisson samples of all records",
    ),
}


def check_noise(options: Any) -> None:
    """Raises ValueError or TypeError if PrivacyArguments with noise contradict each other."""
    if options.noise is None:
        if options.sampling not in (None, "poisson"):
            raise ValueError(
                f"sampling={options.sampling!r} goes with noise, as 'bisr:4': without it, 'poisson' is accounted for"
            )
        return
    strategy = strategy_of(options.noise)
    for name, (given, why) in _REFUSED.items():
        if given(options):
            raise ValueError(f"{name} with noise: {why}")
    if options.sampling == "cyclic_poisson" and getattr(strategy, "bands", None) is None:
        raise ValueError(f"sampling='cyclic_poisson' takes noise of few bands, as 'banded:8', not {options.noise!r}")


def strategy_of(noise: Any, steps: int = 1, participation: Participation | None = None) -> Any:
    """The strategy that noise names, or is. steps, participation: of the run, which "banded" is chosen for."""
    if not isinstance(noise, str):
        check_strategy(noise)
        return noise
    name, *given = noise.split(":")
    makers: dict[str, Callable[..., Any]] = {
        "bisr": lambda bands: Bisr(int(bands)),
        "lambda": lambda weight: Lambda(float(weight)),
        "banded": lambda bands: Banded(int(bands), steps=steps, participation=participation),
        "tree": TreeAggregation,
        "independent": Independent,
    }
    try:
        return makers[name](*given)
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"noise={noise!r} is none ({problem}): write bisr:4, lambda:0.9, banded:8, tree or independent"
        ) from None


def loader_of(data: Any, batch_size: int, privacy: Any, seed: int, options: dict[str, Any]) -> CycleLoader:
    """The loader of a run with correlated noise. seed: of the order, which is shuffled once."""
    if privacy.sampling == "cyclic_poisson":
        bands = strategy_of(privacy.noise).bands
        return cyclic_poisson_loader(data, batch_size=batch_size, cycle=bands, seed=privacy.noise_seed, **options)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    return fixed_order_loader(data, batch_size=batch_size, order=order, **options)
