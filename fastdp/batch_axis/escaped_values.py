"""Detects data that leaves torch: a storage, a numpy array on the same memory, Python numbers.

What is written to such memory, nothing sees; so what it held is kept, and compared whenever the memory is met again,
and at the end of the pass. What is made of numbers that Python has read is of no known sample: it must not meet data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SampleMixingError
from . import operator_table
from .calls import Call
from .data_memory import is_new_foreign, storage_of
from .layout import Layout, tag, tag_of

T = torch.Tensor
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
                    "which samples it holds. Write to a copy of it (clone())."
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
