"""Detects constants that depend on a sample's place in the batch (`torch.arange(len(x))`).

Which sample stands where must not matter: if one is removed, the others move to other places. So a constant with a
number for each row of the batch must have the same for all of them, or be drawn at random, or come from where fastdp
does not look (what a user made for these very samples). What is suspected is what is made within sight: the numbers of
the places themselves (arange, linspace, eye), parts of tables and of parameters cut by the batch's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..utils.pytree import tensors_in
from . import operator_table
from .calls import Call
from .generations import now
from .host_values import note_known, on_host
from .layout import Layout, layout_on
from .own_numbers import DRAWN, OWN_NUMBERS, cuts_a_row
from .own_places import alike
from .tensor_notes import ALIKE, MADE, version_of

_CONSTANT, _RANDOM = "constant", "random"
_RANDOM_ROWS = "random rows"  # drawn in the loop or the loss, by the number of samples: each has its own
_HEAD = "head"  # the first part of a tensor of unseen origin, or made of that
_TABLE = "table"  # made of the model's own tensors alone: its rows are no samples', until the batch's size cuts them


WHY = (
    "meets the samples with different numbers by their place in the batch (a range, or a part of a table or parameter "
    "cut by the batch's size). If one sample is removed, the others move to other places: use numbers that are the "
    "same for every sample, or chosen by the sample's own data (a mask of lengths: torch.arange(T) < lengths[:, None])"
)


def note_made(call: Call, is_owned: Callable[[Tensor], bool], of_loss: Callable[[bool], bool] | None = None) -> None:
    """Note on the results of a call that carry no samples how they were made.

    is_owned: whether a tensor is a parameter or buffer of the model, which has no rows of samples; of_loss: the call
    comes outside of the forward, where the first rows of a tensor may be the batch's labels, and (asked with True)
    whether a size equal to the batch's is that, by the code that calls.
    """
    name, out = call.name, call.out
    if call.batch > 1:
        note_known(call.func, name, *call.given, out)
    if call.batch <= 1 or (isinstance(out, Tensor) and layout_on(out) is not None):
        return
    results = [*call.results(), *(tensors_in(call.args[:1]) if call.in_place else ())]
    results = [tensor for tensor in results if tensor.dim() and layout_on(tensor) is None]
    if not results:
        return
    given = [tensor for tensor in call.tensors if layout_on(tensor) is None]
    known = {_made(tensor) for tensor in given}

    def is_table(tensor: Tensor) -> bool:
        return (_made(tensor) or (is_owned(tensor) and _TABLE)) == _TABLE

    if name in operator_table.DRAWING or known & {_RANDOM, _RANDOM_ROWS}:
        rows = results[0].size(0) == call.batch and (
            _RANDOM_ROWS in known or (name in operator_table.DRAWING and of_loss is not None and of_loss(True))
        )
        made = _CONSTANT if _is_drawn_again(call) else _RANDOM_ROWS if rows else _RANDOM
    elif name in operator_table.CUTTING_A_TABLE and given and is_table(given[0]):
        made = _CONSTANT
    elif name in operator_table.CUTTING_A_TABLE and given and not of_loss and _is_head(given[0], out):
        made = _HEAD
    elif name in operator_table.NUMBERING or name in operator_table.FILLING or _is_counting(call):
        made = _CONSTANT
    elif (
        not of_loss
        and name in operator_table.LOOKING_UP
        and any(map(is_counted_up, given))
        and not all(map(_made, given))
    ):
        made = _HEAD  # rows of a table of unseen origin, by their numbers
    elif OWN_NUMBERS and _goes_by_reads(call):
        made = ""  # as many of each, perhaps, as Python has read of each sample
    elif name == "__setitem__" and cuts_a_row(call.args[1]) and _goes_by_draws(call):
        made = _RANDOM
    elif _CONSTANT in known or _HEAD in known:
        # together with numbers of unseen origin, which may be the samples' own, they are as good as these
        computes = name in operator_table.COMPUTING or name in operator_table.ELEMENTWISE or name == "outer"
        strange = any(
            not _made(t) and t.dim() and not is_owned(t) and (not computes or _fits(t, call.batch)) for t in given
        )
        made = "" if strange else _HEAD if _HEAD in known else _CONSTANT
    elif given and all(map(is_table, given)):
        made = _TABLE
    else:
        made = ""
    for tensor in results:
        if made:
            tensor.__dict__[MADE] = (made, now().number)
        else:
            tensor.__dict__.pop(MADE, None)


def _goes_by_draws(call: Call) -> bool:
    """Whether drawn numbers say which part of a sample's row of a constant is written to."""
    target, index, value = call.args
    if not any(type(item) is int and size == call.batch for item, size in zip(index, target.shape, strict=False)):
        return False
    drawn = DRAWN.note(target, index, value)
    if drawn is False:
        DRAWN.forget(call.args[0])
    return drawn is True


def _goes_by_reads(call: Call) -> bool:
    """Whether a constant is made as a loop over the samples makes it: mask[i, :n] = 1, or of a row for each."""
    if call.name == "__setitem__":
        return cuts_a_row(call.args[1])
    rows = call.args[0] if call.name in ("cat", "stack", "pad_sequence") and call.args else ()
    return isinstance(rows, tuple | list) and len(rows) == call.batch


def _fits(tensor: Tensor, batch: int) -> bool:
    """Whether a tensor may have numbers for each sample."""
    return any(size >= batch and not size % batch for size in tensor.shape)


def is_counted_up(tensor: Tensor) -> bool:
    """Whether a tensor is an index that counts rows, made in sight."""
    return tensor.dtype == torch.int64 and is_counted(tensor)


def note_counting(tensor: Tensor) -> None:
    """Note on a tensor that it was made of `counts` (an index of Python's)."""
    tensor.__dict__[MADE] = (_CONSTANT, now().number)


def counts(values: Any) -> bool:
    """Whether a list, a range or an array counts rows: 0, 1, 2 ..."""
    if isinstance(values, list | tuple | range) or getattr(values, "ndim", 0) == 1:
        return len(values) > 2 and all(not isinstance(n, Tensor) and n == i for i, n in enumerate(values))
    return False


def _is_counting(call: Call) -> bool:
    return call.name in operator_table.OF_NUMBERS and bool(call.args) and counts(call.args[0])


def _is_head(source: Tensor, out: Any) -> bool:
    """Whether a part of a tensor of unseen origin begins with it: `table[: len(h)]`, of more rows than these."""
    if not isinstance(out, Tensor) or _made(source) or out._base is None or out.numel() >= source.numel():
        return False
    return out.storage_offset() == source.storage_offset()


def _is_drawn_again(call: Call) -> bool:
    """Whether random numbers are the first of a generator that was seeded just now: the same in every forward."""
    (args, kwargs), out = call.given, call.out
    generator = kwargs.get("generator")
    if generator is None or not isinstance(out, Tensor) or call.in_place or out.device.type != "cpu":
        return False
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    return torch.equal(call.func(*args, **{**kwargs, "generator": fresh}), out)


def made_in_sight(tensor: Tensor) -> bool:
    """Whether a constant was made of nothing, by a torch function that was seen."""
    return bool(_made(tensor))


def _made(tensor: Tensor) -> str:
    """How a constant was made, if that was seen during the present batch: what is older may be labels, made by a user
    while a forward waited for its backward."""
    note = tensor.__dict__.get(MADE)
    moment = now()
    return str(note[0]) if note is not None and note[1] in (moment.number, moment.before) else ""


def is_random(tensor: Tensor) -> bool:
    """Whether a constant was drawn at random within sight."""
    return _made(tensor) in (_RANDOM, _RANDOM_ROWS)


def is_drawn_by_sample(tensor: Tensor) -> bool:
    """Whether it was drawn at random within sight, outside of the forward, with rows for each sample."""
    return _made(tensor) == _RANDOM_ROWS


def is_numbered(tensor: Tensor) -> bool:
    """Whether a constant was made within sight, of numbers that are not all the same."""
    return is_fixed(tensor) and tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


def is_fixed(tensor: Tensor) -> bool:
    """Whether a constant was made within sight, and neither drawn at random nor of numbers of unseen origin."""
    return _made(tensor) in (_CONSTANT, _HEAD)


def is_counted(tensor: Tensor) -> bool:
    """The same, and no part of a tensor of unseen origin either: places of rows may be counted there by hand."""
    return _made(tensor) == _CONSTANT


def may_matter(tensor: Tensor, batch: int) -> bool:
    """Whether what a call on data makes of this constant may depend on more than on its shape."""
    return made_in_sight(tensor) and _fits(tensor, batch)


def by_place(tensor: Tensor, dim: int, layout: Layout) -> bool:
    """Whether a constant has, along this dimension, different numbers for the samples' rows by their place."""
    if not is_fixed(tensor) or layout.batch <= 1 or not 0 <= dim < tensor.dim() or tensor.size(dim) != layout.rows:
        return False
    return not rows_alike(tensor, dim, layout, computed=True)


def rows_alike(tensor: Tensor, dim: int, layout: Layout, computed: bool = False) -> bool:
    """Whether all samples' rows along a dimension hold the same numbers: the first, the second ... of each.

    computed: they were computed, maybe of the same numbers, which a matrix product rounds as it takes them together.
    """
    if tensor.stride(dim) == 0 or tensor.numel() == 0 or layout.alone >= 0:
        return True
    key = (dim, version_of(tensor), layout[1:4])
    note = tensor.__dict__.get(ALIKE)
    if note is not None and note[0] == key and layout.owner is None:
        return bool(note[1])
    numbers = on_host(tensor)  # without waiting for a device
    found = alike((tensor if numbers is None else numbers).detach(), dim, layout, computed)
    tensor.__dict__[ALIKE] = (key, found)
    return found


def was_by_place(before: Tensor, written: Tensor, dim: int, layout: Layout) -> bool:
    """The same of a constant that was written to in place, as it was before."""
    if (
        not is_fixed(written)
        or dim < 0
        or before.shape[dim : dim + 1] != (layout.rows,)
        or layout.batch <= 1
        or layout.alone >= 0
    ):
        return False
    return before.numel() > 0 and not alike(before, dim, layout)
