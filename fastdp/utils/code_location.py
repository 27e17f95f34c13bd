"""Tells torch's, fastdp's and the user's frames on the stack apart, by the folder of their file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import FrameType

import torch

from .. import errors

TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
FASTDP = os.path.join(os.path.dirname(os.path.abspath(errors.__file__)), "")


def place_of(frame: FrameType | None) -> str:
    """File and line, for messages; '' of no frame."""
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those around it, outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, that is neither torch's nor fastdp's."""
    return next((each for each in frames(frame) if not each.f_code.co_filename.startswith((TORCH, FASTDP))), None)
