"""Multi-head attention and other composites: seen through, call by call."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from ..errors import SampleMixingError
from ..recorder import Recorder
from .base import rule, sample_layout
from .generic import python_body


@rule(F.multi_head_attention_forward)
def capture_attention(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nn.MultiheadAttention: queries, keys and values are [T,B,E] here; the projections are linear uses."""
    query = args[0] if args else kwargs["query"]
    if recorder.batch > 1 and query.dim() == 3 and not recorder.is_parameter(query) and recorder.is_data(query):
        layout = sample_layout(recorder, query, "multi_head_attention_forward")
        if layout.dim != 1:
            raise SampleMixingError(
                f"{recorder.place('multi_head_attention_forward')}: attends from one sample to another, as its "
                "input has the samples in the sequence's place. Build the module with batch_first=True."
            )
    body = python_body(func)
    assert body is not None
    return recorder.traced(body, *args, **kwargs)


# seen through also where no parameter of theirs is trained: their inner dimensions would hide attention from one
# sample to another
COMPOSITES = {F.multi_head_attention_forward: capture_attention}
