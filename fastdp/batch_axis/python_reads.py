"""Detects values of several samples that leave torch: as Python numbers (`.item()`, `bool(t)`), arrays, or memory.

What Python does with it cannot be seen. Mostly it is harmless (a mask without effect is left out, rows are padded to
the longest sample); but a branch or a size may also change what is computed of every sample.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BatchReadWarning, SampleMixingError
from ..utils.code_location import FASTDP, TORCH, frames, place_of
from . import operator_table
from .calls import Call, Tags, bounds_of
from .layout import Layout, tag, tag_of
from .operator_table import COMPARING, READING
from .own_numbers import OWN_NUMBERS
from .tensor_notes import is_new_foreign, storage_of

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
        for layout in found:
            if not layout.mixed:
                OWN_NUMBERS.of(layout, call.out)
        return next((layout.mixed for layout in found if layout.mixed), "")
    if all(layout is not None and layout.mixed for _, layout in tags):
        return ""
    sizes = (found.mixed for t, found in call.inputs() if found.mixed and not t.dim() and not t.is_floating_point())
    return next(sizes, "") or _bound(call)


def _bound(call: Call) -> str:
    """Of x[:, :longest]."""
    if call.func is not T.__getitem__:
        return ""
    found = [call.layout(bound) for bound in bounds_of(call.args[1])]
    return next((layout.mixed for layout in found if layout is not None and layout.mixed), "")


_VALIDATING = ("__init__", "_validate_sample")  # of distributions: they raise, or do nothing


def reading_line() -> str:
    """File and line of the code that reads, or '' where torch checks an assertion."""
    for frame in frames(sys._getframe(1)):
        name = frame.f_code.co_filename
        if name.startswith(TORCH) and frame.f_code.co_name.startswith("_check"):
            return ""
        if name.startswith(os.path.join(TORCH, "distributions")) and frame.f_code.co_name in _VALIDATING:
            return ""
        if not name.startswith((TORCH, FASTDP)):
            return place_of(frame)
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


_GRAD = T.grad.__get__  # type: ignore[union-attr]


GIVING = operator_table.GIVING_MEMORY | operator_table.GIVING_NUMBERS | {T.backward}


class _Given:
    """A memory that was given away, and what it held then."""

    def __init__(self, func: Any, tensor: Tensor) -> None:
        self.name = operator_table.function_name(func)
        self.tensor = tensor.detach()
        self.storage = storage_of(tensor)
        self.before = self.tensor.clone()

    def is_changed(self) -> bool:
        now, before = self.tensor, self.before
        same = now.shape == before.shape and bool(((now == before) | ((now != now) & (before != before))).all())
        return not same


class EscapedValues:
    """What left torch in one pass."""

    def __init__(self, batch: int, model: nn.Module) -> None:
        self.batch, self.model = batch, model
        self.memory: list[_Given] = []
        self.integers: list[tuple[Tensor, Layout]] = []  # read in bulk, as lengths and ids are
        self.read = ""  # what read numbers of samples, floating ones
        self.backward = ""  # a backward within the forward, after which .grad may be data
        self.anything = False  # whether there is any of these

    def __bool__(self) -> bool:
        return self.anything

    def after(self, call: Call) -> str:
        """A call was made: it may give memory or numbers away, or write to such memory. Returns what is to be warned
        of, or ''."""
        given = self._give(call) if call.func in GIVING and call.args and self.batch > 1 else ""
        self.anything = bool(self.memory or self.read or self.integers or self.backward)
        if self.memory:
            self._renew(call.tensors)
        return given

    def _give(self, call: Call) -> str:
        tensor = call.args[0]
        layout = call.layout(tensor)
        if call.func is T.backward and layout is not None:
            self.backward = call.mixed("is called within the forward: gradients made of several samples")
        if call.func in operator_table.GIVING_MEMORY and tensor.layout == torch.strided:
            self.memory.append(_Given(call.func, tensor))
        if layout is None or call.func not in operator_table.GIVING_NUMBERS:
            return ""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            if tensor.dim() and not layout.mixed:
                self.integers.append((tensor.detach().clone(), layout))
            return ""
        self.read = self.read or call.mixed("gives numbers of samples to Python")
        return "" if layout.mixed else self.read

    def check(self, tensors: Sequence[Tensor] | None) -> None:
        """Raises SampleMixingError where memory of these tensors (None: any) was written to out of sight."""
        if not self.memory:
            return
        storages = None if tensors is None else [storage_of(tensor) for tensor in tensors]
        for given in self.memory:
            mine = storages is None or any(storage is given.storage for storage in storages)
            if mine and given.is_changed():
                raise SampleMixingError(
                    f"the memory that {given.name}() gave out of torch was written to there: fastdp no longer knows "
                    "which samples it holds. Write to a copy of it (x.numpy().copy())."
                )

    def _renew(self, tensors: Sequence[Tensor]) -> None:
        storages = [storage_of(tensor) for tensor in tensors]
        for given in self.memory:
            if any(storage is given.storage for storage in storages):
                given.before = given.tensor.clone()

    def meet(self, tensor: Tensor) -> None:
        """A constant over memory from outside of torch is met: after numbers left, it may be made of these."""
        if not self.read or not tensor.is_floating_point() or not is_new_foreign(tensor):
            return
        if tensor.requires_grad and not tensor.is_leaf:  # of a torch.autograd.Function: taken on sight, and warned of
            return
        if any(tensor is own for owns in (self.model.parameters(), self.model.buffers()) for own in owns):
            return
        tag(tensor, Layout(self.batch, mixed=f"{self.read}, of which a tensor was made, perhaps"))

    def made(self, call: Call) -> None:
        """A call without data has made a tensor, of numbers of Python perhaps."""
        func, out = call.func, call.out
        if not self or not isinstance(out, Tensor) or tag_of(out, self.batch) is not None:
            return
        if func == _GRAD and self.backward:
            tag(out, Layout(self.batch, mixed=self.backward))
        if func not in operator_table.OF_PYTHONS_NUMBERS or not out.dim():
            return
        if out.is_floating_point() or out.is_complex():
            if self.read:
                tag(out, Layout(self.batch, mixed=f"{self.read}, of which a tensor was made, perhaps"))
            return
        for numbers, layout in self.integers:
            if numbers.shape == out.shape and bool((numbers.to(out.device) == out).all()):
                tag(out, layout)
