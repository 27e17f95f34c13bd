"""Records a forward and its backward, checks the recording, and replays it without Python."""

from __future__ import annotations

from typing import Any

_RECORDING: list[Any] = []  # the `recorder.Recorder` of the step that is recorded


_MAKING: list[object] = []


def making() -> bool:
    """Whether a recording is made now: forwards are run for it that are not the user's."""
    return bool(_MAKING)


def recording() -> bool:
    """Whether a step is recorded now: what Python keeps from step to step would be replayed as it is."""
    return bool(_RECORDING)
