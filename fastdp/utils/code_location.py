"""Where code is: frames of the stack, by folder torch's, fastdp's or the user's; a file as a module."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

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


def is_running(frame: FrameType) -> bool:
    """Whether what runs in this frame has not ended; if it has, its local variables are given up."""
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


@functools.lru_cache(maxsize=1024)
def is_librarys(name: str) -> bool:
    """Whether a file is torch's or fastdp's."""
    return name.startswith((TORCH, FASTDP))


def users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, that is neither torch's nor fastdp's."""
    while frame is not None and is_librarys(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def module_of_file(path: Path) -> ModuleType:
    """Run a file of Python as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look there
    spec.loader.exec_module(module)
    return module
