"""Detects parameters outside the private optimizer that its backward gives ordinary gradients."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import nested_tensors
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
            near = tuple(node.name() for node in itertools.islice(_nodes(roots), _NEAR))
            if not self._losses & (self._losses - 1) or near not in self._known:
                self._known.add(near)
                found = [p for p in _leaves(roots) if isinstance(p, nn.Parameter) or not p.dim() or p.size(0) % batch]
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
                found.append(name)
        self._before = []
        if not found:
            return
        self._warned = True
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        warnings.warn(
            f"{len(found)} trainable parameter(s) that no private optimizer trains got gradients from this backward: "
            f"{', '.join(found[:_SHOWN])}{more}. These are of the samples as they are, neither clipped nor noised: if "
            "another optimizer trains them, what it makes is not private, and epsilon does not cover it. Freeze them "
            "(requires_grad_(False)), or give them to the private optimizer (params=, or the whole as its model). If "
            "no sample is private (a generator's step through a private discriminator), make forward and backward "
            "within optimizer.public().",
            stacklevel=3,
        )


def _nodes(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of autograd's graph that these tensors were made by, each once, the nearest first."""
    waiting = list(dict.fromkeys(t.grad_fn for t in tensors if t.grad_fn is not None))
    met = set(waiting)
    for node in waiting:  # which grows
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in met:
                met.add(after)
                waiting.append(after)


def _leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What would get gradients by a backward from these tensors."""
    found = (getattr(node, "variable", None) for node in itertools.islice(_nodes(tensors), _MOST))
    return [leaf for leaf in found if leaf is not None]
