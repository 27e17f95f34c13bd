"""Per-sample gradients of one layer by Opacus's own functions, for who calls them: fastdp does not."""

from opacus.grad_sample.dp_multihead_attention import (
    compute_sequence_bias_grad_sample,
)

__all__ = [
    "compute_sequence_bias_grad_sample",
]
