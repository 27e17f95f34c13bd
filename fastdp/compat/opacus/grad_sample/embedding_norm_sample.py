"""Per-sample norms of one layer by Opacus's own functions, for who calls them: fastdp does not."""

from opacus.grad_sample.embedding_norm_sample import (
    compute_embedding_norm_sample,
)

__all__ = [
    "compute_embedding_norm_sample",
]
