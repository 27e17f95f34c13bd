"""Chooses the route of each use to its norms and clipped sum: the one predicted to be the fastest.

    gram         sum_ts (a_t . a_s)(g_t . g_s), then one product for the clipped sum
    direct       the gradient of each sample tile by tile, never stored, then one product
    materialise  the gradient of each sample, stored: norms and the clipped sum are read off it
    T=1          |a|^2 |g|^2, then one product

Materialising happens within backward, and drops the inputs and output gradients that the others keep until its end.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..ops import registry
from .cost_model import Shape, constants, seconds

MORE = 1.25  # what faster stored gradients may take, of the bytes that they replace, where no budget is given


class Planner:
    """Chooses routes.

    memory_budget: bytes that may be held from backward's begin to its end for norms and sums; None: whatever is
    fastest, as long as stored gradients take no more than the inputs and output gradients they replace. Where the
    budget is used up, blocks under activation checkpointing run backward twice (`fastdp.engine.memory_budget`).
    """

    def __init__(self, memory_budget: int | None = None) -> None:
        if memory_budget is not None and (isinstance(memory_budget, bool) or not memory_budget > 0):
            raise ValueError(f"memory_budget must be a positive number of bytes, not {memory_budget!r}")
        self.memory_budget = memory_budget
        self._held = HeldBytes()
        self._routes: dict[tuple[Shape, torch.device, bool, int], tuple[str, str]] = {}

    def begin(self) -> None:
        """A backward begins: nothing is held."""
        self._held = HeldBytes()

    @property
    def held(self) -> int:
        """Bytes that are held until the end of backward (those of small uses only where there is a budget)."""
        return self._held.bytes

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """These are held until the end of backward."""
        self._held.hold(tensors)

    def adds(self, *tensors: Tensor) -> int:
        """How many bytes more are held if these are: none for what another use holds already."""
        return self._held.adds(tensors)

    def exceeds(self, count: int) -> bool:
        """Whether holding `count` bytes more would go over the budget."""
        return self.memory_budget is not None and self.held + count > self.memory_budget

    def materialises(self, shape: Shape, replaced: int, device: torch.device, short: bool) -> bool:
        """Whether to store per-sample gradients, in place of `replaced` bytes of inputs and output gradients."""
        stored = shape.gradient_bytes()
        if self.memory_budget is None:
            return stored <= MORE * replaced and self.fastest(shape, device, short)[0] == "materialise"
        if self.exceeds(replaced):
            return stored < replaced  # whatever is smaller
        return not self.exceeds(stored) and self.fastest(shape, device, short)[0] == "materialise"

    def norm_route(self, shape: Shape, device: torch.device, short: bool) -> str:
        """The faster of the routes that need no storage."""
        return "T=1" if shape.t == 1 else self.fastest(shape, device, short)[1]

    def fastest(self, shape: Shape, device: torch.device, short: bool) -> tuple[str, str]:
        """(of all routes, of those without storage)."""
        if depthwise(shape) and device.type == "cpu":
            # MEASURED: 7x7, 4 x 96 x 56 x 56: 0.9 ms for stored gradients, 8 to 26 ms for torch's weight gradient, by
            # which the clipped sum would be taken otherwise
            return "materialise", "direct"
        key = (shape, device, short, registry.changes())
        found = self._routes.get(key)
        if found is None:
            known = constants(device, short, shape.family)
            # kernels take many layers in one launch, whose cost is then no layer's
            # gram needs a product of whole rows: no groups
            routes = ("direct", "materialise") if shape.groups > 1 else ("gram", "direct", "materialise")
            times = {route: seconds(route, shape, known, calls=device.type == "cpu") for route in routes}
            lean = {route: time for route, time in times.items() if route != "materialise"}
            found = self._routes[key] = (min(times, key=times.__getitem__), min(lean, key=lean.__getitem__))
        return found


def depthwise(shape: Shape) -> bool:
    """A convolution whose groups have one output each; the compiled kernel takes those with one input, too."""
    return shape.family == "conv" and shape.groups > 1 and shape.groups == shape.o


def versions(tensors: Iterable[Tensor]) -> int:
    """The versions of tensors, added up."""
    try:
        return sum([t._version for t in tensors])
    except RuntimeError:  # inference tensors have none
        return sum([t._version for t in tensors if not t.is_inference()])


class HeldBytes:
    """Tensors that are held until the end of a backward, by the memory in which they lie.

    The projections of a query, a key and a value hold one input, and a bias at a single position the output gradient
    that its weight holds.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._regions: set[tuple[int, int, int]] = set()  # storage, offset in it, numbers

    def adds(self, tensors: Iterable[Tensor]) -> int:
        """How many bytes more it would be to hold these too."""
        return sum({key: size for key, size in map(_region, tensors) if key not in self._regions}.values())

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Hold these, too. Returns the bytes that they add."""
        found = {key: size for key, size in map(_region, tensors) if key not in self._regions}
        self._regions.update(found)
        added = sum(found.values())
        self.bytes += added
        return added


def _region(tensor: Tensor) -> tuple[tuple[int, int, int], int]:
    """Where a tensor lies, and its bytes: of an expanded one, those of its storage.

    A storage is known by its address, which no other has for as long as this one is held.
    """
    storage = tensor.untyped_storage()
    return (storage._cdata, int(tensor.storage_offset()), tensor.numel()), min(tensor.nbytes, storage.nbytes())
