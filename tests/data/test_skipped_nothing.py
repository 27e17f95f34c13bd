"""Loops over a Poisson loader that are right, and hear nothing of batches passed over."""

from __future__ import annotations

import pytest
import torch

import fastdp

from ..by_hand import network
from .skipping import made, train

pytestmark = pytest.mark.slow  # `make test-all` runs it


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
