"""What goes past torch's dispatcher, or changes between steps, is seen: refused, recorded again, or left to Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import FastDPError, GraphError

B = 6
OPTIONS = dict(lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=B, seed=5)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def data(size: int = B, seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        d = torch.rand(3)
    return x * d


OWN = torch.Generator()


def of_an_own_generator(x: Tensor) -> Tensor:
    return x * torch.rand(3, generator=OWN)


def applied(x: Tensor) -> Tensor:
    return x * x.detach().clone().apply_(lambda v: 1 + v * v)


class Between(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.own = nn.Linear(4, 3), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.layer(x))


@pytest.mark.parametrize("function", [seeded, of_an_own_generator, applied])
def test_what_goes_past_the_dispatcher_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    optimizer = fastdp.DPSGD(Between(function), **OPTIONS)
    OWN.manual_seed(1)
    before = OWN.get_state()
    with warnings.catch_warnings(), pytest.raises(FastDPError):
        warnings.simplefilter("ignore")
        optimizer.graphed(losses, data())
    assert torch.equal(OWN.get_state(), before) or function is of_an_own_generator


class Sampled(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.how = nn.Parameter(torch.randn(10, 4)), how
        self.register_buffer("fixed", torch.tensor([1, 5, 7]))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        index = {"given": rows, "random": torch.randperm(10)[:3], "fixed": self.fixed}[self.how]
        return F.linear(x, F.embedding(index, self.w))


@pytest.mark.parametrize("how", ["given", "random", "fixed"])
def test_rows_of_a_weight_that_the_batch_chooses(how: str) -> None:
    """The gradient would go to the rows of the recording; rows that never change are replayed."""
    rows, moved = torch.tensor([2, 3, 4]), []
    loss_fn: Any = lambda m, x, rows, y: F.cross_entropy(m(x, rows), y, reduction="none")
    for graphed in (False, True):
        model = Sampled(how)
        before = model.w.detach().clone()
        optimizer = fastdp.DPSGD(model, **OPTIONS)
        x, y = data()
        if graphed and how != "fixed":
            with pytest.raises(GraphError, match="made of parameters by other functions"):
                optimizer.graphed(loss_fn, (x, rows - 2, y))
            return
        if graphed:
            optimizer.graphed(loss_fn, (x, rows - 2, y))(x, rows, y)
        else:
            loss_fn(model, x, rows, y).mean().backward()
            optimizer.step()
        moved.append((model.w - before).abs().sum(1).nonzero().flatten().tolist())
    assert moved == [[1, 5, 7]] * 2


# --------------------------------------------------------------------------- changes of the model


def test_a_recording_that_fails_leaves_the_step_as_it_was() -> None:
    """It fails with the same words each time, and works again once the cause is gone."""
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model.register_buffer("seen", torch.zeros(()))
    optimizer = fastdp.DPSGD(model, **OPTIONS)
    step = optimizer.graphed(losses, data())
    handle = model[0].register_forward_hook(lambda module, given, out: (model.seen.add_(1), out)[1])
    for _ in range(6):
        with pytest.raises(GraphError, match="writes to 'seen'"):
            step(*data())
    handle.remove()
    step(*data())
    model.extra = nn.Linear(2, 2)
    with pytest.raises(FastDPError, match="added to the model"):
        step(*data())


# --------------------------------------------------------------------------- sizes and arguments


def test_arguments_that_are_no_tensors() -> None:
    """Compared by type and value; what could change without being seen is refused."""
    model = nn.Linear(4, 3)
    optimizer = fastdp.DPSGD(model, **OPTIONS)
    loss_fn: Any = lambda m, x, y, flag: losses(m, x, y) * (2.0 if flag is True else 1.0)
    step = optimizer.graphed(loss_fn, (*data(), True))
    step(*data(), True)
    with pytest.warns(UserWarning, match="no tensor differs"):
        step(*data(), 1)
    assert (step.replayed, step.eager) == (1, 1)

    class Settings:
        scale = 1.0

    with pytest.raises(GraphError, match="the batch holds a Settings"):
        optimizer.graphed(loss_fn, (*data(), Settings()))
    with pytest.raises(GraphError, match="two samples or more"):
        optimizer.graphed(losses, data(1))
    label = torch.tensor([1])
    with pytest.raises(GraphError, match=r"a tensor of shape \(1,\)"):
        optimizer.graphed(
            lambda m, x, y: F.cross_entropy(m(x), label.expand(len(x)), reduction="none"), data(), sizes=(1,)
        )
