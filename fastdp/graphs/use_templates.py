"""The parameter uses of a recorded backward, filled with the tensors of each replay."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..engine.gradients import Gradients
from ..engine.repeated_backward import DATA, Template, template_of
from ..errors import GraphError
from ..grad_sample.parameter_links import link_of
from ..grad_sample.parameter_use import Lazy, Stored
from ..utils.autograd_graph import graph_nodes
from ..utils.pytree import tensors_of
from .recorder import Recorder

LARGEST = 1 << 24  # numbers of per-sample gradients that a replay stores, where Python's step computes some at a time


def store(gradients: Gradients) -> None:
    """Compute the small per-sample gradients that are else computed when asked for within the program."""
    for place, use in enumerate(gradients.uses):
        if type(use) is Lazy and use.batch * use.operand.numel() <= LARGEST:
            gradients.uses[place] = Stored(use.operand, use.per_sample(0, use.batch), use.name)


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
        names = DATA.get(type(use))
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
        rows_of = [getattr(use, name) for name in names]
        for rows in rows_of:
            if {rows.size(0), use.batch, gradients.batch, gradients.records} != {size}:
                raise GraphError(
                    f"{use.name}() has rows of {use.batch} samples, the batch {size}: several rows of each sample "
                    "(rows_per_sample, batch_first=False) are not replayed"
                )
        found.append(template_of(use, len(data)))
        data += rows_of
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
    return all(
        node.name().rpartition("::")[2] in _FIXED and not any(map(recorder.changes, _saved(node)))
        for node in graph_nodes([operand.grad_fn])
    )


def _saved(node: Any) -> list[Tensor]:
    """The tensors that a node of autograd keeps: indices, of which the gradients depend."""
    found = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return tensors_of(found)
