"""Programs as PyTorch's tutorials and layers have them, against the gradient of each sample alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import BatchLayoutError, SampleMixingError

from ..cases import Net

B = 4
Loss = Callable[[nn.Module, Any], Tensor]


def _norms(model: nn.Module, loss: Loss, batch: Any, **options: Any) -> Tensor:
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B, **options)
    try:
        for _ in range(2):  # the second takes shorter ways
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            found = optimizer.norms
        return found
    finally:
        optimizer.detach()


def _assert_exact(
    model: nn.Module, loss: Loss, batch: Any, one: Callable[[int], Any], count: int = B, **options: Any
) -> None:
    moved = copy.deepcopy(model)
    found = _norms(moved, loss, batch, max_grad_norm=1e-9, **options)  # the weights stay as good as they are
    for i in range(count):
        model.zero_grad()
        loss(model, one(i)).backward()
        want = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(found[i].to(want), want, rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------- time first


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.inner(self.words(source), self.words(target)))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("length", [5, B])  # as many steps as samples
def test_translation(before: bool, length: int) -> None:
    """Given target[:-1], judged by target[1:], which is cut out before the forward or after it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        source, target = batch
        labels = target[1:] if before else None
        out = model(source, target[:-1])
        labels = target[1:] if labels is None else labels
        return F.cross_entropy(out.reshape(-1, 20), labels.reshape(-1))

    source, target = torch.randint(2, 20, (5, B)), torch.randint(2, 20, (length + 1, B))
    one = lambda i: (source[:, i : i + 1].clone(), target[:, i : i + 1].clone())
    _assert_exact(Translator(), loss, (source, target), one, batch_first=False)


# --------------------------------------------------------------------------- texts one after another


class Texts(nn.Module):
    def __init__(self, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(50, 8, **options), nn.Linear(8, 4)
        self.weights = nn.Embedding(50, 1) if weighted else None

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        weights = None if self.weights is None else self.weights(text).squeeze(-1)
        return self.head(self.bags(text, offsets, per_sample_weights=weights))


@pytest.mark.parametrize("lengths", [[3, 5, 2, 4], [1, 1, 1, 1], [0, 5, 0, 2]])
@pytest.mark.parametrize(
    "options", [{}, {"include_last_offset": True}, {"padding_idx": 3}, {"mode": "sum", "weighted": True}]
)
def test_bags_by_offsets(options: dict[str, Any], lengths: list[int]) -> None:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    text, y = torch.randint(0, 50, (sum(lengths),)), torch.tensor([0, 1, 2, 3])
    last = options.get("include_last_offset", False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(*batch[:2]), batch[2])

    def one(i: int) -> Any:
        return text[ends[i] : ends[i + 1]].clone(), torch.tensor([0, lengths[i]][: 1 + last]), y[i : i + 1]

    _assert_exact(Texts(**options), loss, (text, ends if last else ends[:-1].clone(), y), one)


# --------------------------------------------------------------------------- layers


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10])


@pytest.mark.parametrize(
    "labels", [[0, 5, 12, 3, 19, 7], [0, 5, 1, 3, 2, 2], [0, 1, 2, 3, 1, 2], [19, 18, 17, 5, 15, 11]]
)
def test_adaptive_softmax(labels: list[int]) -> None:
    x, y = torch.randn(6, 4), torch.tensor(labels)  # a cluster of several samples, of one, of none
    loss = lambda m, batch: m.head(m.body(batch[0]), batch[1]).loss
    _assert_exact(Adaptive(), loss, (x, y), lambda i: (x[i : i + 1], y[i : i + 1]), count=6)


# --------------------------------------------------------------------------- empty batches


def test_a_model_that_cannot_take_an_empty_batch() -> None:
    model = Net(lambda m, x: m.layer(x).view(len(x), -1, 2).sum(1), layer=nn.Linear(4, 4))
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    data = torch.utils.data.TensorDataset(torch.randn(50, 4))
    steps = 0
    for (x,) in fastdp.poisson_loader(data, sample_rate=0.02, steps=20):
        if len(x):
            model(x).square().sum(1).mean().backward()
        else:
            with pytest.raises(BatchLayoutError, match=r"empty batch.*if len\(x\)"):
                model(x)
        optimizer.step()  # of noise alone, then
        optimizer.zero_grad()
        steps += 1
    assert sum(run[2] for run in optimizer.history) == steps == 20


@pytest.mark.parametrize("mixes", [False, True])
def test_variables_of_old_programs_are_the_batch_itself(mixes) -> None:
    """`x = Variable(x)` is another tensor of the same memory, which no function of torch has made."""
    records = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    optimizer = fastdp.DPSGD(model := nn.Linear(4, 2), lr=0.1, noise_multiplier=0.0)
    for x, y in fastdp.poisson_loader(records, sample_rate=1.0, steps=2):
        same = torch.autograd.Variable(x)
        if mixes:
            same.sub_(same.mean(0))
            with pytest.raises(SampleMixingError):
                F.cross_entropy(model(x), y).backward()
            break
        F.cross_entropy(model(same / 2 - 0.1), torch.autograd.Variable(y)).backward()
        own = [torch.cat([row, torch.ones(1)]) for row in x / 2 - 0.1]
        left = (F.linear(x / 2 - 0.1, model.weight, model.bias).softmax(1) - F.one_hot(y, 2)).detach()
        exact = torch.stack([torch.outer(g, row).norm() for g, row in zip(left, own, strict=True)])
        torch.testing.assert_close(optimizer.norms, exact)
        optimizer.step()
        optimizer.zero_grad()
