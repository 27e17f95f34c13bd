"""`graphed=True`: what changes from step to step is seen, or goes through Python: the run is that without replays."""

from __future__ import annotations

import functools
import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp

from .test_graphed_forwards import CLASSES, B, D, at_once, batch  # noqa: F401  (at_once is for every test)

STEPS, FROM = 9, 5
Step = Callable[[Any, int], Tensor]  # (model, number of the step) -> loss
SCALE = [1.0]  # kept outside of every module


class Model(nn.Module):
    """A forward to choose."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head, self.own = nn.Linear(D, 8), nn.Linear(8, CLASSES), forward
        self.alpha, self.config = 1.0, types.SimpleNamespace(alpha=1.0, kinds={"b": [1.0]})
        self.register_buffer("shift", torch.zeros(D))
        self.frozen = nn.Parameter(torch.zeros(D), requires_grad=False)
        self.loose, self.array, self.names, self.slots = torch.ones(1), numpy.ones(2), {"a"}, Slots(1.0)
        self.counted, self.calls, self.draws = Counter("a"), 0, numpy.random.RandomState(5)

    def rows(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x)).mean(1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(self, *args, **kwargs)


def run(forward: Callable[..., Any], step: Step, graphed: bool) -> tuple[list[Any], Model, Any]:
    """What each step gives: norms, or the class of the error."""
    model = Model(forward)
    settings = dict(lr=0.05, noise_multiplier=0.6, max_grad_norm=0.4, expected_batch_size=B, sample_rate=0.1, seed=3)
    optimizer = fastdp.DPSGD(model, **settings, graphed=graphed)
    found: list[Any] = []
    for k in range(STEPS):
        try:
            step(model, k).backward()
            found.append(optimizer.norms)
            optimizer.step()
        except Exception as problem:  # noqa: BLE001
            found.append(type(problem))
        optimizer.zero_grad()
    return [*found, *[p.detach() for p in model.parameters()]], model, optimizer


def told_of(forward: Callable[..., Any], step: Step) -> Any:
    """The run with replays, after it was compared with that without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (plain, _, _), (graphed, _, optimizer) = (run(forward, step, graphed) for graphed in (False, True))
    for a, b in zip(plain, graphed, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b, (a, b)
    return optimizer._privacy.graphs


def loss_of(out: Any, k: int) -> Tensor:
    logits = out["logits"] if isinstance(out, dict) else out
    return F.cross_entropy(logits, batch(k)[1])


def later(change: Callable[[Model], Any]) -> Step:
    """A plain step; the model changes before step FROM."""

    def step(model: Model, k: int) -> Tensor:
        if k == FROM:
            change(model)
        return loss_of(model(batch(k)[0]), k)

    return step


def plain(m: Model, x: Tensor) -> Tensor:
    return m.head(m.rows(x))


def weighted(m: Model, x: Tensor) -> dict[str, Tensor]:
    logits = plain(m, x)
    w = logits.detach().softmax(-1).amax(-1)
    return {"logits": logits, "w": w if m.alpha == 1 else w / w.sum()}


def unfrozen(m: Model) -> None:
    m.up.requires_grad_(True)


def wrapped(m: Model) -> None:
    own = m.forward
    m.forward = lambda x: own(x) * 2  # type: ignore[method-assign]


def weights_in_the_loss(m: Model, k: int) -> Tensor:
    if k == FROM:
        m.alpha = 2.0
    out = m(batch(k)[0])
    return (F.cross_entropy(out["logits"], batch(k)[1], reduction="none") * out["w"]).mean()


def argument_centred(m: Model, k: int) -> Tensor:
    """By what a submodule gave: of the batch, as fastdp knows."""
    x = batch(k)[0]
    h = m.up(x).detach()
    return loss_of(m(h - h.mean(0) if k >= FROM else h), k)


def buffer_filled(m: Model, k: int) -> Tensor:
    h = m.up(batch(k)[0]).detach()
    if k >= FROM:
        m.shift.copy_(h.mean((0, 1))[:D])
    return loss_of(m(batch(k)[0]), k)


def frozen_filled(m: Model, k: int) -> Tensor:
    """A frozen parameter in the place of the buffer."""
    h = m.up(batch(k)[0]).detach()
    if k >= FROM:
        with torch.no_grad():
            m.frozen.copy_(h.mean((0, 1))[:D])
    return loss_of(m(batch(k)[0]), k)


def hidden_frozen_at_first(m: Model, k: int) -> Tensor:
    m.up.requires_grad_(k >= FROM)
    out = m(batch(k)[0])
    return loss_of(out, k) + out["hidden"].square().sum(1).mean()


def retained(m: Model, k: int) -> Tensor:
    out = m(batch(k)[0])
    out["hidden"].retain_grad()
    return loss_of(out, k)


def gradient_of_hidden(m: Model, k: int) -> Tensor:
    out = m(batch(k)[0])
    loss = loss_of(out, k)
    m.seen = torch.autograd.grad(loss, out["hidden"], retain_graph=True)[0]
    return loss


def with_hidden(m: Model, x: Tensor) -> dict[str, Tensor]:
    h = m.rows(x)
    return {"logits": m.head(h), "hidden": h}


def told(m: Model, x: Tensor) -> dict[str, Any]:
    return {"logits": plain(m, x), "n": len(x)}


def divided_by_what_is_told(m: Model, k: int) -> Tensor:
    x, y = batch(k, B - (k >= FROM))  # which is padded, if nothing is told
    out = m(x)
    return F.cross_entropy(out["logits"], y, reduction="sum") / out["n"]


def another_count(m: Model, k: int) -> Tensor:
    x, y = batch(k, B - (k >= FROM))
    assert int((out := m(x))["n"]) == len(x)
    return F.cross_entropy(out["logits"], y)


def by_places(m: Model, k: int) -> Tensor:
    out = m(batch(k)[0])
    return loss_of(out["logits"] * (1 + out["at"][:, None]) if k >= FROM else out, k)


def turned(m: Model, x: Tensor) -> dict[str, Tensor]:
    """[B, B], if there are as many samples as numbers of each."""
    rows = m.rows(x)
    return {"logits": m.head(rows), "rows": rows if m.alpha == 1 else rows.mT}


def of_turned(m: Model, k: int, start: int = FROM) -> Tensor:
    m.alpha = 1.0 if k < start else 2.0
    out = m(batch(k)[0])
    return loss_of(out, k) + out["rows"].square().sum(1 if k < start else 0).mean()


def drawn_and_decided(m: Model, x: Tensor) -> Tensor:
    """The random numbers are drawn before Python decides."""
    rows = F.dropout(m.rows(x), 0.3)
    return m.head(rows if x[0, 0, 0] > 0 else rows * 2)


def partly_cast(m: Model, x: Tensor) -> Tensor:
    rows = m.rows(x)
    with torch.autocast("cpu", enabled=False):
        return F.linear(rows.float(), m.head.weight, m.head.bias)


def within_autocast(m: Model, k: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = m(batch(k)[0])
    return loss_of(out, k)


def within_vmap(m: Model, k: int) -> Tensor:
    x = batch(k)[0]
    if k >= FROM:
        assert torch.vmap(m)(torch.stack([x, x])).shape == (2, B, CLASSES)
    return loss_of(m(x), k)


def left_behind(m: Model, x: Tensor) -> Tensor:
    m.aux = m.rows(x)
    return m.head(m.aux)


def of_an_attribute(m: Model, k: int) -> Tensor:
    return loss_of(m(batch(k)[0]), k) + m.aux.square().sum(1).mean()


def counted(m: Model, x: Tensor) -> Tensor:
    m.alpha += 1
    return plain(m, x) / m.alpha


def drawn_by_its_own(m: Model, x: Tensor) -> Tensor:
    if not hasattr(m, "source"):
        m.source = torch.Generator().manual_seed(5)
    return plain(m, x) * torch.rand(1, generator=m.source)


def only_even(m: Model, x: Tensor) -> Tensor:
    assert len(x) % 2 == 0
    return plain(m, x)


def joined(m: Model, **parts: Tensor) -> Tensor:
    a, b = parts.values()
    return m.head(m.rows(a) - 2 * m.rows(b))


def in_another_order(m: Model, k: int) -> Tensor:
    a, b = batch(k)[0], batch(k + 50)[0]
    return loss_of(m(b=a, a=b) if k < FROM else m(a=a, b=b), k)


def flagged(m: Model, x: Tensor, flag: Any = False) -> Tensor:
    return plain(m, x) * (3 if flag is True else 1)


def one_or_true(m: Model, k: int) -> Tensor:
    return loss_of(m(batch(k)[0], 1 if k < FROM else True), k)


def twice(m: Model, x: Tensor) -> dict[str, Tensor]:
    out = plain(m, x)
    return {"logits": out, "same": out}


def written_to_one(m: Model, k: int) -> Tensor:
    out = m(batch(k)[0])
    out["same"].mul_(2)
    return loss_of(out, k)


def by_item(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * m.shift[0].add(1).item()


def by_loose_item(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * m.loose.item()


def of_array(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * float(m.array[0]) * len(m.names)


class Slots:
    """An object that nothing is known of."""

    __slots__ = ("alpha",)

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha


def of_slots(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * m.slots.alpha


def taken_from_a_dict(m: Model, parts: dict[str, Tensor]) -> Tensor:
    return plain(m, parts.pop("x"))


def given_a_dict(m: Model, k: int) -> Tensor:
    parts = {"x": batch(k)[0], "rest": torch.ones(1)}
    loss = loss_of(m(parts), k)
    assert list(parts) == ["rest"]
    return loss


def once_a_step(m: Model, x: Tensor) -> Tensor:
    if m.calls:
        raise KeyError("called twice in a step")
    m.calls += 1
    return plain(m, x)


def one_call(m: Model, k: int) -> Tensor:
    m.calls = 0
    return loss_of(m(batch(k)[0]), k)


def of_counter(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * m.counted["a"]


def by_a_note(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * getattr(x, "weight", 1.0)


def given_with_a_note(m: Model, k: int) -> Tensor:
    x = batch(k)[0]
    x.weight = 1.0 + k  # type: ignore[attr-defined]
    return loss_of(m(x), k)


def of_config(m: Model, x: Tensor) -> Tensor:
    return plain(m, x) * m.config.alpha * m.config.kinds["b"][0]


NOT_REPLAYED = {
    "an attribute that the loss takes": (left_behind, of_an_attribute),
    "a counter": (counted, later(lambda m: None)),
    "a generator of its own": (drawn_by_its_own, later(lambda m: None)),
    "one of NumPy's": (lambda m, x: plain(m, x) * m.draws.rand(), later(lambda m: None)),
    "constants as long as the batch": (lambda m, x: {"logits": plain(m, x), "at": torch.arange(len(x))}, by_places),
    "outputs in one memory": (twice, written_to_one),
    "an argument that is taken apart": (taken_from_a_dict, given_a_dict),
    "an argument with a note": (by_a_note, given_with_a_note),
    "a gradient of an output": (with_hidden, gradient_of_hidden),
    "a gradient that an output retains": (with_hidden, retained),
    "one call a step": (once_a_step, one_call),
}
CHANGES = {
    "weights that mix samples": (weighted, weights_in_the_loss),
    "an argument that mixes samples": (lambda m, h: m.head(F.gelu(h).mean(1)), argument_centred),
    "a buffer that holds the batch": (lambda m, x: plain(m, x + m.shift), buffer_filled),
    "a frozen parameter that holds the batch": (lambda m, x: plain(m, x + m.frozen), frozen_filled),
    "an output that begins to require grad": (with_hidden, hidden_frozen_at_first),
    "unfrozen": (plain, later(unfrozen)),
    "a configuration": (of_config, later(lambda m: setattr(m.config, "alpha", 3.0))),
    "deep in a configuration": (of_config, later(lambda m: m.config.kinds["b"].__setitem__(0, 3.0))),
    "a number of a loose tensor": (by_loose_item, later(lambda m: m.loose.fill_(2.0))),
    "the memory of a loose tensor": (lambda m, x: plain(m, x) * m.loose, later(lambda m: m.loose.set_(m.loose * 2))),
    "an array in place": (of_array, later(lambda m: m.array.fill(2.0))),
    "a Counter": (of_counter, later(lambda m: m.counted.update("a"))),
    "a set": (of_array, later(lambda m: m.names.add("b"))),
    "another object": (of_slots, later(lambda m: setattr(m, "slots", Slots(3.0)))),
    "a number of a buffer": (by_item, later(lambda m: m.shift.fill_(2.0))),
    "a forward that is wrapped": (plain, later(wrapped)),
    "a number that is told": (told, divided_by_what_is_told),
    "a forward that not every size passes": (only_even, later(lambda m: None)),
    "a constant of that size": (lambda m, x: {"logits": plain(m, x), "n": torch.full((), len(x))}, another_count),
    "rows in another dimension": (turned, of_turned),
    "a branch behind random numbers": (drawn_and_decided, later(lambda m: None)),
    "a part without autocast": (partly_cast, within_autocast),
    "calls within vmap": (plain, within_vmap),
    "arguments in another order": (joined, in_another_order),
    "1 and True": (flagged, one_or_true),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name: str) -> None:
    forward, step = CHANGES[name]
    assert told_of(forward, step).replayed > 0


@pytest.mark.parametrize("start, by_python", [(2, 4), (FROM, 3)], ids=["at the recording", "behind it"])
def test_outputs_that_lie_otherwise_are_recorded_anew(start: int, by_python: int) -> None:
    assert told_of(turned, functools.partial(of_turned, start=start)).replayed == STEPS - by_python


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_what_goes_through_python(name: str) -> None:
    """And is left as it was by the recording that was tried."""
    forward, step = NOT_REPLAYED[name]
    assert told_of(forward, step).replayed == 0
