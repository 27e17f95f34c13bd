"""Attaches a new engine where a framework shards the model after its optimizer was made (Accelerate's `prepare`).

Till then the engine is on the whole model, and checks it. Accelerate then calls `fully_shard`, and puts the parts in
the place of the optimizer's parameters. The first call of the model after that, or of the optimizer, puts a new engine
on the parts. The key of the noise, the ledger and all options stay, and so does the noise: it depends on an element's
place among all the model's elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..distributed.frameworks import lays_in_parts
from ..distributed.sharded import is_sharded
from ..errors import ParameterError, StepError

if TYPE_CHECKING:
    from .private_step import PrivateStep

_OTHERS = (
    "fully_shard was called on the model once the private optimizer was made, and {what}. Make the optimizer after "
    "fully_shard, or let accelerator.prepare(model, optimizer) do both."
)


class DeferredSetup:
    """Stands before the model's call until parts are there.

    params: gives the optimizer's parameters.
    """

    def __init__(self, privacy: PrivateStep, params: Callable[[], list[Tensor]]) -> None:
        self._privacy, self._params = privacy, params
        self._model = weakref.ref(privacy.engine.model)
        privacy.clipping.style = privacy.clipping.by_names()
        privacy.engine.hold_no_parameters()  # the whole model would stay in memory beside its parts
        self._put(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        self.look()
        return model._call_impl(*args, **kwargs)

    def look(self) -> None:
        """Put a new engine on the model if it lies in parts now. All processes must come here."""
        model, privacy = self._model(), self._privacy
        if privacy.deferred_setup is not self or model is None or not is_sharded(model):
            return
        self.cancel()
        with privacy.world.deciding():
            try:
                _attach_parts(privacy, model, self._params())
            except Exception:
                privacy.detach()
                raise

    def cancel(self) -> None:
        """Wait no longer."""
        self._privacy.deferred_setup = None
        self._put(None)

    def _put(self, call: DeferredSetup | None) -> None:
        """What torch.compile would put before a module's call. The hooks of a call are chosen as it begins, so none of
        them could make others."""
        if (model := self._model()) is not None:
            model._compiled_call_impl = call


def defer_setup(privacy: PrivateStep, params: Callable[[], list[Tensor]]) -> None:
    """Wait for parts if a framework will make them."""
    model = privacy.engine.model
    whole = privacy.replica.shards is None and privacy.replica.wrapper is None
    if whole and lays_in_parts() and model._compiled_call_impl is None:
        privacy.deferred_setup = DeferredSetup(privacy, params)


def _attach_parts(privacy: PrivateStep, model: nn.Module, params: list[Tensor]) -> None:
    if privacy.busy or privacy._released:
        raise StepError(_OTHERS.format(what="it has trained the whole model before"))
    old = privacy.engine
    places, trained = list(old.offsets()), list(old.named_parameters())
    privacy.detach()
    held = {id(p) for p in model.parameters()}
    if any(id(p) not in held for p in params):
        raise ParameterError(_OTHERS.format(what="the parts are not the optimizer's parameters"))
    privacy.attach(model, params)
    new = list(privacy.engine.offsets())
    renamed = dict(zip(places, new, strict=False))  # wrappers of checkpointing change names
    named = privacy.engine.named_parameters()
    if len(places) != len(new) or [renamed[name] for name in trained] != list(named):
        raise ParameterError(_OTHERS.format(what="its parameters, or which of them are trained, are others now"))
    style = privacy.clipping.by_names(renamed)
    privacy.clipping = privacy.clipping.changed(named, style=style)
    privacy.replica.check_others(privacy.engine)
    privacy.listen()
