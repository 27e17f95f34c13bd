"""Where the model's Python reads statistics of the batch: a warning, once, unless `verify` has found them harmless."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn

from ..errors import BatchReadWarning
from ..layouts.reads import reading_line

_HARMLESS: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class Reads:
    """The places where a model's forwards read numbers made of several samples into Python."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: dict[str, str] = {}  # by line of code, and value of a truth
        self._warned = False

    def note(self, what: str, found: Any) -> None:
        """A read, by the code that called into torch. what: the operation that combined the samples; found: its value.

        A truth is another read than a falsehood: with all samples whole, "is any padded" shows nothing.
        """
        line = reading_line()
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
