"""A forward and its backward as a program without Python: recorded once, checked, and replayed."""

from __future__ import annotations

_RECORDING: list[object] = []


def recording() -> bool:
    """Whether a step is recorded now: what Python keeps from step to step would be replayed as it is."""
    return bool(_RECORDING)
