"""The uses of a recorded backward, to be filled with the numbers of a replay."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..engine.bundle import Arrangement
from ..engine.gradients import Gradients
from ..errors import GraphError
from ..uses.conv import Conv
from ..uses.embedding import Lookup
from ..uses.linear import Matmul
from ..uses.links import link_of
from ..uses.use import Lazy, Stored, Use
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
            empty.bound = None
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


def filled(
    templates: Sequence[Template], data: Sequence[Tensor], samples: int, scale: float,
    arranged: dict[tuple[int, ...], Arrangement],
) -> Gradients:  # fmt: skip
    """The gradients of the first samples of a replay. arranged: what was found out of the uses, kept by the caller."""
    uses: list[Use] = []
    for use, places in templates:
        filled_in = object.__new__(type(use))
        filled_in.__dict__.update(use.__dict__)
        for name, place in places.items():
            rows = data[place]
            setattr(filled_in, name, rows if rows.size(0) == samples else rows[:samples])
        filled_in.batch = samples
        uses.append(filled_in)
    return Gradients.of_joined(uses, samples, scale, templates[0].use.operand.device, arranged)
