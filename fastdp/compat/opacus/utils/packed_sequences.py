"""Packed sequences: Opacus's own."""

from opacus.utils.packed_sequences import (
    _gen_packed_data,
    compute_seq_lengths,
)

__all__ = [
    "_gen_packed_data",
    "compute_seq_lengths",
]
