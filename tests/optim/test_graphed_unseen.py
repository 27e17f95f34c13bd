"""What goes past torch's dispatcher, or changes between steps, is seen: refused, recorded again, or left to Python."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import FastDPError, GraphError
from fastdp.optim import forward_shapes

from .test_graphed_forwards import at_once  # noqa: F401  (for what goes by `told_of`)
from .test_graphed_forwards_changes import FROM, STEPS, Model, Step, later, plain, told_of
from .test_graphed_forwards_changes import batch as batch_of
from .test_graphed_forwards_changes import loss_of as loss_of_step

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


# --------------------------------------------------------------------------- what modules keep, and others


class Slotted:
    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.scale = 1.0

    @property
    def scale(self) -> float:
        return self.__scale

    @scale.setter
    def scale(self, scale: float) -> None:
        self.__scale = scale


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "beside a path": lambda: SimpleNamespace(scale=1.0, out=Path("runs")),
    "beside a tensor": lambda: SimpleNamespace(scale=1.0, means=torch.zeros(3)),
    "beside a set and an array": lambda: SimpleNamespace(scale=1.0, skipped={1}, means=numpy.zeros(3)),
    "beside a generator": lambda: SimpleNamespace(scale=1.0, generator=torch.Generator()),
    "in slots": Slotted,
    "within another": lambda: SimpleNamespace(out=Path("runs"), inner=Slotted(), scale=1.0),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_number_of_a_configuration_is_seen_whatever_is_beside_it(name: str) -> None:
    def step(m: Model, k: int) -> Tensor:
        m.config = CONFIGURATIONS[name]() if k == 0 else m.config
        box = getattr(m.config, "inner", m.config)
        box.scale = 2.0 if k == FROM else box.scale
        return loss_of_step(m(batch_of(k)[0]), k)

    graphs = told_of(lambda m, x: plain(m, x) * getattr(m.config, "inner", m.config).scale, step)
    assert graphs.replayed >= 4 and graphs.reasons["module '' has another 'config'"]


RNG = numpy.random.default_rng(3)


def of_queue(m: Model, x: Tensor) -> Tensor:
    m.queue.append(1)
    return plain(m, x) * (1.0 if len(m.queue) < 6 else 2.0)


def of_slots(m: Model, x: Tensor) -> Tensor:
    m.own_slots.scale += 1
    return plain(m, x) * (1.0 if m.own_slots.scale < 6 else 2.0)


def of_nested(m: Model, x: Tensor) -> Tensor:
    m.nested["a"]["b"]["c"]["d"][0] += 1
    return plain(m, x) * (1.0 if m.nested["a"]["b"]["c"]["d"][0] < 6 else 2.0)


def of_iterator(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * (1.0 if next(m.turns) < 6 else 2.0)


def of_drawn(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * (1.0 if RNG.random() < 0.6 else 2.0)


def of_rarely_drawn(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * (1.0 if RNG.random() < 2 else 2.0)


COUNTING = {
    of_queue: "changes its 'queue' each time",
    of_slots: "changes its 'own_slots' each time",
    of_nested: "changes its 'nested' each time",
    of_iterator: "'turns' of module 'Model' is an iterator",
    of_drawn: "is not the same for two batches",
    of_rarely_drawn: "numpy.random._generator.Generator",
}


@pytest.mark.parametrize("forward", COUNTING)
def test_what_moves_on_in_every_forward_is_left_to_python(forward: Callable[..., Tensor]) -> None:
    """And what a recording has moved is set back."""

    def step(m: Model, k: int) -> Tensor:
        if k == 0:
            m.queue, m.own_slots, m.nested, m.turns = deque[int](), Slotted(), {"a": {"b": {"c": {"d": [0]}}}}, None
            m.turns = itertools.count() if forward is of_iterator else None  # one anywhere is in the way
            RNG.bit_generator.state = numpy.random.default_rng(4).bit_generator.state
        return loss_of_step(m(batch_of(k)[0]), k)

    graphs = told_of(forward, step)
    assert graphs.replayed == 0 and COUNTING[forward] in graphs.told()


def test_attributes_that_the_forward_does_not_read_may_change() -> None:
    """As epochs and numbers of steps do; also one that is not there at first, or is read past the class, is seen."""

    def counted(m: Model, k: int) -> Tensor:
        m.global_step, m.alpha = k, 2.0 if k == FROM else m.alpha
        return loss_of_step(m(batch_of(k)[0]), k)

    assert told_of(lambda m, x: plain(m, x) * m.alpha, counted).replayed == STEPS - 3
    reads: list[Callable[[Model], float]] = [
        lambda m: getattr(m, "late", 1.0),
        lambda m: m.__dict__.get("late", 1.0),
        lambda m: vars(m).get("late", 1.0),
        lambda m: m.late if hasattr(m, "late") else 1.0,
        lambda m: 2.0 if "late" in dir(m) else 1.0,
    ]
    for read in reads:
        told_of(lambda m, x, read=read: plain(m, x) * read(m), later(lambda m: setattr(m, "late", 2.0)))
    assert "__getattribute__" not in vars(Model)


SHARED = SimpleNamespace(scale=1.0)


class Closed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError("closed")


class Scaling(nn.Module, metaclass=Closed):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_objects_that_are_reached_past_the_module_and_classes_that_take_nothing() -> None:
    """What only a number can be is told from what may be read elsewhere, too."""

    def shared(m: Model, k: int) -> Tensor:
        SHARED.scale, m.kept = 2.0 if k >= FROM else 1.0, SHARED
        return loss_of_step(m(batch_of(k)[0]), k)

    assert told_of(lambda m, x: plain(m, x) * SHARED.scale, shared).replayed >= 4

    def within(m: Model, k: int) -> Tensor:
        if k == 0:
            m.scaling, m.filled = Scaling(), OrderedDict(a=1)
        m.scaling.scale = 2.0 if k >= FROM else 1.0
        return loss_of_step(m(batch_of(k)[0]), k)

    def filling(m: Model, x: Tensor) -> Tensor:
        m.filled.setdefault(len(x), 1)
        assert list(m.filled.items())[0] == ("a", 1)
        return m.scaling(plain(m, x))

    assert told_of(lambda m, x: m.scaling(plain(m, x)), within).replayed >= 4
    told_of(filling, within)
    assert not any("__getattribute__" in vars(kind) for kind in (Model, nn.Linear, Scaling))


TWICE: dict[str, Step] = {
    "a target": lambda m, k: (m(batch_of(k)[0]) - m(batch_of(k)[0].flip(1)).detach()).square().sum(1).mean(),
    "an accuracy": lambda m, k: (lambda loss: (m(batch_of(k)[0]).argmax(1), loss)[1])(
        loss_of_step(m(batch_of(k)[0]), k)
    ),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_second_forward_before_the_backward(name: str) -> None:
    assert told_of(plain, TWICE[name]).replayed >= 2 * STEPS - 6


def test_a_number_of_a_buffer_that_has_changed_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_shapes, "_MISSES", 2)
    graphs = told_of(lambda m, x: plain(m, x) / (1 + m.shift[0].item()), later(lambda m: m.shift.add_(1)))
    assert graphs.replayed >= 4 and sum(n for why, n in graphs.reasons.items() if "another way" in why) == 2
