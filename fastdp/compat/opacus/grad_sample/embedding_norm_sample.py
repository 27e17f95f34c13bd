"""Per-sample norms of one layer as Opacus computes them: its own functions, for who calls them. fastdp's engine does not."""

from opacus.grad_sample.embedding_norm_sample import (
    compute_embedding_norm_sample,
)

__all__ = [
    "compute_embedding_norm_sample",
]
