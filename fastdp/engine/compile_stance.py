"""While a pass is on, functions that were compiled on their own run as plain Python, where the capture mode sees them.

Torch would trace the mode itself into their code. What Dynamo does is one setting for the whole process (torch's
"stance"), so passes of several threads share it; it is the user's own again when the last of them ends.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from ..layouts.code import FASTDP

_DYNAMO = "torch._dynamo.eval_frame"  # imported by torch.compile, as it takes seconds: without it nothing is compiled


_COMPILED = "/torch/_dynamo/eval_frame.py"


def _is_call(name: str) -> bool:
    """Whether code of this file only stands between a model's forward and who called it."""
    return name.startswith(FASTDP) or name.endswith(("/torch/nn/modules/module.py", _COMPILED))


class _Plainly:
    """Counts who wants compiled functions to run as plain Python."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage may end another one
        self._wanted = 0
        self._users: Any = None

    def begin(self) -> None:
        """From here on."""
        with self._lock:
            self._wanted += 1
            if self._wanted == 1 and (dynamo := sys.modules.get(_DYNAMO)) is not None:
                try:  # what torch.compiler.set_stance does, at a tenth of its time
                    self._users = dynamo._set_stance(dynamo.DynamoStance("force_eager"))
                except RuntimeError:  # compiled code called the model
                    self._users = None

    def possible(self) -> bool:
        """Whether no compiled function runs that called the model (the model itself may be compiled)."""
        if sys.modules.get(_DYNAMO) is None:
            return True
        frame: Any = sys._getframe(1)
        while frame is not None and _is_call(frame.f_code.co_filename):
            frame = frame.f_back
        while frame is not None and not frame.f_code.co_filename.endswith(_COMPILED):
            frame = frame.f_back
        return frame is None

    def end(self) -> None:
        """No longer."""
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0 and self._users is not None:
                sys.modules[_DYNAMO]._set_stance(self._users)
                self._users = None


PLAINLY = _Plainly()
