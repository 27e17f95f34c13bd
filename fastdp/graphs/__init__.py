"""Records a forward and its backward, checks the recording, and replays it without Python."""

from __future__ import annotations

_RECORDING: list[object] = []


def recording() -> bool:
    """Whether a step is recorded now: what Python keeps from step to step would be replayed as it is."""
    return bool(_RECORDING)
