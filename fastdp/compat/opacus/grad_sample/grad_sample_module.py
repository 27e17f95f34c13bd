"""The wrappers of modes "hooks", "functorch" and "ew", and of "no_op", in which the user fills `p.grad_sample`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from opacus.grad_sample.grad_sample_module import create_or_accumulate_grad_sample, promote_current_grad_sample
from torch import nn

from .exact_samplers import LAYERS, layer_grad_sample
from .gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule, EngineHooks

__all__ = [
    "GradSampleHooks",
    "GradSampleHooksNoOp",
    "GradSampleModule",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleNoOp",
    "create_or_accumulate_grad_sample",
    "promote_current_grad_sample",
]


class GradSampleHooks(EngineHooks):
    """Attached to a model that stays as it is (wrap_model=False); `cleanup()` leaves it.

    strict: raise NotImplementedError for trainable layers with buffers, which are not private.
    force_functorch: accepted; the engine has one way for all layers.
    GRAD_SAMPLERS holds an exact function for each layer for which Opacus has one, and what `register_grad_sampler` was
    given. The engine calls none of them: it sees which torch functions a layer calls and is exact for those, and
    refuses by name what it cannot see.
    """

    GRAD_SAMPLERS: dict[type[nn.Module], Callable[..., Any]] = dict.fromkeys(LAYERS, layer_grad_sample)

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
    ) -> None:
        self.validate(module=m, strict=strict)
        self._warn_of_samplers(m)
        self.force_functorch = force_functorch
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)

    @classmethod
    def _warn_of_samplers(cls, m: nn.Module) -> None:
        own = {kind for kind, function in cls.GRAD_SAMPLERS.items() if function is not layer_grad_sample}
        given = sorted({type(module).__name__ for module in m.modules() if type(module) in own})
        if given:
            warnings.warn(
                f"the functions registered by register_grad_sampler for {', '.join(given)} are not called: per-sample "
                "gradients are those of the torch functions that the layer calls. If the registered ones are meant "
                "to differ from autograd's, write p.grad_sample between backward and step.",
                stacklevel=3,
            )

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Modules that hold trainable parameters themselves."""
        return (m for m in module.modules() if any(p.requires_grad for p in m.parameters(recurse=False)))

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Deprecated: True."""
        warnings.warn(
            f"{cls.__name__}.is_supported is deprecated: layers need not be known.", DeprecationWarning, stacklevel=2
        )
        return True

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Errors for trainable layers that keep statistics of the data, raised together if strict."""
        errors = [
            NotImplementedError(
                f"'{name}' ({type(m).__name__}) is trainable and keeps buffers of its own "
                f"({', '.join(key for key, _ in m.named_buffers(recurse=False))}): what is written there is not private"
            )
            for name, m in module.named_modules()
            if any(p.requires_grad for p in m.parameters(recurse=False)) and _keeps_statistics(m)
        ]
        if strict and errors:
            raise NotImplementedError(errors)
        return errors


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer's own buffers are written to in training; constant tables are no harm."""
    statistics = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    return statistics and any(True for _ in module.buffers(recurse=False))


class GradSampleModule(GradSampleHooks, AbstractGradSampleModule):
    """The user's module with `.grad_sample` on its parameters; arguments of `GradSampleHooks`.

    >>> import torch
    >>> model = GradSampleModule(nn.Linear(3, 2))
    >>> model(torch.ones(5, 3)).square().sum(1).mean().backward()
    >>> model.weight.grad_sample.shape
    torch.Size([5, 2, 3])
    """


class GradSampleModuleExpandedWeights(EngineHooks, AbstractGradSampleModule):
    """As GradSampleModule, for mode "ew". Raises NotImplementedError for batch_first=False, as Opacus does."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        if not batch_first:
            raise NotImplementedError("grad_sample_mode 'ew' takes batch_first=True only")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)


class GradSampleHooksNoOp(AbstractGradSampleHooks):
    """Makes the attribute, and computes nothing."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        if not batch_first:
            raise NotImplementedError("grad_sample_mode 'no_op' takes batch_first=True only")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)

    def remove_hooks(self) -> None:
        pass


class GradSampleModuleNoOp(GradSampleHooksNoOp, AbstractGradSampleModule):
    """The user's module, wrapped."""
