"""The options of a privacy budget: `target_epsilon=`, `delta=`, `epochs=` or `steps=`, and `loader=`."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import IterableDataset

from ..accounting import History, check_options, default_delta, delta_problem, noise_multiplier_for, steps_per_epoch
from ..accounting.budget import Budget
from ..accounting.participation import Block
from ..data.loader import PoissonLoader
from ..errors import AccountingError
from .correlated_noise import BlocksBudget, check_strategy
from .optimizer_replacement import uncounted

OF_BUDGET = ("target_epsilon", "delta", "epochs", "steps", "loader")
_NEEDED = "give noise_multiplier=, or target_epsilon= with loader= (or sample_rate=) and epochs= (or steps=)"


def take_budget(options: dict[str, Any], owner: str, spent: History) -> Budget | None:
    """Turn the options of a budget into a noise multiplier and a sample rate, among the options of an optimizer.

    spent: the steps of the optimizer of the same model in whose place this one comes. The noise is that with which the
    steps planned keep the budget together with these.

    Returns the budget; None if a noise multiplier was given. Raises TypeError if options are missing or too many,
    ValueError or AccountingError if one has no such value.
    """
    given = {name: options.pop(name, None) for name in OF_BUDGET}
    target, delta, epochs, steps, loader = given.values()
    if target is None:
        if options.get("noise_multiplier") is None:
            raise TypeError(f"{owner}: {_NEEDED}")
        if named := [f"{name}=" for name, value in given.items() if value is not None]:
            raise TypeError(f"{owner}: {', '.join(named)} goes with target_epsilon=, not with noise_multiplier=")
        return None
    if options.get("noise_multiplier") is not None:
        raise TypeError(f"{owner}: give either noise_multiplier= or target_epsilon=, from which the noise follows")
    if (epochs is None) == (steps is None):
        raise TypeError(f"{owner}: target_epsilon= needs the length of the run: either epochs= or steps=")
    for name in ("target_epsilon", "delta", "epochs"):
        if (value := given[name]) is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name} must be a number, not {value!r}")
    if options.get("noise") is not None:
        return _of_blocks(options, given, owner, spent)
    rate, accountant = options.get("sample_rate"), options.get("accountant", "prv")
    check_options(1.0, options.get("expected_batch_size"), rate, 0.0)
    samples, truncation, per_epoch = None, 0.0, None
    if loader is not None:
        rate, samples, truncation, per_epoch = _of_loader(loader, rate, owner)
    elif rate is None:
        raise TypeError(f"{owner}: target_epsilon= needs loader=, a fastdp.poisson_loader, or sample_rate= and steps=")
    elif expected := options.get("expected_batch_size"):
        samples = expected / rate
    if delta is None:
        if samples is None:
            raise TypeError(
                f"{owner}: target_epsilon= needs delta=, as the number of samples is not known without loader="
            )
        delta = default_delta(samples)
    elif samples is not None and (problem := delta_problem(delta, samples, "sample")):
        raise ValueError(f"{problem}. Leave delta= out for {default_delta(samples):g}")
    if epochs is not None:
        if not 0 < epochs < math.inf:
            raise ValueError(f"epochs must be a positive number, not {epochs!r}")
        steps = math.ceil(epochs * (per_epoch or steps_per_epoch(rate)) - 1e-9)
    if any(run[1] is None for run in spent):
        raise AccountingError(
            "the budget cannot be kept: the sample rate of steps that the model's optimizer has made is not known. "
            "Give it sample_rate= from the start; or detach() it before, if it has trained on other data"
        )
    noise = noise_multiplier_for(
        target_epsilon=target,
        delta=delta,
        sample_rate=rate,
        steps=steps,
        accountant=accountant,
        truncation=truncation,
        history=spent,
    )
    options["noise_multiplier"] = noise  # (the rate of a loader's batches, they tell themselves)
    return Budget(target, delta, accountant, (noise, rate, truncation), steps)


def _of_loader(loader: Any, rate: float | None, owner: str) -> tuple[float, int, float, int]:
    """Its sample rate, samples (records, or persons), truncation and steps of an epoch."""
    if not isinstance(loader, PoissonLoader):
        of_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        of = "list(loader.dataset), expected_batch_size=loader.batch_size" if of_stream else "loader"
        raise TypeError(
            f"{owner}: loader= takes a fastdp.poisson_loader, not {type(loader).__name__}: "
            f"fastdp.poisson_loader({of}) makes one of a DataLoader. For other batches give sample_rate= and steps="
        )
    if rate is not None and abs(rate - loader.sample_rate) > 1e-9:
        raise AccountingError(
            f"sample_rate={rate} was given, but the loader samples at {loader.sample_rate}: leave it out"
        )
    return loader.sample_rate, loader.sampler.size, loader.truncation, loader.steps_per_epoch


def _of_blocks(options: dict[str, Any], given: dict[str, Any], owner: str, spent: History) -> Budget:
    """As `take_budget`, where noise= is given: one block of correlated noise over the whole run."""
    target, delta, epochs, steps, loader = given.values()
    check_strategy(options["noise"])
    promise = getattr(loader, "participation", None)
    if promise is None:
        raise TypeError(f"{owner}: target_epsilon= with noise= needs loader=, one of fastdp.mechanisms, not {loader!r}")
    if spent:
        raise uncounted("with correlated noise")
    delta = default_delta(loader.sampler.size) if delta is None else delta
    if problem := delta_problem(delta, loader.sampler.size, "sample"):
        raise ValueError(f"{problem}. Leave delta= out for {default_delta(loader.sampler.size):g}")
    if steps is None:
        if not 0 < epochs < math.inf:
            raise ValueError(f"epochs must be a positive number, not {epochs!r}")
        steps = math.ceil(epochs * loader.steps_per_epoch - 1e-9)
    accountant, strategy = options.get("accountant", "prv"), options["noise"]
    strategy.check(promise)
    sigma = options["noise_multiplier"] = strategy.noise_multiplier(
        target_epsilon=target, delta=delta, steps=steps, participation=promise, accountant=accountant
    )
    return BlocksBudget(target, delta, accountant, Block("planned", sigma, steps, promise, 0))
