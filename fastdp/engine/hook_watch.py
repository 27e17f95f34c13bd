"""Follows the torch calls of a gradient hook, as those of a forward are followed.

See `fastdp.engine.activation_hooks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..batch_axis import operator_table
from ..batch_axis.batch_positions import note_made
from ..batch_axis.batch_slices import BY_POSITION, stamp
from ..batch_axis.calls import Call
from ..batch_axis.layout import Layout, tag, tag_of
from ..batch_axis.probing import keep_target
from ..batch_axis.propagate import propagate
from ..batch_axis.python_reads import PythonReads
from ..batch_axis.python_sizes import Sizes
from ..errors import SampleMixingError, StepError
from ..utils.pytree import map_tensors, tensors_in
from .call_cache import Memo, inquires
from .hook_scales import NOT_LINEAR, Replayed

_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]


class Owner:
    """Stands for an engine. node: where autograd would add up its token's gradient.

    nodes: whether a node of the graph of data was handed out; guarded: whether the hooks on nodes are looked at.
    mean: whether the loss is a mean over the samples, so that gradients carry 1 / their number.
    """

    def __init__(self, memo: Memo, sizes: Sizes, reads: PythonReads, node: Any, mean: bool) -> None:
        self.memo, self.sizes, self.reads, self.node, self.mean = memo, sizes, reads, node, mean
        self.nodes = self.guarded = False

    def __deepcopy__(self, memo: Any) -> Owner:
        return self

    def begins(self, first: bool) -> None:
        """A forward begins. first: that no backward is to go through another one."""
        self.nodes = self.nodes and not first
        self.guarded = False

    def runs(self) -> bool:
        """Whether the backward that runs goes through forwards of the engine."""
        return torch._C._will_engine_execute_node(self.node)


class Watch(TorchFunctionMode):
    """Follows what a hook makes of these gradients of a batch of this size."""

    def __init__(self, owner: Owner, batch: int, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.owner, self.batch = owner, batch
        self.replayed = Replayed(given) if owner.mean else None
        self.told = ""  # what Python was told of the gradients
        self.unseen = ""  # what may have written to them out of sight
        self.written: set[int] = set()  # tensors that calls in sight wrote to
        self.aliases: list[tuple[Tensor, int]] = []  # .data, which has a version of its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if inquires(func):
            return self._tell(func, args, kwargs)
        if func == _GRAD_FN and args[0].grad_fn is not None:
            raise StepError(
                "a hook on a gradient takes a node of the graph (grad_fn) while the backward runs: what it hooks to it "
                "fastdp could not check any more. Use Tensor.register_hook in the forward."
            )
        call = Call(func, args, kwargs, self.batch)
        given, name = call.tensors, call.name
        if not call.inputs():
            replayed = self.replayed if self.replayed is not None and self.replayed.knows(given) else None
            state = None if replayed is None else replayed.begin(name, args, kwargs)
            out = call.run()
            if replayed is not None:
                replayed.note(state, func, args, kwargs, out, True)
            note_made(call, lambda tensor: tensor.requires_grad)
            return out
        if name in operator_table.SHARING_MEMORY:
            self.told = self.told or f"{name}()"
            return func(given[0].clone(), *args[1:], **kwargs)  # what is written there is not the gradient's
        if name in operator_table.CHANGING_MEMORY or (name == "data" and len(args) > 1):
            self.unseen = self.unseen or f"{name} writes in a way that cannot be followed"
        return self._follow(call)

    def _tell(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if func in operator_table.TELLING_SIZES:
            self.owner.sizes.asked(args[0], out, self.batch)
        return out

    def _follow(self, call: Call) -> Any:
        func, (args, kwargs), name = call.func, call.given, call.name
        signature = self.owner.memo.signature(func, args, kwargs, self.batch, {})
        layouts = self.owner.memo.layouts(signature)
        if layouts is None:
            keep_target(call)
        state = self.replayed.begin(name, args, kwargs) if self.replayed is not None else None
        out = call.run()
        if layouts is not None:
            for tensor, layout in zip(call.results(), layouts, strict=True):
                tag(tensor, layout)
        else:
            self._ask(call)
            if signature is not None:
                self.owner.memo.learn(signature, out, self.batch)
        if self.replayed is not None:
            of_data = any(tag_of(tensor, self.batch) is not None for tensor in call.results())
            self.replayed.note(state, func, args, kwargs, out, of_data)
        if call.in_place or kwargs.get("out") is not None:
            self._note_written(tensors_in((args[:1] if call.in_place else (), kwargs.get("out"))))
        elif not call.results() and name != "data":
            self.told = self.told or f"{name}()"
        if name == "data" and isinstance(out, Tensor):
            self.aliases.append((out, out._version))
        return out

    def _ask(self, call: Call) -> None:
        try:
            told = propagate(call)
            why, certain = self.owner.sizes.problem(call)
            self.told = self.told or told or (why if certain else "")
            if why and not certain:
                self.owner.reads.note(why, None)
        except SampleMixingError as problem:
            why = problem.mixed or str(problem)
            map_tensors(call.out, lambda tensor: tag(tensor, Layout(self.batch, mixed=why)))
        note_made(call, lambda tensor: tensor.requires_grad)
        stamp(call)

    def _note_written(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.written.update((id(tensor), id(tensor._base)))

    def problem(self, given: Tensor, version: int, layout: Layout | None, result: Tensor) -> str:
        """Why this result must not take the place of a gradient that lies as `layout` says; '' if it may."""
        if any(alias._version != before for alias, before in self.aliases):
            return "writes into .data, out of sight"
        if given._version != version and (self.unseen or id(given) not in self.written):
            return self.unseen or "writes to it out of sight"
        if result is given and given._version == version:
            return ""
        if self.told:
            return f"changes it after Python was told of it by {self.told}, which cannot be followed: use torch.where"
        if layout is None:
            return "changes a gradient in which fastdp cannot find the samples"
        found = tag_of(result, self.batch)
        if layout.total and (found is None or result is given):  # one number for all, made of constants
            scaled = layout.total == "sum" and self.replayed is not None  # the loss is that over their number
            return NOT_LINEAR if scaled and not self.replayed.is_linear(result, -1) else ""  # type: ignore[union-attr]
        if found is None:
            return "replaces it by values that fastdp cannot assign to samples"
        if found.mixed:
            return found.mixed
        if layout.mixed or layout.total:
            return "changes the gradient of a number that several samples made"
        if found.piece is not None and found.piece != layout.piece:
            return BY_POSITION
        same = found.alone == layout.alone and (layout.alone >= 0 or self._lies_alike(found, layout, result))
        if not same or found.is_row_index or found.inferred:
            return "moves rows of one sample to another's"
        dim = -1 if found.alone >= 0 else found.dim
        return NOT_LINEAR if self.replayed is not None and not self.replayed.is_linear(result, dim) else ""

    def _lies_alike(self, found: Layout, layout: Layout, result: Tensor) -> bool:
        return self.batch <= 1 or (found.dim == layout.dim and found.same_rows(layout, result.device))
