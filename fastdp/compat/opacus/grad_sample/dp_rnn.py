"""Per-sample gradients of one layer as Opacus computes them: its own functions, for who calls them. fastdp's engine does not."""

from opacus.grad_sample.dp_rnn import (
    compute_rnn_linear_grad_sample,
)

__all__ = [
    "compute_rnn_linear_grad_sample",
]
