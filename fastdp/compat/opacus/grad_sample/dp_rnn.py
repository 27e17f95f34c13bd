"""Per-sample gradients of one layer by Opacus's own functions, for who calls them: fastdp does not."""

from opacus.grad_sample.dp_rnn import (
    compute_rnn_linear_grad_sample,
)

__all__ = [
    "compute_rnn_linear_grad_sample",
]
