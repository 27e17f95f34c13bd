"""Parameters that a private backward gives ordinary gradients: what another optimizer makes of them is not private."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import nested_tensors
from .graph_activations import nodes_of
from .tracked import Tracked

_SHOWN = 5


class Others:
    """Watches the parameters of a model that its private optimizer does not train, and those its inputs were made with.

    Warns once, at the end of the first backward that gives one of them a gradient (of all samples, neither clipped nor
    noised) beside the private one.
    """

    def __init__(self, tracked: Tracked) -> None:
        self.tracked = tracked
        self._before: list[tuple[str, weakref.ref[Tensor], Tensor | None, int]] = []
        self._outside: list[tuple[str, weakref.ref[Tensor]]] = []  # of the model, but the inputs were made with them
        self._followed = self._warned = False

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
        """Look, once, for parameters outside of the model that its inputs were made with (a trunk of its own)."""
        if self._followed or self._warned:
            return
        made = [t for t in nested_tensors(given) if t.grad_fn is not None]
        if not made:
            return
        self._followed = True
        with torch._C.DisableTorchFunction():
            mine = self.tracked.current()
            leaves = {
                id(v): v for t in made for node in nodes_of(t) if (v := getattr(node, "variable", None)) is not None
            }
        outside = [p for p in leaves.values() if isinstance(p, nn.Parameter) and id(p) not in mine]
        self._outside = [(f"one of shape {tuple(p.shape)}, which the inputs were made with", weakref.ref(p))
                         for p in outside]  # fmt: skip
        self._before += [(name, ref, p.grad, -1 if p.grad is None else p.grad._version)
                         for (name, ref), p in zip(self._outside, outside, strict=True)]  # fmt: skip

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
            "(requires_grad_(False)), or give them to the private optimizer (params=, or the whole as its model).",
            stacklevel=3,
        )
