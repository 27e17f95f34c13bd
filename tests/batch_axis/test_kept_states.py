"""Samples of an earlier batch must not act in a later one; what is not data may be kept."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastdp
from fastdp.engine import later_copies
from fastdp.errors import SampleMixingError

from ..programs_by_hand import C, D, Program, run, squares


def keeping(use, keep):
    def forward(model, h):
        out = use(h, model.kept) if hasattr(model, "kept") else h
        model.kept = keep(h, getattr(model, "kept", None))
        return out

    return forward


STATES = {
    "the batch before": (lambda h, k: h + k[: len(h)].mean(0), lambda h, k: h.detach()),
    "by rows": (lambda h, k: h[: len(k)] + k[: len(h)], lambda h, k: h.detach()),
    "a queue": (
        lambda h, k: h - k.mean(0),
        lambda h, k: torch.cat([h.detach()] + ([] if k is None else [k]))[:9],
    ),
    "an average": (
        lambda h, k: h - k,
        lambda h, k: h.mean(0).detach() if k is None else 0.9 * k + 0.1 * h.mean(0).detach(),
    ),
    "an average in place": (
        lambda h, k: h - k,
        lambda h, k: torch.zeros(h.size(1)) if k is None else k.mul_(0.9).add_(h.detach().mean(0), alpha=0.1),
    ),
    "a memory by attention": (lambda h, k: h + (h @ k.T).softmax(-1) @ k, lambda h, k: h.detach()),
    "one number": (lambda h, k: h * k, lambda h, k: h.detach().abs().max()),
}


@pytest.mark.parametrize("sizes", [(6, 6, 6), (6, 5, 7), (1, 1, 1)])
@pytest.mark.parametrize("name", STATES)
def test_states_of_earlier_batches_are_refused(name: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(SampleMixingError, match="earlier batch|by their place"):
        run(keeping(*STATES[name]), sizes=sizes)


MADE_ONCE = {
    "cast": lambda h, kept: kept.to(h) if kept is not None else torch.linspace(-1, 1, h.size(1)),
    "cast by type": lambda h, kept: kept.type_as(h) if kept is not None else torch.linspace(-1, 1, h.size(1)),
    "of the data's dtype": lambda h, kept: h.new_ones(h.size(1)) if kept is None else kept,
    "of the data's shape": lambda h, kept: torch.ones_like(h[0]).cumsum(0) if kept is None else kept,
}


@pytest.mark.parametrize("sizes", [(1, 2, 3), (2, 1, 2), (4, 4, 1, 4)])
@pytest.mark.parametrize("name", MADE_ONCE)
def test_constants_made_once_are_no_state(name: str, sizes: tuple[int, ...]) -> None:
    """A batch of one, as Poisson sampling draws it, makes no data of them."""

    def forward(model, h):
        model.kept = MADE_ONCE[name](h, getattr(model, "kept", None))
        return h * MADE_ONCE[name](h, model.kept)

    run(forward, sizes=sizes)


KEPT = {
    "a count, and what is only looked at": (
        lambda h, k: h * (1 + 0.1 * k[0]),
        lambda h, k: (1 if k is None else k[0] + 1, h.detach()),
    ),
    "positions": (lambda h, k: h + k, lambda h, k: torch.arange(h.size(1), dtype=h.dtype) if k is None else k),
    "an average that is not used": (lambda h, k: h, lambda h, k: (0 if k is None else k) * 0.9 + h.detach().mean(0)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_meet_data_may_be_kept(name: str) -> None:
    assert len(run(keeping(*KEPT[name]), sizes=(6, 6, 5, 1))) == 4


def test_two_forwards_before_one_backward_are_one_batch() -> None:
    model = Program(lambda m, h: h)
    engine = fastdp.PerSampleGradients(model)
    for _ in range(2):
        one, two = model(torch.randn(6, D)), model(torch.randn(6, D))
        (one - two).square().sum(1).mean().backward()
        assert engine.norms().shape == (6,)
    one, two = model(torch.randn(6, D)), model(torch.randn(6, D))
    squares(one, one).backward()
    squares(two, two).backward()
    engine.detach()


def test_a_state_kept_by_the_loss() -> None:
    centre: list[torch.Tensor] = []

    def loss(out, labels):
        found = (out - (centre[-1] if centre else 0)).square().sum(1).mean()
        centre.append(out.detach().mean(0))
        return found

    with pytest.raises(SampleMixingError, match="earlier batch"):
        run(lambda m, h: h, loss, sizes=(6, 6))


# what a training loop keeps of outputs after backward, in place of (or in) what it kept before
COPIES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "their memory": lambda out, kept: out.detach(),
    "a copy": lambda out, kept: out.detach().clone(),
    "other numbers": lambda out, kept: out.data.double().softmax(1).float(),
    "a queue": lambda out, kept: torch.cat([kept, out.detach()])[-len(kept) :],
    "rows, one by one": lambda out, kept: torch.stack(list(out.detach())),
    "written over": lambda out, kept: kept.copy_(out.detach()[0]),
    "written to a part": lambda out, kept: kept.__setitem__(slice(0, 2), out.detach()[:2]),
    "written to a view": lambda out, kept: (kept.view(-1)[:C].add_(out.detach()[0]), None)[1],
    "given as new memory": lambda out, kept: setattr(kept, "data", out.detach().clone()),
    "an average": lambda out, kept: 0.9 * kept + 0.1 * out.detach().mean(0),
    "an average in place": lambda out, kept: kept.lerp_(out.detach().mean(0), 0.1),
    "averages of many": lambda out, kept: torch._foreach_lerp_([kept], [out.detach().mean(0)], 0.1),
    "into given memory": lambda out, kept: torch.mul(out.detach()[0], torch.ones_like(kept), out=kept),
    "numbers in a shape": lambda out, kept: (
        torch.full_like(kept, out.detach().sum()) + kept.new_tensor(out[:1].tolist())
    ),
    "one number": lambda out, kept: kept * out.detach().abs().max(),
}
NO_COPIES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "their shape": lambda out, kept: torch.zeros_like(out[0]) + out.new_ones(C) * out.size(1),
    "random numbers": lambda out, kept: torch.rand_like(out[0]),
    "figures to print": lambda out, kept: print(out.detach().argmax(1).float().mean()),
    "nothing": lambda out, kept: kept.mul_(0.9),
}


def step_by_step(keep: Callable[..., Any], when: str, sizes: tuple[int, ...], rows: int = 9, **options) -> None:
    """Train on batches of these sizes; the loss takes what was kept of the batch before, as a table of rows, or as
    labels, if these are as many."""
    kept, model = torch.rand(rows, C), Program(lambda m, h: h)
    options = dict(lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1) | options
    optimizer = fastdp.DPSGD(model, **options)
    for size in sizes:
        out = model(torch.randn(size, D))
        away = (out - (kept if rows == size else kept.mean(0))).square().sum(1)
        away.mean().backward()
        for moment in ("before step", "before zero_grad", "after an evaluation"):
            if moment == "after an evaluation":
                with torch.no_grad():
                    model(torch.randn(3, D))
            if moment == when:
                new = keep(out, kept)
                kept = new if isinstance(new, torch.Tensor) else kept
            if moment == "before step":
                optimizer.step()
            elif moment == "before zero_grad":
                optimizer.zero_grad()
    optimizer.detach()


@pytest.fixture
def nothing_compiled(monkeypatch) -> None:
    """As in a process of its own: other tests have compiled functions."""
    monkeypatch.setattr(later_copies, "any_compiled", lambda: False)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("sizes", [(6, 6), (6, 5), (1, 1), (6, 1)])
@pytest.mark.parametrize("when", ["before step", "before zero_grad", "after an evaluation"])
@pytest.mark.parametrize("name", COPIES)
def test_what_the_training_loop_keeps_of_outputs(name: str, when: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(SampleMixingError, match="earlier batch"):
        step_by_step(COPIES[name], when, sizes)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("name", ["a copy", "written over", "written to a view", "given as new memory", "an average"])
def test_what_was_a_label_holds_outputs_now(name: str) -> None:
    with pytest.raises(SampleMixingError, match="earlier batch"):
        step_by_step(COPIES[name], "before zero_grad", (6, 6), rows=6)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("name", NO_COPIES)
def test_what_holds_nothing_of_outputs_may_be_kept(name: str) -> None:
    step_by_step(NO_COPIES[name], "after an evaluation", (6, 6, 5, 6))


@pytest.mark.usefixtures("nothing_compiled")
def test_what_other_models_and_constants_make_of_outputs() -> None:
    """Each sample's own row, for another private model; constants that took the type or shape of an output; memory
    that was written over."""
    options = dict(lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1)
    first, second = Program(lambda m, h: h), nn.Linear(C, C)
    optimizers = [fastdp.DPSGD(model, **options) for model in (first, second)]
    weights, room = torch.linspace(1, 2, C), torch.zeros(6, C)
    for _ in range(3):
        out = first(torch.randn(6, D))
        (out * weights - room).square().sum(1).mean().backward()
        optimizers[0].step()
        given = out.detach().clone()
        second(given).square().sum(1).mean().backward()
        optimizers[1].step()
        weights = torch.broadcast_tensors(weights.to(out.detach()), out.detach()[:, :C])[0][0]
        room.copy_(out.detach())
        room.zero_()
    for optimizer in optimizers:
        optimizer.detach()


@pytest.mark.usefixtures("nothing_compiled")
def test_copies_after_a_closure_and_of_what_another_network_makes_of_inputs() -> None:
    model, teacher = Program(lambda m, h: h), nn.Linear(D, C)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1)
    outs: list[torch.Tensor] = []
    queue = torch.rand(9, C)

    def closure() -> torch.Tensor:
        x = torch.randn(6, D)
        outs.append(model(x))
        with torch.no_grad():
            outs.append(teacher(x))
        loss = (outs[-2] @ queue.mT).logsumexp(1).mean()
        loss.backward()
        return loss

    for place in (-2, -1):  # the outputs, and the keys of a momentum encoder
        queue = torch.rand(9, C)
        optimizer.step(closure)
        queue[:6] = outs[place].detach()
        with pytest.raises(SampleMixingError, match="earlier batch"):
            closure()
    optimizer.detach()


def test_compiling_while_copies_are_followed_and_the_end_of_the_process() -> None:
    script = """
import torch, fastdp
model = torch.nn.Linear(3, 2)
optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1)
out = model(torch.randn(6, 3))
out.square().sum(1).mean().backward()
optimizer.step()
assert torch.overrides._len_torch_function_stack() == 1
with torch.inference_mode():
    out.softmax(1).view(-1, 1)[0].mul_(2)
print(torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.zeros(2)).tolist())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[1.0, 1.0]\n", "")


@pytest.mark.usefixtures("nothing_compiled")
def test_copies_of_outputs_in_replayed_steps() -> None:
    with pytest.raises(SampleMixingError, match="earlier batch"):
        step_by_step(lambda out, kept: COPIES["a copy"](out, kept), "after an evaluation", (6,) * 6, graphed=True)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("keys", [False, True])  # what another network made of the loader's batch, before the model
@pytest.mark.parametrize("at_once", [False, True])  # else when the loader has handed out the next batch
def test_copies_of_what_is_made_of_a_loaders_batch(keys: bool, at_once: bool) -> None:
    model, teacher, centre = Program(lambda m, h: h), nn.Linear(D, C), lambda: torch.zeros(C)
    loader = fastdp.poisson_loader([(torch.randn(D), torch.ones(())) for _ in range(40)], sample_rate=0.3, steps=4)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=12)
    next(iter(fastdp.poisson_loader([(torch.randn(D),) for _ in range(40)], sample_rate=0.3)))  # an interrupted epoch
    with pytest.raises(SampleMixingError, match="earlier batch"):
        for x, _ in loader:
            given = centre()
            with torch.no_grad():
                key = teacher(x)
            out = model(x)
            (out - given).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = key if keys else out.detach()
            copy_now = kept.clone().mean(0) if at_once else None
            centre = lambda made=copy_now, kept=kept: kept.clone().mean(0) if made is None else made
    optimizer.detach()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.filterwarnings("ignore::fastdp.errors.PairedForwardsWarning")
@pytest.mark.parametrize("which", [0, 1])
def test_copies_of_one_of_two_forwards(which: int) -> None:
    """Of one backward; nothing is left of the other one."""
    model = Program(lambda m, h: h)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1)
    centre = torch.zeros(C)
    with pytest.raises(SampleMixingError, match="earlier batch"):
        for _ in range(2):
            outs = [model(torch.randn(6, D)) for _ in range(2)]
            (outs[0] - outs[1] - centre).square().sum(1).mean().backward()
            del outs[1 - which]
            optimizer.step()
            centre = outs[0].detach().mean(0)
    optimizer.detach()


@pytest.mark.usefixtures("nothing_compiled")
def test_an_update_is_made_out_of_sight() -> None:
    """Of the mode that follows copies, also after a closure; after it, the mode is on again."""
    during: list[list[str]] = []

    def modes() -> list[str]:
        return [type(mode).__name__ for mode in torch.overrides._get_current_function_mode_stack()]

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            during.append(modes())
            return super().step()

    model = Program(lambda m, h: h)
    optimizer = fastdp.privatize(
        Recording(model.parameters(), lr=0.1), model, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1
    )
    losses: list[torch.Tensor] = []

    def closure() -> None:
        losses.append(model(torch.randn(6, D)).square().sum(1).mean())
        losses[-1].backward()

    for given in (closure, None):
        if given is None:
            closure()
        optimizer.step(given)
        assert modes() == ["LaterCopies"]
    assert during == [[], []]
    optimizer.detach()


def test_the_mode_for_later_copies_ends_where_there_can_be_none(nothing_compiled) -> None:
    def modes() -> list[str]:
        return [type(mode).__name__ for mode in torch.overrides._get_current_function_mode_stack()]

    model = Program(lambda m, h: h)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1)
    kept: list[torch.Tensor] = []
    for end in (kept.clear, optimizer.detach):
        loss = model(torch.zeros(6, D)).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept[:] = [loss.detach() * 2]
        del loss
        assert modes() == ["LaterCopies"]
        end()
        assert not modes()


def test_parts_of_one_tensor_may_be_the_batches_and_come_again() -> None:
    model, data, labels = Program(lambda m, h: h), torch.randn(18, D), torch.randint(0, 4, (18,))
    engine = fastdp.PerSampleGradients(model)
    found = []
    for start in (0, 6, 12, 3, 0):
        nn.functional.cross_entropy(model(data[start : start + 6]), labels[start : start + 6]).backward()
        found.append(engine.norms())
    assert torch.equal(found[0], found[-1]) and not torch.equal(found[0], found[1])
    engine.detach()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_labels_are_labels(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    labels = torch.randint(0, 4, (6,))
    for model in (Program(lambda m, h: h), Program(lambda m, h: h)):  # of another model's, too
        engine = fastdp.PerSampleGradients(model)
        for times in (0, 1, 0):
            given = copied(labels) if times else labels
            nn.functional.cross_entropy(model(torch.randn(6, D)), given).backward()
        assert engine.norms().shape == (6,)
        engine.detach()


def test_a_hidden_state_passed_on_is_refused() -> None:
    model, h = nn.GRUCell(D, D), torch.zeros(6, D)
    fastdp.PerSampleGradients(model)
    for step in range(2):
        with pytest.raises(SampleMixingError, match="earlier batch") if step else torch.enable_grad():
            out = model(torch.randn(6, D), h)
            h = out.detach()
            out.square().sum(1).mean().backward()
