"""DPLoss by default is the published loss: equations 5 to 8, 10 and 11 of the paper, written out here once more."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import StepError
from fastdp.losses import DPLoss


def published(h: list[Tensor], z: Tensor, y: int, e_c: float, e_t: float, beta: float, gamma: float, **other) -> Tensor:
    """The loss of one sample: h the pre-activations of the layers 1 to M - 1, z the logits."""
    alpha = 1 / (1 + math.exp(-(e_c - e_t)))
    p, one_hot = z.exp() / z.exp().sum(), torch.eye(len(z), dtype=z.dtype)[y]
    focal = -((1 - p[y]) ** gamma) * sum(one_hot[d] * p[d].log() for d in range(len(z)))  # (6)
    off = [z[d] - one_hot[d] for d in range(len(z))]
    if other.get("error", "sse") == "sse":
        error = sum(e**2 for e in off) / 2  # (5)
    elif other["error"] == "sae":
        error = sum(e.abs() for e in off)  # (10)
    else:
        b = other["huber_delta"]
        error = sum(0.5 * e**2 / b if abs(float(e)) < b else e.abs() - 0.5 * b for e in off)  # (11)
    reg = sum((layer.flatten() @ layer.flatten()) / layer.numel() for layer in h)  # (7)
    return alpha * focal + (1 - alpha) * error + (1 - alpha) / beta * reg  # (8)


class Written(nn.Module):
    """Convolutions, pooling and layers of the paper's kind that also returns what equation 7 asks for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 2)
        self.fc1, self.fc2 = nn.Linear(24, 8), nn.Linear(8, 5)
        self.act1, self.act2, self.act3, self.pool = nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.MaxPool2d(2, 1)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h1 = self.conv1(x)
        h2 = self.conv2(self.pool(self.act1(h1)))
        h3 = self.fc1(self.pool(self.act2(h2)).flatten(1))
        self.seen = [h1, h2, h3]
        return self.fc2(self.act3(h3))


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return 2 * torch.randn(n, 1, 7, 7, dtype=torch.float64), torch.arange(n) % 5


@pytest.mark.parametrize("e_c, e_t, beta, gamma", [(0.0, 0, 1, 5), (5.5, 2, 51, 2)])
@pytest.mark.parametrize("other", [{}, {"error": "sae"}, {"error": "huber", "huber_delta": 0.3}])
def test_values_and_gradients_are_the_equations(e_c, e_t, beta, gamma, other):
    model, (x, y) = Written().double(), data()
    loss = DPLoss(model, threshold=e_t, beta=beta, focal=gamma, **other)
    loss.epoch = e_c
    engine = fastdp.PerSampleGradients(model)
    each = loss(model(x), y, "none")
    each.mean().backward()
    found = engine.materialize()
    engine.detach()
    loss.remove()
    for i in range(len(x)):
        z = model(x[i : i + 1])[0]
        wanted = published([h[0] for h in model.seen], z, int(y[i]), e_c, e_t, beta, gamma, **other)
        assert float(each[i].detach()) == pytest.approx(float(wanted.detach()), abs=1e-9)
        grads = torch.autograd.grad(wanted, list(model.parameters()))
        for ours, theirs in zip(found.values(), grads, strict=True):
            assert torch.allclose(ours[i], theirs, rtol=1e-7, atol=1e-9)


def test_the_logits_are_left_out_whoever_names_their_layer():
    model, (x, y) = Written().double(), data()
    plain = DPLoss(model, threshold=0, beta=1)
    wanted = float(plain(model(x), y).detach())
    plain.remove()
    named = DPLoss(model, threshold=0, beta=1, layers=["conv1", "conv2", "fc1", "fc2"])
    assert float(named(model(x), y).detach()) == pytest.approx(wanted, abs=1e-12)
    assert float(named(model(x).float(), y).detach()) == pytest.approx(wanted, rel=1e-6)  # in other bits
    with torch.no_grad():
        assert float(named(model(x), y)) == pytest.approx(wanted, abs=1e-12)
        assert float(named(model(x)[:], y)) == pytest.approx(wanted, abs=1e-12)
    engine = fastdp.PerSampleGradients(model)
    assert float(named(model(x), y).detach()) == pytest.approx(wanted, abs=1e-12)
    engine.detach()
    named.remove()
    only = DPLoss(model, threshold=0, beta=1, layers=["fc2"])
    with pytest.raises(StepError, match="its only pre-activation is the logits"):
        only(model(x), y)


def test_a_model_that_ends_in_an_activation_function_is_refused():
    model, x, y = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh()),
        torch.randn(4, 3),
        torch.arange(4),
    )
    loss = DPLoss(model, threshold=0, beta=1)
    with pytest.raises(StepError, match="ends in an activation function"):
        loss(model(x), y)
    loss.remove()
    named = DPLoss(model, threshold=0, beta=1, layers=["1"])  # who names layers says which count
    named(model(x), y).backward()


class Half(nn.Module):
    """One activation function is a module, another one is only called."""

    def __init__(self, called) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 5)
        self.act, self.called = nn.Tanh(), called

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.second(self.called(self.first(x)))))


@pytest.mark.parametrize("called", [torch.tanh, F.gelu, lambda h: h.tanh()])
@pytest.mark.parametrize("engine", [False, True])
def test_an_activation_function_that_no_hook_sees_is_refused(called, engine):
    model, x, y = Half(called), torch.randn(4, 3), torch.arange(4)
    loss = DPLoss(model, threshold=0, beta=1)
    gradients = fastdp.PerSampleGradients(model) if engine else None
    with pytest.raises(StepError, match=r"no modules.*layers="):
        loss(model(x), y)
    loss.remove()
    named = DPLoss(model, threshold=0, beta=1, layers=["first", "act"])
    named(model(x), y).backward()
    if gradients is not None:
        gradients.detach()
    wanted = sum(h.detach().square().mean(1).mean() for h in (model.first(x), model.second(called(model.first(x)))))
    assert named.terms["reg"] == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTM])
def test_recurrent_layers_are_refused_unless_layers_are_named(kind):
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc, self.act, self.out = (
                kind(3, 4, batch_first=True),
                nn.Linear(4, 4),
                nn.Tanh(),
                nn.Linear(4, 5),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.act(self.fc(self.rnn(x)[0][:, -1])))

    model, x, y = Text(), torch.randn(4, 6, 3), torch.arange(4)
    with pytest.raises(ValueError, match="'rnn' lie inside of it"):
        DPLoss(model, threshold=0, beta=1)
    DPLoss(model, threshold=0, beta=math.inf)  # no penalty asks for them
    loss = DPLoss(model, threshold=0, beta=1, layers=["fc"])
    assert fastdp.verify(model, lambda m, b: loss(m(b[0]), b[1]), (x, y)).ok
