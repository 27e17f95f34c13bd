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
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from ..ops.clip import GAMMA
from .checks import take_norms
from .clipping import ClippingFunction
from .options import declared, named, parameters_of
from .privacy import Privacy
from .private_optimizer import PrivateOptimizer, base_of
from .succession import made
from .waiting import wait

_OPTIONS = inspect.getfullargspec(Privacy.__init__).kwonlyargs

_CLASSES: dict[type, type[PrivateOptimizer]] = {}


def _private_class(base: type[torch.optim.Optimizer]) -> type[PrivateOptimizer]:
    """Return the class DP<base>. There is one class for each base, so that its objects are alike."""
    if base not in _CLASSES:
        _CLASSES[base] = type(f"DP{base.__name__}", (PrivateOptimizer, base), {"__module__": __name__})
    return _CLASSES[base]


@named
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
    gamma: float = GAMMA,
    batch_first: bool = True,
    batch_size: int | None = None,
    rows_per_sample: int = 1,
    memory_budget: int | None = None,
    seed: int | None = None,
    process_group: Any = None,
    mesh: Any = None,
    ledger: str | PathLike[str] | None = None,
    norms: str = "exact",
) -> PrivateOptimizer:
    """Make an optimizer private, in place. It keeps its parameter groups, state, hooks and schedulers.

    Args:
        optimizer: any torch.optim.Optimizer with a step that reads `.grad` once (so not LBFGS).
        model: the model that the optimizer's parameters belong to.
        noise_multiplier: sigma. The noise on the sum has standard deviation sigma * sensitivity; 0 adds no noise.
        max_grad_norm: the clipping norm R of a sample's gradient.
        expected_batch_size: the number of samples by which the noisy sum is divided under a mean loss. A Poisson loader
            supplies it.
        clipping: "local" for min(1, R/n), "global" for 1[n <= R], "automatic" for R/(n + gamma), or a function from
            norms [B] to factors [B].
        style: "flat", "layerwise", or a list of {"params", "max_grad_norm", "name"}; see `fastdp.training.clipping`.
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
        norms: "exact". ("jl", norms by random projections, is refused: docs/mechanisms.md says why.)

    Returns:
        The same object, which now has the class DP<its class>.

    Raises:
        ParameterError: if the optimizer cannot be made private, or does not fit the model.
        ClippingError: if the clipping function, the clipping norm, the groups or the norms are invalid.
        TypeError: if an option is unknown; the error names the nearest, or what to do instead.
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
    make = functools.partial(
        Privacy, model, params, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, clipping=clipping,
        style=style, expected_batch_size=expected_batch_size, loss_reduction=loss_reduction, sample_rate=sample_rate,
        accountant=accountant, gamma=gamma, batch_first=batch_first, batch_size=batch_size,
        rows_per_sample=rows_per_sample, memory_budget=memory_budget, seed=seed, process_group=process_group, mesh=mesh,
        ledger=ledger,
    )  # fmt: skip
    kind = _private_class(type(optimizer))
    privacy = made(model, kind.__name__, make)
    optimizer.__class__ = kind
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
    """An optimizer that is made from a model: DPSGD(model, lr=..., noise_multiplier=..., ...).

    The signatures of the classes say what there is, and nothing else: `declared` hands on what was given. That they say
    the same as `privatize` and torch's classes, defaults included, is tested (tests/training/test_options.py).
    """

    _kept_by: type[Privacy] = Privacy

    def _make(self, model: nn.Module, lr: Any = None, params: Iterable[Any] | None = None, **options: Any) -> None:
        """What `__init__` does with what it was given."""
        take_norms(options.pop("norms", "exact"))
        private = {name: options.pop(name) for name in _OPTIONS if name in options}
        if lr is not None:
            options["lr"] = lr
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
        if not chosen:
            raise ParameterError("no trainable parameter: set requires_grad=True on what is to be trained")
        super().__init__(chosen, **options)  # type: ignore[arg-type]
        self._privacy = made(model, type(self).__name__, lambda: self._kept_by(model, self._params(), **private))
        wait(self._privacy, self._params)

    def _base_parameters(self) -> dict[str, inspect.Parameter]:
        return parameters_of(base_of(self))


class DPSGD(_Constructed, torch.optim.SGD):
    """torch.optim.SGD with private steps, including momentum, Nesterov's momentum and weight decay.

    The keyword arguments from `noise_multiplier` to `norms` are those of `privatize`, and the others those of
    torch.optim.SGD. Each class takes the options of its own torch class.

    Args:
        model: the model to train. Its parameters that require grad are trained.
        lr: the learning rate, per step.
        params: tensors or parameter groups to train instead, as for torch's optimizers.

    Raises:
        ParameterError: if the first argument is not a model, or no parameter is trainable.
        ClippingError: if the clipping function, the clipping norm, the groups or the norms are invalid.
        TypeError: if noise_multiplier is missing, or an option is unknown; the error names the nearest, or what to do
            instead.
        ValueError: if the value of an option is out of range.
    """

    @declared
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        params: Iterable[Any] | None = None,
        noise_multiplier: float,
        max_grad_norm: float = 1.0,
        expected_batch_size: float | None = None,
        clipping: ClippingFunction = "local",
        style: str | Sequence[Any] = "flat",
        loss_reduction: str = "mean",
        sample_rate: float | None = None,
        accountant: str = "prv",
        gamma: float = GAMMA,
        batch_first: bool = True,
        batch_size: int | None = None,
        rows_per_sample: int = 1,
        memory_budget: int | None = None,
        seed: int | None = None,
        process_group: Any = None,
        mesh: Any = None,
        ledger: str | PathLike[str] | None = None,
        norms: str = "exact",
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None: ...


class DPAdam(_Constructed, torch.optim.Adam):
    """torch.optim.Adam with private steps.

    The arguments are those of `DPSGD`, with the options of torch.optim.Adam.
    """

    @declared
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        params: Iterable[Any] | None = None,
        noise_multiplier: float,
        max_grad_norm: float = 1.0,
        expected_batch_size: float | None = None,
        clipping: ClippingFunction = "local",
        style: str | Sequence[Any] = "flat",
        loss_reduction: str = "mean",
        sample_rate: float | None = None,
        accountant: str = "prv",
        gamma: float = GAMMA,
        batch_first: bool = True,
        batch_size: int | None = None,
        rows_per_sample: int = 1,
        memory_budget: int | None = None,
        seed: int | None = None,
        process_group: Any = None,
        mesh: Any = None,
        ledger: str | PathLike[str] | None = None,
        norms: str = "exact",
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None: ...


class DPAdamW(_Constructed, torch.optim.AdamW):
    """torch.optim.AdamW with private steps.

    The arguments are those of `DPSGD`, with the options of torch.optim.AdamW.
    """

    @declared
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        params: Iterable[Any] | None = None,
        noise_multiplier: float,
        max_grad_norm: float = 1.0,
        expected_batch_size: float | None = None,
        clipping: ClippingFunction = "local",
        style: str | Sequence[Any] = "flat",
        loss_reduction: str = "mean",
        sample_rate: float | None = None,
        accountant: str = "prv",
        gamma: float = GAMMA,
        batch_first: bool = True,
        batch_size: int | None = None,
        rows_per_sample: int = 1,
        memory_budget: int | None = None,
        seed: int | None = None,
        process_group: Any = None,
        mesh: Any = None,
        ledger: str | PathLike[str] | None = None,
        norms: str = "exact",
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None: ...


class DPRMSprop(_Constructed, torch.optim.RMSprop):
    """torch.optim.RMSprop with private steps.

    The arguments are those of `DPSGD`, with the options of torch.optim.RMSprop.
    """

    @declared
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-2,
        *,
        params: Iterable[Any] | None = None,
        noise_multiplier: float,
        max_grad_norm: float = 1.0,
        expected_batch_size: float | None = None,
        clipping: ClippingFunction = "local",
        style: str | Sequence[Any] = "flat",
        loss_reduction: str = "mean",
        sample_rate: float | None = None,
        accountant: str = "prv",
        gamma: float = GAMMA,
        batch_first: bool = True,
        batch_size: int | None = None,
        rows_per_sample: int = 1,
        memory_budget: int | None = None,
        seed: int | None = None,
        process_group: Any = None,
        mesh: Any = None,
        ledger: str | PathLike[str] | None = None,
        norms: str = "exact",
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None: ...
