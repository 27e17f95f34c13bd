"""augmentations=K: K views of a sample are clipped as one, by the mean of their gradients (De et al. 2022)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, TensorDataset

import fastdp
from fastdp.errors import GraphError, StepError

from ..by_hand import network, records

K, R = 3, 0.3


class Views(Dataset):
    """Each time a record is taken it is another view; `seen` tells which."""

    def __init__(self):
        self.x, self.y = records().tensors
        self.seen = []

    def __len__(self):
        return len(self.y)

    def __getitem__(self, number):
        self.seen.append(number)
        return self.x[number] + 0.3 * torch.randn(4), self.y[number]


def step_by_hand(model, samples, expected, lr=1.0):
    """samples: of each its views and labels, clipped by the norm of the mean gradient, in float64."""
    model = copy.deepcopy(model).double()
    total = [torch.zeros_like(p) for p in model.parameters()]
    norms = []
    for x, y in samples:
        model.zero_grad()
        for view, label in zip(x.double(), y, strict=True):
            (F.cross_entropy(model(view[None]), label[None]) / len(x)).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        norms.append(float(norm))
        for t, p in zip(total, model.parameters(), strict=True):
            t += p.grad * min(1.0, R / float(norm))
    with torch.no_grad():
        for t, p in zip(total, model.parameters(), strict=True):
            p -= lr * t / expected
    return model, norms


def assert_equal(model, other):
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=1e-6)


def test_the_loader_takes_each_record_k_times():
    """Poisson batches in physical parts of two records, empty ones among them."""
    torch.manual_seed(1)
    data = Views()
    loader = fastdp.poisson_loader(data, sample_rate=0.06, steps=12, max_physical_batch_size=2, augmentations=K, seed=4)
    model = network()
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=R, augmentations=K)
    samples, sizes, start = [], [], model
    for x, y in loader:
        assert len(x) % K == 0 and len(x) <= 2 * K
        if not samples:
            start = copy.deepcopy(model)
        samples += zip(x.split(K), y.split(K), strict=True) if len(x) else []
        if len(x):
            assert not torch.equal(x[0], x[1]) and torch.equal(y[::K], y[1::K])
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.stepped:
            truth, _ = step_by_hand(start, samples, 0.06 * 40)
            assert_equal(model, truth)
            sizes.append(len(samples))
            samples = []
    assert len(sizes) == 12 and min(sizes) == 0 and max(sizes) > 2
    assert optimizer.history == [(0.0, 0.06, 12)]
    assert data.seen.count(data.seen[-1]) >= K


def test_numbers_of_views_that_do_not_fit_are_refused():
    x, y = records().tensors
    loader = fastdp.poisson_loader(TensorDataset(x, y), sample_rate=0.5, augmentations=K, steps=1)
    optimizer = fastdp.DPSGD(model := network(), lr=1.0, noise_multiplier=1.0)
    for inputs, labels in loader:
        with pytest.raises(StepError, match="augmentations="):
            F.cross_entropy(model(inputs), labels).backward()
    optimizer.detach()
    with pytest.raises(ValueError, match="under a sum it would be 3 times that"):
        fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, augmentations=K, loss_reduction="sum")
    with pytest.raises(ValueError, match="only one of them"):
        fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, augmentations=K, rows_per_sample=K)
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match="augmentations must be a whole number"):
            fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, augmentations=wrong)
    with pytest.raises(ValueError, match="augmentations must be a whole number"):
        fastdp.poisson_loader(TensorDataset(x, y), sample_rate=0.5, augmentations=0)
    with pytest.raises(ValueError, match="persons' records"):
        fastdp.poisson_loader(TensorDataset(x, y), sample_rate=0.5, augmentations=K, group_by=[0, 1] * 20)
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, augmentations=K, expected_batch_size=2)
    with pytest.raises(GraphError, match="several rows of each sample"):
        optimizer.graphed(lambda m, a, b: F.cross_entropy(m(a), b, reduction="none"), (x[:6], y[:6]))


APART = {
    "joined": lambda x: torch.cat([x + 0.1 * torch.randn(x.shape) for _ in range(K)]),
    "repeated": lambda x: x.repeat(K, *[1] * (x.dim() - 1)),
    "stacked": lambda x: torch.stack([x] * K).flatten(0, 1),
}
IN_TURN = {
    "stacked behind": lambda x: torch.stack([x] * K, 1).flatten(0, 1),
    "repeated in turn": lambda x: x.repeat_interleave(K, 0),
}


@pytest.mark.parametrize("name", [*APART, *IN_TURN])
def test_views_made_in_the_loop_follow_one_another(name):
    """By the rows of the loader's batch: those of one record, not one view of all."""
    views = {**APART, **IN_TURN}[name]
    optimizer = fastdp.DPSGD(model := network(), lr=1.0, noise_multiplier=0.0, max_grad_norm=R, augmentations=K)
    for x, y in fastdp.poisson_loader(records(), sample_rate=0.3, steps=2):
        labels = y.repeat(K) if name in APART else y.repeat_interleave(K)
        if name in APART:
            with pytest.raises(StepError, match=r"rows apart .*torch.stack\(views, 1\).flatten\(0, 1\)"):
                model(views(x))
            break
        inputs = views(x)
        truth, _ = step_by_hand(model, list(zip(inputs.split(K), labels.split(K), strict=True)), 12)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        assert_equal(model, truth)
