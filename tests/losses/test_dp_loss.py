"""DPLoss: its numbers, its gradient by hand, and that each sample's loss is its own."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.errors import StepError
from fastdp.losses import DPLoss
from fastdp.losses.dp_loss import focal_loss


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    tanh = nn.Tanh()  # one module for both places
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), tanh, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5), tanh, nn.Linear(5, 3)
    )


def images(n: int = 6):
    torch.manual_seed(1)
    return torch.randn(n, 1, 8, 8), torch.arange(n) % 3


@pytest.mark.parametrize("options", [{}, {"error": "huber"}, {"beta": math.inf}])
@pytest.mark.parametrize("budget", [None, 1])
def test_verify_passes(options, budget):
    model, batch = cnn(), images()
    loss = DPLoss(model, **{"threshold": 0.5, "beta": 20.0, **options})
    assert fastdp.verify(model, lambda m, b: loss(m(b[0]), b[1]), batch, memory_budget=budget).ok
    assert fastdp.verify(model, lambda m, b: loss(m(b[0]), b[1], "sum"), batch, loss_reduction="sum").ok
    assert fastdp.verify(model, lambda m, b: loss(m(b[0]), b[1]), batch, group_by=[0, 1, 0, 2, 2, 1]).ok


def test_evaluation_gives_the_same_number():
    model, (x, y) = cnn(), images()
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    value = float(loss(model(x), y).detach())
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            logits = model(x)
        assert float(loss(logits, y)) == pytest.approx(value, rel=1e-6)


def test_logits_of_another_forward_than_the_last_are_refused():
    model, (x, y) = cnn(), images()
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    first, second = model(x) * 1.0, model(2 * x)[:, :]
    with pytest.raises(StepError, match="the model's last forward"):
        loss(first, y)
    with pytest.raises(StepError, match="the model's last forward"):
        loss(second, y)  # a refusal takes it
    wanted = float(loss(model(x), y).detach())
    assert float(loss(model(x)[:, :] * 1.0, y).detach()) == pytest.approx(wanted, rel=1e-6)
    with torch.no_grad():
        logits = model(x)
    for other in (torch.zeros(6, 3, requires_grad=True) * 1, logits.clone(), logits.requires_grad_()):
        with pytest.raises(StepError, match="the model's last forward"):
            loss(other, y)


def test_copies_and_pickles_of_a_model_are_free_and_the_loss_is_refused():
    model, (x, y) = mlp(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 3]))
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    logits = model(x)
    twin(x), again(x)
    wanted = float(loss(logits, y).detach())
    with pytest.raises(StepError, match="the model's last forward"):
        loss(twin(x), y)
    ours = DPLoss(twin, threshold=0.5, beta=20.0)
    assert float(ours(twin(x), y).detach()) == pytest.approx(wanted)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make a new"):
            copying(loss)


def test_remove_leaves_the_model_as_it_was():
    model = cnn()
    before = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    loss.remove()
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == before
    with pytest.raises(StepError, match="removed"):
        loss(model(images()[0]), images()[1])


def test_sure_and_empty_batches():
    logits = torch.tensor([[80.0, 0.0, 0.0], [0.0, 800.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    for gamma in (0.0, 0.5, 1.0, 2.0):
        each = focal_loss(logits, torch.tensor([0, 0, 1]), gamma)
        assert torch.allclose(each, torch.tensor([0.0, 800.0, (2 / 3) ** gamma * math.log(3)]), atol=1e-6)
        (grad,) = torch.autograd.grad(each.sum(), logits)
        assert bool(torch.isfinite(grad).all())
    plain = F.cross_entropy(logits, torch.tensor([0, 0, 1]), reduction="none")
    assert torch.allclose(focal_loss(logits, torch.tensor([0, 0, 1]), 0), plain)
    model, (x, y) = cnn(), images()
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    empty = loss(model(x[:0]), y[:0])
    assert float(empty.detach()) == 0
    empty.backward()
