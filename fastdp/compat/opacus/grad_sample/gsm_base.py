"""What all ways of per-sample gradients share: the engine on the model, and attributes on its parameters."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ....distributed.world import World
from ....distributed.wrappers import check_samples
from ....engine.gradients import Gradients
from ....engine.per_sample import PerSampleGradients
from . import samples

logger = logging.getLogger(__name__)

OPACUS_PARAM_MONKEYPATCH_ATTRS = ["grad_sample", "_forward_counter", "_current_grad_sample", "_norm_sample"]


class AbstractGradSampleHooks(ABC):
    """Attached to a module, so that its trainable parameters have `.grad_sample`.

    batch_first: whether samples lie along the first dimension of the inputs, else the second.
    loss_reduction: "mean" or "sum": how the loss combines the samples' losses.
    """

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        super().__init__()
        samples.install()
        self._module = m
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        for p in m.parameters():
            if p.requires_grad:
                p.grad_sample = None  # type: ignore[attr-defined]

    def set_grad_sample_to_none(self) -> None:
        """Drop the per-sample gradients."""
        for p in self._module.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]

    def del_grad_sample(self) -> None:
        """Take the attribute `grad_sample` off all parameters."""
        for p in self._module.parameters():
            del p.grad_sample  # type: ignore[attr-defined]

    def forbid_grad_accumulation(self) -> None:  # noqa: B027
        """A second backward before the gradients of the first are taken and cleared becomes a ValueError."""

    def allow_grad_accumulation(self) -> None:  # noqa: B027
        """Backwards may add up before a step."""

    @abstractmethod
    def remove_hooks(self) -> None:
        """Take the hooks off the module."""

    def cleanup(self) -> None:
        """Take off the module whatever was put on it."""
        try:
            self.remove_hooks()
        finally:
            for p in self._module.parameters():
                for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
                    p.__dict__.pop(name, None)


class _Handle:
    """Stands in `autograd_grad_sample_hooks` for all hooks of an engine, which copies of a module do not have."""

    def __init__(self, engine: PerSampleGradients | None = None) -> None:
        self.engine = engine

    def remove(self) -> None:
        if self.engine is not None:
            self.engine.detach()

    def __reduce__(self) -> Any:
        return _Handle, ()


class EngineHooks(AbstractGradSampleHooks):
    """Per-sample gradients by fastdp's engine: lazily in `p.grad_sample`, see `samples`."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.hooks_enabled = False
        self.grad_accumulation_allowed = True
        self._engine: PerSampleGradients | None = None
        self._world = World()
        self.add_hooks(loss_reduction=loss_reduction, batch_first=batch_first)

    # ------------------------------------------------------------------ on the module and off it

    def add_hooks(
        self, *, loss_reduction: str = "mean", batch_first: bool = True, force_functorch: bool = False
    ) -> None:
        """Attach the engine. Raises ValueError where the module has hooks already."""
        if any(
            getattr(handle, "engine", handle) is not None
            for handle in self._module.__dict__.get("autograd_grad_sample_hooks", ())
        ):
            raise ValueError("Trying to add hooks twice to the same model: call remove_hooks() or cleanup() first")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction = {loss_reduction}. Only 'sum' and 'mean' losses are supported")
        self.batch_first, self.loss_reduction = batch_first, loss_reduction
        self._attach()
        handles = [] if self._engine is None else [_Handle(self._engine)]
        self._module.__dict__["autograd_grad_sample_hooks"] = self.__dict__["autograd_grad_sample_hooks"] = handles
        self.hooks_enabled = True

    def _attach(self) -> None:
        """Put the engine on the module; without trainable parameters there is nothing to do."""
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if parameters:
            self._engine = PerSampleGradients(
                self._module, loss_reduction=self.loss_reduction, batch_first=self.batch_first,
                on_backward=self._on_backward,
            )  # fmt: skip
            self.share(self._world)
            self._own(parameters)

    def _own(self, parameters: list[nn.Parameter]) -> None:
        """Optimizers of these parameters find these hooks."""
        for p in parameters:
            _OWNERS[p] = weakref.ref(self)

    def share(self, world: World) -> None:
        """Train together with other processes, which hear of errors of this one."""
        self._world = world
        if self._engine is not None:
            self._engine.watch(world.begins, world.refuse)

    def _detach(self) -> None:
        if self._engine is not None:
            self._engine.detach()
            self._engine = None
        for p in self._module.parameters():
            if _owner_of(p) is self:
                del _OWNERS[p]

    def remove_hooks(self) -> None:
        """Take the engine off the module."""
        self.hooks_enabled = False
        self._detach()
        self.__dict__.pop("autograd_grad_sample_hooks", None)
        self._module.__dict__.pop("autograd_grad_sample_hooks", None)

    def disable_hooks(self) -> None:
        """From the next forward on autograd fills `.grad` as if nothing was attached."""
        self.hooks_enabled = False
        self._detach()

    def enable_hooks(self) -> None:
        """The opposite of `disable_hooks`."""
        if not self.hooks_enabled and self._engine is None:
            self._attach()
        self.hooks_enabled = True

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry no engine; they attach one when they are called."""
        return {**self.__dict__, "_engine": None, "_world": World(), "autograd_grad_sample_hooks": [_Handle()]}

    def ready(self) -> None:
        """A forward begins: attach the engine where there is none (a copy, parameters unfrozen since)."""
        if self.hooks_enabled and self._engine is None:
            self._attach()

    def forbid_grad_accumulation(self) -> None:
        self.grad_accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        self.grad_accumulation_allowed = True

    # ------------------------------------------------------------------ backward

    def _trained(self) -> list[Tensor]:
        return [] if self._engine is None else self._engine.parameters()

    def note_grads(self) -> None:
        """`.grad` was zeroed, maybe between a forward and its backward."""
        if self._engine is not None:
            self._engine.note_grads()

    def _counts(self) -> bool:
        """Whether a backward is one of training: of a module in eval mode (an attack's, say) it is not."""
        return self.hooks_enabled and self._module.training

    def _on_backward(self, gradients: Gradients) -> None:
        """The end of a backward: its gradients wait on the parameters."""
        if not self._counts():
            return
        self._world.check()
        check_samples(self._world)
        parameters = self._trained()
        record = samples.Record(gradients, parameters)
        waiting = 0
        for p in parameters:
            waiting = max(waiting, samples.push(p, record))
        if waiting > 1 and not self.grad_accumulation_allowed:
            self._refuse_accumulation()

    def _refuse_accumulation(self) -> None:
        raise ValueError(
            "Poisson sampling is not compatible with grad accumulation: a backward came before the gradients of the "
            "one before it were taken by optimizer.step() and cleared by optimizer.zero_grad(). Take every batch of "
            "the loader as one step; BatchMemoryManager cuts large ones for you."
        )


_OWNERS: Any = WeakIdKeyDictionary()  # of a parameter, the hooks that record its backwards


def _owner_of(parameter: Tensor) -> EngineHooks | None:
    reference = _OWNERS.get(parameter)
    return None if reference is None else reference()


def owners_of(parameters: list[Any]) -> list[EngineHooks]:
    """The hooks that record the backwards of these parameters, each once."""
    found = {id(owner): owner for p in parameters if (owner := _owner_of(p)) is not None}
    return list(found.values())


class AbstractGradSampleModule(nn.Module, AbstractGradSampleHooks, ABC):
    """A module around the user's own, which is `_module`; its parameters have `.grad_sample`.

    A subclass names its hooks before this class, so that their constructor ends in this one's.
    """

    grad_accumulation_hook: RemovableHandle | None

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        nn.Module.__init__(self)
        AbstractGradSampleHooks.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.grad_accumulation_hook = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, EngineHooks):
            self.ready()
        return self._module(*args, **kwargs)

    def __getattr__(self, item: str) -> Any:
        try:
            return super().__getattr__(item)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("_module")
            if module is None or item.startswith("__"):
                raise
            found = dict(module.named_modules()).get(item) if item else None
            if found is not None:
                return found
            try:
                return getattr(module, item)
            except AttributeError:
                pass
            raise

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the per-sample gradients; `.grad` becomes zero, or None."""
        self.set_grad_sample_to_none()
        super().zero_grad(set_to_none)
        if isinstance(self, EngineHooks):
            self.note_grads()

    def to_standard_module(self) -> nn.Module:
        """The user's module, as it was but for its weights."""
        self._close()
        return self._module

    def _close(self) -> None:
        self.cleanup()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"
