"""While a pass is on, functions that were compiled on their own run as plain Python, where the capture mode sees them.

Torch would trace the mode itself into their code. What Dynamo does is one setting for the whole process (torch's
"stance"), so passes of several threads share it; it is the user's own again when the last of them ends.
"""

from __future__ import annotations

import threading

from torch._dynamo import eval_frame

_FORCED = eval_frame.DynamoStance("force_eager")  # what torch.compiler.set_stance makes, at a tenth of its time


class _Plainly:
    """Counts who wants compiled functions to run as plain Python."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._users: eval_frame.DynamoStance | None = None

    def begin(self) -> None:
        """From here on."""
        with self._lock:
            self._wanted += 1
            if self._wanted == 1:
                try:
                    self._users = eval_frame._set_stance(_FORCED)
                except RuntimeError:  # compiled code called the model: its hooks refuse that
                    self._users = None

    def end(self) -> None:
        """No longer."""
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0 and self._users is not None:
                eval_frame._set_stance(self._users)
                self._users = None


PLAINLY = _Plainly()
