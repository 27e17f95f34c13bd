"""Ordinary gradients in a private backward: of parameters outside the optimizer, or of uses that were not captured.

Captured uses are detached. If autograd writes a tracked parameter's `.grad`, a use was missed, which raises an error.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import nested_tensors
from ..errors import UncapturedUseError
from ..grad_sample.head_loss import outside
from ..grad_sample.parameter_links import leaves_of
from ..grad_sample.parameter_use import ParameterUse
from ..utils.autograd_graph import graph_nodes
from .tracked_parameters import Tracked

_SHOWN = 5
_NEAR = 8  # nodes next to the loss whose names tell that it is made otherwise than before
_MOST = 50_000  # nodes that are looked at


class ForeignParameters:
    """Watches the parameters of a model that its private optimizer does not train, and those outside of it that its
    inputs or the loss are made with.

    Warns once, at the end of the first backward that gives one of them a gradient (of all samples, neither clipped nor
    noised) beside the private one. What lies outside is looked for in autograd's graph, at the first forward or
    backward, the second, the fourth, the eighth and so on, and where the loss is made otherwise than before.
    """

    def __init__(self, tracked: Tracked) -> None:
        self.tracked = tracked
        self._before: list[tuple[str, weakref.ref[Tensor], Tensor | None, int]] = []
        self._outside: list[tuple[str, weakref.ref[Tensor]]] = []  # not of the model
        self._inputs = self._losses = 0  # made by others, so far; and losses
        self._known: set[tuple[str, ...]] = set()  # how losses were made
        self._warned = False
        self._met: list[weakref.ref[Tensor]] = []  # leaves that are no Parameters, and got a gradient in one backward

    def begin(self) -> None:
        """A forward begins: what stands in `.grad` now does not come of its backward."""
        if self._warned:
            return
        found = [(name, weakref.ref(p)) for name, p in self.tracked.others()]
        self._before = []
        for name, ref in [*found, *self._outside]:
            if (p := ref()) is not None and p.is_leaf:
                self._before.append((name, ref, p.grad, -1 if p.grad is None else p.grad._version))

    def inputs(self, given: Any) -> None:
        """Look for parameters outside of the model that its inputs were made with (a trunk of its own)."""
        if self._warned:
            return
        made = [t for t in nested_tensors(given) if t.grad_fn is not None]
        if not made:
            return
        self._inputs += 1
        if not self._inputs & (self._inputs - 1):
            with torch._C.DisableTorchFunction():
                leaves = [p for p in _leaves(made) if isinstance(p, nn.Parameter)]
                self._add(leaves, self.tracked.current(), "inputs were")

    def loss(self, roots: list[Tensor], batch: int, private: Callable[[], set[int]]) -> None:
        """Backward is called on these tensors: look for what else they were made with (a head, a temperature).

        private: ids of the parameters of all private optimizers' models. Beside parameters, a tensor counts that is
        trained as such; one with rows of its own for the samples is data.
        """
        if self._warned:
            return
        self._losses += 1
        with torch._C.DisableTorchFunction():
            near = tuple(node.name() for node in itertools.islice(graph_nodes(t.grad_fn for t in roots), _NEAR))
            if not self._losses & (self._losses - 1) or near not in self._known:
                self._known.add(near)
                found = [
                    p for p in _leaves(roots) if isinstance(p, nn.Parameter) or not p.dim() or p.size(0) % max(batch, 1)
                ]
                self._add(found, private(), "loss was")

    def _add(self, leaves: Sequence[Tensor], private: set[int], what: str) -> None:
        known = {id(ref()) for _, ref in self._outside} | {id(ref()) for _, ref, *_ in self._before}
        for p in leaves:
            if id(p) not in private and id(p) not in known:
                name, ref = f"one of shape {tuple(p.shape)}, which the {what} made with", weakref.ref(p)
                self._outside.append((name, ref))
                self._before.append((name, ref, p.grad, -1 if p.grad is None else p.grad._version))

    def end(self) -> None:
        """A backward has given the private optimizer its gradients: warn if others have got some, too."""
        found = []
        for name, ref, before, version in self._before:
            p = ref()
            if p is None or not p.requires_grad or p.grad is None:
                continue
            if p.grad is not before or p.grad._version != version:
                # (a zero made anew by each forward, from which a sum of losses begins, is trained by nobody)
                if isinstance(p, nn.Parameter) or any(met() is p for met in self._met):
                    found.append(name)
                else:
                    self._met = [*(met for met in self._met if met() is not None), ref]
        self._before = []
        if not found:
            return
        self._warned = True
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        warnings.warn(
            f"{len(found)} trainable parameter(s) that no private optimizer trains got gradients from this backward: "
            f"{', '.join(found[:_SHOWN])}{more}. These are of the samples as they are, neither clipped nor noised: if "
            "another optimizer trains them, what it makes is not private, and epsilon does not cover it. Freeze them "
            "(requires_grad_(False)), or give them to the private optimizer: make them attributes of its module, and "
            "add_param_group() those that were frozen when it was made. If no sample is private (a generator's step "
            "through a private discriminator), make forward and backward within optimizer.public().",
            stacklevel=3,
        )


def _leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What would get gradients by a backward from these tensors."""
    nodes = itertools.islice(graph_nodes(t.grad_fn for t in tensors), _MOST)
    found = (getattr(node, "variable", None) for node in nodes)
    return [leaf for leaf in found if leaf is not None]


class UncapturedUses:
    """Looks for them at the end of backward."""

    def __init__(self, tracked: Tracked) -> None:
        self.tracked = tracked
        self._before: dict[int, tuple[Tensor, int]] = {}  # what stood in `.grad`, by parameter
        self._noted = False

    def note_grads(self) -> None:
        """What stands in `.grad` now did not come of the backwards to follow."""
        self._noted = True
        leaves = [p for p in self.tracked.holders() if p.is_leaf]  # of others .grad warns
        self._before = {id(p): (p.grad, p.grad._version) for p in leaves if p.grad is not None}

    def _has_new(self, parameter: Tensor) -> bool:
        """Whether other numbers stand in `.grad` now (zeros do no harm)."""
        grad = parameter.grad
        if grad is None:
            return False
        before, version = self._before.get(id(parameter), (None, 0))
        if grad is before and grad._version == version:
            return False
        here: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad  # of a part
        return bool((here._values() if here.is_sparse else here).count_nonzero())

    def written(self) -> list[str]:
        """Parameters in whose `.grad` numbers stand that no backward has put there since the last forward began."""
        if not self._noted:
            return []
        holders_of, named = self.tracked.holders_of, self.tracked.named().items()
        if not self.tracked.is_sharded:
            return [name for name, p in named if p.grad is not None and self._has_new(p)]
        return [name for name, p in named if any(map(self._has_new, holders_of(p)))]

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
