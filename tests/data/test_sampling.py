"""Poisson sampling, physical batches, empty batches."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp import sampling
from fastdp.errors import StepError
from fastdp.utils.pytree import map_tensors

from ..runs import backward, data, model_of

COLLATES = {
    "a list beside a tensor": (lambda b: ([x for x, _ in b], torch.tensor([y for _, y in b])), ([], (0,))),
    "a tuple of each": (lambda b: tuple(zip(*b, strict=True)), ((), ())),
    "lists alone": (lambda b: [x for x, _ in b], []),
    "columns": (lambda b: [torch.stack([x[0] for x, _ in b]), torch.tensor([y for _, y in b])], [(0, 3), (0,)]),
    "names": (lambda b: {"x": torch.stack([x[0] for x, _ in b]), "names": ["a"] * len(b)}, {"x": (0, 3), "names": []}),
}


@pytest.mark.parametrize("name", COLLATES)
def test_an_empty_batch_has_the_form_of_others_with_nothing_of_any_record(name):
    collate, form = COLLATES[name]
    records = [(torch.randn(n % 3 + 1, 3), n) for n in range(6)]
    loader = fastdp.poisson_loader(records, sample_rate=1e-9, steps=1, collate_fn=collate)
    for batch in loader:
        assert map_tensors(batch, lambda tensor: tuple(tensor.shape)) == form


def test_an_empty_batch_is_a_noise_only_step():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(3 * 36, 2))
    images = TensorDataset(torch.randn(5, 1, 8, 8), torch.tensor([0, 1, 0, 1, 0]))
    loader = fastdp.poisson_loader(images, sample_rate=1e-9, steps=3)
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, max_grad_norm=1.0)
    before = model[3].weight.detach().clone()
    seen = 0
    for x, y in loader:
        assert x.shape == (0, 1, 8, 8) and y.shape == (0,)
        x.requires_grad_()  # (as attacks and saliency maps do)
        nn.functional.cross_entropy(model(x), y).backward()
        assert optimizer.norms.shape == (0,)
        optimizer.step()
        optimizer.zero_grad()
        seen += 1
    assert seen == 3 and optimizer.history == [(1.0, 1e-9, 3)]
    assert torch.isfinite(model[3].weight).all() and not torch.equal(before, model[3].weight)


@pytest.mark.parametrize("n, b", [(49, 1), (49, 7), (50, 7), (1000, 333), (60000, 256), (3, 3), (7, 6)])
def test_expected_batch_size_and_steps_are_exact(n, b):
    loader = fastdp.poisson_loader(TensorDataset(torch.zeros(n)), expected_batch_size=b)
    assert loader.sample_rate * n == pytest.approx(b, rel=1e-12)
    assert len(loader) == loader.steps_per_epoch == math.ceil(n / b)
    again = fastdp.poisson_loader(TensorDataset(torch.zeros(n)), sample_rate=b / n)
    assert again.steps_per_epoch == math.ceil(n / b) and again.expected_batch_size == pytest.approx(b)


def test_sampling_is_poisson():
    """Batch sizes are binomial, and every record has the same chance."""
    steps = 800
    loader = fastdp.poisson_loader(TensorDataset(torch.arange(200)), sample_rate=0.1, steps=steps, seed=1)
    sizes, counts = [], torch.zeros(200)
    for (rows,) in loader:
        sizes.append(len(rows))
        counts[rows] += 1
    sizes = torch.tensor(sizes, dtype=torch.float64)
    assert abs(float(sizes.mean()) - 20) < 5 * math.sqrt(18 / steps)
    assert abs(float(sizes.var()) / 18 - 1) < 5 * math.sqrt(2 / steps)
    chi = float(((counts - 0.1 * steps) ** 2 / (0.09 * steps)).sum())
    assert abs(chi - 200) < 5 * math.sqrt(400)


def test_from_a_loader_with_workers_and_dicts():
    records = [{"x": torch.randn(4), "y": torch.tensor(i % 2), "name": f"n{i}"} for i in range(20)]
    plain = torch.utils.data.DataLoader(records, batch_size=5, num_workers=1)
    loader = fastdp.poisson_loader(plain, max_physical_batch_size=3, seed=2)
    assert loader.sample_rate == 0.25 and loader.expected_batch_size == 5
    finals = 0
    for batch in loader:
        current = sampling.current()
        assert current.size == len(batch["x"]) == len(batch["name"]) <= 3
        finals += current.final
    assert finals == len(loader) == 4 and sampling.current() is None


def test_a_batch_that_is_not_the_loaders_is_refused():
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0)
    loader = fastdp.poisson_loader(TensorDataset(data(50)), sample_rate=0.5)
    for (x,) in loader:
        with pytest.raises(StepError, match="handed out"):
            backward(model, torch.cat([x, x]))
        break
    optimizer.detach()


def test_bad_loaders():
    with pytest.raises(ValueError, match="either"):
        fastdp.poisson_loader(TensorDataset(torch.zeros(5)))
    with pytest.raises(ValueError, match="empty"):
        fastdp.poisson_loader([], sample_rate=0.5)
    with pytest.raises(ValueError, match="expected_batch_size"):
        fastdp.poisson_loader(TensorDataset(torch.zeros(5)), expected_batch_size=6)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(5))

    for stream in (Stream(), torch.utils.data.DataLoader(Stream())):
        with pytest.raises(StepError, match="map-style.*ftrl_loader"):
            fastdp.poisson_loader(stream, sample_rate=0.5)


def test_physical_batches_give_the_same_update_as_one():
    x = data(60)
    weights = []
    for limit in (None, 7, 1):
        model = model_of()
        loader = fastdp.poisson_loader(
            TensorDataset(x), expected_batch_size=20, max_physical_batch_size=limit, steps=3, seed=5
        )
        optimizer = fastdp.DPAdam(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=0.5)
        for (batch,) in loader:
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        assert sum(n for _, _, n in optimizer.history) == 3
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(weights[0], weights[1], atol=1e-5) and torch.allclose(weights[0], weights[2], atol=1e-5)


@pytest.mark.parametrize("option", [{"shuffle": True}, {"batch_size": 5}, {"drop_last": True}])
def test_options_of_another_draw_are_refused_by_name(option):
    with pytest.raises(TypeError, match=f"poisson_loader: {next(iter(option))}=: .* give expected_batch_size="):
        fastdp.poisson_loader(range(20), expected_batch_size=5, **option)
