"""What tests of batches that a loop passes over share: a model, its loader and optimizer, and a step."""

from __future__ import annotations

import warnings

import pytest
import torch.nn.functional as F

import fastdp

from ..by_hand import network, records


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


def sizes(loader):
    """Of the batches of a pass, in another loader of the same seed."""
    return [len(x) for x, _ in loader]


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastdp.errors.NotVerifiedWarning)
        warnings.filterwarnings("ignore", "the batches come from a loader with seed=")
        yield
