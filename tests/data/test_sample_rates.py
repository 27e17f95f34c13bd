"""Runs on an ordinary loader: what the first step says of the sample rate, and epsilon(sample_rate=)."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.data import sample_rates
from fastdp.errors import AccountingError, SampleRateWarning
from fastdp.mechanisms import DPFTRL, ftrl_loader

from ..runs import backward, data, model_of, steps


def private(model, **options):
    known = dict(lr=0.1, noise_multiplier=1.0, expected_batch_size=6, accountant="rdp", **options)
    return fastdp.DPSGD(model, **known)


def train(optimizer, model, records=60):
    for (x,) in DataLoader(TensorDataset(data(records)), batch_size=6, shuffle=True):
        backward(model, x)
        optimizer.step()


def test_a_loader_is_seen_after_none_was_there(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sample_rates, "_SECONDS", 0.0)  # it is looked for each time
        for _ in range(3):
            steps(private(model := model_of()), model, 1)
    optimizer = private(model := model_of())
    with pytest.warns(SampleRateWarning, match="6 of the 60 records"):
        train(optimizer, model)


def test_the_first_step_warns_once_and_says_what_it_saw():
    optimizer = private(model := model_of())
    with pytest.warns(SampleRateWarning, match=r"epsilon\(delta, sample_rate=\).*6 of the 60 records.*0.1") as seen:
        train(optimizer, model)
    assert len([w for w in seen if w.category is SampleRateWarning]) == 1
    assert [w.filename for w in seen if w.category is SampleRateWarning] == [__file__]
    assert optimizer.history == [(1.0, None, 10)]


@pytest.mark.parametrize("rate", [None, 0.1])
def test_a_loader_that_draws_some_records_more_often_is_warned_of(rate):
    optimizer, sampler = private(model := model_of(), sample_rate=rate), WeightedRandomSampler([9.0] + [1.0] * 59, 60)
    with pytest.warns(UserWarning, match=r"one record 7.94 times as often.*weight\[y\]"):
        for (x,) in DataLoader(TensorDataset(data(60)), batch_size=6, sampler=sampler):
            backward(model, x)
            optimizer.step()


def test_epsilon_at_a_rate_that_is_given_later(silent):
    optimizer = private(model := model_of())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SampleRateWarning)
        train(optimizer, model)
    assert optimizer.epsilon(1e-5, sample_rate=0.1) == epsilon_of([(1.0, 0.1, 10)], 1e-5, "rdp")
    assert optimizer.history == [(1.0, None, 10)]  # what is known of the steps is what was told
    with pytest.raises(AccountingError, match="give sample_rate= to the optimizer or to its epsilon"):
        optimizer.epsilon(1e-5)
    for wrong in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(AccountingError, match=r"\(0, 1\]"):
            optimizer.epsilon(1e-5, sample_rate=wrong)
    with pytest.raises(ValueError, match="must be a number"):
        optimizer.epsilon(1e-5, sample_rate="0.1")
    with pytest.raises(TypeError):
        optimizer.epsilon(1e-5, 0.1)  # by its name alone


def test_a_rate_far_below_what_the_first_batch_showed_is_warned_of():
    optimizer = private(model := model_of())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(optimizer, model)
    with pytest.warns(UserWarning, match="sample_rate=0.001 is far below.*had 6 of the 60 records") as seen:
        optimizer.epsilon(1e-5, sample_rate=0.001)
    assert [w.filename for w in seen if "far below" in str(w.message)] == [__file__]


def test_a_rate_that_is_known_is_not_another_one(silent):
    model = model_of()
    optimizer = private(model, sample_rate=0.2)
    steps(optimizer, model, 3)
    assert optimizer.epsilon(1e-5, sample_rate=0.2) == optimizer.epsilon(1e-5)
    with pytest.raises(AccountingError, match=r"sample_rate=0.1 was given, and steps were sampled at 0.2"):
        optimizer.epsilon(1e-5, sample_rate=0.1)


def test_who_needs_no_rate_hears_nothing(silent):
    """Runs on a Poisson loader, with sample_rate=, and without noise."""
    records = TensorDataset(data(60))
    for loader, options in (
        (fastdp.poisson_loader(records, sample_rate=0.1, steps=2), {}),
        (DataLoader(records, batch_size=6, shuffle=True), {"sample_rate": 0.1}),
        (DataLoader(records, batch_size=6), {"sample_rate": 1.0}),  # amplified by nothing
        (DataLoader(records, batch_size=6), {"noise_multiplier": 0.0}),
    ):
        size = {} if isinstance(loader, fastdp.sampling.PoissonLoader) else {"expected_batch_size": 6}
        model = model_of()
        optimizer = fastdp.DPSGD(model, **{"lr": 0.1, "noise_multiplier": 1.0, **size, **options})
        for (x,) in loader:
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(data(60)))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "records, options",
    [(TensorDataset(data(60)), {}), (Stream(), {}), (TensorDataset(data(60)), {"sampler": range(60)}),
     (TensorDataset(data(60)), {"sampler": DistributedSampler(range(60), 1, 0, shuffle=False)})],
)  # fmt: skip
def test_a_rate_of_batches_that_nobody_draws_is_warned_of(records, options, later):
    """In one order a record is in a step for certain: the rate of an IterableDataset's batches amplifies nothing."""
    optimizer = private(model := model_of(), **({} if later else {"sample_rate": 0.1}))
    with pytest.warns(UserWarning) as seen:
        for (x,) in DataLoader(records, batch_size=6, **options):
            backward(model, x)
            optimizer.step()
        before = sum("draws nothing" in str(w.message) for w in seen)
        optimizer.epsilon(1e-3, **({"sample_rate": 0.1} if later else {}))
    assert (before, sum("draws nothing" in str(w.message) for w in seen)) == (int(not later), 1)


def test_what_an_ordered_loader_of_other_batches_does_is_no_matter(silent):
    """Batches that were drawn by hand, while a loader of validation, of another size, is being read."""
    other = iter(DataLoader(TensorDataset(data(60)), batch_size=4))
    next(other)
    optimizer = private(model := model_of(), sample_rate=0.1)
    backward(model, data(60)[torch.rand(60) < 0.12])
    optimizer.step()
    assert next(other)


def test_batches_from_a_seed_are_said_as_noise_from_one():
    records, found = TensorDataset(torch.randn(20, 3)), []
    known = {"lr": 0.1, "noise_multiplier": 1.0}
    for kind, loader in (
        (fastdp.DPSGD, fastdp.poisson_loader(records, sample_rate=0.5, steps=1, seed=1)),
        (fastdp.DPSGD, fastdp.poisson_loader(records, sample_rate=0.5, steps=1)),
        (DPFTRL, ftrl_loader(records, batch_size=10)),  # whose order need not be secret
    ):
        model = torch.nn.Linear(3, 1)
        optimizer = kind(model, **known)
        for (x,) in loader:
            model(x).sum(1).mean().backward()
            optimizer.step()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.epsilon(1e-3)
        texts = [str(each.message) for each in seen]
        found.append(sum("batches come from a loader with seed=" in text for text in texts))
    assert found == [1, 0, 0]
