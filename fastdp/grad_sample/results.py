"""Results of captured functions: tensors in nested containers, perhaps with None among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import UncapturedUseError


def result_tensors(out: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return [out] if isinstance(out, Tensor) else [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


class Nest:
    """The form of a result that is no single tensor: where its tensors stand among its leaves.

    Raises UncapturedUseError where it has none, or holds numbers: these would not be followed by sample.
    """

    def __init__(self, out: Any, place: str) -> None:
        self.leaves, self.form = tree_flatten(tuple(out) if type(out).__module__ == "torch.return_types" else out)
        self.kind = type(out)
        self.places = [n for n, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        odd = [leaf for leaf in self.leaves if not isinstance(leaf, Tensor | str | None)]
        if odd or not self.places:
            what = f"a {type(odd[0]).__name__} among its results" if odd else "no tensor"
            raise UncapturedUseError(
                f"{place} returns {what}: only tensors (and None) can be followed by sample. Return tensors, or "
                "register the functions within that take the parameters"
            )
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The result with these tensors."""
        out = tree_unflatten(self._placed(tensors, self.leaves), self.form)
        return self.kind(out) if self.kind.__module__ == "torch.return_types" else out

    def aligned(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """One value for each leaf: of the tensors these, None of the others."""
        return tuple(self._placed(values, [None] * len(self.leaves)))

    def _placed(self, values: Sequence[Any], among: Sequence[Any]) -> list[Any]:
        found = list(among)
        for place, value in zip(self.places, values, strict=True):
            found[place] = value
        return found
