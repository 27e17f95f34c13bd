"""Per-sample gradients of one layer by Opacus's own functions, for who calls them: fastdp does not."""

from opacus.grad_sample.embedding import (
    compute_embedding_grad_sample,
    compute_embedding_norm_sample,
    compute_embeddingbag_gradsampler,
)

__all__ = [
    "compute_embedding_grad_sample",
    "compute_embedding_norm_sample",
    "compute_embeddingbag_gradsampler",
]
