"""The table of `optimizer.explain()`: route, predicted and measured cost of each parameter use.

One unit is the multiply-adds of an ordinary weight gradient of that use (B T I O). Ordinary training takes
three units (forward, input gradient, weight gradient); a private step replaces the third by the route's norm
and a clipped sum.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..grad_sample.cost_model import Clock, Segments, Shape, constants, seconds
from ..grad_sample.parameter_links import leaves_of
from ..grad_sample.planner import HeldBytes
from .gradients import Gradients


class PlanRow(NamedTuple):
    """A row of the plan: units are relative to one weight gradient of this use.

    bytes are held until the step; an input that several uses share is in the row of the first of them.
    """

    parameter: str
    function: str
    shape: str
    route: str
    units: float
    bytes: int
    predicted_ms: float | None
    measured_ms: float | None


class Plan:
    """What a backward did, without its data: uses are described when asked for.

    before: of the backward before, whose descriptions are taken over where the uses are the same.
    """

    def __init__(self, gradients: Gradients, before: Plan | None = None) -> None:
        self._people = gradients.people
        self._early: list[Plan] = [taken.plan for taken in gradients.taken.values() if taken.plan]
        self._uses: list[tuple[Any, ...]]
        self._clocks = [use.clock for use in gradients.uses]
        self._key = [(id(u.operand), u.name, u.shape, u.route, u.batch, u.shared) for u in gradients.uses]
        if before is not None and before._key == self._key and all(use.shape is not None for use in gradients.uses):
            self._uses = before._uses  # (which hold the operands, so that no other has their ids)
            return
        held = HeldBytes()
        self._uses = [
            (u.operand, u.name, u.shape or u.segments(), u.route, held.hold(u.data()), u.batch, u.short, u.shared)
            for u in gradients.uses
        ]

    def again(self, clocks: list[Clock | None]) -> Plan:
        """Of a backward that did the same, with these clocks of its uses."""
        plan = copy.copy(self)
        plan._clocks = clocks
        return plan

    def rows(self, named: Mapping[str, Tensor]) -> list[PlanRow]:
        """A row a use."""
        names = {id(p): name for name, p in named.items()}
        rows = []
        for clock, use in zip(self._clocks, self._uses, strict=True):
            operand, function, shape, route, held, batch, short, shared = use
            owners = ", ".join(names.get(id(leaf), "?") for leaf in leaves_of(operand))
            text, units = _shape_and_units(shape, route, batch, operand)
            predicted = None
            if isinstance(shape, Segments):
                predicted = 1e3 * shape.seconds(constants(operand.device, short, "linear"))
            elif shape is not None and route in ("gram", "direct", "materialise"):
                predicted = 1e3 * seconds(route, shape, constants(operand.device, short, shape.family))
            measured = clock.milliseconds() if clock is not None else None
            route = route + (" + cross terms" if shared else "")
            rows.append(PlanRow(owners, function, text, route, units, held, predicted, measured))
        return rows + [row for plan in self._early for row in plan.rows(named)]

    def table(self, named: Mapping[str, Tensor], profile: bool) -> str:
        """The rows as aligned text, with `profile` also the measured time of each use; what a sample is, where it is
        not a record."""
        rows = self.rows(named)
        head = ["parameter", "function", "shape", "route", "units", "bytes", "predicted ms"] + ["measured ms"] * profile
        cells = [head]
        for r in rows:
            words = [r.parameter, r.function, r.shape, r.route]
            cells.append([*words, f"{r.units:.2f}", _bytes(r.bytes), _ms(r.predicted_ms)])
            if profile:
                cells[-1].append(_ms(r.measured_ms))
        widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        last = f"{len(rows)} uses, {_bytes(sum(r.bytes for r in rows))} held until the end of backward"
        if profile:
            last += f", {sum(r.measured_ms or 0 for r in rows):.2f} ms measured"
        return "\n".join([*lines, last] if self._people is None else [*lines, last, str(self._people)])


def _shape_and_units(shape: Shape | Segments | None, route: str, batch: int, operand: Tensor) -> tuple[str, float]:
    if isinstance(shape, Segments):
        text = f"rows={int(shape.rows.sum())} of B={batch} E={shape.experts} I={shape.i} O={shape.o}"
        return text, shape.norm_units() + 1
    if shape is None:
        return f"B={batch} {tuple(operand.shape)}", 1.0 if route == "kept" else 2.0
    family, b, t, i, o, _ = shape
    norm = {"T=1": (i + o) / (i * o), "gram": t * (i + o) / (i * o), "direct": 1.0, "materialise": 0.0}[route]
    return f"{family} B={b} T={t} I={i} O={o}", norm + 1


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _bytes(count: int) -> str:
    if count <= 0:
        return "0"
    power = min(int(math.log(count, 1024)), 3)
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
