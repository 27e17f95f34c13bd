"""Modules whose parameters have `.grad_sample`, by fastdp's engine: modes "hooks", "functorch" and "ew"."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from opacus.grad_sample import (
    AbstractGradSampleHooks,
    AbstractGradSampleModule,
    GradSampleHooksNoOp,
    GradSampleModuleNoOp,
)
from opacus.grad_sample import grad_sample_module as theirs
from opacus.grad_sample.grad_sample_module import create_or_accumulate_grad_sample, promote_current_grad_sample
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ....batch_axis.deferred_checks import settle
from ....distributed.world import World
from ....distributed.wrappers import check_samples
from ....engine.gradients import Gradients
from ....engine.per_sample import PerSampleGradients
from . import samples

__all__ = [
    "GradSampleHooks",
    "GradSampleHooksNoOp",
    "GradSampleModule",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleNoOp",
    "create_or_accumulate_grad_sample",
    "promote_current_grad_sample",
]
_OWNERS: Any = WeakIdKeyDictionary()  # of a parameter, the hooks that record its backwards


def owners_of(parameters: Iterable[Any]) -> list[Any]:
    """The hooks that record the backwards of these parameters, each once."""
    found = [reference() for p in parameters if (reference := _OWNERS.get(p)) is not None]
    return list({id(owner): owner for owner in found if owner is not None}.values())


class GradSampleHooks(AbstractGradSampleHooks):  # type: ignore[misc]
    """Attached to a model that stays as it is (wrap_model=False); `cleanup()` leaves it.

    strict: raise NotImplementedError for trainable layers that keep statistics of the data, which are not private.
    force_functorch: accepted; the engine has one way for all layers. Functions in GRAD_SAMPLERS are not called: the
    engine sees which torch functions a layer calls, is exact for those, and refuses by name what it cannot see.
    """

    GRAD_SAMPLERS: dict[type[nn.Module], Callable[..., Any]] = dict(theirs.GradSampleHooks.GRAD_SAMPLERS)

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
        _warn_of_samplers(m)
        self._samplers = dict(self.GRAD_SAMPLERS)
        samples.install()
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.force_functorch = force_functorch
        self.grad_accumulation_allowed = True
        self._engine: PerSampleGradients | None = None
        self._world = World()
        self.add_hooks(loss_reduction=loss_reduction, batch_first=batch_first)

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Errors for trainable layers that keep statistics of the data, raised together if strict."""
        errors = [
            NotImplementedError(f"'{name}' ({type(m).__name__}) keeps statistics of the data, which are not private")
            for name, m in module.named_modules()
            if getattr(m, "track_running_stats", False) and any(p.requires_grad for p in m.parameters(recurse=False))
        ]
        if strict and errors:
            raise NotImplementedError(errors)
        return errors

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Deprecated in Opacus: True, as layers need not be known."""
        return True

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Modules that hold trainable parameters themselves."""
        return (m for m in module.modules() if any(p.requires_grad for p in m.parameters(recurse=False)))

    # ------------------------------------------------------------------ on the module and off it

    def add_hooks(
        self, *, loss_reduction: str = "mean", batch_first: bool = True, force_functorch: bool = False
    ) -> None:
        """Attach the engine. Raises ValueError where the module has hooks already."""
        if owners_of(self._module.parameters()):
            raise ValueError("Trying to add hooks twice to the same model: call remove_hooks() or cleanup() first")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction = {loss_reduction}. Only 'sum' and 'mean' losses are supported")
        self.batch_first, self.loss_reduction = batch_first, loss_reduction
        self.enable_hooks()
        self._module.__dict__["autograd_grad_sample_hooks"] = ["fastdp's engine"]

    def enable_hooks(self) -> None:
        """The opposite of `disable_hooks`. A model without trainable parameters needs no engine."""
        self.hooks_enabled = True
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if self._engine is None and parameters:
            self._attach()
            _OWNERS.update({p: weakref.ref(self) for p in parameters})

    def _attach(self) -> None:
        self._engine = PerSampleGradients(
            self._module, loss_reduction=self.loss_reduction, batch_first=self.batch_first,
            on_backward=self._on_backward,
        )  # fmt: skip
        self.share(self._world)

    def share(self, world: World) -> None:
        """Train together with other processes, which hear of errors of this one."""
        self._world = world
        if self._engine is not None:
            self._engine.watch(world.begins, world.refuse)

    def disable_hooks(self) -> None:
        """From the next forward on autograd fills `.grad` as if nothing was attached."""
        self.hooks_enabled = False
        if self._engine is not None:
            self._engine.detach()
            self._engine = None
        for p in self._module.parameters():
            if owners_of([p]) == [self]:
                del _OWNERS[p]

    def remove_hooks(self) -> None:
        """Take the engine off the module."""
        self.disable_hooks()
        self._module.__dict__.pop("autograd_grad_sample_hooks", None)

    def cleanup(self) -> None:
        """Take off the module whatever was put on it."""
        self.set_grad_sample_to_none()  # what waits need not be computed
        super().cleanup()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry no engine; they attach one when they are called."""
        return {**self.__dict__, "_engine": None, "_world": World()}

    def forbid_grad_accumulation(self) -> None:
        self.grad_accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        self.grad_accumulation_allowed = True

    # ------------------------------------------------------------------ backward

    def note_grads(self) -> None:
        """`.grad` was zeroed, maybe between a forward and its backward: the engine must not take it for autograd's."""
        if self._engine is not None:
            self._engine.note_grads()

    def _on_backward(self, gradients: Gradients) -> None:
        """The end of a backward: its gradients wait on the parameters, unless the module is in eval mode."""
        if self._engine is None or not self._module.training:
            return
        self._world.check()
        check_samples(self._world)
        settle(gradients.doubts)
        if self._samplers != self.GRAD_SAMPLERS:  # registered since
            self._samplers = dict(self.GRAD_SAMPLERS)
            _warn_of_samplers(self._module)
        record = samples.Record(gradients, self._engine.parameters())
        self._take(record)
        waiting = max([samples.push(p, record) for p in record.parameters])
        if waiting > 1 and not self.grad_accumulation_allowed:
            self._refuse_accumulation()

    def _refuse_accumulation(self) -> None:
        raise ValueError(
            "Poisson sampling is not compatible with grad accumulation: a backward came before the gradients of the "
            "one before it were taken by optimizer.step() and cleared by optimizer.zero_grad(). Take every batch of "
            "the loader as one step; BatchMemoryManager cuts large ones for you."
        )

    def _take(self, record: samples.Record) -> None:
        """Called before the gradients of a backward are left on the parameters."""


def _warn_of_samplers(module: nn.Module) -> None:
    known = theirs.GradSampleHooks.GRAD_SAMPLERS
    own = {kind for kind, function in GradSampleHooks.GRAD_SAMPLERS.items() if function is not known.get(kind)}
    given = sorted({type(layer).__name__ for layer in module.modules() if type(layer) in own})
    if given:
        warnings.warn(
            f"the functions registered by register_grad_sampler for {', '.join(given)} are not called: per-sample "
            "gradients are those of the torch functions that the layer calls. If the registered ones are meant to "
            "differ from autograd's, write p.grad_sample between backward and step.",
            stacklevel=4,
        )


class GradSampleModule(GradSampleHooks, AbstractGradSampleModule):  # type: ignore[misc]
    """The user's module with `.grad_sample` on its parameters; arguments of `GradSampleHooks`.

    >>> import torch
    >>> model = GradSampleModule(nn.Linear(3, 2))
    >>> model(torch.ones(5, 3)).square().sum(1).mean().backward()
    >>> model.weight.grad_sample.shape
    torch.Size([5, 2, 3])
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.hooks_enabled and self._engine is None:  # a copy, or parameters unfrozen since
            self.enable_hooks()
        return self._module(*args, **kwargs)

    def __getattr__(self, item: str) -> Any:
        try:
            return super().__getattr__(item)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("_module")
            if module is None or item.startswith("__") or not hasattr(module, item):
                raise
            return getattr(module, item)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the per-sample gradients; `.grad` becomes zero, or None."""
        super().zero_grad(set_to_none)
        self.note_grads()


class GradSampleModuleExpandedWeights(GradSampleModule):
    """As GradSampleModule, for mode "ew". Raises NotImplementedError for batch_first=False, as Opacus does."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        if not batch_first:
            raise NotImplementedError("grad_sample_mode 'ew' takes batch_first=True only")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
