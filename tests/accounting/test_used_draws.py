"""A sample that is drawn once is used once: what a second step on it costs, of one optimizer or of two."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.accounting import epsilon_of

pytestmark = pytest.mark.slow  # `make test-all` runs it

DELTA, SIGMA, RATE, STEPS = 1e-5, 0.8, 0.1, 4


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Batches that were copied are known by their size and rate alone, among the loaders of the process."""
    yield
    gc.collect()


def loader_of(**options: Any) -> Any:
    return fastdp.poisson_loader(TensorDataset(torch.randn(60, 3)), sample_rate=RATE, steps=STEPS, **options)


def optimizer_of(model: nn.Module) -> Any:
    return fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=SIGMA, expected_batch_size=6, sample_rate=RATE, accountant="rdp"
    )


def train(model: nn.Module, *optimizers: Any, batches: Iterable[Any]) -> None:
    for (x,) in batches:
        if len(x):
            model(x).square().sum(1).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def together(releases: int, steps: int = STEPS) -> tuple[float, float, int]:
    return SIGMA / math.sqrt(releases), RATE, steps


def states(loader: Any) -> Iterator[Any]:
    start = copy.deepcopy(loader.state_dict())
    for _ in range(3):
        loader.load_state_dict(start)
        yield loader


def lists(loader: Any) -> Iterator[Any]:
    batches = [batch for batch in loader if len(batch[0])]
    yield from (batches, batches, batches)


AGAIN: dict[str, Callable[[Any], Iterable[Any]]] = {
    "an earlier state of the loader": states,
    "copies": lambda loader: [copy.deepcopy(loader) for _ in range(3)],
    "pickles": lambda loader: [pickle.loads(pickle.dumps(loader)) for _ in range(3)],
    "one seed": lambda loader: [loader_of(seed=7) for _ in range(3)],
    "a list of the batches": lists,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", AGAIN)
def test_a_sample_that_is_used_again_is_accounted_as_one_release(way: str) -> None:
    model = nn.Linear(3, 2)
    optimizer, loader = optimizer_of(model), loader_of()
    with pytest.warns(UserWarning, match="a step was made on a batch that had one before"):
        for batches in AGAIN[way](loader):
            train(model, optimizer, batches=batches)
    steps = sum(run[2] for run in optimizer.history)
    assert optimizer.epsilon(DELTA) == pytest.approx(epsilon_of([together(3, steps // 3)], DELTA, "rdp"))
    again = optimizer_of(other := nn.Linear(3, 2))
    again.load_state_dict(optimizer.state_dict())
    assert again.epsilon(DELTA) == optimizer.epsilon(DELTA)
    train(other, again, batches=loader_of())  # drawn anew
    mixed = [together(3, steps // 3), (SIGMA, RATE, STEPS)]
    assert again.epsilon(DELTA) == pytest.approx(epsilon_of(mixed, DELTA, "rdp"))


@pytest.mark.filterwarnings("error:a step was made")
def test_passes_and_a_resumed_run_draw_anew() -> None:
    model, loader = nn.Linear(3, 2), loader_of()
    optimizer = optimizer_of(model)
    for batches in (loader, copy.copy(loader), loader):
        train(model, optimizer, batches=batches)
    state = copy.deepcopy((optimizer.state_dict(), loader.state_dict(secret=True)))
    resumed, other = optimizer_of(again := nn.Linear(3, 2)), loader_of()
    resumed.load_state_dict(state[0])
    other.load_state_dict(state[1])
    train(again, resumed, batches=other)
    assert resumed.history == [(SIGMA, RATE, 4 * STEPS)]


def test_two_optimizers_on_one_loader() -> None:
    body, head = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizers = [optimizer_of(body), optimizer_of(head)]
    train(nn.Sequential(body, head), *optimizers, batches=(loader := loader_of()))
    with pytest.warns(UserWarning, match="1 other private optimizer") as caught:
        alone = optimizers[0].epsilon(DELTA)
    joint = epsilon_of([together(2)], DELTA, "rdp")
    assert alone == pytest.approx(epsilon_of([together(1)], DELTA, "rdp"))
    assert any(f"{alone:.3g} of this one alone, and {joint:.3g} of all" in str(w.message) for w in caught)
    train(body, optimizers[0], batches=loader)  # the next pass is of one alone
    with pytest.warns(UserWarning, match=f"{epsilon_of([together(2), together(1)], DELTA, 'rdp'):.3g} of all together"):
        optimizers[1].epsilon(DELTA)
    for optimizer in optimizers:
        optimizer.detach()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="1 other private")
        train(model := nn.Linear(3, 2), fresh := optimizer_of(model), batches=loader_of())
        fresh.epsilon(DELTA)
