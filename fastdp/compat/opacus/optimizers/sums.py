"""Norms and clipped sums of one backward's samples, from what waits on the parameters: a record of it, or tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....ops.rows import square_sum, weighted_sum
from ..grad_sample.samples import Pending, Record


def norm_sq(parts: list[tuple[nn.Parameter, Any]]) -> Tensor:
    """Squared norms [B] of one backward's samples, all parameters together."""
    total: Tensor | None = None
    for record, parameters in _by_record(parts):
        record.check(parameters)
        total = _plus(total, record.gradients.norm_sq(parameters))
    for _, entry in parts:
        if isinstance(entry, Tensor):
            total = _plus(total, square_sum(entry.detach()))
    assert total is not None
    return total


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    if total is None:
        return more
    if total.shape != more.shape:
        raise ValueError(f"grad_sample of {total.numel()} samples on some parameters and of {more.numel()} on others")
    return total + more.to(total.device)


def sums(parts: list[tuple[nn.Parameter, Any]], factors: Tensor) -> dict[int, Tensor]:
    """sum_b factors_b gradient_b by id of the parameter, float32 or better."""
    found: dict[int, Tensor] = {}
    for record, parameters in _by_record(parts):
        record.check(parameters)
        clipped = record.gradients.clipped_sum(factors, parameters)
        for p in parameters:
            total = clipped.get(id(p))
            if total is None:
                total = torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
            found[id(p)] = total
    for p, entry in parts:
        if isinstance(entry, Tensor):
            rows = entry.detach()
            kind = torch.promote_types(torch.promote_types(rows.dtype, p.dtype), torch.float32)
            found[id(p)] = weighted_sum(rows.to(kind), factors.to(rows.device)).reshape(p.shape)
    return found


def _by_record(parts: list[tuple[nn.Parameter, Any]]) -> list[tuple[Record, list[Tensor]]]:
    found: dict[int, tuple[Record, list[Tensor]]] = {}
    for p, entry in parts:
        if isinstance(entry, Pending):
            found.setdefault(id(entry.record), (entry.record, []))[1].append(p)
    return list(found.values())
