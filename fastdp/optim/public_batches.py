"""Public batches beside private ones: ordinary gradients, which nothing captures, clips, noises or counts."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import StepError
from .fused_update import Release
from .private_step import PrivateStep


class _Left(NamedTuple):
    """What a backward within `public()` left in a parameter's `.grad`, for the next private step."""

    parameter: Tensor
    weights: int  # its version: another one tells that an optimizer has used the gradient
    gradient: Tensor
    version: int

    def is_there(self) -> bool:
        """Not where zero_grad() has dropped it."""
        return self.parameter.grad is self.gradient

    def is_used(self) -> bool:
        return self.parameter._version != self.weights


class PublicBatches:
    """The public gradients that wait for a private optimizer's step."""

    def __init__(self, privacy: PrivateStep) -> None:
        self._privacy = privacy
        self._left: list[_Left] = []
        self._taken: dict[int, Tensor] = {}  # by the logical batch's steps so far, by the parameter's id
        self._beside: dict[int, Tensor] | None = None  # the clipped sums of these steps

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Forwards and backwards are ordinary ones. What stands in `.grad` at the end waits for the next private step,
        unless an ordinary optimizer has stepped, or the parameters were updated otherwise: then it has been used."""
        params = self._privacy.engine.parameters()
        waits = {id(left.parameter) for left in self._left if left.is_there() and not left.is_used()}
        for p in params:
            if id(p) not in waits:
                p.grad = None  # of the private step before, which is over
        before, steps, whole = [p._version for p in params], _STEPS[0], False
        try:
            with self._privacy.engine.public():
                yield
            whole = True
        finally:
            used = _STEPS[0] != steps or [p._version for p in params] != before
            if used or not whole:
                for p in params:
                    p.grad = None
            found = [(p, p.grad) for p in params if p.grad is not None]
            self._left = [_Left(p, p._version, grad, grad._version) for p, grad in found]
            self._privacy.engine.note_grads()

    def ready(self) -> bool:
        """As `PrivateStep.ready`: a step takes the gradients at hand."""
        self._check()
        complete = self._privacy.ready()
        if self._beside is not self._privacy._sums:  # a new one for every logical batch
            self._taken, self._beside = {}, self._privacy._sums
        left, self._left = [each for each in self._left if each.is_there()], []
        used = any(each.is_used() for each in left)
        for parameter, _, gradient, _ in left:
            parameter.grad = None
            if not used:
                before = self._taken.get(id(parameter))
                self._taken[id(parameter)] = gradient if before is None else before + gradient
        return complete

    def _check(self) -> None:
        """Raises StepError, before anything is taken, where what waits cannot be."""
        left = [left for left in self._left if left.is_there()]
        if left and (mechanism := self._privacy.mechanism) is not None:
            name = getattr(mechanism, "name", type(mechanism).__name__)
            raise StepError(
                f"a backward within public() waits for this step, whose mechanism ({name}) takes private gradients "
                "alone. Call zero_grad(), and step an ordinary optimizer within public()."
            )
        if any(each.gradient._version != each.version and bool(_any(each.gradient)) for each in left):
            raise StepError(
                "the gradient that a backward within public() left in .grad was written to since (clip_grad_norm_, a "
                "division): what of it is public is not known. Do that within public(), or drop it by zero_grad()."
            )

    def release(self) -> Release:
        """As `PrivateStep.release`, with the public gradients beside the sums."""
        return self._privacy.release()._replace(public=self._taken)


def _any(gradient: Tensor) -> Tensor:
    return (gradient._values() if gradient.is_sparse else gradient).count_nonzero()


# ------------------------------------------------------------------ an ordinary step outside of `public()`

_PRIVATE: weakref.WeakSet[PrivateStep] = weakref.WeakSet()
_HOOKS: list[Any] = []
_LOOKED_AT: weakref.WeakSet[Any] = weakref.WeakSet()  # ordinary optimizers, at their first step beside a private one
_STEPS = [0]  # of ordinary optimizers so far


def watch(privacy: PrivateStep) -> None:
    """Look at the steps of ordinary optimizers, from now on."""
    _PRIVATE.add(privacy)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_after_step))


@torch.no_grad()
def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Raises StepError where the gradients that a step was to be made of wait for a private one."""
    if "_privacy" in optimizer.__dict__:
        return
    _STEPS[0] += 1
    for privacy in [privacy for privacy in _PRIVATE if privacy.pending() and not privacy.detached]:
        tracked = set(map(id, privacy.engine.parameters()))
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in tracked]
        if mine and all(p.grad is None for p in mine):
            privacy.zero_grad()
            raise StepError(
                f"{type(optimizer).__name__}.step() found no gradient of {len(mine)} parameter(s) that a private "
                "optimizer trains: backward keeps its samples' gradients for the private step(), and leaves .grad "
                "alone. Those at hand are dropped. If the batch is not private, make forward, backward and step within "
                "`with private_optimizer.public():`; else call the private step()."
            )
    if optimizer not in _LOOKED_AT:
        _warn_of_withheld(optimizer)


def _warn_of_withheld(optimizer: Any) -> None:
    """Of parameters beside private ones of the same calls, which no backward gives a gradient."""
    without = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is None}
    for privacy in [privacy for privacy in _PRIVATE if privacy._released and not privacy.detached]:
        _LOOKED_AT.add(optimizer)
        tracked = set(map(id, privacy.engine.parameters()))
        owners = [m for m in privacy.engine.model.modules() if any(id(p) in tracked for p in m.parameters(False))]
        beside = {id(p) for module in owners for p in module.parameters(recurse=False)} - tracked
        names = [name for name, p in privacy.engine.model.named_parameters() if id(p) in without & beside]
        if names:
            warnings.warn(
                f"{type(optimizer).__name__}.step() found no gradient of {len(names)} of its parameters, as "
                f"'{names[0]}', in a private optimizer's model: a call that uses one of the private parameters (a "
                "layer's weight) gives none to its others (the bias). Let the private optimizer train them, too, in a "
                "group of their own, or freeze them (requires_grad_(False)).",
                stacklevel=4,
            )
