"""A bounded cache that is cleared when full."""

from __future__ import annotations

from typing import Any

SIZE = 20_000  # a forward of a large model makes some hundred


class Answers(dict[Any, Any]):
    """Answers by key. A full store is emptied: what repeats comes back within a step, what does not must not grow."""

    def __setitem__(self, key: Any, answer: Any) -> None:
        if len(self) >= SIZE:
            self.clear()
        super().__setitem__(key, answer)
