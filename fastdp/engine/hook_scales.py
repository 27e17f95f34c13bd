"""Checks that a gradient hook is linear in the scale of its gradient: `hook(g / 4) == hook(g) / 4`.

Under a mean loss, the gradient that autograd hands to a hook carries 1/B, and the engine multiplies by B what comes of
it. A hook that changes each sample's rows alone, but not in proportion (`F.normalize(g)`, `g.sign()`, `g + c`,
`g.clamp(-c, c)`), then gives a sample another gradient as others join it. The user's hook is not called again for this:
the calls of torch that it made of the gradients are, on gradients of other scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.operator_table import DRAWING, is_in_place
from ..utils.pytree import map_tensors, tensors_in
from ..utils.rng_state import States, random_states, set_random_states

NOT_LINEAR = (
    "is not linear in the scale of the gradient, which under loss_reduction='mean' carries 1 / the number of samples: "
    "how much a sample's gradient changes depends on how many others there are. Give loss_reduction='sum' to the "
    "optimizer and take the loss's sum over the samples; or leave bounding a sample's gradient to the optimizer "
    "(max_grad_norm)"
)
_CLOSE, _AMONG = 1e-4, 1e-6  # of the number itself, and of the largest one in its row


class Replayed:
    """The calls that a hook made of these gradients, to be made again of others."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.given = list(given)
        self.before: list[Tensor] | None = None  # the gradients as they were, once one is written to
        self.known = {id(tensor): tensor for tensor in given}  # the gradients, and what was made of them
        self.written: list[tuple[Tensor, Tensor]] = []  # constants that gradients were written to, as they were before
        self.calls: list[tuple[Any, Any, Any, Any, Any]] = []

    def knows(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a gradient is among these, or what was made of one."""
        return any(id(tensor) in self.known for tensor in tensors)

    def begin(self, name: str, args: Any, kwargs: Any) -> Any:
        """A call is about to be made on something known. Returns the state of the generator, if it draws."""
        targets = [*tensors_in(args[:1] if is_in_place(name) else ()), *tensors_in(kwargs.get("out"))]
        if targets and self.before is None:
            self.before = [tensor.detach().clone() for tensor in self.given]
        for target in targets:
            whole = target._base if target._is_view() and target._base is not None else target
            if id(target) not in self.known and id(whole) not in self.known:
                self.written.append((whole, whole.detach().clone()))
                self.known[id(whole)] = whole
        return self._states() if name in DRAWING else None

    def _states(self) -> States:
        return random_states(*{tensor.device for tensor in self.given})

    def note(self, state: Any, func: Any, args: Any, kwargs: Any, out: Any, of_data: bool) -> None:
        """The call was made."""
        if of_data or not tensors_in(out):
            self.calls.append((func, args, kwargs, out, state))
            self.known.update((id(tensor), tensor) for tensor in tensors_in(out))

    def is_linear(self, result: Tensor, dim: int) -> bool:
        """Whether this result goes along with the scale of the gradients. dim: of the samples, in the result."""
        given = [torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in self.before or [t.detach() for t in self.given]]
        one = self._run([t.clone() for t in given], result)
        for scale in (0.25, _large(given)):
            other = self._run([t * scale for t in given], result)
            if one is None or other is None or not _equal(one * scale, other, dim):
                return False
        return True

    def _run(self, given: list[Tensor], result: Tensor) -> Tensor | None:
        """What stands in the place of the result, from these gradients; None for a constant."""
        found = {id(old): new for old, new in zip(self.given, given, strict=True)}
        found.update((id(old), before.clone()) for old, before in self.written)
        bases = {id(old) for old, _ in self.written}

        def moved(tensor: Tensor) -> Tensor:
            new = found.get(id(tensor))
            if new is None and tensor._is_view() and id(tensor._base) in bases:  # of a constant, before it was written
                base: Tensor = tensor._base  # type: ignore[assignment]
                offset = tensor.storage_offset() - base.storage_offset()
                new = found[id(tensor)] = found[id(base)].as_strided(tensor.shape, tensor.stride(), offset)
            return tensor if new is None else new

        now = self._states() if any(state is not None for *_, state in self.calls) else None
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for func, args, kwargs, out, state in self.calls:
                if state is not None:
                    set_random_states(state)
                new = func(*map_tensors(args, moved), **map_tensors(kwargs, moved))
                found.update((id(old), made) for old, made in zip(tensors_in(out), tensors_in(new), strict=False))
            if now is not None:
                set_random_states(now)
            return None if (final := moved(result)) is result else final


def _large(given: Sequence[Tensor]) -> float:
    """A scale at which thresholds show: a power of 4, whose root is exact, too."""
    largest = max((float(t.abs().max()) for t in given if t.numel()), default=0.0)
    if not largest:
        return 4.0
    wanted = min(torch.finfo(t.dtype).max for t in given if t.is_floating_point() or t.is_complex()) ** 0.25
    return float(4.0 ** max(1, math.floor(math.log(min(wanted, 1e12) / largest, 4))))


def _equal(wanted: Tensor, found: Tensor, dim: int) -> bool:
    if wanted.shape != found.shape:
        return False
    if not wanted.numel():
        return True
    others = [d for d in range(wanted.dim()) if d != dim]
    row = wanted.abs().amax(others, keepdim=True) if others else wanted.abs()
    lowest = torch.finfo(wanted.dtype).smallest_normal
    allowed = _CLOSE * wanted.abs() + _AMONG * row + 4 * lowest
    return bool(((wanted - found).abs() <= allowed).logical_or(~(wanted.isfinite() & found.isfinite())).all())
