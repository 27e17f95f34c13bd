"""What a schedule's state holds beyond Opacus's: how far it has gone, so that a loaded one goes on from there."""

from __future__ import annotations

from typing import Any


class Resumed:
    """Opacus saves the epoch only, and a resumed run begins again at its first value. Here the state also holds the
    factor on that value; the value itself stays the optimizer's own, which may be another one than before."""

    VALUE: str  # of the optimizer, that is scheduled
    _first: Any

    @property
    def optimizer(self) -> Any:
        """Whose value is scheduled."""
        return self.__dict__["optimizer"]

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:  # set by the constructor, before its first step
        self.__dict__["optimizer"], self._first = optimizer, getattr(optimizer, self.VALUE, None)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state = {name: value for name, value in state.items() if name != "_first"}
        return {**state, "factor": getattr(self.optimizer, self.VALUE) / self._first if self._first else 1.0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        if "factor" in state:
            setattr(self.optimizer, self.VALUE, self._first * state.pop("factor"))
        super().load_state_dict(state)  # type: ignore[misc]
