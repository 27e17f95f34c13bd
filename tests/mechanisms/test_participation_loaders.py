"""Loaders for correlated noise: what each promises of a record's steps, counted over passes; resuming, refusals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

import fastdp
from fastdp.accounting.participation import KINDS
from fastdp.accounting.used_draws import UsedDraws
from fastdp.batch_axis.current_batch import PhysicalBatch, current
from fastdp.data.loader import share
from fastdp.errors import AccountingError, StepError
from fastdp.mechanisms import (
    DPFTRL,
    CycleLoader,
    balls_in_bins_loader,
    cyclic_poisson_loader,
    fixed_order_loader,
    ftrl_loader,
)

from .test_ftrl import Stream, data, losses, network, train

N = 60
MAKERS: dict[str, Callable[..., CycleLoader]] = {
    "fixed order": lambda **options: ftrl_loader(range(N), batch_size=5, **options),
    "separated": lambda **options: ftrl_loader(range(N), batch_size=5, shuffle_within=3, **options),
    "cyclic Poisson": lambda **options: cyclic_poisson_loader(range(N), batch_size=5, cycle=4, **options),
    "balls in bins": lambda **options: balls_in_bins_loader(range(N), batch_size=5, **options),
}
every = pytest.mark.parametrize("kind", KINDS)


def logical(loader: CycleLoader, steps: int | None = None) -> list[tuple[list[int], PhysicalBatch]]:
    """The records of each logical batch of a pass, and what is said of it."""
    found, records = [], []
    for batch in loader:
        note = current()
        assert note is not None and note.size == len(batch)
        records += batch.tolist()
        if note.final:
            found.append((records, note))
            records = []
            if len(found) == steps:
                break
    return found


def steps_of(loader: CycleLoader, passes: int) -> dict[int, list[int]]:
    """The steps that each record takes part in, counted on over the passes."""
    found: dict[int, list[int]] = {}
    for step, (records, _) in enumerate(entry for _ in range(passes) for entry in logical(loader)):
        for record in records:
            found.setdefault(record, []).append(step)
    return found


# ---------------------------------------------------------------------- promises


@every
def test_every_batch_says_what_the_loader_promises(kind: str) -> None:
    loader = MAKERS[kind]()
    promise = loader.participation
    assert promise.kind == kind and promise.mark
    notes = [note for _, note in logical(loader)]
    assert len(notes) == len(loader) == loader.steps_per_epoch and not len(loader) % promise.period
    assert all(note.participation == promise and not note.seeded for note in notes)
    assert all(note.expected_batch_size == loader.expected_batch_size == 5 for note in notes)
    places = [note.place for _ in range(2) for _, note in logical(loader)]
    places += [note.place for note in notes]
    assert len({*places}) == 3 * len(loader)
    draws = UsedDraws()
    assert not any(draws.add(place, (1.0, None, 0.0)) for place in places)  # none is taken for one made before
    assert bool(draws) == loader.sampler.secret and draws.add(places[0], (1.0, None, 0.0)) == loader.sampler.secret
    assert fastdp.poisson_loader(data(), expected_batch_size=3).participation is None


@pytest.mark.parametrize("within", [1, 2, 3, 5, 12])
def test_steps_are_as_far_apart_as_is_promised(within: int) -> None:
    """The last group is smaller where 12 steps are no multiple; the least distance occurs."""
    loader = ftrl_loader(range(N), batch_size=5, shuffle_within=within, **({"seed": 3} if within > 1 else {}))
    promise = loader.participation
    assert (promise.period, promise.separation, promise.rate) == (12, 13 - within, 1)
    found = steps_of(loader, passes=40)
    assert len(found) == N and all(len(steps) == 40 for steps in found.values())
    assert all([step // 12 for step in steps] == list(range(40)) for steps in found.values())
    assert all(len({step % 12 // within for step in steps}) == 1 for steps in found.values())  # it stays in its group
    distances = [b - a for steps in found.values() for a, b in zip(steps, steps[1:], strict=False)]
    assert min(distances) == promise.separation and max(distances) == 12 + min(within, 12) - 1


def test_deals_within_groups_differ_by_pass_group_and_seed_alone() -> None:
    def one(**options: Any) -> list[list[int]]:
        return [records for records, _ in logical(ftrl_loader(range(N), batch_size=5, shuffle_within=6, **options))]

    assert one() == one() == one(seed=0) != one(seed=1)
    loader = ftrl_loader(range(N), batch_size=5, shuffle_within=6)
    first, second = logical(loader), logical(loader)
    assert first[0][0] != second[0][0]
    assert [r for records, _ in first[:6] for r in records] != [r - 30 for records, _ in first[6:] for r in records]
    others = (ftrl_loader(range(N), batch_size=5, shuffle_within=w, seed=s) for w, s in ((6, 0), (6, 9), (4, 0)))
    assert [other.participation.mark == loader.participation.mark for other in others] == [True, False, False]


def test_records_that_fill_no_batch_are_in_none_of_any_deal() -> None:
    with pytest.warns(UserWarning, match="4 record") as told:
        loader = ftrl_loader(range(N), batch_size=7, shuffle_within=3)
    assert told[0].filename == __file__
    assert set(steps_of(loader, 5)) == set(range(56)) and "4 of 60 records are in none" in repr(loader)


def bounds(chance: float, trials: int) -> tuple[float, float]:
    middle, width = chance * trials, 5 * math.sqrt(trials * chance * (1 - chance))
    return middle - width, middle + width


def test_cyclic_poisson_samples_a_part_with_the_promised_rate() -> None:
    loader = cyclic_poisson_loader(range(62), batch_size=4, cycle=5, steps=500, seed=1)
    promise = loader.participation
    assert (promise.period, promise.separation, promise.rate) == (5, 5, 4 * 5 / 62)
    found = steps_of(loader, passes=4)
    for record in range(62):
        assert {step % 5 for step in found[record]} == {record % 5}
        low, high = bounds(promise.rate, 400)
        assert low < len(found[record]) < high
    # steps and records are independent: pairs of records of a part, and of cycles
    together = [len({*found[a]} & {*found[a + 5]}) for a in range(57)]
    again = [len({*found[a]} & {step + 5 for step in found[a]}) for a in range(62)]
    for counts, trials in ((together, 400), (again, 399)):
        low, high = bounds(promise.rate**2, trials)
        assert low < min(counts) and max(counts) < high
    order = torch.randperm(62).tolist()
    dealt = steps_of(cyclic_poisson_loader(range(62), batch_size=4, cycle=5, order=order), 20)
    assert all({step % 5 for step in steps} == {order.index(record) % 5} for record, steps in dealt.items())


def test_one_cycle_samples_all_and_a_rate_of_one_takes_whole_parts() -> None:
    loader = cyclic_poisson_loader(range(N), batch_size=6, cycle=1)
    assert len(loader) == 10 and loader.participation.rate == 0.1 and len(steps_of(loader, 30)) > N / 2
    whole = cyclic_poisson_loader(range(N), batch_size=20, cycle=3)
    assert [records for records, _ in logical(whole)] == [list(range(part, N, 3)) for part in range(3)]
    assert len(cyclic_poisson_loader(range(N), batch_size=7, cycle=3)) == 9  # 60 / 7 is 8.6


def test_balls_fall_uniformly_and_stay() -> None:
    counts = [[0] * 6 for _ in range(12)]
    for seed in range(600):
        loader = balls_in_bins_loader(range(12), batch_size=2, seed=seed)
        assert (loader.participation.period, len(loader), loader.expected_batch_size) == (6, 6, 2)
        for record, (step,) in steps_of(loader, 1).items():
            counts[record][step] += 1
    low, high = bounds(1 / 6, 600)
    assert all(low < count < high for record in counts for count in record)
    assert len({tuple(record) for record in counts}) > 6  # each by itself
    again = balls_in_bins_loader(range(50), batch_size=1)
    first = [records for records, _ in logical(again)]
    assert [] in first and sorted(sum(first, [])) == list(range(50))
    assert all([records for records, _ in logical(again)] == first for _ in range(4))
    assert balls_in_bins_loader(range(50), batch_size=7).expected_batch_size == 50 / 7
    assert len(balls_in_bins_loader(range(50), batch_size=50)) == 1


# ---------------------------------------------------------------------- resuming, ranks, physical batches


@every
def test_a_run_goes_on_in_the_middle_of_a_pass(kind: str) -> None:
    loader = MAKERS[kind]()
    passes = [[records for records, _ in logical(loader)] for _ in range(3)]
    for state in (loader.state_dict(secret=True), loader.state_dict()):
        again = MAKERS[kind]() if "key" in state or kind in ("fixed order", "separated") else loader
        again.load_state_dict({**state, "pass": 1, "step": 5})
        assert [records for records, _ in logical(again)] == passes[1][5:]
        assert again.participation == loader.participation
        assert [records for records, _ in logical(again)] == passes[2]
    again.load_state_dict({**state, "pass": 1, "step": 0})
    logical(again, steps=7)
    assert {**state, "pass": 1, "step": 7} == again.state_dict()


def test_states_of_other_orders_and_deals_are_refused() -> None:
    secret = balls_in_bins_loader(range(N), batch_size=5)
    cyclic = cyclic_poisson_loader(range(N), batch_size=5, cycle=4)
    for loader, state, words in (
        (balls_in_bins_loader(range(N), batch_size=5), secret.state_dict(), "secret=True.*holds the key"),
        (balls_in_bins_loader(range(N), batch_size=6), secret.state_dict(secret=True), "the arguments of the one"),
        (ftrl_loader(range(N), batch_size=5), MAKERS["separated"]().state_dict(), "than this fixed_order_loader's"),
        (MAKERS["separated"](seed=1), MAKERS["separated"]().state_dict(), "another order or deal"),
        (cyclic_poisson_loader(range(N), batch_size=5, cycle=3), cyclic.state_dict(), "than this cyclic_poisson_"),
        (cyclic, {"pass": -1, "step": 0}, "no state of a cyclic_poisson_loader"),
        (cyclic, None, "no state of a cyclic_poisson_loader"),
    ):
        before = loader.state_dict(secret=True)
        with pytest.raises(StepError, match=words):
            loader.load_state_dict(state)  # type: ignore[arg-type]
        assert loader.state_dict(secret=True) == before
    again = cyclic_poisson_loader(range(N), batch_size=5, cycle=4)  # another key, and the same parts: it may go on
    again.load_state_dict(cyclic.state_dict())
    assert again.participation == cyclic.participation
    assert next(iter(logical(again)))[1].place[0] != next(iter(logical(cyclic)))[1].place[0]


@every
@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 2}, {"num_workers": 1}])
def test_the_shares_of_ranks_are_the_whole_batch(kind: str, options: dict[str, Any]) -> None:
    loader = MAKERS[kind](**options)
    whole = logical(loader)
    for ranks in (2, 3) if "num_workers" not in options else (1,):
        parts, counts = [], []
        for rank in range(ranks):
            mine = MAKERS[kind](**options)
            mine.load_state_dict({**loader.state_dict(secret=True), "pass": 0, "step": 0})
            mine.sampler.share = (rank, ranks)
            parts.append(logical(mine))
            counts.append([note.physical for _, note in parts[-1]])
            assert all(note.share == (rank, ranks) for _, note in parts[-1])
        for (records, note), *own in zip(whole, *parts, strict=True):
            assert sorted(sum((mine for mine, _ in own), [])) == sorted(records)
            assert {each.whole for _, each in own} == {note.whole} == {len(records)}
        assert all(count == counts[0] for count in counts)  # as many physical batches on each
    limit = options.get("max_physical_batch_size", N)
    assert all(note.physical == max(0, math.ceil(len(records) / limit) - 1) for records, note in whole)


@every
def test_sharing_before_there_are_others_changes_nothing(kind: str) -> None:
    loader = MAKERS[kind]()
    before = loader.participation
    share(loader)
    assert loader.participation == before and loader.sampler.share == (0, 1)


@pytest.mark.parametrize("kind", ["cyclic Poisson", "balls in bins"])
def test_a_seed_repeats_secret_draws_and_is_told(kind: str) -> None:
    one, two, other = (logical(MAKERS[kind](seed=seed)) for seed in (4, 4, 5))
    assert [records for records, _ in one] == [records for records, _ in two] != [records for records, _ in other]
    assert all(note.seeded for _, note in one)
    assert one[0][1].place[0].startswith("by seed")
    assert not MAKERS["separated"](seed=4).sampler.seeded


def test_data_loaders_are_read_as_they_fetch() -> None:
    source = DataLoader(data(N), batch_size=6, shuffle=True, collate_fn=lambda rows: [len(rows)])
    assert sum(sizes[0] for sizes in balls_in_bins_loader(source)) == N
    assert cyclic_poisson_loader(source, cycle=2).participation.rate == 0.2
    empty = [x.shape for x, _ in cyclic_poisson_loader(data(N), batch_size=0.1, cycle=2, steps=40)]
    assert (0, 5) in empty
    assert fixed_order_loader is ftrl_loader


# ---------------------------------------------------------------------- refusals


@every
def test_what_cannot_be_is_refused(kind: str) -> None:
    make = {"cyclic Poisson": cyclic_poisson_loader, "balls in bins": balls_in_bins_loader}.get(kind, ftrl_loader)
    more = {"separated": {"shuffle_within": 2}, "cyclic Poisson": {"cycle": 2}}.get(kind, {})
    with pytest.raises(AccountingError, match=f"{make.__name__} takes no Poisson samples.*noise="):
        _ = MAKERS[kind]().sample_rate
    for source, options, error, words in (
        (range(N), {"batch_size": 0}, ValueError, "batch_size must be"),
        (range(N), {"batch_size": True}, ValueError, "batch_size must be"),
        (range(N), {"batch_size": N + 1}, ValueError, "batch_size"),
        (range(N), {}, ValueError, "batch_size must be"),
        ([], {"batch_size": 1}, ValueError, "empty"),
        (Subset(range(N), [1, 2, 1, 3]), {"batch_size": 1}, ValueError, "holds a record twice"),
        (range(N), {"batch_size": 5, "max_physical_batch_size": 0}, ValueError, "max_physical_batch_size must be"),
        (range(N), {"batch_size": 5, "seed": -1}, ValueError, "seed must be a whole number of at least 0"),
        (range(N), {"batch_size": 5, "shuffle": True}, ValueError, "shuffle: "),
        (range(N), {"batch_size": 5, "in_order": False}, ValueError, "in_order=False"),
        (range(N), {"batch_size": 5, "group_by": "name"}, TypeError, "group_by"),
        (range(N), {"batch_size": 5, "num_wokers": 1}, TypeError, "num_workers"),
        (DataLoader(range(N), sampler=WeightedRandomSampler([1.0] * N, N)), {"batch_size": 5}, StepError, "Weighted"),
    ):
        with pytest.raises(error, match=words):
            make(source, **options, **more)
    if make is not ftrl_loader:
        with pytest.raises(StepError, match="map-style dataset is needed"):
            make(Stream(), batch_size=5, **more)


def test_wrong_cycles_and_groups_are_refused() -> None:
    for make, options, words in (
        (cyclic_poisson_loader, {"batch_size": 20, "cycle": 4}, "probability 1.333. Take cycle=3 or less"),
        (cyclic_poisson_loader, {"batch_size": 5, "cycle": 0}, "cycle must be"),
        (cyclic_poisson_loader, {"batch_size": 5, "cycle": 4, "steps": 10}, "multiple of cycle=4: take 12"),
        (cyclic_poisson_loader, {"batch_size": 5, "cycle": 4, "steps": 0}, "steps must be"),
        (cyclic_poisson_loader, {"batch_size": 5, "cycle": 4, "order": [0, 1, 0]}, "record 0 is in the order twice"),
        (ftrl_loader, {"batch_size": 5, "shuffle_within": 13}, "more than the 12 steps"),
        (ftrl_loader, {"batch_size": 5, "shuffle_within": 0}, "shuffle_within must be"),
        (ftrl_loader, {"batch_size": 5, "seed": 1}, "seed= is of shuffle_within="),
    ):
        with pytest.raises(ValueError, match=words):
            make(range(N), **options)
    with pytest.raises(ValueError, match="shuffle_within= with an IterableDataset"):
        ftrl_loader(Stream(), records=24, batch_size=4, shuffle_within=2)


@pytest.mark.parametrize(
    "loader",
    [
        ftrl_loader(data(), batch_size=4, shuffle_within=2),
        cyclic_poisson_loader(data(), batch_size=4, cycle=3),
        balls_in_bins_loader(data(), batch_size=4),
    ],
    ids=repr,
)
def test_optimizers_that_account_otherwise_refuse(loader: CycleLoader) -> None:
    for made, words in ((fastdp.DPAdamW, "noise=fastdp.mechanisms.*poisson_loader"), (DPFTRL, "promise is another")):
        model = network()
        optimizer = made(model, lr=0.1, noise_multiplier=1.0)
        with pytest.raises(StepError, match=words):
            for x, y in loader:
                if len(x):
                    losses(model, x, y).mean().backward()
                optimizer.step()
        assert not optimizer.history
        optimizer.detach()


def test_dpftrl_trains_on_a_fixed_order_of_groups_of_one() -> None:
    model = network()
    optimizer = DPFTRL(model, lr=0.1, noise_multiplier=1.0)
    loader = ftrl_loader(data(), batch_size=4, shuffle_within=1)
    for _ in range(2):
        train(optimizer, model, loader)
    assert [tree.steps for tree in optimizer.trees] == [6, 6]


@dataclasses.dataclass
class Pair:
    """A record of a type of its own."""

    number: int
    of: Any


class Image:
    """As PIL's: its numbers are in no attribute."""

    __slots__ = ("number",)
    size = (1, 1)

    def __init__(self, number: int) -> None:
        self.number = number

    def tobytes(self) -> bytes:
        return bytes([self.number])


RECORDS: dict[str, Callable[[int], Any]] = {
    "numbers": int, "numpy's": np.float32, "objects": lambda n: np.array([n, str(n)], dtype=object),
    "a dataclass": lambda n: Pair(0, [n]), "an image": Image, "sets": lambda n: {n, -n}, "complex": lambda n: 1j * n,
    "sparse": lambda n: torch.eye(N)[n].to_sparse(), "dates": lambda n: np.datetime64(n, "D"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS)
def test_records_in_another_order_are_others(kind: str) -> None:
    """In another loader, and in the same one from pass to pass."""
    records = list(map(RECORDS[kind], range(N)))
    make = lambda records: ftrl_loader(records, batch_size=5, collate_fn=len)
    loader = make(records)
    before = loader.participation
    assert make(list(records)).participation == before != make(records[::-1]).participation
    list(loader)
    assert loader.participation == before
    records.reverse()
    with pytest.warns(UserWarning, match="in another order"):
        list(loader)
    assert loader.participation == make(records).participation != before


def test_records_of_which_nothing_is_known_are_of_no_other_loader() -> None:
    """Of objects without attributes nothing can be compared."""
    records = [object() for _ in range(N)]
    one, other = (ftrl_loader(records, batch_size=5, collate_fn=len).participation for _ in range(2))
    assert one != other
