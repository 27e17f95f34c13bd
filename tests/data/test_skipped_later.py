"""Batches of a Poisson loader that were passed over, noticed later: after a checkpoint, in eval mode, detached."""

from __future__ import annotations

import pickle

import pytest

import fastdp
from fastdp.errors import StepError

from ..by_hand import network, records
from .skipping import made, train

pytestmark = pytest.mark.slow  # `make test-all` runs it

# --------------------------------------------------------------------------- taking up a run


def resumed(optimizer, loader=None):
    """As in another process: a new model, optimizer and loader."""
    state = pickle.loads(pickle.dumps((optimizer.state_dict(), loader and loader.state_dict(secret=True))))
    model, again, new = made(seed=None)
    new.load_state_dict(state[0])
    if loader is not None:
        again.load_state_dict(state[1])
    return model, again, new


def test_what_was_missed_goes_into_checkpoints():
    optimizer = None
    for number in range(3):
        model, loader, new = made(seed=number)
        if optimizer is not None:
            new.load_state_dict(optimizer.state_dict())
        optimizer = new
        for i, batch in enumerate(loader):
            if i == 2:
                break
            train(model, optimizer, batch)
        with pytest.warns(UserWarning, match=rf"{number + 1} time\(s\) the loop was left with a batch"):
            optimizer.epsilon(1e-2)
    with pytest.raises(StepError):
        for i, batch in enumerate(loader):
            if i != 1:
                train(model, optimizer, batch)
    new = resumed(optimizer)[2]
    with pytest.warns(UserWarning, match=r"1 batch\(es\) of the loader were skipped.* 3 time\(s\)"):
        new.epsilon(1e-2)
    state = new.state_dict()
    with pytest.warns(UserWarning, match=r"1 batch\(es\) of the loader were skipped.* 3 time\(s\)"):
        new.load_state_dict(state)  # the same again
        new.epsilon(1e-2)


def test_resuming_a_right_run_hears_nothing(silent):
    model, loader, optimizer = made(seed=None, limit=4)
    for batch in loader:
        train(model, optimizer, batch)
        if optimizer.stepped and optimizer.history[0][2] == 3:
            break
    assert "missed" not in optimizer.state_dict()["fastdp"]
    model, again, new = resumed(optimizer, loader)
    for batch in again:
        train(model, new, batch)
    assert new.history[0][2] == 6 and new.epsilon(1e-2) > 0


# --------------------------------------------------------------------------- before training, in eval mode, detached


@pytest.mark.parametrize("first", [False, True])
def test_batches_that_are_passed_over_by_loaders_made_anew_are_warned_of(first):
    """Each draw of one batch, which is left for what is in it; first: the first one, whose purpose is not known."""
    data, model = records(), network()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    for draw in range(4):
        for batch in fastdp.poisson_loader(data, sample_rate=0.5, steps=1):
            if draw in ((1, 3) if first else (0, 2)):
                train(model, optimizer, batch)
            break
    with pytest.warns(UserWarning, match=rf"{1 if first else 2} pass\(es\)"):
        optimizer.epsilon(1e-3)
