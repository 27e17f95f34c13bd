"""Noise and the optimizer's update in one pass over the parameters, for torch's SGD, Adam and AdamW.

The state is torch's own (`momentum_buffer`, `exp_avg`, `exp_avg_sq`, `step`), so checkpoints, schedulers and a
change of mind work as ever. What a group asks for beyond that (amsgrad, a tensor as learning rate, tensors that are
not contiguous or share memory, a subclass with a step of its own) takes the two-pass way: noise into `.grad`, then
torch's step.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.shards import Box, Part, placed_like
from ..ops.checks import words_of
from ..ops.common import DTYPES
from ..ops.noise import Noise
from ..ops.step import StepTable
from ..ops.updates import SGD, Adam, Draw

FUSED = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}


# elements that may be drawn in vain to save a call. MEASURED on one core: a call is worth 5,000 of them
_IN_VAIN = {"cpu": 4096}
_AT_ONCE = 1 << 22  # elements that are laid out together


class Release(NamedTuple):
    """What a step makes of the clipped sums: (sum + std * N) * scale for each parameter, by id."""

    sums: dict[int, Tensor]
    offsets: dict[int, int]  # global index of each parameter's first element
    noise: Noise
    std: float
    scale: float
    parts: dict[int, Box] = {}  # of sharded parameters: what of them the sums are
    earlier: Sequence[tuple[int, float]] = ()  # (step, weight): correlated noise has these normals, too
    public: dict[int, Tensor] = {}  # gradients without noise, added to what is released: in the sum they would round it

    def noise_into(self, total: Tensor, offset: int) -> Tensor:
        """The same, of a sum whose first element has this global index, in place."""
        return self.noise.add_scaled_(total, self.std, self.scale, offset, self.earlier)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The private gradient of a parameter, in its type; None if it is not tracked."""
        total = self.sums.pop(id(parameter), None)
        if total is None:
            return None
        part, offset = self.parts.get(id(parameter)), self.offsets[id(parameter)]
        start = offset if part is None else offset - part.first
        noisy = add_noise_(self, total, start, part)
        if (more := self.public.get(id(parameter))) is not None:
            noisy.add_(more)
        noisy = noisy if noisy.dtype == parameter.dtype else noisy.to(parameter.dtype)
        return noisy if part is None else placed_like(noisy, parameter)


def add_noise_(by: Release, total: Tensor, offset: int, part: Part | Box | None) -> Tensor:
    """(total + std * N) * scale, in place. offset: of the first element of the whole parameter, of which the total is
    this part (None: all of it)."""
    part = part.box if isinstance(part, Part) else part
    if part is None or part.rows == 1:
        return by.noise_into(total, offset + (0 if part is None else part.first))
    _add_by_runs(by, total.view(part.rows, part.length), part.stride, offset + part.first)
    return total


def _add_by_runs(by: Release, runs: Tensor, stride: int, offset: int) -> None:
    """runs: [rows, length], each `stride` elements after the one before. Where not much lies between, they are laid
    out as in the whole parameter, many at once: more noise is drawn than is used, by fewer calls."""
    rows, length = runs.shape
    if stride - length > _IN_VAIN.get(runs.device.type, 1 << 17) or rows * length == 0:
        for row, run in enumerate(runs):
            by.noise_into(run, offset + row * stride)
        return
    at_once = max(1, _AT_ONCE // stride)
    for row in range(0, rows, at_once):
        some = runs[row : row + at_once]
        laid = some.new_zeros(len(some), stride)
        laid[:, :length] = some
        by.noise_into(laid, offset + row * stride)
        some.copy_(laid[:, :length])


def kind_of(base: type) -> str | None:
    """ "sgd" or "adam" where the class's step is torch's own, else None."""
    for known, kind in FUSED.items():
        if base is known or (issubclass(base, known) and getattr(base, "step", None) is getattr(known, "step", None)):
            return kind
    return None


class GroupTable(StepTable):
    """A table of a group that one launch takes. Adam's numbers of steps lie side by side, to be counted by one call."""

    def __init__(self, params: Sequence[Tensor], states: Sequence[Sequence[Tensor]], offsets: Sequence[int]) -> None:
        super().__init__(params, states, offsets)
        self._ids = frozenset(map(id, params))
        self.own: list[dict[str, Any]] = []  # the states of this step, by parameter
        self._counts: Tensor | None = None
        self._counters: list[Tensor] = []
        self._version = -1  # of the counts, once this table has added to them

    def is_of_one_age(self, kind: str, sums: dict[int, Tensor]) -> bool:
        """Whether all parameters have a sum, and were last updated together, by this table. (If it fits, so do its
        states: they are all there, or none is.)"""
        if not self._ids <= sums.keys():
            return False
        if kind == "sgd":
            return True
        return self._counts is not None and self._counts._version == self._version and self._counts_own()

    def _counts_own(self) -> bool:
        return all(map(operator.is_, [own.get("step") for own in self.own], self._counters))

    def count(self) -> None:
        """Add a step to each parameter's number of them."""
        if self._counts is None or not self._counts_own():
            self._counts = torch.tensor([float(own["step"]) for own in self.own], dtype=torch.float32)
            self._counters = [self._counts[place] for place in range(len(self.params))]
            for own, counter in zip(self.own, self._counters, strict=True):
                own["step"] = counter
        self._counts.add_(1)
        self._version = self._counts._version


Tables = dict[int, GroupTable]  # what was found out of each group that one launch can take, by its place


def can_fuse(kind: str, groups: list[dict[str, Any]], state: dict[Tensor, Any], known: Tables | None = None) -> bool:
    """Whether every group asks only for what the fused operators do.

    known: of earlier steps, which spare the look at every tensor; what no longer holds is dropped.
    """
    known = {} if known is None else known
    for number, group in enumerate(groups):
        if isinstance(group["lr"], Tensor) or group.get("amsgrad") or group.get("differentiable"):
            return False
        if group.get("capturable") or any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            return False
        table, own = known.pop(number, None), [state.get(p, {}) for p in group["params"]]
        if table is not None and table.fits(group["params"], _states(kind, group, own), table.offsets):
            known[number], table.own = table, own
            continue
        for p, each in zip(group["params"], own, strict=True):
            if p.layout != torch.strided or p.dtype not in DTYPES or not p.is_contiguous():
                return False
            if any(isinstance(v, Tensor) and v.dim() and not _alike(v, p) for v in each.values()):
                return False
        if _overlap(group["params"]):
            return False
    return kind in ("sgd", "adam")


def _states(kind: str, group: dict[str, Any], own: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """What a launch works on of the states of parameters in a group; None for those that are not there."""
    names = ("exp_avg", "exp_avg_sq") if kind == "adam" else ("momentum_buffer",) if group["momentum"] else ()
    return [[each.get(name) for each in own] for name in names]


def _overlap(params: Sequence[Tensor]) -> bool:
    """Whether parameters lie in the same memory (tied by `.data =`): one launch would lose all updates but the last."""
    spans = sorted((p.device.index or 0, p.data_ptr(), p.numel() * p.element_size()) for p in params if p.numel())
    return any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in itertools.pairwise(spans))


def _alike(value: Tensor, p: Tensor) -> bool:
    return value.is_contiguous() and value.device == p.device and value.dtype in DTYPES and value.shape == p.shape


def step(
    kind: str, groups: list[dict[str, Any]], state: dict[Tensor, Any], release: Release, known: Tables | None = None
) -> None:
    """Update all parameters that have a sum, in place; `.grad` becomes the noisy gradient where types allow.

    The sums are overwritten. known: as of `can_fuse`, which must have been asked just before; what is found is added.
    """
    known, noise = {} if known is None else known, release.noise
    earlier = [list(each) for each in zip(*release.earlier, strict=True)]
    draw = Draw(words_of(noise.key), noise.step, release.std, release.scale, True, *earlier)
    for number, group in enumerate(groups):
        table = known.get(number)
        same = table is not None and table.is_of_one_age(kind, release.sums)
        for params in [group["params"]] if same else _alike_in_device_and_age(kind, group, state, release.sums):
            offsets = [release.offsets[id(p)] for p in params]
            own = table.own if same and table is not None else [state[p] for p in params]
            update = (_adam if kind == "adam" else _sgd)(group, own, params)
            table = known.get(number)
            if table is None or len(params) != len(table.params) or table.offsets != offsets:
                table = GroupTable(params, _states(kind, group, own), offsets)
                if len(params) == len(group["params"]):
                    known[number] = table
            table.own = own
            totals = [release.sums[id(p)] for p in params]
            table.run(totals, draw, update)
            if kind == "adam":
                table.count()
            for p, total in zip(params, totals, strict=True):
                p.grad = total if total.dtype == p.dtype else None


def _alike_in_device_and_age(
    kind: str, group: dict[str, Any], state: dict[Tensor, Any], sums: dict[int, Tensor]
) -> list[list[Tensor]]:
    """Parameters that one launch can take: on one device, updated equally often."""
    found: dict[Any, list[Tensor]] = {}
    for p in group["params"]:
        if id(p) not in sums:
            continue
        own = state[p]
        if kind == "adam":
            if not own:
                own["step"] = torch.tensor(0.0, dtype=torch.float32)
                own["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                own["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            if own["step"].device.type != "cpu":  # of a state saved with fused=True: one look, once
                own["step"] = own["step"].cpu()
            age: Any = float(own["step"])
        else:
            age = own.get("momentum_buffer") is None
        found.setdefault((p.device, age), []).append(p)
    return list(found.values())


def _adam(group: dict[str, Any], states: list[dict[str, Any]], params: list[Tensor]) -> Adam:
    """The update of this step."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return Adam(
        float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]),
        t=int(states[0]["step"]) + 1, decoupled=bool(group.get("decoupled_weight_decay")),
        maximize=bool(group["maximize"]),
    )  # fmt: skip


def _sgd(group: dict[str, Any], states: list[dict[str, Any]], params: list[Tensor]) -> SGD:
    """The update of this step; makes the momentum buffers at the first one."""
    momentum = float(group["momentum"])
    first = momentum != 0 and states[0].get("momentum_buffer") is None
    if first:
        for p, own in zip(params, states, strict=True):
            own["momentum_buffer"] = torch.empty_like(p)
    return SGD(float(group["lr"]), momentum, float(group["dampening"]), float(group["weight_decay"]),
               bool(group["nesterov"]), bool(group["maximize"]), first)  # fmt: skip
