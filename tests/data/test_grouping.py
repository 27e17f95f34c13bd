"""Poisson samples of persons: whole persons in physical batches, accounted at the persons' rate, resumed exactly."""

from __future__ import annotations

import copy
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import fastdp
from fastdp import sampling
from fastdp.errors import StepError

KEYS = [7, 3, 3, 9, 7, 3, 5, 9, 3, 7, 5, 3]  # of 12 records: five of 3, three of 7, two of 9 and of 5
PERSONS = len(set(KEYS))


def table(keys=KEYS) -> TensorDataset:
    return TensorDataset(torch.arange(len(keys)), torch.tensor(keys))


class Rows(Dataset):
    """Records as given, by index only."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int):
        return self.rows[place]


def batches(loader) -> list[tuple[list[int], list[int], bool]]:
    """(records, keys, final) of each physical batch of a pass."""
    found = []
    for records, keys in loader:
        current = sampling.current()
        assert current.size == len(records) == current.people.records
        found.append((records.tolist(), keys.tolist(), current.final))
    return found


# --------------------------------------------------------------------------- what is sampled


def test_a_step_has_all_records_of_its_persons_and_a_physical_batch_whole_ones() -> None:
    loader = fastdp.poisson_loader(
        table(), sample_rate=0.5, group_by=KEYS, max_physical_batch_size=6, steps=200, seed=1
    )
    assert loader.expected_batch_size == PERSONS / 2 and len(loader) == 200
    step, sizes = Counter(), set()
    for records, keys, final in batches(loader):
        assert len(records) <= 6
        sizes.add(len(records))
        assert not set(keys) & set(step), "a person in two physical batches"
        assert Counter(keys) == {key: KEYS.count(key) for key in set(keys)} and [KEYS[r] for r in records] == keys
        step += Counter(keys)
        step = Counter() if final else step
    assert 0 in sizes and 5 in sizes


def test_persons_join_at_the_rate_and_independently() -> None:
    steps, rate = 1500, 0.3
    loader = fastdp.poisson_loader(table(), sample_rate=rate, group_by=KEYS, steps=steps, seed=5)
    joined = torch.tensor([[key in keys for key in sorted(set(KEYS))] for _, keys, _ in batches(loader)]).double()
    assert len(joined) == steps
    spread = (rate * (1 - rate) / steps) ** 0.5
    assert bool(((joined.mean(0) - rate).abs() < 5 * spread).all())
    assert float((torch.corrcoef(joined.T) - torch.eye(PERSONS)).abs().max()) < 5 / steps**0.5


def test_the_epsilon_is_of_persons() -> None:
    """Half of four persons, not six of twelve records."""
    model = nn.Linear(1, 1)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=2.0, max_grad_norm=1.0)
    loader = fastdp.poisson_loader(table(), expected_batch_size=1, group_by=KEYS, steps=3, seed=0)
    for records, _ in loader:
        model(records.float().unsqueeze(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.history == [(2.0, 1 / PERSONS, 3)] and optimizer.unit == "group"
    twin = fastdp.DPSGD(nn.Linear(1, 1), lr=0.1, noise_multiplier=2.0)
    twin._privacy.ledger.begin([(2.0, 0.25, 3)])
    assert optimizer.epsilon(1e-5) == twin.epsilon(1e-5)
    assert "each of 4 groups of 12 records (at most 5 each a step) with probability 0.25" in repr(loader)
    assert "12 records with probability" in repr(fastdp.poisson_loader(table(), sample_rate=0.5))


# --------------------------------------------------------------------------- a cap


def test_a_cap_takes_some_records_of_a_person_anew_at_each_step() -> None:
    loader = fastdp.poisson_loader(
        table(), sample_rate=1.0, group_by=KEYS, max_records_per_group=2, max_physical_batch_size=2, steps=300, seed=4
    )
    taken, subsets = Counter(), set()
    for records, keys, _ in batches(loader):
        assert len(set(records)) == len(records) <= 2 and len(set(keys)) == 1
        taken.update(records)
        if keys[0] == 3:
            subsets.add(tuple(records))
    assert len(subsets) == 10  # of five records two
    of_three = [taken[record] for record, key in enumerate(KEYS) if key == 3]
    assert all(abs(count - 120) < 5 * (300 * 0.4 * 0.6) ** 0.5 for count in of_three)


def test_a_person_too_large_for_a_physical_batch_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="max_records_per_group=4"):
        fastdp.poisson_loader(table(), sample_rate=0.5, group_by=KEYS, max_physical_batch_size=4)
    with pytest.raises(ValueError, match="of which a step takes 5"):
        fastdp.poisson_loader(
            table(), sample_rate=0.5, group_by=KEYS, max_physical_batch_size=4, max_records_per_group=5
        )
    with pytest.raises(ValueError, match="needs group_by"):
        fastdp.poisson_loader(table(), sample_rate=0.5, max_records_per_group=2)
    for bad in (0, 2.5):
        with pytest.raises(ValueError, match="max_records_per_group must be a whole number"):
            fastdp.poisson_loader(table(), sample_rate=0.5, group_by=KEYS, max_records_per_group=bad)
    with pytest.raises(ValueError, match=r"\(0, 4\], the size of the data in groups"):
        fastdp.poisson_loader(table(), expected_batch_size=6, group_by=KEYS)


# --------------------------------------------------------------------------- ways to say whose a record is

Record = namedtuple("Record", "x who")
NAMED = [Record(place, key) for place, key in enumerate(KEYS)]
DICTS = [{"x": place, "who": f"person {key}"} for place, key in enumerate(KEYS)]
WAYS = {
    "list": (table(), KEYS),
    "array": (table(), np.array(KEYS)),
    "tensor": (table(), torch.tensor(KEYS)),
    "function": (table(), lambda record: record[1]),
    "function giving tensors": (table(), lambda record: int(record[1])),
    "dicts": (Rows(DICTS), "who"),
    "named tuples": (Rows(NAMED), "who"),
    "subset": (Subset(Rows(DICTS * 2), list(range(12, 24))), "who"),
    "a DataLoader": (DataLoader(Rows(DICTS), batch_size=2), "who"),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_say_whose(way: str) -> None:
    data, group_by = WAYS[way]
    rate = {} if isinstance(data, DataLoader) else {"expected_batch_size": 2}
    loader = fastdp.poisson_loader(data, group_by=group_by, **rate)
    same = fastdp.poisson_loader(table(), group_by=KEYS, expected_batch_size=2)
    assert loader.sample_rate == 0.5
    assert [list(r) for r in loader.grouping._records] == [list(r) for r in same.grouping._records]


def test_a_column_of_a_hugging_face_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"x": list(range(12)), "who": [str(key) for key in KEYS]})
    for data in (plain, plain.with_format("torch", columns=["x"]), plain.with_transform(lambda rows: {"x": rows["x"]})):
        loader = fastdp.poisson_loader(data, group_by="who", sample_rate=1.0, steps=1)
        assert loader.grouping.groups == PERSONS
        (batch,) = list(loader)
        assert sorted(int(x) for x in batch["x"]) == list(range(12))
    with pytest.raises(ValueError, match="no such column, but x, who"):
        fastdp.poisson_loader(plain, group_by="name", sample_rate=1.0)


def test_what_tells_no_person() -> None:
    for data, group_by, message in (
        (Rows(DICTS), "name", "no such column, but x, who"),
        (table(), "who", "a key for each record, or a function"),
        (table(), KEYS[:-1], "11 keys for 12 records"),
        (table(), [*KEYS[:-1], None], "record 11 has no key"),
        (table(), torch.ones(12, 2), "one key for each record"),
        (table(), 3, "not int"),
        (Rows([*DICTS[:-1], {"x": 1}]), "who", "record 11 has no such column"),
    ):
        with pytest.raises(ValueError, match=message):
            fastdp.poisson_loader(data, group_by=group_by, sample_rate=0.5)


# --------------------------------------------------------------------------- the loop


def run(steps: int = 6, workers: int = 0):
    torch.manual_seed(0)
    model = nn.Linear(1, 2)
    optimizer = fastdp.DPAdamW(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=0.5)
    loader = fastdp.poisson_loader(
        table(), sample_rate=0.4, group_by=KEYS, max_physical_batch_size=4, max_records_per_group=3, steps=steps,
        num_workers=workers,
    )  # fmt: skip
    return model, optimizer, loader


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_by_person_is_taken_up_exactly(workers: int) -> None:
    def train(model, optimizer, loader, keep=None):
        weights, handed, kept = [], [], None
        for records, _ in loader:
            (model(records.float().unsqueeze(1)) - 1).square().mean(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            handed.append(records.tolist())
            if sampling.current().final:
                weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
                if len(weights) == keep:
                    states = loader.state_dict(secret=True), optimizer.state_dict(), optimizer.noise_state()
                    kept = len(handed), copy.deepcopy((model.state_dict(), *states))
        return weights, handed, kept

    whole, handed, (place, state) = train(*run(workers=workers), keep=3)
    model, optimizer, loader = run(workers=workers)
    model.load_state_dict(state[0])
    loader.load_state_dict(state[1])
    optimizer.load_state_dict(state[2])
    optimizer.load_noise_state(state[3])
    weights, again, _ = train(model, optimizer, loader)
    assert again == handed[place:] and len(weights) == 3
    assert all(torch.equal(a, b) for a, b in zip(weights, whole[3:], strict=True))
    assert optimizer.history == [(1.0, 0.4, 6)] and optimizer.unit == "group"


def test_what_is_said_twice_or_of_another_batch_is_refused() -> None:
    model, optimizer, loader = run()
    grouped = fastdp.poisson_loader(table(), sample_rate=1.0, group_by=KEYS, steps=1)
    for records, keys in grouped:
        optimizer.group_by(keys)
        with pytest.raises(StepError, match="leave group_by"):
            model(records.float().unsqueeze(1)).square().mean().backward()
        optimizer.group_by(None)
        with pytest.raises(StepError, match="handed out 12 records, the model was given 10"):
            model(records[:10].float().unsqueeze(1)).square().mean().backward()
    plain = fastdp.poisson_loader(table(), sample_rate=1.0, steps=1)
    for records, keys in plain:
        optimizer.group_by(keys)
        with pytest.raises(StepError, match="samples records, not persons"):
            model(records.float().unsqueeze(1)).square().mean().backward()
    with pytest.raises(StepError):
        optimizer.step()


def test_a_forward_on_another_batch_of_as_many_records_is_refused() -> None:
    """Its persons are not those of the batch in hand, though the sizes agree."""
    model, optimizer, _ = run()
    loader = fastdp.poisson_loader(table([0, 0, 1, 2]), sample_rate=1.0, group_by=[0, 0, 1, 2],
                                   max_physical_batch_size=2, steps=1)  # fmt: skip
    kept = None
    for records, _ in loader:
        loss = model(records.float().unsqueeze(1)).square().mean()
        if kept is None:
            kept = loss
            model(records.float().unsqueeze(1)).square().mean().backward()
            optimizer.step()
            continue
        with pytest.raises(StepError, match="other persons"):
            kept.backward()
        break  # the loader would refuse to end without a step
