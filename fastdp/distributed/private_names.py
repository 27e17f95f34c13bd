"""The names of torch that are not public and that this room uses, with what happens where a torch lacks them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch


def collectives_so_far(group: Any) -> int | None:
    """How many collectives this process has begun in a process group; None if this torch, or backend, does not say."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


def timeout_of(group: Any) -> timedelta | None:
    """How long collectives of a process group wait for others; None if this torch, or backend, does not say."""
    for kind in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta):
            return found
    return None
