"""Runs backward twice for a checkpointed block whose stored inputs would exceed the memory budget.

Flat clipping needs all norms before any clipped sum, so a use's input and output gradient must wait for the end of
backward; under checkpointing that is the very memory the user wanted to save. A block whose forward is computed
again anyway may instead keep its own input and output gradient: the norms of its uses are taken at once, and at the
end the block runs forward and backward a second time, now with known clip factors. Costs a forward, an input gradient
and the norms of the block; saves everything between.

A block from inside of which the loss may take tensors (a penalty on activations: they are still alive when its forward
ends) keeps its data as any other. The norms are taken again, and must be the same: a block that does not repeat itself
(random numbers outside of torch's generators) is refused.

Source: the two-backward form of ghost clipping, Li et al. 2022.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..batch_axis.inputs import nested_tensors
from ..errors import StepError
from ..grad_sample.parameter_links import leaves_of, link_of, span_of
from ..grad_sample.parameter_use import ParameterUse
from ..utils.autograd_graph import on_gradient
from ..utils.pytree import map_tensors
from ..utils.rng_state import States, random_states, set_random_states

SAME = 1e-6  # squared norms of the same data, computed twice by the same way, differ by less
# Norms of another gradient differ by more, relative to the use's own and to the whole block's (the gradient of a key's
# bias is rounding alone); in float32, and under autocast or of 16-bit parameters
APART, APART_16_BIT = (5e-4, 1e-5), (1.5e-2, 3e-3)

Part = tuple[int, tuple[int, ...], tuple[int, ...], int]


def part_of(operand: Tensor) -> Part:
    """A parameter or a slice of it, known again when it is sliced anew."""
    leaf = leaves_of(operand)[0]
    return id(leaf), tuple(operand.shape), operand.stride(), int(operand.storage_offset())


class Inner(TorchFunctionMode):
    """Holds weakly what the torch functions called in a block's forward return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # an engine's mode is on
            self.seen += [weakref.ref(tensor) for tensor in nested_tensors(out) if tensor.requires_grad]
        return out

    def outlives(self, besides: Iterable[Tensor]) -> bool:
        """Whether somebody holds a tensor made of data beside these: a loss may take it."""
        known = set(map(id, besides))
        alive = [tensor for seen in self.seen if (tensor := seen()) is not None and id(tensor) not in known]
        return any(not tensor.is_leaf and link_of(tensor) is None for tensor in alive)


class Block:
    """A module inside a checkpointed region: what its second run needs."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        self.inner = Inner()
        self.inputs: list[weakref.ref[Tensor]] = []
        self.outlived = False  # by tensors within, which the loss may take
        self.grads: list[Tensor | None] = []  # of its outputs
        self.arguments: tuple[Any, Any] | None = None  # known when it is computed again
        self.norm_sq: dict[Part, Tensor] = {}  # of the operands whose data was dropped
        self.calls = 1
        self._random: States = {}
        self._autocast: list[tuple[str, bool, torch.dtype]] = []

    def leave(self, out: Any) -> None:
        """The forward ends: keep the gradients that arrive at the outputs."""
        self.inner.__exit__(None, None, None)
        outputs = nested_tensors(out)
        with torch._C.DisableTorchFunction():  # an engine's mode is on, which follows the hooks of users
            for tensor in outputs:
                place = len(self.grads)
                self.grads.append(None)
                if tensor.requires_grad:
                    on_gradient(tensor, lambda grad, place=place: self._keep(place, grad))
            inputs = [given for ref in self.inputs if (given := ref()) is not None]
            self.outlived = self.inner.outlives([*inputs, *outputs])
        self.inner = Inner()

    def _keep(self, place: int, grad: Tensor) -> None:
        before = self.grads[place]
        self.grads[place] = grad if before is None else before + grad

    def computed_again(self, args: Any, kwargs: Any) -> None:
        """The recomputation begins: the arguments, random state and autocast of the forward are at hand."""
        self.arguments = map_tensors((args, kwargs), _fresh)
        devices = {t.device for t in nested_tensors((args, kwargs)) if t.device.type not in ("cpu", "meta")}
        self._random = random_states(*devices)
        kinds = ["cpu", *{d.type for d in devices}]
        self._autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]

    def can_replay(self) -> bool:
        known = self.arguments is not None and self.calls == 1 and not self.outlived
        return known and any(g is not None for g in self.grads)

    def run(self) -> None:
        """Forward and backward again; what the pass records goes wherever the backward sends it."""
        assert self.arguments is not None
        args, kwargs = map_tensors(self.arguments, _fresh)
        now = random_states(*self._random)
        set_random_states(self._random)
        try:
            with torch.enable_grad(), contextlib.ExitStack() as stack:
                for kind, enabled, dtype in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                out = self.module(*args, **kwargs)
        finally:
            set_random_states(now)
        pairs = [
            (t, g) for t, g in zip(nested_tensors(out), self.grads, strict=True) if g is not None and t.requires_grad
        ]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


class Replayed(ParameterUse):
    """A use whose norms are known and whose data was dropped: the block gives its clipped sum."""

    route = "two backwards"

    def __init__(self, use: ParameterUse, block: Block, replay: Callable[[Block, Tensor], dict[Part, Tensor]]) -> None:
        super().__init__(use.operand, use.batch, use.name)
        self.block, self.replay, self.part, self._norm_sq = block, replay, part_of(use.operand), use.norm_sq()

    def norm_sq(self) -> Tensor:
        return self._norm_sq

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        return self.replay(self.block, factors)[self.part]

    def per_sample(self, low: int, high: int) -> Tensor:
        rows = []
        for b in range(low, high):  # one run of the block a sample: for tests and small models
            one = torch.zeros(self.batch, device=self.operand.device, dtype=torch.float32)
            one[b] = 1.0
            rows.append(self.replay(self.block, one)[self.part])
        return torch.stack(rows)


class Replays:
    """The blocks of one forward, and the sums that their second runs give. collect: takes the uses of a second run."""

    def __init__(self) -> None:
        self.collect: Callable[[ParameterUse], None] | None = None
        self.begin()

    def begin(self) -> None:
        """What comes is of other forwards."""
        self.blocks: dict[str, Block] = {}
        self._last: tuple[Block, Tensor, dict[Part, Tensor]] | None = None  # of one block at a time

    def entered(self, path: str, module: nn.Module) -> Block:
        """A module under checkpointing is called in the forward."""
        block = self.blocks.get(path)
        if block is None:
            block = self.blocks[path] = Block(path, module)
        else:
            block.calls += 1  # which of its calls is computed again cannot be told: kept as any use
        return block

    def block_of(self, path: str) -> Block | None:
        """The block in which a call stands."""
        found = [b for b in self.blocks.values() if path == b.path or path.startswith(b.path + ".")]
        return found[0] if len(found) == 1 else None

    def drop_data(self, use: ParameterUse, path: str, uses_of: dict[int, list[tuple[int, int]]]) -> ParameterUse:
        """The use with its norms taken and its data dropped, where its block can run again."""
        block = self.block_of(path)
        if block is None or not block.can_replay() or not _shares_nothing(use.operand, uses_of):
            return use
        replayed = Replayed(use, block, self.sums)
        block.norm_sq[replayed.part] = replayed.norm_sq()
        return replayed

    def sums(self, block: Block, factors: Tensor) -> dict[Part, Tensor]:
        """Clipped sums of all uses in the block, by one more run of it."""
        if self._last is not None and self._last[0] is block and self._last[1] is factors:
            return self._last[2]
        found: dict[Part, Tensor] = {}
        self._last = None
        low = any(enabled for _, enabled, _ in block._autocast)

        def collect(use: ParameterUse) -> None:
            part = part_of(use.operand)
            before = block.norm_sq.get(part)
            if before is not None:
                now = use.norm_sq()
                _check_same(block, use.name, before, now, low or use.operand.dtype.itemsize < 4)
                found[part] = use.clipped_sum(factors.to(before.device) * _at_most(before, now))

        self.collect = collect
        try:
            block.run()
        finally:
            self.collect = None
        if found.keys() != block.norm_sq.keys():
            raise StepError(_unrepeated(block.path, "parameters that it used before had no gradient the second time"))
        self._last = (block, factors, found)
        return found


def _shares_nothing(operand: Tensor, uses_of: dict[int, list[tuple[int, int]]]) -> bool:
    """Whether the operand is a parameter, or a slice of one, none of whose elements another call used."""
    leaves, link = leaves_of(operand), link_of(operand)
    if len(leaves) != 1 or not (link is None or link.isometric):
        return False
    start, stop = span_of(operand, leaves[0])
    if link is not None and (start, stop) == (0, max(leaves[0].numel() - 1, 0)):
        return False  # a whole parameter seen otherwise: no slice
    return sum(start <= last and first <= stop for first, last in uses_of.get(id(leaves[0]), ())) == 1


def _check_same(block: Block, name: str, before: Tensor, now: Tensor, low_precision: bool) -> None:
    """Raises StepError where squared norms [B] of one use are not those of the first backward."""
    own, whole = APART_16_BIT if low_precision else APART
    finite = torch.isfinite(before)
    root = before.sqrt()
    off = torch.where(finite, (now.sqrt() - root).abs(), torch.zeros_like(root))
    all_uses = sum((n.to(before.device) for n in block.norm_sq.values()), torch.zeros_like(before)).sqrt()
    if bool((finite != torch.isfinite(now)).any()) or bool((off > own * root + whole * all_uses).any()):
        known = off[torch.isfinite(off)]
        by = f"by up to {float(known.max()):.3g}" if len(known) else "and are not finite"
        raise StepError(_unrepeated(block.path, f"the norms of samples at {name}() differ {by}"))


def _unrepeated(path: str, what: str) -> str:
    return (
        f"checkpointed block '{path}' was run backward a second time, as memory_budget= asks, and gave another "
        f"gradient: {what}. A block that draws random numbers outside torch's generators does so, and one where the "
        "loss takes a tensor from within that no torch function returned (of a custom autograd function): return that "
        "tensor from the block, make the block repeat itself, or leave out memory_budget="
    )


def _at_most(before: Tensor, now: Tensor) -> Tensor:
    """Factors [B] that bring norms back to what they were, where they grew; 1 where they did not."""
    grown = now > before * (1 + SAME)
    ratio = torch.where(grown | ~torch.isfinite(now), (before / now).sqrt(), torch.ones_like(now))
    return torch.where(torch.isfinite(ratio), ratio, torch.zeros_like(ratio)).float()


def _fresh(tensor: Tensor) -> Tensor:
    """A leaf, so that backward ends here; what is differentiable stays so, for the same calls to be captured."""
    return tensor.detach().requires_grad_(tensor.requires_grad and tensor.is_floating_point())
