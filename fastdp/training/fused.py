"""Noise and the optimizer's update in one pass over the parameters, for torch's SGD, Adam and AdamW.

The state is torch's own (`momentum_buffer`, `exp_avg`, `exp_avg_sq`, `step`), so checkpoints, schedulers and a
change of mind work as ever. What a group asks for beyond that (amsgrad, a tensor as learning rate, tensors that are
not contiguous, a subclass with a step of its own) takes the two-pass way: noise into `.grad`, then torch's step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..engine.buffers import alias
from ..ops.common import DTYPES
from ..ops.noise import Noise

FUSED = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adam"}


class Release(NamedTuple):
    """What a step makes of the clipped sums: (sum + std * N) * scale for each parameter, by id."""

    sums: dict[int, Tensor]
    offsets: dict[int, int]  # global index of each parameter's first element
    noise: Noise
    std: float
    scale: float

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The private gradient of a parameter, in its type; None if it is not tracked."""
        total = self.sums.pop(id(parameter), None)
        if total is None:
            return None
        noisy = self.noise.add_scaled_(total, self.std, self.scale, self.offsets[id(parameter)])
        return alias(noisy) if noisy.dtype == parameter.dtype else noisy.to(parameter.dtype)


def kind_of(base: type) -> str | None:
    """ "sgd" or "adam" where the class's step is torch's own, else None."""
    for known, kind in FUSED.items():
        if base is known or (issubclass(base, known) and getattr(base, "step", None) is getattr(known, "step", None)):
            return kind
    return None


def can_fuse(kind: str, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> bool:
    """Whether every group asks only for what the fused operators do."""
    for group in groups:
        if isinstance(group["lr"], Tensor) or group.get("amsgrad") or group.get("differentiable"):
            return False
        if group.get("capturable") or any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            return False
        for p in group["params"]:
            if p.layout != torch.strided or p.dtype not in DTYPES or not p.is_contiguous():
                return False
            if any(isinstance(v, Tensor) and v.dim() and not _alike(v, p) for v in state.get(p, {}).values()):
                return False
    return kind in ("sgd", "adam")


def _alike(value: Tensor, p: Tensor) -> bool:
    return value.is_contiguous() and value.device == p.device and value.dtype in DTYPES and value.shape == p.shape


def step(kind: str, groups: list[dict[str, Any]], state: dict[Tensor, Any], release: Release) -> None:
    """Update all parameters that have a sum, in place; `.grad` becomes the noisy gradient where types allow.

    The sums are overwritten.
    """
    update, noise = _adam if kind == "adam" else _sgd, release.noise
    draw = dict(key=noise.key, step=noise.step, std=release.std, scale=release.scale)
    for group in groups:
        common = dict(lr=float(group["lr"]), weight_decay=float(group["weight_decay"]),
                      maximize=bool(group["maximize"]), **draw)  # fmt: skip
        for params in _alike_in_device_and_age(kind, group, state, release.sums):
            totals = [release.sums[id(p)] for p in params]
            update(group, params, totals, [release.offsets[id(p)] for p in params], [state[p] for p in params], common)
            for p, total in zip(params, totals, strict=True):
                p.grad = alias(total) if total.dtype == p.dtype else None


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


def _adam(group: dict[str, Any], params: list[Tensor], totals: list[Tensor], offsets: list[int],
          states: list[dict[str, Any]], common: dict[str, Any]) -> None:  # fmt: skip
    steps, exp_avgs, exp_avg_sqs = ([own[name] for own in states] for name in ("step", "exp_avg", "exp_avg_sq"))
    beta1, beta2 = (float(beta) for beta in group["betas"])
    ops.noisy_adamw_step_(
        params, totals, exp_avgs, exp_avg_sqs, offsets, beta1=beta1, beta2=beta2, eps=float(group["eps"]),
        t=int(steps[0]) + 1, decoupled=bool(group.get("decoupled_weight_decay")), **common,
    )  # fmt: skip
    torch._foreach_add_(steps, 1)


def _sgd(group: dict[str, Any], params: list[Tensor], totals: list[Tensor], offsets: list[int],
         states: list[dict[str, Any]], common: dict[str, Any]) -> None:  # fmt: skip
    momentum = float(group["momentum"])
    first = momentum != 0 and states[0].get("momentum_buffer") is None
    if first:
        for p, own in zip(params, states, strict=True):
            own["momentum_buffer"] = torch.empty_like(p)
    buffers = [own["momentum_buffer"] for own in states] if momentum != 0 else []
    ops.noisy_sgd_step_(
        params, totals, buffers, offsets, momentum=momentum, dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]), first=first, **common,
    )  # fmt: skip
