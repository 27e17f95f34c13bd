"""What the engine does for each use of a parameter, in units of work.

One unit is the multiply-adds of an ordinary weight gradient of that use (B T I O). Ordinary training takes
three units (forward, input gradient, weight gradient); a private step replaces the third by the route's norm
and a clipped sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from .gradients import Gradients
from .links import leaves_of
from .uses.base import Direct, Use
from .uses.conv import Conv
from .uses.embedding import Lookup
from .uses.linear import Matmul


class PlanRow(NamedTuple):
    """A row of the plan: units are relative to one weight gradient of this use; bytes are held until the step."""

    parameter: str
    function: str
    shape: str
    route: str
    units: float
    bytes: int


def describe(gradients: Gradients, named: Mapping[str, Tensor]) -> list[PlanRow]:
    """The plan that the last backward followed."""
    names = {id(p): name for name, p in named.items()}
    rows = []
    for use in gradients.uses:
        owners = ", ".join(names.get(id(leaf), "?") for leaf in leaves_of(use.operand))
        joint = len([leaf for leaf in leaves_of(use.operand) if len(gradients.uses_of(leaf)) > 1]) > 0
        shape, units = _shape_and_units(use)
        route = use.route + (" + cross terms" if joint else "")
        rows.append(PlanRow(owners, use.name, shape, route, units, use.held_bytes()))
    return rows


def _shape_and_units(use: Use) -> tuple[str, float]:
    if isinstance(use, Matmul):
        b, t, i = use.a.shape
        o = use.g.size(2)
        norm = {"T=1": (i + o) / (i * o), "gram": t * (i + o) / (i * o), "direct": 1.0}[use.route]
        return f"B={b} T={t} I={i} O={o}", norm + 1
    if isinstance(use, Conv):
        x, g = tuple(use.x.shape[2:]), tuple(use.g.shape[2:])
        t, i, o = math.prod(g[1:]) * use.g.size(1), math.prod(use.geometry.weight[1:]), use.geometry.weight[0]
        return f"B={use.batch} x={x} g={g}", 2.0 if use.route == "direct" else 1 + t * (i + o) / (i * o)
    if isinstance(use, Lookup):
        return f"B={use.batch} K={use.ids.size(1)} d={use.g.size(2)}", 2.0
    if isinstance(use, Direct):
        return f"B={use.batch} {tuple(use.operand.shape)}", 1.0
    return f"B={use.batch} {tuple(use.operand.shape)}", 2.0


def table(rows: list[PlanRow]) -> str:
    """The plan as aligned text."""
    head = ("parameter", "function", "shape", "route", "units", "bytes")
    cells = [head] + [(r.parameter, r.function, r.shape, r.route, f"{r.units:.2f}", _bytes(r.bytes)) for r in rows]
    widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    total = sum(r.bytes for r in rows)
    return "\n".join([*lines, f"{len(rows)} uses, {_bytes(total)} held until the end of backward"])


def _bytes(count: int) -> str:
    if count <= 0:
        return "0"
    power = min(int(math.log(count, 1024)), 3)
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
