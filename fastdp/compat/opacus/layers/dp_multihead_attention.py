"""Attention from linear layers: Opacus's own class, right for batch_first too."""

from __future__ import annotations

from typing import Any

from opacus.layers import dp_multihead_attention as theirs
from opacus.layers.dp_multihead_attention import SequenceBias
from torch import Tensor

__all__ = ["DPMultiheadAttention", "SequenceBias"]


class DPMultiheadAttention(theirs.DPMultiheadAttention):  # type: ignore[misc]
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

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Also torch.nn.MultiheadAttention's; the dictionary given stays as it is."""
        return super().load_state_dict(dict(state_dict), *args, **kwargs)
