"""The one name of torch that is not public and that this room uses, with what happens where a torch lacks it."""

from __future__ import annotations

from typing import Any


def collectives_so_far(group: Any) -> int | None:
    """How many collectives this process has begun in a process group; None if this torch, or backend, does not say."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None
