"""The uses of a recorded backward, to be filled with the numbers of a replay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..engine.bundle import Abreast, Bundle
from ..engine.gradients import Arranged, Gradients
from ..errors import GraphError
from ..uses.conv import Conv
from ..uses.embedding import Lookup
from ..uses.linear import Matmul, by_address
from ..uses.links import link_of
from ..uses.use import Lazy, Positioned, Stored, Use
from .recorder import Recorder

_DATA: dict[type[Use], tuple[str, ...]] = {
    Matmul: ("a", "g"),
    Conv: ("x", "g"),
    Lookup: ("ids", "g"),
    Stored: ("grads",),
}


LARGEST = 1 << 24  # numbers of per-sample gradients that a replay stores, where Python's step computes some at a time


def store(gradients: Gradients) -> None:
    """Compute the small per-sample gradients that are else computed when asked for within the program."""
    for place, use in enumerate(gradients.uses):
        if type(use) is Lazy and use.batch * use.operand.numel() <= LARGEST:
            gradients.uses[place] = Stored(use.operand, use.per_sample(0, use.batch), use.name)


class Template(NamedTuple):
    """A use without its data. places: of its data among the outputs of the program."""

    use: Use
    places: dict[str, int]


def templates_of(gradients: Gradients, size: int, recorder: Recorder) -> tuple[list[Template], list[Tensor]]:
    """The templates, and the data that a replay must give: rows of each of `size` samples.

    Raises GraphError on uses that have no such form.
    """
    if gradients.people is not None:
        raise GraphError("records are grouped (group_by): the groups of a batch are not known when it is recorded")
    if gradients.doubts:
        raise GraphError("whether the loss couples samples is known by the numbers of each batch only")
    found: list[Template] = []
    data: list[Tensor] = []
    for use in gradients.uses:
        names = _DATA.get(type(use))
        if names is None:
            raise GraphError(
                f"{use.name}() uses a parameter of shape {tuple(use.operand.shape)} by a rule ({type(use).__name__}) "
                "whose numbers of rows, or whose computation, may change from batch to batch"
            )
        if not _is_fixed_map(use.operand, recorder):
            raise GraphError(
                f"{use.name}() uses a tensor made of parameters by other functions (a weight norm, a product): what "
                "pulls its gradients back is not recorded"
            )
        places = {}
        for name in names:
            rows = getattr(use, name)
            if {rows.size(0), use.batch, gradients.batch, gradients.records} != {size}:
                raise GraphError(
                    f"{use.name}() has rows of {use.batch} samples, the batch {size}: several rows of each sample "
                    "(rows_per_sample, batch_first=False) are not replayed"
                )
            places[name] = len(data)
            data.append(rows)
        empty = copy.copy(use)
        for name in names:
            setattr(empty, name, torch.empty(0))
        empty.clock, empty.shared = None, False
        if isinstance(empty, Matmul):
            empty.bound = empty.filled = None
        found.append(Template(empty, places))
    return found, data


# nodes of autograd whose gradients do not depend on the numbers that went through them
_FIXED = frozenset(
    f"{name}Backward{number}"
    for number in (0, 1, 2)
    for name in "Embedding View UnsafeView ReshapeAlias Unsqueeze Expand ToCopy Slice Select T Transpose Permute Clone "
    "Alias Split SplitWithSizes Unbind IndexSelect Index Repeat Squeeze Cat Stack Flip Roll Narrow Add Sub Neg Sum "
    "Mean".split()
) | {"AccumulateGrad"}


def _is_fixed_map(operand: Tensor, recorder: Recorder) -> bool:
    """Whether what pulls gradients of the operand back to its parameters does not depend on the parameters' numbers, so
    that the graph of the recording serves: rows, parts, casts, repetitions and sums of parameters."""
    if link_of(operand) is None:
        return True
    nodes, seen = [operand.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node.name().rpartition("::")[2] not in _FIXED or any(map(recorder.changes, _saved(node))):
                return False
            nodes += [following for following, _ in node.next_functions]
    return True


def _saved(node: Any) -> list[Tensor]:
    """The tensors that a node of autograd keeps: indices, of which the gradients depend."""
    found = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


_GONE = torch.empty(0)
Lasting = Callable[[], None]  # raises StepError once the data of a replay is overwritten


class Replayed(Gradients):
    """The gradients of the first samples of a replay: uses are filled with its data when they are asked for, and those
    that are taken together never one by one.

    templates, data: of the recording, and what the replay gave. size: samples of the replay. lasting: asked before any
    data is read.
    """

    def __init__(
        self, templates: Sequence[Template], data: Sequence[Tensor], samples: int, size: int, scale: float,
        of: dict[int, list[int]], arranged: Arranged, lasting: Lasting | None = None,
    ) -> None:  # fmt: skip
        self._templates, self._data, self._samples, self._size = templates, list(data), samples, size
        self._of, self._filled, self._lasting = of, dict[int, Use](), lasting
        self._take(samples, scale, templates[0].use.operand.device, None, arranged)

    @property
    def uses(self) -> list[Use]:
        return [self.use(place) for place in range(len(self._templates))]

    def bundles(self, parameters: Sequence[Tensor]) -> list[Bundle | Abreast]:
        self._check()
        return super().bundles(parameters)

    def _check(self) -> None:
        if self._lasting is not None:
            self._lasting()

    def use(self, place: int) -> Use:
        self._check()
        if place not in self._filled:
            template = self._templates[place]
            use = self._filled[place] = object.__new__(type(template.use))
            use.__dict__.update(template.use.__dict__)
            for name, number in template.places.items():
                rows = self._data[number]
                setattr(use, name, rows if self._samples == self._size else rows[: self._samples])
            use.batch = self._samples
        return self._filled[place]

    def drop(self, place: int) -> None:
        self._filled.pop(place, None)
        for number in self._templates[place].places.values():
            self._data[number] = _GONE

    def _bundle(self, kind: type[Bundle] | type[Abreast], members: list[tuple[Tensor, int]]) -> Bundle | Abreast:
        parameters = [parameter for parameter, _ in members]
        templates = [self._templates[place] for _, place in members]
        sides = [[self._data[t.places[name]] for t in templates] for name in templates[0].places]
        if kind is Bundle:
            rows = [side if side.dim() == 2 else side.reshape(side.size(0), -1) for side in sides[0]]
            whole = torch.cat(rows, 1)
            return Bundle(parameters, whole if self._samples == self._size else whole[: self._samples])
        one = templates[0].use
        assert isinstance(one, Positioned)
        if isinstance(one, Matmul) and by_address(sides[0][0], sides[1][0]):
            return Abreast.of([(p, self.use(place)) for p, place in members])
        joined = [self._of_samples(torch.cat(side), len(templates)) for side in sides]
        return Abreast(parameters, one.joined(*joined))

    def _of_samples(self, rows: Tensor, count: int) -> Tensor:
        """Of `count` uses by all samples of the replay, one after the other: without the padding of each."""
        if self._samples == self._size:
            return rows
        return rows.unflatten(0, (count, self._size))[:, : self._samples].flatten(0, 1)
