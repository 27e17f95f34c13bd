"""Raises if a parameter was used without being captured (autograd wrote its `.grad`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..errors import UncapturedUseError
from ..grad_sample.head_loss import outside
from ..grad_sample.parameter_links import leaves_of
from ..grad_sample.parameter_use import ParameterUse
from .tracked_parameters import Tracked


class UncapturedUses:
    """Looks for them at the end of backward."""

    def __init__(self, tracked: Tracked) -> None:
        self.tracked = tracked
        self._before: dict[int, tuple[Tensor, int]] = {}  # what stood in `.grad`, by parameter

    def note_grads(self) -> None:
        """What stands in `.grad` now did not come of the backwards to follow."""
        leaves = [p for p in self.tracked.holders() if p.is_leaf]  # of others .grad warns
        self._before = {id(p): (p.grad, p.grad._version) for p in leaves if p.grad is not None}

    def _has_new(self, parameter: Tensor) -> bool:
        grad = parameter.grad
        if grad is None:
            return False
        before, version = self._before.get(id(parameter), (None, 0))
        return grad is not before or grad._version != version

    def check(self, last_use_of: Mapping[int, str]) -> None:
        """Raises UncapturedUseError where autograd has given a parameter a gradient. last_use_of: for the message."""
        missed = []
        named = self.tracked.named()
        if not self.tracked.is_sharded and all(p.grad is None for p in named.values() if p.is_leaf):
            return
        for name, parameter in named.items():
            holders = self.tracked.holders_of(parameter)
            found = [holder for holder in holders if self._has_new(holder)]
            for holder in found:
                holder.grad = None  # not private
            if self.tracked.drops_stray(parameter) or found:
                where = last_use_of.get(id(parameter), outside(parameter))
                missed.append(f"'{name}' ({where})")
        if missed:
            raise UncapturedUseError(
                f"{len(missed)} parameter(s) were used where no per-sample rule applies: {', '.join(missed[:5])}. "
                "Their per-sample gradients are unknown, so nothing was clipped and no step is possible. Use the "
                "parameter within the model's forward, combined with the data, or freeze it; a function that fastdp "
                "does not see becomes seen by fastdp.register_rule. A term of the weights alone (L2-SP, EWC, FedProx) "
                "is public: leave it out of the loss, and call its backward() within optimizer.public()."
            )

    def check_owned(self, uses: Sequence[ParameterUse]) -> None:
        """What was used in the place of the model's parameters for one call would be clipped and then lost."""
        if not uses:
            return
        current = self.tracked.current()
        for use in uses:
            if any(id(leaf) not in current for leaf in leaves_of(use.operand)):
                raise UncapturedUseError(
                    f"{use.name}() used a tensor of shape {tuple(use.operand.shape)} that stood in the place of a "
                    "parameter only for the forward (torch.func.functional_call with other tensors, perhaps): "
                    "its gradient would be lost. Call the model with its own parameters, or call functional_call "
                    "within the forward of a module that owns them."
                )
