"""Batches of a Poisson loader that a loop passes over: what notices them."""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
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
        with pytest.warns(UserWarning, match=r"1 batch\(es\) of the loader were skipped"):
            optimizer.epsilon(1e-2)


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("graphed", [False, True])
def test_a_loop_left_between_backward_and_step_can_be_run_again(limit, graphed):
    """A cell of a notebook that was interrupted: what its last backward left is dropped, with a warning."""
    model = nn.Linear(6, 3)
    data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
    loader = fastdp.poisson_loader(data, expected_batch_size=8, max_physical_batch_size=limit)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, graphed=graphed)

    def cell(last: int = -1) -> None:
        for i, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            if i == last:
                raise KeyboardInterrupt
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="the loop was left with"):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                cell(1)
        cell()
    optimizer.detach()


def test_the_backward_of_a_loop_that_was_left_is_not_in_the_next_step():
    model = nn.Linear(6, 3)
    data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
    loader = fastdp.poisson_loader(data, expected_batch_size=20)
    optimizer = fastdp.DPSGD(model, lr=0.0, noise_multiplier=1e-6, max_grad_norm=1e3)  # clips none
    for x, y in loader:
        (F.cross_entropy(model(x), y) * 100).backward()
        break
    with pytest.warns(UserWarning, match="the loop was left with"):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            break
    optimizer.detach()
    weight = model.weight.detach().requires_grad_()
    F.cross_entropy(F.linear(x, weight, model.bias.detach()), y, reduction="sum").backward()
    torch.testing.assert_close(model.weight.grad, weight.grad / 20, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("how", ["break", "exception"])
def test_a_loop_that_ends_with_a_batch_in_hand(how):
    model, loader, optimizer = made()
    with contextlib.suppress(KeyboardInterrupt):
        for i, batch in enumerate(loader):
            if i == 3 and how == "exception":
                raise KeyboardInterrupt
            if i == 3:
                break
            train(model, optimizer, batch)
    gc.collect()
    with pytest.warns(UserWarning, match="with a batch of the loader in hand"):
        optimizer.epsilon(1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in loader:  # said before
            train(model, optimizer, batch)
    with pytest.warns(UserWarning, match=r"1 time\(s\) the loop was left"):  # and true still
        optimizer.epsilon(1e-2)


def test_a_logical_batch_that_is_left_within():
    model, loader, optimizer = made(limit=2)
    for batch in loader:
        train(model, optimizer, batch)
        if not optimizer.stepped:
            break
    with pytest.warns(UserWarning, match="before its last physical batch"):
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
    with pytest.warns(UserWarning, match=r"\d+ batch\(es\) of the loader had no step\(\) while others had"):
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
    with pytest.warns(UserWarning, match=rf"{missed} batch\(es\) of the loader had no step\(\) while others"):
        optimizer.epsilon(1e-2)


@pytest.mark.parametrize("pattern, passes", [
    ("111111111111", 1), ("101010101010", 1), ("100001000010", 1), ("000010000100", 1), ("111110111110", 1),
    ("000000111111", 1), ("100001100001", 2), ("110110110110", 2), ("100100100100100", 3), ("001001111111", 2),
])  # fmt: skip
def test_turns_hear_nothing(pattern, passes, silent):
    if pattern == "001001111111":
        pattern = "000111111111"  # a first pass that begins late
    two(pattern, passes).epsilon(1e-2)
