"""Every attribute that fastdp sets on tensors and storages, what invalidates it, and which storages hold batch data.

A note with a version is valid while the tensor's `_version` is that one: what is written to the tensor since ends it.
Notes lie in the tensor's `__dict__`, so they are lost where torch makes another tensor of the same memory; what must
outlive that lies on the storage (`HELD`, `OF_MODEL`, `FOREIGN`). None of them is pickled with a meaning.

torch makes tensors over a memory that exists already in ways that no function mode sees: `nn.Parameter(h)`,
`Tensor._make_subclass`, `set_`, `from_dlpack`, `from_numpy`; and `.data` and `detach()` share memory without being
views in autograd's books. So the memory itself (torch's storage, one Python object for as long as the memory lives)
notes that it holds data, and every tensor that a call takes is asked whose memory it lies in (`aliasing.look`).
"""

from __future__ import annotations

import math
from typing import Any
from weakref import ref as _ref

import torch
from torch import Tensor

# ------------------------------------------------------------------ on data
LAYOUT = "_fastdp_layout"  # which rows belong to which sample (`batch_axis.layout.Layout`)
MOMENT = "_fastdp_moment"  # of which batch the samples are (`batch_axis.generations.Generation`)
TOKEN = "_fastdp_token"  # of that moment: its end tells that nothing of the batch is left
TAGGED_AT = "_fastdp_tagged_at"  # the version at which a view was tagged
RELAID = "_fastdp_relaid"  # the version at which a memory got other rows: what its views said before is past
INPUT = "_fastdp_input"  # one of the model's arguments: its rows may be packed in ways that shapes do not tell
LOADED = "_fastdp_loaded"  # as a loader has handed it out, followed or not: its batch's records, the loader's id or 0
LISTED = "_fastdp_listed"  # of a list that a loader handed out, with an item for each sample
ROWS = "_fastdp_rows"  # what the user said of its rows (`fastdp.mark_rows`)
PRESUMED = "_fastdp_presumed"  # taken for labels: in which batch, and the version then
LABELS = "_fastdp_labels"  # made of labels alone: of which, and in which order (`batch_axis.labels.Origin`)
SEEN_WITH = "_fastdp_seen_with"  # the size of the batch beside which it was first met
CUT = "_fastdp_cut"  # parts were cut out of it: the number of these parts, and the version
WRITTEN = "_fastdp_written"  # single samples' rows were written to it: the number of this memory
LONGEST = "_fastdp_longest"  # padded to the longest sample: the dimension of that size
COUNTED = "_fastdp_counted"  # one of its sizes, which the data of several samples made
GROUPS = "_fastdp_groups"  # the group of each row, the layout of these rows, the version of the memory
SHARE = "_fastdp_share"  # terms of a loss, each divided by the number of samples: the version, and if that is certain
TERMS = "_fastdp_terms"  # on a total: what it was summed from, with that tensor's layout and version
PARTS = "_fastdp_parts"  # rows of parameters alone, joined with rows of data (`engine.parameter_slices`)
SPREAD = "_fastdp_spread"  # holds the terms of a sum elsewhere (`batch_axis.reduction_ops.Spread`)
GATHERED = "_fastdp_gathered"  # a parameter's rows, one for each row of data (`grad_sample.routed_rows`)

# ------------------------------------------------------------------ on constants
MADE = "_fastdp_made"  # how it was made within sight, and during which batch's forward or loss
ALIKE = "_fastdp_alike"  # a dimension, the version, and whether the rows along it are alike
KNOWN = "_fastdp_known"  # its numbers, of sizes alone (`batch_axis.host_values`), in the batch and version noted there
FILLED = "_fastdp_filled"  # made by ones_like or zeros_like of whole data, whose layout it has: the number, the version
SHAPED = "_fastdp_shaped"  # the layout of the data whose shape it took
NUMBER = "_fastdp_number"  # made of one number: that number
NUMBER_OF = "_fastdp_number_of"  # of which size such a number was made
APART = "_fastdp_apart"  # shares memory with data and is none: a view of an input beside the data
WRITTEN_DOWN = "_fastdp_written_down"  # made of numbers that stand in the code: a constant, no labels
OF_READ = "_fastdp_of_read"  # made of numbers of Python, after it had read several samples
UNTRACKED = "_fastdp_constant"  # requires a gradient, but is of no sample and of no tracked parameter

# ------------------------------------------------------------------ on what is made of parameters
LINK = "_fastdp_link"  # of which parameters, and how (`grad_sample.parameter_links.Link`)
REPEATED = "_fastdp_repeated"  # has a copy for every sample (`grad_sample.repeated_parameters.Repeated`)
OUTSIDE = (
    "_fastdp_outside"  # a parameter: `linear_cross_entropy` gave it a gradient outside of any forward that is seen
)

# ------------------------------------------------------------------ on storages
HELD = "_fastdp_held"  # (and on each tensor with a layout) what the memory held when it was tagged
OF_MODEL = "_fastdp_of_model"  # the memory of a parameter, or of what was computed of parameters alone
OF_STATE = "_fastdp_of_state"  # by which forward without gradients it was found to hold no data
FOREIGN = "_fastdp_foreign"  # memory that torch did not make: when it was compared with the data's

# ------------------------------------------------------------------ storages that hold data

_PRUNE = 1_000
OF_LABELS = "labels"  # in the place of the moment, of memory that a user's labels lie in
_GIVEN = (None, OF_LABELS)


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
            try:
                if other is None or other is storage or other.device != storage.device:
                    continue
                begin = other.data_ptr()
            except RuntimeError:  # of torch 2.9, a storage may outlive its memory
                continue
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
    """The tensor was given a layout: its memory holds data, of this moment's batch (None: of inputs; OF_LABELS)."""
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
        or (held[0] is not layout and (not (view or _is_part(tensor, storage)) or held[0].batch != layout.batch))
    ):
        held[:] = [layout, held[1] if held[1] in _GIVEN else moment]  # what a user made stays that
    tensor.__dict__[HELD] = held


def _is_part(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a tensor's memory is more than its own: a view's, perhaps by detach()."""
    return tensor.numel() * tensor.element_size() < storage.nbytes()


def version_of(tensor: Tensor) -> float:
    """How often a tensor was written to. Of those of inference mode nobody counts it: no note on them is valid."""
    return math.nan if tensor.is_inference() else tensor._version


def release(tensor: Tensor) -> None:
    """What was taken for data is none after all: forget it of the tensor's memory."""
    storage = storage_of(tensor)
    if storage is not None and getattr(storage, HELD, None) is tensor.__dict__.get(HELD):
        setattr(storage, HELD, None)


def filled(tensor: Tensor, writes: int = 0) -> bool:
    """Whether a tensor is one of ones_like or zeros_like that was not written to. writes: but for these, just now."""
    note = tensor.__dict__.get(FILLED)
    return note is not None and note[1] == version_of(tensor) - writes


def left_as_constant(tensor: Tensor) -> bool:
    """Takes the layout off such a tensor, once its batch is over. Its numbers say whether data was written to it."""
    if not filled(tensor) or not bool((tensor == tensor.__dict__[FILLED][0]).all()):
        return False
    release(tensor)
    setattr(storage_of(tensor), FILLED, True)  # no label, whatever other tensor lies there
    for note in (LAYOUT, HELD, FILLED):
        tensor.__dict__.pop(note, None)
    return True


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
