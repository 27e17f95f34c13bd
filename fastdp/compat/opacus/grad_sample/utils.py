"""Which class serves a grad_sample_mode, and registering functions of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opacus.grad_sample import AbstractGradSampleHooks, AbstractGradSampleModule
from torch import nn

from .grad_sample_module import (
    GradSampleHooks,
    GradSampleHooksNoOp,
    GradSampleModule,
    GradSampleModuleExpandedWeights,
    GradSampleModuleNoOp,
)
from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleHooksFastGradientClippingTP,
    GradSampleModuleFastGradientClipping,
)
from .grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleModuleFastGradientClippingFSDP,
)

Sampler = Callable[..., Any]
Classes = type[nn.Module] | Sequence[type[nn.Module]]

_MODULES: dict[str, type[AbstractGradSampleModule]] = {
    "hooks": GradSampleModule,
    "functorch": GradSampleModule,
    "ew": GradSampleModuleExpandedWeights,
    "ghost": GradSampleModuleFastGradientClipping,
    "ghost_fsdp": GradSampleModuleFastGradientClippingFSDP,
    "no_op": GradSampleModuleNoOp,
}
_HOOKS: dict[str, type[AbstractGradSampleHooks]] = {
    "hooks": GradSampleHooks,
    "functorch": GradSampleHooks,
    "ghost": GradSampleHooksFastGradientClipping,
    "ghost_fsdp": GradSampleHooksFastGradientClippingFSDP,
    "ghost_tp": GradSampleHooksFastGradientClippingTP,
    "no_op": GradSampleHooksNoOp,
}


def register_grad_sampler(target_class_or_classes: Classes) -> Callable[[Sampler], Sampler]:
    """Decorate f(layer, activations, backprops) for classes of layers.

    Accepted, so that scripts run, and not called: per-sample gradients come of the torch functions that a layer calls,
    exactly; `GradSampleModule` warns. A layer that hides from torch (a kernel of one's own) is refused by name, and
    becomes seen by `fastdp.register_rule`.
    """

    return _register(target_class_or_classes, GradSampleHooks.GRAD_SAMPLERS)


def register_norm_sampler(target_class_or_classes: Classes) -> Callable[[Sampler], Sampler]:
    """Decorate f(layer, activations, backprops) for classes of layers; see `register_grad_sampler`."""

    return _register(target_class_or_classes, GradSampleHooksFastGradientClipping.NORM_SAMPLERS)


def _register(classes: Classes, table: dict[type[nn.Module], Sampler]) -> Callable[[Sampler], Sampler]:
    def keep(f: Sampler) -> Sampler:
        table.update(dict.fromkeys(classes if isinstance(classes, Sequence) else [classes], f))
        return f

    return keep


def prepare_module(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, *args: Any, **kwargs: Any
) -> AbstractGradSampleModule | AbstractGradSampleHooks:
    """The model wrapped for a mode; with wrap_model=False, hooks on the model, which stays as it is."""
    if grad_sample_mode == "functorch":
        kwargs["force_functorch"] = True
    if wrap_model:
        return get_gsm_class(grad_sample_mode)(model, *args, **kwargs)
    return get_hooks_class(grad_sample_mode)(model, *args, **kwargs)


wrap_model = prepare_module  # its older name


def get_gsm_class(grad_sample_mode: str) -> type[AbstractGradSampleModule]:
    """The class that wraps a model. Raises ValueError for a mode that does not wrap."""
    return _class_of(_MODULES, grad_sample_mode)


def get_hooks_class(grad_sample_mode: str) -> type[AbstractGradSampleHooks]:
    """The class of hooks on an unwrapped model. Raises ValueError for a mode that has none."""
    return _class_of(_HOOKS, grad_sample_mode)


def _class_of(classes: dict[str, Any], mode: str) -> Any:
    if mode not in classes:
        raise ValueError(f"Unexpected grad_sample_mode: {mode}. Allowed here: {', '.join(classes)}")
    return classes[mode]
