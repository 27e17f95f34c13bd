"""Private optimizers: torch's optimizers, with the gradient replaced by a clipped and noised one.

>>> model = torch.nn.Linear(4, 2)
>>> optimizer = DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)
>>> model(torch.ones(8, 4)).square().sum(1).mean().backward()
>>> optimizer.step(); optimizer.zero_grad()
>>> optimizer.detach()
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from ..ops.clip import GAMMA
from ..utils.keyword_arguments import declared, parameters_of
from .adaptive_clipping import step_class_for
from .budget_options import take_budget
from .clipping import ClippingFunction
from .deferred_setup import defer_setup
from .optimizer_replacement import made, spent_before
from .option_checks import take_norms, take_views
from .private_optimizer import PrivateOptimizer, base_of
from .private_step import PrivateStep
from .privatize import OF_PRIVACY


class _Constructed(PrivateOptimizer):
    """An optimizer that is made from a model: DPSGD(model, lr=..., noise_multiplier=..., ...).

    The signatures of the classes say what there is, and nothing else: `declared` hands on what was given. That they say
    the same as `privatize` and torch's classes, defaults included, is tested (tests/optim/test_options.py).
    """

    _kept_by: type[PrivateStep] = PrivateStep

    def _make(self, model: nn.Module, lr: Any = None, params: Iterable[Any] | None = None, **options: Any) -> None:
        """What `__init__` does with what it was given."""
        take_norms(options.pop("norms", "exact"))
        budget = take_budget(options, type(self).__name__, spent_before(model, options.get("target_epsilon")))
        take_views(options, options.get("loss_reduction", "mean"))
        private = {name: options.pop(name) for name in OF_PRIVACY if name in options}
        if lr is not None:
            options["lr"] = lr
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else list(params)
        if not chosen:
            raise ParameterError("no trainable parameter: set requires_grad=True on what is to be trained")
        super().__init__(chosen, **options)  # type: ignore[arg-type]
        self._privacy = made(
            model, type(self).__name__, lambda: step_class_for(self._kept_by, private)(model, self._params(), **private)
        )
        self._privacy.ledger.budget = budget
        defer_setup(self._privacy, self._params)

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
        TypeError: if neither noise_multiplier nor target_epsilon is given, or an option is unknown; the error names the
            nearest, or what to do instead.
        ValueError: if the value of an option is out of range.
    """

    @declared
    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        params: Iterable[Any] | None = None,
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
