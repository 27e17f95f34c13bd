"""Combines the uses recorded in a backward into norms and clipped sums of each parameter.

A parameter's gradient is the sum over its uses, so its norm has cross terms (`fastdp.grad_sample.cross_terms`);
uses of the same kind are joined along T.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.deferred_checks import DeferredCheck
from ..batch_axis.row_groups import People
from ..errors import StepError
from ..grad_sample.cost_model import Clock
from ..grad_sample.cross_terms import disjoint, isometric, joint_norm_sq, materialised, same_memory
from ..grad_sample.embedding import Lookup
from ..grad_sample.linear import Matmul
from ..grad_sample.parameter_links import leaves_of, link_of, pull_back_sum
from ..grad_sample.parameter_use import ParameterUse, Regrouped, Stored
from ..grad_sample.planner import Planner
from ..grad_sample.routed_rows import Routed
from .foreach import Abreast, Arrangement, Bundle, arrangement, rows_of, sums_by_group

Arranged = dict[tuple[int, ...], Arrangement]  # by the ids of the parameters


class Gradients:
    """The per-sample gradients of one backward, as uses; in units of one sample's own loss.

    batch: the number of records, which are the samples unless `people` says that some are of one person.
    scale: what the recorded gradients are multiplied by (the number of records under a mean loss).
    profile: measure the time of each use (on the CPU it is always measured).
    """

    def __init__(
        self,
        uses: Iterable[ParameterUse],
        batch: int,
        scale: float,
        device: torch.device,
        planner: Planner,
        profile: bool = False,
        people: People | None = None,
    ) -> None:
        # first what single samples used, as uses by the batch; then all, by their parameters
        uses = list(uses)
        if not _are_apart(uses):
            uses = _joined(_padded([settled(use) for use in _joined(uses)]))
        for use in uses:
            use.plan(planner)
            if profile or use.operand.device.type == "cpu":
                use.clock = Clock(use.operand.device)
        self._uses, self._of = uses, places_of(uses)
        self._take(batch, scale, device, people, {})
        self._versions = [use.versions() for use in self.uses]

    def _take(self, batch: int, scale: float, device: torch.device, people: People | None, arranged: Arranged) -> None:
        self.records, self.people = batch, people
        self.doubts: list[DeferredCheck] = []  # whether samples were mixed, where a device knows
        self.batch = batch if people is None else people.count
        self.scale, self.device = scale, device
        self.plan: Any = None  # the `engine.explain.Plan`, if it is known already
        self.watched = True  # others than clipping may ask for norms and sums
        self.taken: dict[int, Any] = {}  # the `engine.layerwise.Taken` of groups of parameters, which have no uses here
        self._bundles: dict[tuple[int, ...], list[Bundle | Abreast]] = {}
        self.arranged = arranged

    @property
    def uses(self) -> list[ParameterUse]:
        """All uses, joined."""
        return self._uses

    def use(self, place: int) -> ParameterUse:
        return self._uses[place]

    def drop(self, place: int) -> None:
        """Nobody asks for this use again: its data goes, when the last who holds it has let go of it."""
        self._uses[place] = ParameterUse(self._uses[place].operand, self.batch, self._uses[place].name)

    def uses_of(self, parameter: Tensor) -> list[ParameterUse]:
        return [self.use(place) for place in self._of.get(id(parameter), ())]

    def arrangement(self, parameters: Sequence[Tensor]) -> Arrangement:
        """How these parameters' gradients are taken."""
        key = tuple(map(id, parameters))
        if (known := self.arranged.get(key)) is not None:
            return known
        single = [(p, places[0]) for p in parameters if len(places := self._of.get(id(p), [])) == 1]
        bundles = arrangement([(p, self.use(place)) for p, place in single])
        together = {id(single[number][0]) for _, numbers in bundles for number in numbers}
        apart = [p for p in parameters if id(p) not in together and id(p) in self._of]
        found = Arrangement(
            [(kind, [single[number] for number in numbers]) for kind, numbers in bundles],
            apart,
            sorted({place for p in apart for place in self._of[id(p)]}),
            [p for p in parameters if p.dtype == torch.float64],
        )
        return self.arranged.setdefault(key, found)

    def bundles(self, parameters: Sequence[Tensor]) -> list[Bundle | Abreast]:
        """The small gradients of these parameters, taken together."""
        key = tuple(map(id, parameters))
        if key not in self._bundles:
            together = self.arrangement(parameters).together
            self._bundles[key] = [self._bundle(kind, members) for kind, members in together]
        return self._bundles[key]

    def _bundle(self, kind: type[Bundle] | type[Abreast], members: list[tuple[Tensor, int]]) -> Bundle | Abreast:
        return kind.of([(p, self.use(place)) for p, place in members])

    def timed(self) -> list[ParameterUse | Bundle | Abreast]:
        """What has a clock."""
        return [*self.uses, *(bundle for found in self._bundles.values() for bundle in found)]

    def norm_sq(self, parameters: Sequence[Tensor]) -> Tensor:
        """Squared norms of the per-sample gradients of these parameters together, [B] float64."""
        return self.norms_sq([parameters])[0]

    def norms_sq(self, groups: Sequence[Sequence[Tensor]]) -> Tensor:
        """Squared norms of the per-sample gradients of each group of parameters, [groups, B] float64."""
        if not self.batch:
            return torch.zeros(len(groups), 0, dtype=torch.float64, device=self.device)
        every, group_of = _grouped(groups)
        parts, rows = list[Tensor](), list[int]()  # squared norms [n, B], and the group of each of their rows
        for bundle in self.bundles(every):
            own = [group_of[key] for key in bundle.members]
            several = len(set(own)) > 1
            with bundle.clock or contextlib.nullcontext():
                parts.append(bundle.norms_sq(several).to(self.device))
            rows += own if several else own[:1]
        for parameter in self.arrangement(every).apart:
            uses = self.uses_of(parameter)
            with uses[-1].clock or contextlib.nullcontext():
                parts.append(joint_norm_sq(parameter, uses).to(self.device)[None])
            rows.append(group_of[id(parameter)])
        if not parts:
            return torch.zeros(len(groups), self.batch, dtype=torch.float64, device=self.device)
        return sums_by_group(parts, rows, len(groups)) * self.scale**2

    def clipped_sum(self, factors: Tensor, parameters: Sequence[Tensor], last: bool = False) -> dict[int, Tensor]:
        """`clipped_sums` of one group, factors [B]."""
        return self.clipped_sums(factors[None], [parameters], last)

    def clipped_sums(
        self, factors: Tensor, groups: Sequence[Sequence[Tensor]], last: bool = False
    ) -> dict[int, Tensor]:
        """{id(parameter): sum_b factors[group, b] gradient_b} in float32; parameters without a use are absent.

        last: nothing more is asked for of these parameters, so that the data of each use is dropped after its sum.
        """
        total: dict[int, Tensor] = {}
        if not self.batch:
            return total
        (every, group_of), scaled = _grouped(groups), factors * self.scale  # [groups, B]
        arranged = self.arrangement(every)
        for bundle, (_, members) in zip(self.bundles(every), arranged.together, strict=True):
            if last and isinstance(bundle, Abreast) and bundle.lets_go:
                for _, place in members:
                    self.drop(place)
            own = [group_of[key] for key in bundle.members]
            with bundle.clock or contextlib.nullcontext():
                total.update(bundle.clipped_sum(rows_of(scaled, own), last))
        apart = {id(p) for p in arranged.apart if _in_slices(p, self.uses_of(p))}
        by_group = scaled.unbind()
        for place in arranged.uses_apart:
            use = self.use(place)
            leaves = leaves_of(use.operand)
            wanted = [group_of.get(id(leaf)) for leaf in leaves]
            if last and None not in wanted:
                self.drop(place)
            for group in dict.fromkeys(wanted):
                if group is not None:
                    keys = {id(leaf) for leaf, own in zip(leaves, wanted, strict=True) if own == group}
                    ends = last and {*wanted} == {group}
                    with use.clock or contextlib.nullcontext():
                        self._add_sum(total, use, by_group[group], keys, id(leaves[0]) in apart, ends)
        for p in arranged.doubles:
            if id(p) in total:
                total[id(p)] = total[id(p)].double()
        return total

    def _add_sum(
        self, total: dict[int, Tensor], use: ParameterUse, factors: Tensor, keys: set[int], in_slices: bool, last: bool
    ) -> None:
        """Add a use's clipped sum to those of its parameters with these ids."""
        leaves = leaves_of(use.operand)
        if in_slices:
            if id(leaves[0]) not in total:
                total[id(leaves[0])] = _memory(leaves[0], self.uses_of(leaves[0]))
            into = _place(use.operand, leaves[0], total[id(leaves[0])])
            part = use.clipped_sum(factors.to(into.device), into)
            if part.data_ptr() != into.data_ptr():
                into.copy_(part)
            return
        sum_of = use.last_sum if last and isinstance(use, Stored) else use.clipped_sum
        part = sum_of(factors.to(use.operand.device))
        if use.operand is not leaves[0] and is_slice(use.operand, leaves):
            _add_slice(total, use.operand, leaves[0], part)
            return
        for key, value in pull_back_sum(use.operand, part).items():
            if key in keys:
                total[key] = total[key] + value if key in total else value

    def per_sample(self, parameter: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        """The per-sample gradients of one parameter, materialised: [B, *shape]."""
        high = self.batch if high is None else high
        total = materialised(parameter, self.uses_of(parameter), low, high)
        return total * self.scale

    def check_unwritten(self) -> None:
        """Raises StepError where something that the uses hold (the model's input, perhaps) was written to since."""
        check_unwritten(self.uses, self._versions)


def _grouped(groups: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], dict[int, int]]:
    """All parameters, and the group of each by its id."""
    return [p for group in groups for p in group], {id(p): n for n, group in enumerate(groups) for p in group}


def places_of(uses: Sequence[ParameterUse]) -> dict[int, list[int]]:
    """The places of each parameter's uses, by its id. Uses of a parameter that has several are `shared` from now on."""
    found: dict[int, list[int]] = {}
    for place, use in enumerate(uses):
        for leaf in leaves_of(use.operand):
            found.setdefault(id(leaf), []).append(place)
    for places in found.values():
        for place in places if len(places) > 1 else ():
            uses[place].shared = True
    return found


def check_unwritten(uses: Iterable[Any], versions: Iterable[int]) -> None:
    """Raises StepError where what a use holds is not what it held at these versions."""
    for use, version in zip(uses, versions, strict=True):
        if use.versions() != version:
            raise written_to(use.name)


def written_to(name: str) -> StepError:
    """What to say of data that was written to."""
    return StepError(
        f"{name}(): its input or the gradient of its output was written to in place (by a hook that "
        "changes its argument, or as a buffer for the next batch) before norms and sums were taken: they would "
        "be of other numbers. Take them first, or write into a copy."
    )


def _are_apart(uses: Sequence[ParameterUse]) -> bool:
    """Whether each use is of a parameter of its own, by the whole batch: nothing is to be joined."""
    if len({id(use.operand) for use in uses}) < len(uses):
        return False
    return not any(isinstance(use, Regrouped | Routed) or link_of(use.operand) is not None for use in uses)


def settled(use: ParameterUse) -> ParameterUse:
    """A use of a whole parameter seen through a view, written as a use of the parameter itself."""
    operand, link = use.operand, link_of(use.operand)
    if link is None or not link.isometric or len(link.leaves) != 1:
        return use
    leaf = link.leaves[0]
    if (
        link.kind == "cast" and operand.device == leaf.device
    ):  # in float32, where autograd would round the sum to the operand's type
        use.operand = leaf
        return use
    if not same_memory(operand, leaf) or operand.numel() != leaf.numel():
        return use
    if operand.shape == leaf.shape and operand.stride() == leaf.stride():
        use.operand = leaf
    elif operand.dim() == 2 and operand.shape == leaf.shape[::-1] and operand.stride() == leaf.stride()[::-1]:
        return use.transposed(leaf) or use
    return use


def _padded(uses: list[ParameterUse]) -> list[ParameterUse]:
    """Rows of a matrix in any order as rows by sample, if other uses of the matrix lie by sample: a tied table that is
    the head of packed rows, a layer that meets all tokens and routed ones."""
    by_sample = {id(use.operand) for use in uses if isinstance(use, Matmul | Lookup)}
    return [
        Matmul.of_rows(use)
        if isinstance(use, Routed) and use.operand.dim() == 2 and id(use.operand) in by_sample
        else use
        for use in uses
    ]


def _joined(uses: Iterable[ParameterUse]) -> list[ParameterUse]:
    """Uses of one operand and kind made one, if there is such a form."""
    groups: dict[tuple[int, Any], list[ParameterUse]] = {}
    for use in uses:
        groups.setdefault((id(use.operand), use.kind), []).append(use)
    joined: list[ParameterUse] = []
    for first, *others in groups.values():
        name = f"{first.name} x{1 + len(others)}" if others else first.name
        one = first.concat(others, name) if others or isinstance(first, Regrouped) else None
        joined += [first, *others] if one is None else [one]
    return joined


def is_slice(operand: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether the operand is a part of one parameter's memory, each element once."""
    leaf = leaves[0]
    return len(leaves) == 1 and isometric(operand) and same_memory(operand, leaf) and leaf.is_contiguous()


def _add_slice(total: dict[int, Tensor], operand: Tensor, leaf: Tensor, part: Tensor) -> None:
    """Add to the leaf's sum what belongs to a slice: no sum of the leaf's size for each of many slices."""
    whole = total.get(id(leaf))
    if whole is None:
        whole = total[id(leaf)] = torch.zeros(leaf.shape, dtype=part.dtype, device=part.device)
    elif not whole.is_contiguous():
        whole = total[id(leaf)] = whole.contiguous()
    _place(operand, leaf, whole).add_(part)


def _place(operand: Tensor, leaf: Tensor, whole: Tensor) -> Tensor:
    """Where a slice of the leaf lies in its sum."""
    return whole.as_strided(operand.shape, operand.stride(), operand.storage_offset() - leaf.storage_offset())


def _in_slices(parameter: Tensor, uses: list[ParameterUse]) -> bool:
    """Whether the sums can be written each into its own part of the parameter's: many slices that share nothing."""
    if len(uses) < 2 or parameter.device.type != "cpu" or parameter.dtype == torch.float64:
        return False
    each = all(use.overwrites and use.operand is not parameter for use in uses)
    return each and all(is_slice(u.operand, leaves_of(u.operand)) for u in uses) and disjoint(parameter, uses)


def _memory(parameter: Tensor, uses: list[ParameterUse]) -> Tensor:
    """Memory for the sum of slices: zero, unless they cover it."""
    covered = sum(use.operand.numel() for use in uses) == parameter.numel()
    return torch.empty(parameter.shape, dtype=torch.float32) if covered else torch.zeros(parameter.shape)


def add(total: dict[int, Tensor], *more: dict[int, Tensor]) -> None:
    """Add tensors by key."""
    for key, value in itertools.chain.from_iterable(own.items() for own in more):
        if key in total:
            total[key].add_(value)
        else:  # one that is expanded has elements in one place
            total[key] = value.contiguous() if 0 in value.stride() else value
