"""Detects values of several samples that leave the graph as Python numbers (`.item()`, `bool(t)`).

What Python does with it cannot be seen. Mostly it is harmless (a mask without effect is left out, rows are padded to
the longest sample); but a branch or a size may also change what is computed of every sample.
"""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BatchReadWarning
from ..utils.code_location import FASTDP, TORCH, place_of
from .batch_slices import OWN_READS
from .calls import Call, Tags
from .operator_table import COMPARING, READING

T = torch.Tensor


def read_of(call: Call, tags: Tags | None) -> str:
    """What a call tells Python, or a size, of several samples together; '' if nothing.

    tags: the layouts of its results, None where it has none.
    """
    if tags is None:
        if call.func in COMPARING and call.inputs():
            return f"{call.mixed()} compares all samples"
        if call.func not in READING:
            return ""
        found = [layout for _, layout in call.inputs()]
        if not OWN_READS and any(not layout.mixed for layout in found):
            OWN_READS.append(True)
        return next((layout.mixed for layout in found if layout.mixed), "")
    if all(layout is not None and layout.mixed for _, layout in tags):
        return ""
    sizes = (found.mixed for t, found in call.inputs() if found.mixed and not t.dim() and not t.is_floating_point())
    return next(sizes, "") or _bound(call)


def _bound(call: Call) -> str:
    """Of x[:, :longest]."""
    if call.func is not T.__getitem__:
        return ""
    items = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    bounds = [bound for item in items if isinstance(item, slice) for bound in (item.start, item.stop)]
    found = [call.layout(bound) for bound in bounds if isinstance(bound, Tensor)]
    return next((layout.mixed for layout in found if layout is not None and layout.mixed), "")


_VALIDATING = ("__init__", "_validate_sample")  # of distributions: they raise, or do nothing


def reading_line() -> str:
    """File and line of the code that reads, or '' where torch checks an assertion."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(TORCH) and frame.f_code.co_name.startswith("_check"):
            return ""
        if name.startswith(os.path.join(TORCH, "distributions")) and frame.f_code.co_name in _VALIDATING:
            return ""
        if not name.startswith((TORCH, FASTDP)):
            return place_of(frame)
        frame = frame.f_back
    return ""


_HARMLESS: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class PythonReads:
    """The places where a model's forwards read numbers made of several samples into Python."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: dict[str, str] = {}  # by line of code, and value of a truth
        self._warned = False

    def note(self, what: str, found: Any, line: str = "") -> None:
        """A read, by the code that called into torch. what: the operation that combined the samples; found: its value.

        A truth is another read than a falsehood: with all samples whole, "is any padded" shows nothing.
        """
        line = line or reading_line()
        if line and isinstance(found, bool):
            line = f"{line}, being {found}"
        if not line or line in self._known:
            return
        self._known[line] = what
        model = self._model()
        if self._warned or (model is not None and line in _HARMLESS.get(model, ())):
            return
        self._warned = True
        warnings.warn(
            f"Python reads a number made of several samples ({line}: {what}). Most often it only chooses a faster way "
            "to the same result (is anything padded?), but fastdp cannot see what is done with it, and clipping does "
            "not bound what it changes for other samples. Run fastdp.verify once, on samples as different as yours are "
            "(padded and not, short and long): if it finds nothing, this warning goes.",
            BatchReadWarning,
            stacklevel=2,
        )

    def lines(self) -> list[str]:
        """`file, line: operation` of every read so far."""
        return [f"{line}: {what}" for line, what in self._known.items()]

    def harmless(self) -> None:
        """Verified: of no read so far need be warned again, for this model."""
        model = self._model()
        if model is not None and self._known:
            _HARMLESS.setdefault(model, set()).update(self._known)
