"""DPLoss around models of other kinds: Opacus's wrappers, layers by name, checkpointing, torch.compile."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import StepError
from fastdp.losses import DPLoss

from .test_dp_loss import cnn, images

pytestmark = pytest.mark.slow  # `make test-all` runs it


class Called(nn.Module):
    """Activation functions that are only called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 5)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def test_layers_by_name():
    torch.manual_seed(0)
    model, x, y = Called(), torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    with pytest.raises(ValueError, match="no activation function that is a module"):
        DPLoss(model, threshold=0.5, beta=20.0)
    loss = DPLoss(model, threshold=0.5, beta=20.0, layers=["first"])
    assert fastdp.verify(model, lambda m, b: loss(m(b[0]), b[1]), (x, y)).ok
    loss(model(x), y)
    assert loss.terms["reg"] == pytest.approx(float(model.first(x).detach().square().mean(1).mean()), rel=1e-6)
    for wrong in (["third"], [], "first"):
        with pytest.raises(ValueError):
            DPLoss(model, threshold=0.5, beta=20.0, layers=wrong)
    unused = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Linear(3, 5)})
    unused.forward = lambda x: unused["b"](x)
    for layers in (["a"], None):
        lonely = DPLoss(unused, threshold=0.5, beta=20.0, layers=layers)
        with pytest.raises(StepError, match="did not run"):
            lonely(unused(x), y)
        lonely.remove()


class Tokens(nn.Module):
    """Rows of all samples in one dimension, or in any order."""

    def __init__(self, routed: bool) -> None:
        super().__init__()
        self.body, self.act, self.head, self.routed = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), routed

    def forward(self, x):
        rows = x.flatten(0, 1)
        if not self.routed:
            return self.head(self.act(self.body(rows))).unflatten(0, x.shape[:2]).mean(1)
        chosen = (rows[:, 0] > 0).nonzero().squeeze(1)
        out = torch.zeros(len(rows), 5).index_copy(0, chosen, self.head(self.act(self.body(rows[chosen]))))
        return out.unflatten(0, x.shape[:2]).sum(1)


@pytest.mark.parametrize("routed", [False, True])
def test_rows_of_tokens_are_added_up_by_sample(routed):
    torch.manual_seed(0)
    model, x, y = Tokens(routed), torch.randn(4, 6, 3), torch.tensor([0, 1, 2, 3])
    loss = DPLoss(model, threshold=0.5, beta=5.0)
    engine = fastdp.PerSampleGradients(model)
    each = loss(model(x), y, "none")
    each.mean().backward()
    found = engine.norms()
    engine.detach()
    for i in range(4):
        model.zero_grad()
        rows = model.body(x[i][x[i, :, 0] > 0] if routed else x[i])
        logits = model.head(rows.tanh())
        logits = (logits.sum(0) if routed else logits.mean(0))[None]
        plain = DPLoss(model, threshold=0.5, beta=math.inf)(logits, y[i : i + 1])
        alone = plain + (1 - loss.alpha) / 5.0 * rows.square().sum() / rows.numel()
        assert float(each[i].detach()) == pytest.approx(float(alone.detach()), rel=1e-5)
        alone.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        assert float(found[i]) == pytest.approx(float(norm), rel=1e-5)
    with pytest.raises(StepError, match="first dimension is not the batch"):
        loss(model(x), y)  # without an engine nothing says whose the rows are


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 5), reentrant

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


def test_checkpointing_is_exact_or_refused():
    torch.manual_seed(0)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    model = Checkpointed(False)
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    assert fastdp.verify(model, lambda m, b: loss(m(b[0]), b[1]), (x, y)).ok
    assert fastdp.verify(model, lambda m, b: loss(m(b[0]), b[1]), (x, y), memory_budget=1).ok
    model = Checkpointed(True)
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    with pytest.raises(StepError, match="ran without gradient"):
        loss(model(x.requires_grad_()), y)


def test_activations_in_place_are_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 5))
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    with pytest.raises(StepError, match="inplace"):
        model(torch.randn(4, 3))
    loss.remove()
    loss = DPLoss(model, threshold=0.5, beta=20.0, layers=["0"])
    with pytest.raises(StepError, match="written to in place"):
        loss(model(torch.randn(4, 3)), torch.tensor([0, 1, 2, 3]))
    loss.remove()
    model[1] = nn.Tanh()
    model.forward = lambda x: model[2](model[1](input=model[0](x)))
    DPLoss(model, threshold=0.5, beta=20.0)
    with pytest.raises(StepError, match="first argument"):
        model(torch.randn(4, 3))


def test_compiled_models_are_exact():
    model, (x, y) = cnn(), images()
    loss = DPLoss(model, threshold=0.5, beta=20.0)
    wanted = float(loss(model(x), y).detach())
    compiled = torch.compile(model, backend="eager")
    value = loss(compiled(x), y)
    assert float(value.detach()) == pytest.approx(wanted, rel=1e-6)
    with pytest.warns(UserWarning, match="not compiled"):
        assert fastdp.verify(compiled, lambda m, b: loss(m(b[0]), b[1]), (x, y)).ok
