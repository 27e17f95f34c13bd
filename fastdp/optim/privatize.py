"""`privatize`: an optimizer that exists becomes private."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..errors import ParameterError
from ..ops.clip import GAMMA
from ..utils.keyword_arguments import named
from . import checkpoint
from .adaptive_clipping import OPTIONS, step_class_for
from .budget_options import take_budget
from .clipping import ClippingFunction
from .deferred_setup import defer_setup
from .optimizer_replacement import made, spent_before
from .option_checks import take_norms, take_views
from .private_optimizer import PrivateOptimizer
from .private_step import PrivateStep

OF_PRIVACY = [*inspect.getfullargspec(PrivateStep.__init__).kwonlyargs, *OPTIONS, "noise"]


@functools.cache
def _private_class(base: type[torch.optim.Optimizer]) -> type[PrivateOptimizer]:
    """Return the class DP<base>. There is one class for each base, so that its objects are alike."""
    return type(f"DP{base.__name__}", (PrivateOptimizer, base), {"__module__": __name__})


@named
def privatize(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    delta: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    loader: Any = None,
    max_grad_norm: float = 1.0,
    expected_batch_size: float | None = None,
    clipping: ClippingFunction = "local",
    style: str | Sequence[Any] = "flat",
    loss_reduction: str = "mean",
    sample_rate: float | None = None,
    accountant: str = "prv",
    gamma: float = GAMMA,
    target_quantile: float | None = None,
    quantile_rate: float | None = None,
    count_noise: float | None = None,
    batch_first: bool = True,
    batch_size: int | None = None,
    rows_per_sample: int = 1,
    augmentations: int = 1,
    memory_budget: int | None = None,
    seed: int | None = None,
    process_group: Any = None,
    mesh: Any = None,
    ledger: str | PathLike[str] | None = None,
    graphed: bool = False,
    norms: str = "exact",
    noise: Any = None,
) -> PrivateOptimizer:
    """Make an optimizer private, in place. It keeps its parameter groups, state, hooks and schedulers.

    If it has loaded a private optimizer's `state_dict()`, that one's history is its own from now on.

    Args:
        optimizer: any torch.optim.Optimizer with a step that reads `.grad` once (so not LBFGS).
        model: the model that the optimizer's parameters belong to.
        noise_multiplier: sigma. The noise on the sum has standard deviation sigma * sensitivity; 0 adds no noise.
        target_epsilon: in place of noise_multiplier, the epsilon that all steps may spend. The noise follows from it,
            `delta`, the length of the run and the loader's sample rate. A step that would exceed it is refused.
        delta: of target_epsilon. By default 1 / (10 n) for the loader's n records (or persons), rounded down.
        epochs: of target_epsilon, the passes over the loader. Give either epochs or steps.
        steps: of target_epsilon, the number of noised steps.
        loader: of target_epsilon, the `fastdp.poisson_loader` that will be trained on. (Or give sample_rate.)
        max_grad_norm: the clipping norm R of a sample's gradient.
        expected_batch_size: the number of samples by which the noisy sum is divided under a mean loss. A Poisson loader
            supplies it.
        clipping: "local" for min(1, R/n), "global" for 1[n <= R], "automatic" for R/(n + gamma), "adaptive" for
            min(1, R/n) with an R that follows a quantile of the norms (it begins at max_grad_norm), or a function from
            norms [B] to factors [B].
        style: "flat", "layerwise", or a list of {"params", "max_grad_norm", "name"}; see `fastdp.optim.clipping`.
        loss_reduction: "mean" or "sum", which is how the loss combines samples. Under "sum", nothing is divided.
        sample_rate: the probability that a record is in a batch, for the accountant. A Poisson loader supplies it.
        accountant: "prv", "rdp" or "gdp", which are Opacus's accountants.
        gamma: the constant of automatic clipping, 0 or larger, in units of a norm.
        batch_first: whether samples lie along the first dimension of the model's inputs; False means the second.
        batch_size: the number of samples, if the inputs do not show it (see `PerSampleGradients`).
        rows_per_sample: k, if k consecutive rows of the inputs are one sample, whatever the batch.
        memory_budget: the bytes that may be held during backward for norms and clipped sums. None: the fastest plan.
        seed: makes the noise reproducible, for experiments. It voids the guarantee.
        process_group: the processes that train together (default: all of torch.distributed's).
        mesh: their DeviceMesh, for a model in parts.
        ledger: a file in which every noised step is written and synced before it is made, so that steps after the last
            checkpoint stay counted if the process dies.
        graphed: record the model's forward and its backward when a shape of batches is met again, and replay them
            without Python. The loop and the loss stay yours. What does not fit goes through Python, as ever, and is
            counted (`explain()`). On the CPU, or on one CUDA device.
        augmentations: K, for K views of each sample in K consecutive rows, clipped as one by their mean gradient.
        target_quantile: of adaptive clipping, the share of samples that is not clipped (default 0.5). noise_multiplier
            is then that of the whole step, gradients and count, and the gradients get a little more.
        quantile_rate: of adaptive clipping, how fast R moves (default 0.2).
        count_noise: of adaptive clipping, the standard deviation of the noise on the number of samples that are not
            clipped (default: a twentieth of the expected batch size).
        noise: a strategy of `fastdp.mechanisms` (Lambda, Bisr, Banded ...): noise that is correlated from step to step,
            for loaders of `fastdp.mechanisms` (None: independent noise, for Poisson samples).
        norms: "exact". ("jl", norms by random projections, is refused: docs/mechanisms.md says why.)

    Returns:
        The same object, which now has the class DP<its class>.

    Raises:
        ParameterError: if the optimizer cannot be made private, or does not fit the model.
        StepError: if the optimizer made steps of its own after it loaded a private optimizer's state.
        ClippingError: if the clipping function, the clipping norm, the groups or the norms are invalid.
        TypeError: if neither noise_multiplier nor target_epsilon is given, or an option is unknown; the error names the
            nearest, or what to do instead.
        ValueError: if the value of an option is out of range.
    """
    if isinstance(optimizer, PrivateOptimizer):
        raise ParameterError("the optimizer is private already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ParameterError("LBFGS evaluates the gradient many times a step, each of which would cost privacy")
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        raise ParameterError("privatize takes the optimizer, then the model")
    if "param_groups" not in optimizer.__dict__:
        raise ParameterError(
            f"{type(optimizer).__name__} wraps another optimizer: make that one private, then wrap it (with "
            "Accelerate before prepare())"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ParameterError("SparseAdam takes sparse gradients; noise makes every gradient dense. Use Adam")
    take_norms(norms)
    step = optimizer.__dict__.get("step")
    scheduled = getattr(step, "_wrapped_by_lr_sched", False)
    if step is not None and not scheduled:
        raise ParameterError("the optimizer's step was replaced by hand; make it private before that")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    carried = checkpoint.record_in({"state": optimizer.state, "param_groups": optimizer.param_groups})
    given: dict[str, Any] = {
        "clipping": clipping, "batch_size": batch_size, "augmentations": augmentations,
        "target_quantile": target_quantile, "quantile_rate": quantile_rate, "count_noise": count_noise,
        **({} if rows_per_sample == 1 else {"rows_per_sample": rows_per_sample}),
    }  # fmt: skip
    take_views(given, loss_reduction)
    planned = {
        "noise_multiplier": noise_multiplier, "target_epsilon": target_epsilon, "delta": delta, "epochs": epochs,
        "steps": steps, "loader": loader, "sample_rate": sample_rate, "accountant": accountant,
        "expected_batch_size": expected_batch_size, "noise": noise,
    }  # fmt: skip
    spent = [] if target_epsilon is None else [*spent_before(model, target_epsilon), *checkpoint.spent_in(carried)]
    budget = take_budget(planned, "privatize", spent)
    given["noise"] = planned.pop("noise")

    def make() -> PrivateStep:
        privacy = step_class_for(PrivateStep, given)(
            model, params, max_grad_norm=max_grad_norm, style=style, loss_reduction=loss_reduction, gamma=gamma,
            batch_first=batch_first, memory_budget=memory_budget, seed=seed, process_group=process_group, mesh=mesh,
            ledger=ledger, graphed=graphed, **planned, **given,
        )  # fmt: skip
        try:
            checkpoint.continue_from(privacy, carried)
        except Exception:
            privacy.detach()
            privacy.ledger.close()
            raise
        return privacy

    kind = _private_class(type(optimizer))  # type: ignore[arg-type]
    privacy = made(model, kind.__name__, make)
    checkpoint.drop_record(optimizer.param_groups)
    optimizer.__class__ = kind
    assert isinstance(optimizer, PrivateOptimizer)
    torch.optim.Optimizer.__setstate__(optimizer, {})  # also patches `step`; a wrapper may have made none of the hooks
    optimizer._privacy = privacy
    privacy.ledger.budget = budget
    defer_setup(privacy, optimizer._params)
    if scheduled:
        _rewrap_for_schedulers(optimizer)
    return optimizer


def _rewrap_for_schedulers(optimizer: PrivateOptimizer) -> None:
    """Bind the private step, because a scheduler that was made before has bound the old step to the object."""
    del optimizer.__dict__["step"]
    private_step = optimizer.step

    @functools.wraps(private_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return private_step(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
