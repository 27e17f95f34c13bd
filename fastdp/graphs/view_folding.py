"""Removes views of views from a recorded program."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .recorder import Operation, Slot

aten = torch.ops.aten
_FOLDING = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default,
}  # fmt: skip
SEEING = {
    aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int,
    aten.expand.default,
}  # fmt: skip


def without_detours(
    operations: list[Operation], contiguous: dict[int, tuple[int, ...]], apart: Collection[int] = ()
) -> tuple[list[Operation], dict[int, int]]:
    """The same operations, where each view takes the tensor that a chain of views began with; and which slots are
    others by another name. What is not needed any more stays in the list.

    contiguous: the shapes of the slots whose numbers lie one after the other; apart: slots that are to stay what they
    are, with all that is made of them.
    """
    renamed: dict[int, int] = {}
    begin: dict[int, int] = {}  # of a chain of views, by its result
    turned: dict[int, int] = {}  # transposed matrices, by their result
    seen: dict[tuple[Any, ...], int] = {}  # the same view again

    def own(leaf: Any) -> Any:
        return Slot(renamed[leaf.number]) if isinstance(leaf, Slot) and leaf.number in renamed else leaf

    found = []
    for operation in operations:
        args, kwargs = tree_map(own, (operation.args, operation.kwargs))
        out = operation.out
        if isinstance(out, Slot) and out.number not in apart and args and isinstance(args[0], Slot):
            source = args[0].number
            if operation.func in _FOLDING:
                base = begin.get(source, source)
                if base in contiguous and out.number in contiguous:
                    shape = contiguous[out.number]
                    operation = operation._replace(func=aten.view.default)
                    args, begin[out.number] = (Slot(base), list(shape)), base
                    if shape == contiguous[base]:
                        renamed[out.number] = base
            elif operation.func is aten.t.default:
                if source in turned:
                    renamed[out.number] = turned[source]
                turned[out.number] = source
            if operation.func in SEEING and out.number not in renamed:
                first = seen.setdefault((operation.func, repr(args), repr(kwargs)), out.number)
                if first != out.number:
                    renamed[out.number] = first
        found.append(operation._replace(args=args, kwargs=kwargs))
    return found, renamed
