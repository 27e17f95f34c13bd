"""Reuses the arrangement of the previous backward if the same calls arrive with the same shapes.

Between two batches of equal shapes nothing changes but numbers: the same calls arrive in the same order, their uses
take the same routes and are taken together in the same bundles. So the arrangement of a backward is kept, and of the
next one only the data. As soon as another call arrives than is expected, all that was kept is recorded use by use.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..grad_sample.captured_call import FEW, Captured, Context, Given, Native
from ..grad_sample.conv import Conv
from ..grad_sample.cost_model import Clock
from ..grad_sample.embedding import Lookup
from ..grad_sample.linear import Matmul, by_address
from ..grad_sample.parameter_links import leaves_of
from ..grad_sample.parameter_use import ParameterUse, Positioned, Stored
from ..grad_sample.planner import versions
from ..ops import registry
from ..ops.common import exactly
from .explain import Plan
from .foreach import Abreast, Bundle
from .forward_record import ForwardRecord
from .gradients import Arranged, Gradients, places_of, settled, written_to

DATA: dict[type[ParameterUse], tuple[str, ...]] = {
    Matmul: ("a", "g"),
    Conv: ("x", "g"),
    Lookup: ("ids", "g"),
    Stored: ("grads",),
}
_GONE = torch.empty(0)
Lasting = Callable[[], None]  # raises StepError once the data of a replay is overwritten


class Template(NamedTuple):
    """A use without its data. places: of its data among all data of a backward."""

    use: ParameterUse
    places: dict[str, int]


def template_of(use: ParameterUse, first: int) -> Template:
    """Of a use whose data are the `first` and those behind it."""
    empty, names = copy.copy(use), DATA[type(use)]
    for name in names:
        setattr(empty, name, _GONE)
    empty.clock, empty.shared = None, False
    if isinstance(empty, Matmul):
        empty.bound = empty.filled = None
    return Template(empty, {name: first + number for number, name in enumerate(names)})


class Repeated(Gradients):
    """The gradients of the first samples of a backward whose uses are known: they are filled with its data when they
    are asked for, and those that are taken together never one by one.

    templates, data: of the backward before, and what this one gave. size: its samples. lasting: asked before any data
    is read. timed: measure the time of each use.
    """

    def __init__(
        self, templates: Sequence[Template], data: Sequence[Tensor], samples: int, size: int, scale: float,
        of: dict[int, list[int]], arranged: Arranged, lasting: Lasting | None = None, timed: bool = False,
    ) -> None:  # fmt: skip
        self._templates, self._data, self._samples, self._size = templates, list(data), samples, size
        self._of, self._filled, self._lasting = of, dict[int, ParameterUse](), lasting
        self.clocks: list[Clock | None] = [None] * len(templates)  # of the uses
        self._timed = timed
        self._take(samples, scale, templates[0].use.operand.device, None, arranged)
        self._versions = [tensor._version for tensor in self._data]

    def check_unwritten(self) -> None:
        for template in self._templates:
            for number in template.places.values():
                tensor = self._data[number]
                if tensor is not _GONE and tensor._version != self._versions[number]:
                    raise written_to(template.use.name)

    @property
    def uses(self) -> list[ParameterUse]:
        return [self.use(place) for place in range(len(self._templates))]

    def bundles(self, parameters: Sequence[Tensor]) -> list[Bundle | Abreast]:
        self._check()
        return super().bundles(parameters)

    def _check(self) -> None:
        if self._lasting is not None:
            self._lasting()

    def clock(self, place: int) -> Clock | None:
        """The clock of the use at a place; None: nothing is timed."""
        if self._timed and self.clocks[place] is None:
            self.clocks[place] = Clock(self._templates[place].use.operand.device)
        return self.clocks[place]

    def use(self, place: int) -> ParameterUse:
        self._check()
        if place not in self._filled:
            template = self._templates[place]
            use = self._filled[place] = object.__new__(type(template.use))
            use.__dict__.update(template.use.__dict__)
            for name, number in template.places.items():
                rows = self._data[number]
                setattr(use, name, rows if self._samples == self._size else rows[: self._samples])
            use.batch, use.clock = self._samples, self.clock(place)
        return self._filled[place]

    def take(self, place: int, use: ParameterUse) -> None:
        """This is the use."""
        known = self._templates[place].use
        use.clock, use.shared, use.route = self.clock(place), known.shared, known.route
        self._filled[place] = use

    def drop(self, place: int) -> None:
        self._filled.pop(place, None)
        for number in self._templates[place].places.values():
            self._data[number] = _GONE

    def _bundle(self, kind: type[Bundle] | type[Abreast], members: list[tuple[Tensor, int]]) -> Bundle | Abreast:
        parameters = [parameter for parameter, _ in members]
        templates = [self._templates[place] for _, place in members]
        clock = Clock(parameters[0].device, len(members)) if self._timed else None
        for _, place in members if self._timed else ():
            self.clocks[place] = clock
        sides = [[self._data[t.places[name]] for t in templates] for name in templates[0].places]
        if kind is Bundle:
            rows = [side if side.dim() == 2 else side.reshape(side.size(0), -1) for side in sides[0]]
            whole = torch.cat([row.to(rows[0].device) for row in rows], 1)
            return Bundle(parameters, whole if self._samples == self._size else whole[: self._samples], clock)
        first = self.use(members[0][1])
        if not isinstance(first, Positioned) or _by_address(first):
            return Abreast.of([(p, self.use(place)) for p, place in members])
        joined = [self._of_samples(torch.cat(side), len(templates)) for side in sides]
        return Abreast(parameters, first.joined(*joined), clock)

    def _of_samples(self, rows: Tensor, count: int) -> Tensor:
        """Of `count` uses by all samples of the replay, one after the other: without the padding of each."""
        if self._samples == self._size:
            return rows
        return rows.unflatten(0, (count, self._size))[:, : self._samples].flatten(0, 1)


def _by_address(use: Positioned) -> bool:
    """Whether kernels find the data of equal uses where they lie."""
    return use.product() is not None if isinstance(use, Conv) else isinstance(use, Matmul) and by_address(use.a, use.g)


class Arrived(NamedTuple):
    """What gave uses: a call that is known by its rows, or the use of another call.

    together: what calls whose rows are computed together have in common (`Captured.together`). call: of a use, if that
    is known by its rows, but stored gradients take their place.
    """

    what: Captured | ParameterUse
    uses: int
    together: Any
    call: Captured | None = None


class Kept:
    """What a call (or the use of another call) gave within a backward that is like the one before: the rows of its
    uses, or what these are made of at its end. together: as it was in the backward before (`Arrived`). version: of all
    that it holds, if it is known."""

    __slots__ = ("what", "given", "rows", "together", "version")

    def __init__(
        self,
        what: Captured | ParameterUse,
        given: Any,
        rows: Sequence[Tensor] | None,
        together: Any = None,
        version: int | None = None,
    ) -> None:
        self.what, self.rows, self.together = what, rows, together
        self.given = given if rows is None or given is None else (given[0], (), ())  # its data is freed
        self.version = self.versions() if version is None else version

    def holds(self) -> Sequence[Tensor]:
        return (*self.given[1], *self.given[2]) if self.rows is None else self.rows

    @property
    def name(self) -> str:
        return self.what.name

    def versions(self) -> int:
        return versions(self.holds())


def _kind(use: ParameterUse) -> Any:
    """What must be the same of a use whose call is not known."""
    leaves = leaves_of(use.operand)
    own = use.operand is leaves[0]
    rows = [(t.shape, t.dtype, t.device, t.stride()) for t in _data(use)]
    geometry = getattr(use, "geometry", None)
    return type(use), own, tuple(map(id, leaves)), use.operand.shape, use.shape, geometry, rows


def _data(use: ParameterUse) -> list[Tensor]:
    return [getattr(use, name) for name in DATA[type(use)]]


class Like:
    """What a backward was, for one that is like it.

    calls: what arrived, in order. waits: whether all layers waited for its end that could have been taken early.
    """

    def __init__(self, calls: Sequence[Arrived], gradients: Gradients, waits: bool) -> None:
        self.waits = waits
        self._expected = [e.what if isinstance(e.what, Captured) else _kind(e.what) for e in calls]
        self._kinds = [each.together for each in calls]
        self._calls = [each.call for each in calls]
        self._places = list(itertools.accumulate((each.uses for each in calls), initial=0))  # of the uses of each
        groups: dict[Any, list[int]] = {}
        for place, kind in enumerate(self._kinds):
            if kind is not None:
                groups.setdefault(kind, []).append(place)
        self._together = [places for places in groups.values() if len(places) > 1]  # whose rows are computed at the end
        self._late = {place for places in self._together for place in places}
        self._batch, self.changes = gradients.batch, registry.changes()
        self._templates: list[Template] = []
        count = 0
        for use in gradients.uses:
            self._templates.append(template_of(use, count))
            count += len(self._templates[-1].places)
        # whose data is held as it comes until the end: no Python is needed for it before
        self._held: list[Any] = [None] * len(calls)
        for place, (each, (i, j)) in enumerate(zip(calls, itertools.pairwise(self._places), strict=True)):
            if each.call is None and (place in self._late or _holds_data(each, gradients.uses[i:j])):
                self._held[place] = each.what
        self._of = places_of([template.use for template in self._templates])
        for template in self._templates:  # of what is made of parameters anew in every step, nothing is held
            template.use.operand = leaves_of(template.use.operand)[0]
        self._arranged = gradients.arranged
        self.on_cpu = all(use.operand.device.type == "cpu" for use in gradients.uses)
        self._timed = gradients.uses[0].clock is not None
        self._plan = gradients.plan = Plan(gradients)

    def arrived(self, place: int, what: Captured | ParameterUse, given: Given | None) -> Kept | None:
        """What this call or use gives, if it is what arrived at that place."""
        expected = self._expected[place] if place < len(self._expected) else None
        if isinstance(what, Captured):
            if expected is not what:
                return None
            rows = None if place in self._late else what.rows(*given)  # type: ignore[misc]
            return Kept(what, given, rows, self._kinds[place])
        if type(what) not in DATA or settled(what) is not what or expected != _kind(what):
            return None
        return Kept(what, None, _data(what))

    def arrivals(self, tape: ForwardRecord, context: Context) -> Any:
        """What keeps the next calls without Python, if that can be."""
        if isinstance(native := registry.native(), str) or not self.on_cpu or not isinstance(context, Native):
            return None
        expected, task = self._held, torch._C._current_graph_task_id
        return native.Arrivals(context.forward_pass, task(), expected, task, len(tape.kept))

    def kept(self, place: int, context: Native, given: Given, version: int) -> Kept:
        """What has arrived without Python. version: of all that was given."""
        late, call = place in self._late, context.call
        return Kept(call, given, None if late else call.rows(*given), self._kinds[place], version if late else None)

    def stores(self, place: int, what: Captured | ParameterUse) -> bool:
        """Whether uses of this call arrived at that place, one by one, as gradients were stored of its rows."""
        return place < len(self._calls) and self._calls[place] is what

    def is_whole(self, tape: ForwardRecord, current: set[int]) -> bool:
        """Whether all has arrived. current: ids of the model's parameters."""
        same = len(tape.kept) == len(self._expected) and tape.batch == self._batch
        return same and tape.people is None and self._of.keys() <= current

    def gradients(self, kept: Sequence[Kept], scale: float) -> Repeated:
        """Those of a backward that gave these rows."""
        for places in self._together:
            some = [kept[place] for place in places]
            call: Any = some[0].what
            for each, own in zip(some, call.rows_together([e.given for e in some]), strict=True):
                each.rows = own
        rows = [row for each in kept for row in each.rows or ()]
        found = Repeated(
            self._templates, rows, self._batch, self._batch, scale, self._of, self._arranged, timed=self._timed
        )
        for each, place in zip(kept, self._places, strict=False):
            if isinstance(each.what, ParameterUse):
                found.take(place, each.what)
        found.plan = self._plan.again(found.clocks)
        return found


def _holds_data(arrived: Arrived, uses: Sequence[ParameterUse]) -> bool:
    """Whether the rows of a call are the data that it gives, but for some that take no time to compute later."""
    product = next((use for use in uses if isinstance(use, Matmul | Conv)), None)
    return isinstance(arrived.what, Captured) and product is not None and (len(uses) == 1 or product.g.numel() <= FEW)


def like(tape: ForwardRecord, gradients: Gradients) -> Like | None:
    """What the backward was that gave these. None if the next one must be recorded use by use: uses were joined, or are
    of kinds whose data is not known, or do not hold what their calls gave."""
    if not tape.calls or gradients.people is not None or len(gradients.uses) != len(tape.uses):
        return None
    for use, recorded in zip(gradients.uses, tape.uses, strict=True):
        if use is not recorded or type(use) not in DATA or isinstance(use, Matmul) and use.filled is not None:
            return None
    return Like(tape.calls, gradients, tape.early is not None)


def _gives(uses: Sequence[ParameterUse | None], rows: Sequence[Tensor]) -> bool:
    """Whether the data of these uses are these rows."""
    data = [getattr(use, name) for use in uses for name in DATA.get(type(use), ())]  # type: ignore[arg-type]
    return len(data) == len(rows) and all(a is b for a, b in zip(data, rows, strict=True))


# ---------------------------------------------------------------------- what a backward does with what arrives

Record = Callable[[ParameterUse], None]  # keeps a use until the end of backward


def begin(tape: ForwardRecord, before: Like | None, repeats: bool) -> None:
    """A backward begins, and may be like the one before. repeats: whether the next one may be like this one, too."""
    if not repeats:
        tape.calls = None
    elif before is not None and before.changes == registry.changes() and (before.waits or tape.early is None):
        tape.like = before  # else routes may be others, or layers would wait that are to be taken early


def keep(tape: ForwardRecord, what: Captured | ParameterUse, given: Given | None, record: Record) -> bool:
    """Whether this call or use is what arrived here in the backward before: then its data is kept."""
    if tape.like is None:
        return False
    settle(tape)
    if given is not None and tape.like.stores(len(tape.kept), what):
        what.record_rows(given[0], what.rows(*given))  # type: ignore[union-attr]
        return True
    kept = tape.like.arrived(len(tape.kept), what, given)
    if kept is None:
        record_kept(tape, record)
        return False
    tape.kept.append(kept)
    if not tape.like.on_cpu:
        tape.streams.note(kept, kept.holds()[0].device)
    if tape.arrivals is not None:
        tape.arrivals.go_on(len(tape.kept))
    elif given is not None and given[0].forward_pass is tape.checked:
        tape.arrivals = tape.like.arrivals(tape, given[0])
    return True


def settle(tape: ForwardRecord) -> None:
    """Keep what has arrived without Python."""
    arrived, tape.arrived = tape.arrived, []
    if arrived and (place := registry.native().first_written(arrived)) >= 0:  # type: ignore[union-attr]
        raise written_to(arrived[place][0].call.name)
    with torch.no_grad(), exactly():
        for context, saved, gradient, version in arrived:
            tape.kept.append(tape.like.kept(len(tape.kept), context, (context, saved, (gradient,)), version))


def record_call(tape: ForwardRecord, call: Captured, given: Given, rows: Any) -> None:
    """Record a call use by use, and note what it is for the next backward."""
    _record_rows(tape, call, given[0], rows, None if tape.calls is None else call.together(*given))


def _record_rows(tape: ForwardRecord, call: Captured, ctx: Context, rows: Any, together: Any) -> None:
    first, calls = len(tape.uses), tape.calls
    count = 0 if calls is None else len(calls)
    call.record_rows(ctx, rows)
    if calls is not None and tape.calls is not None:  # (layers may have been taken early meanwhile)
        gives = _gives(tape.uses[first:], rows)
        calls[count:] = (
            [Arrived(call, len(tape.uses) - first, together)]
            if gives
            else [each._replace(call=call) for each in calls[count:]]
        )


def record_kept(tape: ForwardRecord, record: Record) -> None:
    """What was kept is recorded use by use, as this backward is another than the one before."""
    settle(tape)
    kept, tape.kept, tape.like, tape.arrivals = tape.kept, [], None, None
    for each in kept:
        if each.versions() != each.version:
            raise written_to(each.name)
        if isinstance(each.what, ParameterUse):
            record(each.what)
        else:
            rows = each.what.rows(*each.given) if each.rows is None else each.rows  # (waiting for others)
            _record_rows(tape, each.what, each.given[0], rows, each.together)
