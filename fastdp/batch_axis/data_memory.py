"""Storages known to hold batch data, and tensors that came to them unseen.

torch makes tensors over a memory that exists already in ways that no function mode sees: `nn.Parameter(h)`,
`Tensor._make_subclass`, `set_`, `from_dlpack`, `from_numpy`; and `.data` and `detach()` share memory without being
views in autograd's books. So the memory itself (torch's storage, one Python object for as long as the memory lives)
notes that it holds data, and every tensor that a call takes is asked whose memory it lies in (`memory.look`):

- one without a layout in memory that holds data is data;
- one with a layout whose memory is another, or was written to with other samples through an alias, is mixed.
"""

from __future__ import annotations

from typing import Any
from weakref import ref as _ref

import torch
from torch import Tensor

from .tensor_notes import FOREIGN, HELD, OF_MODEL

_PRUNE = 1_000
LABELS = "labels"  # in the place of the moment, of memory that a user's labels lie in
_GIVEN = (None, LABELS)


# What one memory holds: the layout of a tensor over it, the moment of its batch, and, where it was written to, the
# shape, strides and offset of this tensor. A list (small, as it is made for every result), the same object for all who
# know this state of the memory.
HeldBytes = list[Any]


def is_over(held: HeldBytes, tensor: Tensor) -> bool:
    """Whether the tensor is known for the noted one's twin."""
    return held[2:] == [tensor.shape, tensor.stride(), tensor.storage_offset()]


class _Holding:
    """All memory that holds data, weakly; `turn` counts how often memory of constants became data."""

    def __init__(self) -> None:
        self.storages: list[_ref[torch.UntypedStorage]] = []
        self.prune, self.turn = _PRUNE, 0

    def drop_gone(self) -> None:
        """Forget memory that is gone."""
        self.storages = [known for known in self.storages if known() is not None]
        self.prune = max(_PRUNE, 2 * len(self.storages))

    def over(self, storage: torch.UntypedStorage) -> HeldBytes | None:
        """What is noted of other memory at the same addresses (of numpy, of dlpack)."""
        start = storage.data_ptr()
        for known in self.storages:
            other = known()
            if other is None or other is storage or other.device != storage.device:
                continue
            begin = other.data_ptr()
            held: HeldBytes | None = getattr(other, HELD, None)
            if held is not None and begin < start + storage.nbytes() and start < begin + other.nbytes():
                setattr(other, HELD, held[:2])  # what is written here, nobody can tell the tensors there
                return held
        return None


HOLDING = _Holding()


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's memory; None for tensors without one (sparse)."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def hold(tensor: Tensor, layout: Any, view: bool, moment: Any) -> None:
    """The tensor was given a layout: its memory holds data, of this moment's batch (None: of inputs; LABELS)."""
    try:
        storage: Any = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return
    held: HeldBytes | None = getattr(storage, HELD, None)
    if held is None:
        held = storage._fastdp_held = [layout, moment]
        HOLDING.storages.append(_ref(storage))
        if len(HOLDING.storages) > HOLDING.prune:
            HOLDING.drop_gone()
    elif (
        held[1] is not moment
        and held[1] is not None
        or (held[0] is not layout and (not view or held[0].batch != layout.batch))
    ):
        held[:] = [layout, held[1] if held[1] in _GIVEN else moment]  # what a user made stays that
    tensor.__dict__[HELD] = held


def release(tensor: Tensor) -> None:
    """What was taken for data is none after all: forget it of the tensor's memory."""
    storage = storage_of(tensor)
    if storage is not None and getattr(storage, HELD, None) is tensor.__dict__.get(HELD):
        setattr(storage, HELD, None)


def written(tensor: Tensor, layout: Any, before: Any) -> None:
    """A tensor (no view) was written to, and holds other samples' numbers now than before: what was known of its memory
    through other tensors is past. before: its layout then, None for a constant."""
    storage = storage_of(tensor)
    if storage is None or tensor.is_nested:
        return
    if before is None:
        HOLDING.turn += 1
    known: HeldBytes | None = getattr(storage, HELD, None)
    held = [layout, known and known[1], tensor.shape, tensor.stride(), tensor.storage_offset()]
    setattr(storage, HELD, held)
    tensor.__dict__[HELD] = held


def was_filled(since: int = 0) -> bool:
    """Whether memory of constants ever became data (since that turn)."""
    return HOLDING.turn > since


def note_parameter(parameter: Tensor) -> None:
    """What lies in this memory (weights, copies and averages of them) is no record's."""
    storage = storage_of(parameter)
    if storage is not None:
        setattr(storage, OF_MODEL, True)


def is_of_model(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter, or shares its memory (`detach()`, `.data`), or was made of such ones."""
    return getattr(storage_of(tensor), OF_MODEL, False)


def is_new_foreign(tensor: Tensor) -> bool:
    """Whether the tensor lies in memory from outside of torch that no call took yet."""
    storage = storage_of(tensor)
    return storage is not None and not storage.resizable() and getattr(storage, FOREIGN, None) is None


def foreign(storage: torch.UntypedStorage) -> HeldBytes | None:
    """Of memory that came from outside of torch (numpy, dlpack): what is known of the same addresses. Searched once,
    and again where constants became data since."""
    if storage.resizable() or getattr(storage, FOREIGN, -1) == HOLDING.turn:
        return None
    found = HOLDING.over(storage)
    if found is None:
        setattr(storage, FOREIGN, HOLDING.turn)
    return found
