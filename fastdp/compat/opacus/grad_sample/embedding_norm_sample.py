"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.embedding_norm_sample import compute_embedding_norm_sample

__all__ = ["compute_embedding_norm_sample"]
