"""What changes between replayed steps is seen: the same numbers as Python's, or an error by name."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import GraphError, StepError

pytestmark = pytest.mark.slow  # `make test-all` runs it

B = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)
        self.square = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("shift", None)
        self.factor, self.rate, self.act = 1.0, numpy.float32(1.0), torch.tanh
        self.table, self.entries, self.weights = {"x": 1.0}, [1.0, 1.0], torch.ones(4)
        self.c = nn.Linear(4, 3, bias=False).requires_grad_(False)
        self.config = types.SimpleNamespace(gain=1.0, prior=torch.ones(1))  # not compared, as it holds a tensor
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x) @ self.square) * self.factor * float(self.rate) * self.table["x"] * self.entries[1]
        h = h * self.weights * self.config.gain
        if self.shift is not None:
            h = h + self.shift
        self.seen = (h.detach(), len(x))
        return self.b(h) + self.c(h)


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def data(count: int = B, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def private(model: nn.Module) -> Any:
    return fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=B)


def setter(name: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        setattr(model, name, value)

    return change


def with_bias(model: Any) -> None:
    model.c.bias = nn.Parameter(torch.ones(3), requires_grad=False)


def transposed(model: Any) -> None:
    model.square.data = model.square.data.t()


def changed_forward(model: Any) -> None:
    model.forward = types.MethodType(lambda self, x: 2 * Net.forward(self, x), model)


CHANGES = {
    "a number": setter("factor", 2.0), "a number of NumPy": setter("rate", numpy.float32(3.0)),
    "a function of torch": setter("act", torch.relu),
    "an entry of a dict": lambda m: m.table.update(x=3.0),
    "an object": setter("config", types.SimpleNamespace(gain=3.0, prior=torch.ones(1))),
    "an entry of a list": lambda m: m.entries.__setitem__(1, 2.0),
    "a tensor": setter("weights", torch.tensor([1.0, 2.0, 3.0, 4.0])), "a buffer": setter("shift", torch.ones(4)),
    "a bias": with_bias, "the strides": transposed, "the class": setter("__class__", Other),
    "the forward": changed_forward, "what is trained": lambda m: m.a.weight.requires_grad_(False),
    "the mode": lambda m: m.drop.eval(), "the rate of dropout": lambda m: setattr(m.drop, "p", 0.0),
    "a module": setter("drop", nn.Tanh()), "a hook": lambda m: m.a.register_forward_hook(lambda *given: given[2] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_replayed_as_python_does_it(name: str) -> None:
    found = []
    for graphed in (False, True):
        model: Any = Dropping()
        optimizer = private(model)
        step = optimizer.graphed(losses, data()) if graphed else None
        for number in range(4):
            torch.manual_seed(number)
            if number == 2:
                CHANGES[name](model)
            if step is not None:
                step(*data(seed=number))
            else:
                losses(model, *data(seed=number)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((optimizer._privacy.norms, [p.detach().clone() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


SIZES = {
    "a tensor of it": lambda count: torch.tensor(float(count)),
    "a sum of ones": lambda count: torch.ones(count).sum(),
    "a branch": lambda count: 3.0 if count == 1 else 1.0,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_loss_of_the_number_of_samples_is_not_padded(name: str) -> None:
    def by_size(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x, y) / SIZES[name](len(x))

    model, known = Net(), Net()
    optimizer, eager = private(model), private(known)
    step = optimizer.graphed(by_size, data(8), sizes=(8,))
    for count in (8, 3, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(*data(count))
            by_size(known, *data(count)).mean().backward()
        torch.testing.assert_close(optimizer._privacy.norms, eager._privacy.norms, rtol=1e-4, atol=1e-6)
        eager.step()
        eager.zero_grad()
    assert (step.replayed, step.eager) == (1, 2)


# --------------------------------------------------------------------------- the loss of `step.loss`


LOSSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a sum of two": lambda loss, step, model: loss + step.loss(*data(seed=3)),
    "a stack": lambda loss, step, model: torch.stack([loss, step.loss(*data(seed=3))]).sum(),
    "a penalty": lambda loss, step, model: loss + model.a.weight.square().sum(),
    "a penalty before it": lambda loss, step, model: model.a.weight.square().sum() + loss,
    "twice": lambda loss, step, model: loss * 2,
    "in place": lambda loss, step, model: loss.add_(1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_not_combined_with_anything(name: str) -> None:
    model = Net()
    optimizer = private(model)
    step = optimizer.graphed(losses, data())
    with pytest.raises(GraphError, match="scaled, or added up with others"):
        LOSSES[name](step.loss(*data()), step, model).backward()
    assert not optimizer._privacy.busy


@pytest.mark.parametrize("what", ["batch", "parameter"])
def test_what_a_loss_was_made_of_must_stay_until_its_backward(what: str) -> None:
    model = Net()
    optimizer = private(model)
    step, (x, y) = optimizer.graphed(losses, data()), data()
    loss = step.loss(x, y)
    with torch.no_grad():
        (x if what == "batch" else model.a.weight).mul_(2)
    with pytest.raises(StepError, match="written to between"):
        loss.backward()
    assert not optimizer._privacy.busy
