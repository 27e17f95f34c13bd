"""Bytes of what is alive, by what it is for, and what collectives send: of a process whose tensors have no numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GATHERED = "gathered weights"
LARGE = 1 << 18  # elements of a result, from which on the peak may change
NAMES = {
    "_allgather_base_": "all-gather", "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce", "broadcast_": "broadcast",
}  # fmt: skip


class Told(TorchDispatchMode):
    """Who asks for a number is told what holds in a step that goes through."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1
        if func is torch.ops.c10d.reduce_scatter_tensor_coalesced_.default:  # fake tensors do not know it
            done: Any = torch.futures.Future()
            done.set_result(args[0])
            return _create_work_from_future(done).boxed()
        return func(*args, **(kwargs or {}))


class Meter(TorchDispatchMode):
    """Within it, every storage that a call brings forth is counted until it is gone, under what was going on then.

    peak_by: bytes by kind when the most was held. sent: by kind of collective, their number and bytes (of the whole
    tensor that is gathered, scattered or reduced).
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[int, str] = {}
        self._bytes: dict[int, int] = {}
        self._gathered: dict[int, weakref.ref[Any]] = {}  # fully_shard changes their size without a call
        self._by: dict[str, int] = {}
        self._now = self._peak = 0
        self._phase = "before"
        self.peak_by: dict[str, int] = {}
        self.sent: dict[str, tuple[int, int]] = {}

    def hold(self, kind: str, values: Iterable[Tensor]) -> None:
        """These are held, and of this kind for good."""
        for value in values:
            self._count(value, kind)

    def phase(self, name: str) -> None:
        """What comes forth from now on is of this kind."""
        self._phase = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._send(func, args)
        out = func(*args, **kwargs)
        found = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        if func.namespace == "c10d" or any(value.numel() >= LARGE for value in found):
            self._look()
        for value in found:
            self._count(value, self._phase)
        return out

    def _look(self) -> None:
        """At what fully_shard has emptied and filled."""
        sizes = [(key, found.nbytes()) for key, kept in self._gathered.items() if (found := kept()) is not None]
        for key, size in sorted(sizes, key=lambda each: each[1]):  # what was emptied first
            self._change(key, size)

    def _send(self, func: Any, args: Any) -> None:
        name = func._schema.name.partition("::")[2]
        sizes = [sum(t.numel() * t.element_size() for t in tree_leaves(each) if isinstance(t, Tensor)) for each in args]
        number, size = self.sent.get(NAMES.get(name, name), (0, 0))
        self.sent[NAMES.get(name, name)] = number + 1, size + max(sizes, default=0)

    def _count(self, value: Tensor, kind: str) -> None:
        value = getattr(value, "_local_tensor", value)
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._bytes:
            self._kinds[key], self._bytes[key] = kind, 0
            weakref.finalize(storage, self._gone, key)
            if kind == GATHERED:
                self._gathered[key] = weakref.ref(storage)
        self._change(key, size)

    def _change(self, key: int, size: int) -> None:
        more, kind = size - self._bytes[key], self._kinds[key]
        self._bytes[key] = size
        self._now += more
        self._by[kind] = self._by.get(kind, 0) + more
        if self._now > self._peak:
            self._peak, self.peak_by = self._now, {k: v for k, v in self._by.items() if v}

    def _gone(self, key: int) -> None:
        self._change(key, 0)
        del self._bytes[key], self._kinds[key]
        self._gathered.pop(key, None)
