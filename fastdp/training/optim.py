"""Private optimizers: torch's optimizers, with the gradient replaced by a clipped and noised one.

>>> model = torch.nn.Linear(4, 2)
>>> optimizer = DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)
>>> model(torch.ones(8, 4)).square().sum(1).mean().backward()
>>> optimizer.step(); optimizer.zero_grad()
>>> optimizer.detach()
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ParameterError
from . import state
from .adaptive import OPTIONS, privacy_for
from .checks import take_norms, take_views
from .clipping import ClippingFunction
from .privacy import Privacy
from .private_optimizer import PrivateOptimizer
from .waiting import wait

_OPTIONS = [*inspect.getfullargspec(Privacy.__init__).kwonlyargs, *OPTIONS]

_CLASSES: dict[type, type[PrivateOptimizer]] = {}


def _private_class(base: type[torch.optim.Optimizer]) -> type[PrivateOptimizer]:
    """Return the class DP<base>. There is one class for each base, so that its objects are alike."""
    if base not in _CLASSES:
        _CLASSES[base] = type(f"DP{base.__name__}", (PrivateOptimizer, base), {"__module__": __name__})
    return _CLASSES[base]


def privatize(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    noise_multiplier: float,
    max_grad_norm: float = 1.0,
    expected_batch_size: float | None = None,
    clipping: ClippingFunction = "local",
    style: str | Sequence[Any] = "flat",
    loss_reduction: str = "mean",
    sample_rate: float | None = None,
    accountant: str = "prv",
    **options: Any,
) -> PrivateOptimizer:
    """Make an optimizer private, in place. It keeps its parameter groups, state, hooks and schedulers.

    If it has loaded a private optimizer's `state_dict()`, that one's history is its own from now on.

    Args:
        optimizer: any torch.optim.Optimizer with a step that reads `.grad` once (so not LBFGS).
        model: the model that the optimizer's parameters belong to.
        noise_multiplier: sigma. The noise on the sum has standard deviation sigma * sensitivity; 0 adds no noise.
        max_grad_norm: the clipping norm R of a sample's gradient.
        expected_batch_size: the number of samples by which the noisy sum is divided under a mean loss. A Poisson loader
            supplies it.
        clipping: "local" for min(1, R/n), "global" for 1[n <= R], "automatic" for R/(n + gamma), "adaptive" for
            min(1, R/n) with an R that follows a quantile of the norms (it begins at max_grad_norm), or a function from
            norms [B] to factors [B].
        style: "flat", "layerwise", or a list of {"params", "max_grad_norm", "name"}; see `fastdp.training.clipping`.
        loss_reduction: "mean" or "sum", which is how the loss combines samples. Under "sum", nothing is divided.
        sample_rate: the probability that a record is in a batch, for the accountant. A Poisson loader supplies it.
        accountant: "prv", "rdp" or "gdp", which are Opacus's accountants.
        options: gamma (of automatic clipping, default 0.01); batch_first, batch_size, rows_per_sample and memory_budget
            (see PerSampleGradients); augmentations, K for K views of each sample in K consecutive rows, which are
            clipped as one, by the mean of their gradients; process_group or mesh (of several processes); ledger, a file
            in which every noised step is written and synced before it is made, so that steps after the last checkpoint
            stay counted if the process dies; seed, which makes the noise reproducible and voids the guarantee; and
            norms, which are "exact" ("jl", norms by random projections, is refused: docs/mechanisms.md says why). Of
            adaptive clipping: target_quantile (the share of samples that is not clipped, 0.5), quantile_rate (how fast
            R moves, 0.2), and count_noise (on the number of those samples; a twentieth of the expected batch size).
            noise_multiplier is then that of the whole step, gradients and count, and the gradients get a little more.

    Returns:
        The same object, which now has the class DP<its class>.

    Raises:
        ParameterError: if the optimizer cannot be made private, or does not fit the model.
        StepError: if the optimizer made steps of its own after it loaded a private optimizer's state.
        ClippingError: if the clipping function, the clipping norm, the groups or the norms are invalid.
        TypeError: if an option is unknown.
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
    take_norms(options)
    take_views(options, loss_reduction)
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise TypeError(f"privatize got unexpected arguments: {', '.join(unknown)}")
    step = optimizer.__dict__.get("step")
    scheduled = getattr(step, "_wrapped_by_lr_sched", False)
    if step is not None and not scheduled:
        raise ParameterError("the optimizer's step was replaced by hand; make it private before that")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    carried = state.carried_by({"state": optimizer.state, "param_groups": optimizer.param_groups})
    privacy = privacy_for(Privacy, {"clipping": clipping, **options})(
        model, params, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, clipping=clipping, style=style,
        expected_batch_size=expected_batch_size, loss_reduction=loss_reduction, sample_rate=sample_rate,
        accountant=accountant, **options,
    )  # fmt: skip
    try:
        state.go_on(privacy, carried)
    except Exception:
        privacy.take_off()
        privacy.ledger.close()
        raise
    state.put_off(optimizer.param_groups)
    optimizer.__class__ = _private_class(type(optimizer))
    assert isinstance(optimizer, PrivateOptimizer)
    optimizer._patch_step_function()
    optimizer._privacy = privacy
    wait(privacy, optimizer._params)
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


class _Constructed(PrivateOptimizer):
    """An optimizer that is made from a model: DPSGD(model, lr=..., noise_multiplier=..., ...)."""

    _kept_by: type[Privacy] = Privacy

    def __init__(
        self, model: nn.Module, lr: Any = None, *, params: Iterable[Any] | None = None, **options: Any
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ParameterError(
                f"the first argument is the model (an nn.Module), not {type(model).__name__}; to train a part of it "
                "freeze the rest, or give params= (tensors or parameter groups)"
            )
        if "noise_multiplier" not in options:
            raise TypeError(f"{type(self).__name__} needs noise_multiplier= (0 for none)")
        take_norms(options)
        take_views(options, options.get("loss_reduction", "mean"))
        private = {name: options.pop(name) for name in _OPTIONS if name in options}
        if lr is not None:
            options["lr"] = lr
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
        if not chosen:
            raise ParameterError("no trainable parameter: set requires_grad=True on what is to be trained")
        super().__init__(chosen, **options)  # type: ignore[arg-type]
        self._privacy = privacy_for(self._kept_by, private)(model, self._params(), **private)
        wait(self._privacy, self._params)


class DPSGD(_Constructed, torch.optim.SGD):
    """torch.optim.SGD with private steps, including momentum, Nesterov's momentum and weight decay.

    Args:
        model: the model to train. Its parameters that require grad are trained.
        lr: the learning rate.
        params: tensors or parameter groups to train instead, as for torch's optimizers.
        options: the arguments of `privatize` (noise_multiplier is required) and of torch.optim.SGD.

    Raises:
        ParameterError: if the first argument is not a model, or no parameter is trainable.
        TypeError: if noise_multiplier is missing.
    """


class DPAdam(_Constructed, torch.optim.Adam):
    """torch.optim.Adam with private steps.

    The arguments are those of `DPSGD`, with the options of torch.optim.Adam.
    """


class DPAdamW(_Constructed, torch.optim.AdamW):
    """torch.optim.AdamW with private steps.

    The arguments are those of `DPSGD`, with the options of torch.optim.AdamW.
    """


class DPRMSprop(_Constructed, torch.optim.RMSprop):
    """torch.optim.RMSprop with private steps.

    The arguments are those of `DPSGD`, with the options of torch.optim.RMSprop.
    """
