"""Coordinates from `nonzero()`: which column tells the sample.

Its other columns are positions within a sample, which are that sample's data like any other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import tensor_notes


def mark_coordinates(matrix: Tensor, dim: int) -> None:
    """Note on a matrix [found, dimensions] that the samples lay along dimension `dim`."""
    matrix.__dict__[tensor_notes.COLUMN] = (dim, matrix._version)


def keep_coordinates(matrix: Tensor, reshaped: Tensor) -> None:
    """Carry the note to a view whose last dimension is still that of the columns."""
    note = matrix.__dict__.get(tensor_notes.COLUMN)
    if note is not None and note[1] == matrix._version and reshaped.shape[-1:] == matrix.shape[-1:]:
        reshaped.__dict__[tensor_notes.COLUMN] = (note[0], reshaped._version)


def is_position_within(matrix: Tensor, index: tuple[Any, ...]) -> bool:
    """Whether the index picks one column, and not the samples'."""
    note = matrix.__dict__.get(tensor_notes.COLUMN)
    if note is None or note[1] != matrix._version or not index or type(index[-1]) is not int:
        return False
    whole = all(item is Ellipsis or isinstance(item, int | slice) for item in index)
    spans = any(item is Ellipsis for item in index) or len(index) == matrix.dim()
    return whole and spans and index[-1] % matrix.size(-1) != note[0]
