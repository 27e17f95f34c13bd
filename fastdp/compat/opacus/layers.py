"""Layers of Opacus. fastdp needs none of them: torch's own are exact as they are.

`DPLSTM`, `DPGRU` and `DPRNN` are torch's layers with Opacus's arguments. Opacus computes them one time step at a time
from linear layers; its dropout also falls on the recurrent state and on the last layer's output, and the last state of
a packed sequence is float32 whatever the layer is. Names, shapes and state dicts are the same.
"""

from __future__ import annotations

from typing import Any

from opacus.layers import RenameParamsMixin, dp_multihead_attention
from opacus.layers.dp_multihead_attention import SequenceBias
from opacus.layers.dp_rnn import (
    RNN_CELL_TYPES,
    DPGRUCell,
    DPLSTMCell,
    DPRNNBase,
    DPRNNCell,
    DPRNNCellBase,
    RNNLinear,
    apply_permutation,
)
from torch import Tensor, nn

__path__: list[str] = []  # see aliases.py
__all__ = [
    "DPGRU",
    "DPGRUCell",
    "DPLSTM",
    "DPLSTMCell",
    "DPMultiheadAttention",
    "DPRNN",
    "DPRNNBase",
    "DPRNNCell",
    "DPRNNCellBase",
    "RNNLinear",
    "RNN_CELL_TYPES",
    "RenameParamsMixin",
    "SequenceBias",
    "apply_permutation",
]


class DPLSTM(nn.LSTM):
    """torch.nn.LSTM, whose arguments are those of opacus.layers.DPLSTM."""


class DPGRU(nn.GRU):
    """torch.nn.GRU, whose arguments are those of opacus.layers.DPGRU."""


class DPRNN(nn.RNN):
    """torch.nn.RNN with the argument order of opacus.layers.DPRNN."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        nonlinearity: str = "tanh",
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, proj_size
        )


class DPMultiheadAttention(dp_multihead_attention.DPMultiheadAttention):  # type: ignore[misc]
    """opacus.layers.DPMultiheadAttention, equal to torch.nn.MultiheadAttention also where batch_first=True.

    Opacus's own lets heads and positions change places there (more than one head), and refuses masks unless there are
    as many samples as positions.
    """

    batch_first: bool

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """query, key, value [B, T, E] if batch_first, else [T, B, E]; -> output of query's shape, weights [B, T, S]."""
        if not self.batch_first:
            return super().forward(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        self.batch_first = False
        try:
            q, k, v = (x.transpose(0, 1) if x.dim() == 3 else x for x in (query, key, value))
            output, weights = super().forward(q, k, v, *args, **kwargs)
        finally:
            self.batch_first = True
        return output.transpose(0, 1), weights
