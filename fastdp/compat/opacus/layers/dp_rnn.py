"""Recurrent layers with Opacus's signatures, which are torch's own layers: fastdp's engine is exact on these.

Opacus computes them time step by time step from linear layers, so that its hooks see every product; there dropout
also falls on the state that is handed from one time step to the next and on the last layer's output, and the final
state of a packed sequence is float32 whatever the layer is. Names, shapes and state dicts are the same.
"""

from __future__ import annotations

from typing import Any

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
from torch import nn

__all__ = [
    "DPGRU",
    "DPGRUCell",
    "DPLSTM",
    "DPLSTMCell",
    "DPRNN",
    "DPRNNBase",
    "DPRNNCell",
    "DPRNNCellBase",
    "RNNLinear",
    "RNN_CELL_TYPES",
    "apply_permutation",
]


def _options(num_layers: int, bias: bool, batch_first: bool, dropout: float, bidirectional: bool) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "bias": bias,
        "batch_first": batch_first,
        "dropout": dropout,
        "bidirectional": bidirectional,
    }


class DPRNN(nn.RNN):
    """torch.nn.RNN with the argument order of opacus.layers.DPRNN; NotImplementedError where proj_size is not 0."""

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
        _no_projection(proj_size)
        options = _options(num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__(input_size, hidden_size, nonlinearity=nonlinearity, **options)


class DPGRU(nn.GRU):
    """torch.nn.GRU with the arguments of opacus.layers.DPGRU; NotImplementedError where proj_size is not 0."""

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
    ) -> None:
        _no_projection(proj_size)
        super().__init__(input_size, hidden_size, **_options(num_layers, bias, batch_first, dropout, bidirectional))


class DPLSTM(nn.LSTM):
    """torch.nn.LSTM with the arguments of opacus.layers.DPLSTM, proj_size too."""

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
    ) -> None:
        options = _options(num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__(input_size, hidden_size, proj_size=proj_size, **options)


def _no_projection(proj_size: int) -> None:
    if proj_size:
        raise NotImplementedError("proj_size: only LSTMs have projections")
