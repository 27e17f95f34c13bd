"""Batches of a Poisson loader that a loop passes over: what notices them, and loops that are right and hear nothing."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import fastdp
from fastdp.errors import StepError

from .by_hand import network, records


def made(steps=6, limit=None, seed=1, rate=0.5, **options):
    model = network()
    loader = fastdp.poisson_loader(
        records(), sample_rate=rate, max_physical_batch_size=limit, steps=steps, seed=seed, **options
    )
    return model, loader, fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)


def train(model, optimizer, batch):
    x, y = batch
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        yield


def sizes(loader):
    """Of the batches of a pass, in another loader of the same seed."""
    return [len(x) for x, _ in loader]


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
    with pytest.raises(StepError, match="passed over"):
        for i, batch in enumerate(loader):
            if i in left_out:
                continue
            train(model, optimizer, batch)
    if which != "all but the last":  # of which none was trained on
        with pytest.warns(UserWarning, match=r"1 batch\(es\) of the poisson_loader were passed over"):
            optimizer.epsilon(1e-2)


@pytest.mark.parametrize("seed", range(12))
def test_batches_passed_over_by_their_size(seed):
    model, loader, optimizer = made(seed=seed)
    small = sorted(sizes(made(seed=seed)[1]))[2]
    with pytest.raises(StepError, match="passed over"):
        for batch in loader:
            if len(batch[0]) < small:
                continue
            train(model, optimizer, batch)


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


def test_epsilon_that_was_told_before_the_batch_in_hand_was_dropped():
    model, loader, optimizer = made()
    batches = iter(loader)
    train(model, optimizer, next(batches))
    next(batches)
    optimizer.epsilon(1e-2)
    with pytest.warns(UserWarning, match="in hand"):
        del batches
        gc.collect()


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


# --------------------------------------------------------------------------- right loops


def test_right_loops_hear_nothing(silent):
    for limit, rate in ((None, 0.5), (4, 0.5), (None, 0.02), (2, 0.02)):
        model, loader, optimizer = made(limit=limit, rate=rate)
        for _ in range(3):
            for number, (x, y) in enumerate(loader):
                if number == 3:
                    optimizer.epsilon(1e-2)
                if len(x) == 0:
                    optimizer.step()  # without a forward
                else:
                    train(model, optimizer, (x, y))
                if number == 4:
                    optimizer.epsilon(1e-2)
        assert sum(n for *_, n in optimizer.history) == 18


def test_a_break_after_the_step_hears_nothing(silent):
    model, loader, optimizer = made(limit=4)
    for _ in range(3):
        for batch in loader:
            train(model, optimizer, batch)
            if optimizer.stepped:
                break
    assert optimizer.epsilon(1e-2) > 0 and optimizer.history[0][2] == 3


def test_a_loader_that_nobody_trains_on(silent):
    model, loader, optimizer = made()
    other = fastdp.poisson_loader(records(), sample_rate=0.3, steps=3)
    list(loader), next(iter(loader))  # before training: statistics, the shape of a batch
    for batch in loader:
        train(model, optimizer, batch)
        list(itertools.islice(other, 2))
    for i, _ in enumerate(other):
        if i == 1:
            break
    optimizer.epsilon(1e-2)


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_evaluation_on_the_loader_of_the_training(how, silent):
    model, loader, optimizer = made()
    for _ in range(2):
        for batch in loader:
            train(model, optimizer, batch)
        model.train(how != "eval")
        with {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[how]():
            for x, _ in loader:
                model(x)
            next(iter(loader))
        model.train()
    optimizer.epsilon(1e-2)


def test_two_models_on_one_loader(silent):
    """As a GAN's: both step on every batch, or they take turns."""
    loader = made()[1]
    models = [network(seed) for seed in (0, 1)]
    optimizers = [fastdp.DPSGD(m, lr=0.1, noise_multiplier=1.0) for m in models]
    for number, batch in enumerate(loader):
        train(models[number % 2], optimizers[number % 2], batch)
    for batch in loader:
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, batch)
    assert [o.history[0][2] for o in optimizers] == [9, 9]
    assert all(o.epsilon(1e-2) for o in optimizers)


def test_a_loader_after_its_optimizer(silent):
    model, loader, optimizer = made()
    for i, batch in enumerate(loader):
        if i < 3:
            train(model, optimizer, batch)
        if i == 3:
            optimizer.detach()  # the rest of the pass is for something else
    list(loader)
    optimizer.epsilon(1e-2)
    model, loader, optimizer = made()
    for i, batch in enumerate(loader):
        if i < 2:
            train(model, optimizer, batch)
            if i == 1:
                del optimizer, model
                gc.collect()


def test_a_batch_that_is_handed_out_again(silent):
    """A loop that takes up a step which failed: the loader's state brings the batch back."""
    model, loader, optimizer = made()
    state = loader.state_dict()
    for i, batch in enumerate(loader):
        if i == 2:
            break
        train(model, optimizer, batch)
        state = loader.state_dict()
    loader.load_state_dict(state)
    for batch in loader:
        train(model, optimizer, batch)
    assert optimizer.history[0][2] == 6 and optimizer.epsilon(1e-2) > 0


def test_copies_of_a_loader(silent):
    model, loader, optimizer = made()
    for batch in loader:
        train(model, optimizer, batch)
    for copied in (copy.deepcopy(loader), copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert len(list(copied)) == 6
    optimizer.epsilon(1e-2)


def test_workers_and_persons(silent):
    model, loader, optimizer = made(num_workers=1, prefetch_factor=2)
    for batch in loader:
        train(model, optimizer, batch)
    optimizer.epsilon(1e-2)
    x, y = records()[:]
    people = fastdp.poisson_loader(
        TensorDataset(x, y), sample_rate=0.3, steps=4, group_by=torch.arange(len(x)) // 2, max_physical_batch_size=4
    )
    model = network()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    for batch in people:
        train(model, optimizer, batch)
    assert optimizer.unit == "group" and optimizer.epsilon(1e-2) > 0
