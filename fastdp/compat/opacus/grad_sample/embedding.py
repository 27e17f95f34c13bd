"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.embedding import (
    compute_embedding_grad_sample,
    compute_embedding_norm_sample,
    compute_embeddingbag_gradsampler,
)

__all__ = ["compute_embedding_grad_sample", "compute_embedding_norm_sample", "compute_embeddingbag_gradsampler"]
