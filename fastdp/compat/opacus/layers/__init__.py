"""Layers by the names and paths of opacus.layers. fastdp needs none of them: torch's own are exact as they are."""

from .dp_multihead_attention import DPMultiheadAttention, SequenceBias
from .dp_rnn import DPGRU, DPLSTM, DPRNN
from .param_rename import RenameParamsMixin

__all__ = ["DPGRU", "DPLSTM", "DPMultiheadAttention", "DPRNN", "RenameParamsMixin", "SequenceBias"]
