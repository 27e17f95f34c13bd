"""Checks of a private optimizer's options, and of whether they fit the loader that it trains on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from ..batch_axis.current_batch import PhysicalBatch
from ..engine.per_sample import PerSampleGradients
from ..errors import AccountingError, ClippingError, ParameterError, StepError
from ..utils.number_checks import check_whole


def of_loader(
    current: PhysicalBatch, stepped: tuple[int, int], rate: float | None, expected: float | None
) -> tuple[float | None, float]:
    """Sample rate and expected batch size, which must be the loader's; one step a batch.

    Args:
        current: the batch in hand.
        stepped: the numbers, logical and physical, of the batch of the step before.
        rate: the sample rate that the optimizer was given, and
        expected: its expected batch size.
    """
    if current.participation is not None:
        raise StepError(
            f"the loader's batches are for correlated noise (its promise: {current.participation.kind}), and this "
            "optimizer accounts for Poisson sampling: give it noise=fastdp.mechanisms.Bisr(4), say, or take "
            "fastdp.poisson_loader. On a fixed order, fastdp.mechanisms.DPFTRL trains, too"
        )
    refuse_second_step(current, stepped)
    if rate is not None and abs(rate - current.sample_rate) > 1e-9:
        raise AccountingError(f"sample_rate={rate} was given, but the loader samples at {current.sample_rate}")
    return current.sample_rate, expected_of(current, expected)


def expected_of(current: PhysicalBatch, expected: float | None) -> float:
    """The expected batch size: the loader's, which one that was given must fit. Raises StepError."""
    if expected is not None and abs(expected - current.expected_batch_size) > 0.5:
        raise StepError(
            f"expected_batch_size={expected} was given, but the loader's is {current.expected_batch_size:g}: leave it "
            "out, the loader tells it"
        )
    return current.expected_batch_size if expected is None else expected


def refuse_second_step(current: PhysicalBatch, stepped: tuple[int, int]) -> None:
    """Raises StepError if the batch in hand has had its step. The arguments are those of `of_loader`."""
    if (current.logical, current.physical) == stepped:
        raise StepError("step() twice on the same batch of the loader: the accountant counts one step a batch")


def take_views(options: dict[str, Any], loss_reduction: str) -> None:
    """Turn augmentations= of an optimizer's options into rows_per_sample=.

    Raises ValueError if it is no number of views, or the gradient would not be the mean over them.
    """
    views = options.pop("augmentations", 1)
    check_whole(augmentations=views)
    if views == 1:
        return
    if "rows_per_sample" in options or options.get("batch_size") is not None:
        raise ValueError("augmentations= is rows_per_sample= (and batch_size= follows from it): give only one of them")
    if loss_reduction != "mean":
        raise ValueError(
            f'augmentations={views} with loss_reduction="{loss_reduction}": a sample\'s gradient is the mean over its '
            f"views, and under a sum it would be {views} times that. Take the mean of the losses, or give "
            f"rows_per_sample={views} and divide the loss by {views}"
        )
    options["rows_per_sample"] = views


def take_norms(norms: Any) -> None:
    """Raises ClippingError if an optimizer's norms= is "jl", and ValueError unless it is "exact"."""
    if norms == "jl":
        raise ClippingError(
            'norms="jl" (DP-SGD-JL: norms estimated by random projections) is refused: fastdp\'s exact norms take a '
            "fraction of its time at the same memory, and estimates cost epsilon besides. See "
            "docs/mechanisms.md. Leave norms= out; if memory is short, give "
            "fastdp.poisson_loader max_physical_batch_size="
        )
    if norms != "exact":
        raise ValueError(f'norms must be "exact", not {norms!r}: there are no other ones')


def check_parameters(params: Iterable[Tensor], engine: PerSampleGradients) -> None:
    """Refuse trained parameters of an optimizer that are no longer the model's (their replacements would never be
    trained), and those that came into its groups unseen: they would not be trained either."""
    trained, current = [p for p in params if p.requires_grad], engine.present()
    lost = [p for p in trained if id(p) not in current]
    if lost:
        shapes = ", ".join(str(tuple(p.shape)) for p in lost[:3])
        raise ParameterError(
            f"{len(lost)} parameter(s) of the optimizer, of shape {shapes}, are no longer the model's: they were "
            "replaced since the optimizer was made. detach() it and make a new one."
        )
    tracked = {id(p) for p in engine.named_parameters().values()}
    if any(id(p) not in tracked for p in trained) and (left := engine.left_out(trained)):  # (or the model is in parts)
        raise ParameterError(
            f"{left[:3]} are in the optimizer's param_groups, but came there without add_param_group(), so their "
            "gradients would not be private, and they would not be trained. Call add_param_group(), or make the "
            "optimizer with params= all that will be trained, frozen or not. (Lightning's BaseFinetuning replaces "
            "param_groups when it resumes a checkpoint: fastdp.lightning.DPCallback takes them up.)"
        )


def refuse_written_grads(engine: PerSampleGradients, busy: bool) -> None:
    """Raises StepError where others have written to `.grad` after the forward: no step takes it from there. busy: a
    step is to be made of the samples' gradients (else it was autograd that wrote there)."""
    if busy and (written := engine.written_grads()):
        raise StepError(
            f".grad of {written[:3]} was written to since the forward began, and would get lost: a private step takes "
            "the samples' gradients, which do not stand there. A term of the weights alone (L2, a control variate) is "
            "public: use weight_decay=, or in one process call backward() on it within optimizer.public(). To go on "
            "without what was written, set .grad to None; zero_grad() drops the samples' gradients, too."
        )


_OF_CLIPPING = {"clipping", "max_grad_norm", "style", "gamma"}
FIXED = _OF_CLIPPING | {  # but for names under which a loop may keep something of its own (steps, loader)
    "target_epsilon", "delta", "expected_batch_size", "loss_reduction", "sample_rate", "accountant", "target_quantile",
    "quantile_rate", "count_noise", "batch_first", "rows_per_sample", "augmentations", "memory_budget", "seed",
    "ledger", "graphed", "norms", "noise",
}  # fmt: skip


def refuse_assignment(optimizer: str, name: str) -> NoReturn:
    """Raises AttributeError for an option that would have no effect as an attribute of a private optimizer."""
    remedy = f"make a new {optimizer}(model, ..., {name}=...): the history goes on; load its state_dict()"
    if name in _OF_CLIPPING:
        remedy = f"call optimizer.set_clipping({name}=...) between steps"
    raise AttributeError(f"{name} cannot be assigned: {optimizer} was made with it. To change it, {remedy}")
