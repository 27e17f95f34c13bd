"""Batches of a Poisson loader that a loop passes over: what notices them."""

from __future__ import annotations

import gc
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import fastdp
from fastdp.errors import StepError

from ..by_hand import network, records
from .skipping import made, sizes, train

pytestmark = pytest.mark.slow  # `make test-all` runs it

# --------------------------------------------------------------------------- noticed


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("which", ["last", "middle", "all but the first", "all but the last"])
def test_a_batch_passed_over_is_refused_by_the_loader(which, limit):
    model, loader, optimizer = made(limit=limit)
    number = len(sizes(made(limit=limit)[1]))
    left_out = {
        "last": [number - 1], "middle": [number // 2], "all but the first": range(1, number),
        "all but the last": range(number - 1),
    }[which]  # fmt: skip
    with pytest.raises(StepError, match="loop skipped"):
        for i, batch in enumerate(loader):
            if i in left_out:
                continue
            train(model, optimizer, batch)
    if which != "all but the last":  # of which none was trained on
        with pytest.warns(UserWarning, match=r"1 batch\(es\) of the poisson_loader were skipped"):
            optimizer.epsilon(1e-2)


def test_a_loss_that_does_not_please():
    """After a backward, too; and where an error of the step is swallowed."""
    for swallowed in (False, True):
        model, loader, optimizer = made(steps=1)
        with pytest.raises(StepError, match="last batch"):
            for x, y in loader:
                F.cross_entropy(model(x), y).backward()
                if swallowed:
                    optimizer._privacy.loss_reduction, optimizer._privacy.expected_batch_size = "mean", 1e6
                    with pytest.raises(StepError, match="expected_batch_size"):
                        optimizer.step()
                else:
                    optimizer.zero_grad()


def test_passes_of_one_batch_each():
    """Where each pass has one batch, one that is passed over is a pass without a step: the next ones say so."""
    model, loader, optimizer = made(steps=1)
    for number in range(4):
        if number == 3:
            with pytest.warns(UserWarning, match="without any step"):
                for batch in loader:
                    train(model, optimizer, batch)
            continue
        for batch in loader:
            if number == 2:
                continue
            train(model, optimizer, batch)
    with pytest.warns(UserWarning, match=r"1 pass\(es\) over the poisson_loader"):
        optimizer.epsilon(1e-2)


@pytest.mark.parametrize("how", ["break", "return", "exception", "next"])
def test_a_loop_that_ends_with_a_batch_in_hand(how):
    model, loader, optimizer = made()

    def loop():
        for i, batch in enumerate(loader):
            if i == 3:
                if how == "break":
                    break
                if how == "exception":
                    raise KeyboardInterrupt
                return
            train(model, optimizer, batch)

    if how == "next":
        batches = iter(loader)
        for i in range(4):
            batch = next(batches)
            if i < 3:
                train(model, optimizer, batch)
        del batches
    elif how == "exception":
        with pytest.raises(KeyboardInterrupt):
            loop()
    else:
        loop()
    gc.collect()
    with pytest.warns(UserWarning, match="with a batch of the poisson_loader in hand"):
        optimizer.epsilon(1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:  # said before
            train(model, optimizer, batch)
    assert not caught
    with pytest.warns(UserWarning, match=r"1 time\(s\) the loop was left"):  # and true still
        optimizer.epsilon(1e-2)


def test_the_next_epoch_says_that_the_one_before_was_left():
    model, loader, optimizer = made()
    for batch in itertools.islice(loader, 2):
        train(model, optimizer, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        warnings.filterwarnings("ignore", "the batches come from a loader with seed=")
        for _ in zip(range(2), loader, strict=False):
            train(model, optimizer, _[1])
    for i, batch in enumerate(loader):
        if i == 2:
            break
        train(model, optimizer, batch)
    with pytest.warns(UserWarning, match="in hand"):
        for batch in loader:
            train(model, optimizer, batch)


def test_an_iteration_that_an_exception_keeps_alive():
    model, loader, optimizer = made()
    kept = iter(loader)
    train(model, optimizer, next(kept))
    next(kept)
    for batch in loader:
        train(model, optimizer, batch)
    with pytest.warns(UserWarning, match="in hand"):
        optimizer.epsilon(1e-2)
    del kept


def test_a_logical_batch_that_is_left_within():
    model, loader, optimizer = made(limit=2)
    for batch in loader:
        train(model, optimizer, batch)
        if not optimizer.stepped:
            break
    with pytest.warns(UserWarning, match="before its last physical batch"):
        optimizer.epsilon(1e-2)


def test_after_detach_epsilon_still_says_it():
    model, loader, optimizer = made()
    with pytest.raises(StepError):
        for i, batch in enumerate(loader):
            if i != 2:
                train(model, optimizer, batch)
    optimizer.detach()
    with pytest.warns(UserWarning, match="epsilon may not hold"):
        optimizer.epsilon(1e-2)


# --------------------------------------------------------------------------- taken out of the loader before training


def given(loader, model=None, **options):
    """An optimizer that is told what the loader would tell."""
    return fastdp.DPSGD(
        model or network(), lr=0.1, noise_multiplier=1.0, sample_rate=loader.sample_rate,
        expected_batch_size=loader.expected_batch_size, **options,
    )  # fmt: skip


CHOICES = {
    "large": lambda loader: [b for b in loader if len(b[0]) >= 20],
    "copied": lambda loader: [(b[0].clone(), b[1]) for b in loader if len(b[0]) >= 20],
    "views": lambda loader: [(b[0].view(len(b[0]), -1), b[1]) for b in loader if len(b[0]) >= 20],
    "sorted": lambda loader: sorted(loader, key=lambda b: -len(b[0]))[:3],
    "largest": lambda loader: [max(loader, key=lambda b: len(b[0]))],
}


@pytest.mark.parametrize("how", CHOICES)
def test_batches_chosen_from_a_list(how):
    model = network()
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    loader = fastdp.poisson_loader(data, sample_rate=0.5, steps=12, seed=3)
    optimizer = given(loader, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for batch in CHOICES[how](loader):
                train(model, optimizer, batch)
    assert any("had no step() while others had" in str(w.message) for w in caught)
    with pytest.warns(UserWarning, match=r"\d+ batch\(es\) of the poisson_loader had no step\(\) while others had"):
        optimizer.epsilon(1e-2)


def test_a_list_of_all_batches_hears_nothing(silent):
    """Nor does epsilon() within it, nor its first part, nor statistics over the loader."""
    model = network()
    loader = fastdp.poisson_loader(records(), sample_rate=0.5, steps=6)
    optimizer = given(loader, model)
    for batch in loader:
        batch[0].mean()
    for _ in range(2):
        batches = list(loader)
        for batch in batches:
            train(model, optimizer, batch)
            optimizer.epsilon(1e-2)
        for number, batch in enumerate(batches := list(loader)):
            if number < 3:
                train(model, optimizer, batch)
        optimizer.epsilon(1e-2)


def test_lists_that_are_dropped_whole():
    model = network()
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    loader = fastdp.poisson_loader(data, sample_rate=0.5, steps=2, seed=3)
    optimizer = given(loader, model)
    for number in range(4):
        for batch in list(loader):
            if number % 2 == 0:
                train(model, optimizer, batch)
    with pytest.warns(UserWarning, match=r"2 pass\(es\) over the poisson_loader were made without any step"):
        optimizer.epsilon(1e-2)


# --------------------------------------------------------------------------- two optimizers


def two(pattern, passes=1):
    """One optimizer steps on every batch, the other where the pattern says: it."""
    model, loader, optimizer = made(steps=len(pattern) // passes)
    other = network(1)
    every = fastdp.DPSGD(other, lr=0.1, noise_multiplier=1.0)
    steps = iter(pattern)
    for _ in range(passes):
        for batch in loader:
            train(other, every, batch)
            if next(steps) == "1":
                train(model, optimizer, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        warnings.filterwarnings("ignore", "the batches come from a loader with seed=")
        every.epsilon(1e-2)
    return optimizer


@pytest.mark.parametrize("pattern, missed", [
    ("110100111011", 4), ("101111111111", 1), ("111111111110", 1), ("111100001100", 6), ("001101011101", 3),
])  # fmt: skip
def test_a_batch_that_only_the_other_optimizer_steps_on(pattern, missed):
    optimizer = two(pattern)
    with pytest.warns(UserWarning, match=rf"{missed} batch\(es\) of the poisson_loader had no step\(\) while others"):
        optimizer.epsilon(1e-2)


@pytest.mark.parametrize("pattern, passes", [
    ("111111111111", 1), ("101010101010", 1), ("100001000010", 1), ("000010000100", 1), ("111110111110", 1),
    ("000000111111", 1), ("100001100001", 2), ("110110110110", 2), ("100100100100100", 3), ("001001111111", 2),
])  # fmt: skip
def test_turns_hear_nothing(pattern, passes, silent):
    if pattern == "001001111111":
        pattern = "000111111111"  # a first pass that begins late
    two(pattern, passes).epsilon(1e-2)


@pytest.mark.parametrize("seed", range(12))
def test_batches_passed_over_by_their_size(seed):
    model, loader, optimizer = made(seed=seed)
    small = sorted(sizes(made(seed=seed)[1]))[2]
    with pytest.raises(StepError, match="loop skipped"):
        for batch in loader:
            if len(batch[0]) < small:
                continue
            train(model, optimizer, batch)


def test_epsilon_that_was_told_before_the_batch_in_hand_was_dropped():
    model, loader, optimizer = made()
    batches = iter(loader)
    train(model, optimizer, next(batches))
    next(batches)
    optimizer.epsilon(1e-2)
    with pytest.warns(UserWarning, match="in hand"):
        del batches
        gc.collect()
