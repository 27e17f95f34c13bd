"""nn.GRU and nn.LSTM, which Opacus replaces: what fixers of both do."""

from __future__ import annotations

from torch import nn

from ..layers import DPGRU, DPLSTM


def replacement(module: nn.RNNBase, kind: type[DPGRU] | type[DPLSTM]) -> DPGRU | DPLSTM:
    """A layer of that kind with the options and weights of torch's own."""
    new = kind(
        input_size=module.input_size,
        hidden_size=module.hidden_size,
        num_layers=module.num_layers,
        bias=module.bias,
        batch_first=module.batch_first,
        dropout=module.dropout,
        bidirectional=module.bidirectional,
        proj_size=module.proj_size,
    )
    new.load_state_dict(module.state_dict())
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(module.get_parameter(name).requires_grad)
    return new
