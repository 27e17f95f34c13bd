"""Applies the fused update to an optimizer's parameters, also to the local shards of a sharded model.

Of a sharded parameter the operators work on what lies on this process. The optimizer's state stays what torch makes of
such a parameter (a DTensor with the same placement), so checkpoints of torch.distributed.checkpoint hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..distributed.shards import placed_like
from . import fused_update
from .checkpoint import MAKER, torch_is_at
from .fused_update import Release


def updated(kind: str, optimizer: Any, release: Release) -> bool:
    """Update the parameters, if the fused operators can: False, and nothing was done, if not."""
    tables = optimizer.__dict__.setdefault("_step_tables", {})
    if release.public:
        return False
    if not release.parts:
        if not fused_update.can_fuse(kind, optimizer.param_groups, optimizer.state, tables):
            return False
        fused_update.step(kind, optimizer.param_groups, optimizer.state, release, tables)
        return True
    if any(part.rows > 1 for part in release.parts.values()):
        return False  # noise runs by runs of the whole parameter's order
    known: _Locals = optimizer.__dict__.setdefault("_local_parts", _Locals())
    groups = known.groups(optimizer.param_groups)
    state = known.state(optimizer.param_groups, optimizer.state)
    if not fused_update.can_fuse(kind, groups, state, tables):
        return False
    fused_update.step(kind, groups, state, known.release(release), tables)
    known.write_back(kind, optimizer.param_groups, optimizer.state)
    return True


@torch.no_grad()
def makes_state(optimizer: Any, busy: bool) -> bool:
    """Whether a step is of torch.distributed.checkpoint, which lets an optimizer without state make its own, by a
    step with zero gradients at the learning rate 0. Such a step tells nothing of data. busy: a backward came before,
    whose gradients must wait for a step of the user's."""
    if any(optimizer.state.values()) or any(group.get("lr") != 0 for group in optimizer.param_groups):
        return False
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not grads or any(g is None or bool(_local(g).count_nonzero()) for g in grads):
        return False
    return not busy or torch_is_at(MAKER)


class _Locals:
    """What lies here of an optimizer's parameters: the same tensors in every step."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, Tensor]] = {}  # by the parameter's id: it, and what lies here of it
        self._state: dict[Tensor, dict[str, Any]] = {}
        self._summed: set[int] = set()  # ids of those that the step is of

    def local(self, parameter: Tensor) -> Tensor:
        now = _local(parameter).detach()
        known = self._of.get(id(parameter))
        if known is None or known[0] is not parameter or known[1].data_ptr() != now.data_ptr():
            known = self._of[id(parameter)] = parameter, now
        return known[1]

    def groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parts without an element are left out."""
        return [{**group, "params": [q for p in group["params"] if (q := self.local(p)).numel()]} for group in groups]

    def state(self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """The state of what lies here."""
        each = [(p, self.local(p)) for group in groups for p in group["params"]]
        self._state = {q: {name: _local(value) for name, value in state[p].items()} for p, q in each if q.numel()}
        return self._state

    def release(self, release: Release) -> Release:
        """The same release, by what lies here."""
        local_of = {key: id(q) for key, (_, q) in self._of.items() if key in release.sums}
        self._summed = set(local_of.values())
        return release._replace(
            sums={local_of[key]: total for key, total in release.sums.items()},
            offsets={local_of[key]: offset for key, offset in release.offsets.items()},
        )

    def write_back(self, kind: str, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> None:
        """What the operators made anew of the state, and the private gradients."""
        for group in groups:
            for p in group["params"]:
                q, own = self.local(p), state[p]
                if not q.numel() and id(q) in self._summed:
                    _make_empty(kind, group, p, own)
                    q.grad = torch.zeros_like(q) if q.dtype in (torch.float32, torch.float64) else None
                p.grad = None if q.grad is None else placed_like(q.grad, p)
                for name, value in self._state.get(q, {}).items():
                    if own.get(name) is None or name == "step":
                        own[name] = placed_like(value, p) if isinstance(value, Tensor) and value.dim() else value


def _make_empty(kind: str, group: dict[str, Any], parameter: Tensor, own: dict[str, Any]) -> None:
    """The state of a part without elements, after a step."""
    if kind == "sgd":
        if group["momentum"] and own.get("momentum_buffer") is None:
            own["momentum_buffer"] = torch.zeros_like(parameter)
        return
    if not own:
        own["step"] = torch.tensor(0.0, dtype=torch.float32)
        own["exp_avg"], own["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    own["step"] = own["step"] + 1


@torch.no_grad()
def _local(value: Any) -> Any:
    """What lies on this process of a DTensor; else the value itself."""
    return value.to_local() if hasattr(value, "to_local") else value


def unhooked(step: Any) -> Callable[..., Any]:
    """A class's step, without the hooks that torch has put around it (ours has them)."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]
