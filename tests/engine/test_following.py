"""Between a forward and its backward: other threads, other models, forwards without a backward, and what stays on."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.engine import later_copies, loss_tracking
from fastdp.engine.compile_stance import PLAINLY
from fastdp.errors import LossNotFollowedWarning, SampleMixingError

N, D, C = 8, 5, 3


def new() -> tuple[nn.Module, Any]:
    model = nn.Linear(D, C)
    return model, fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=6)


def data(rows: int = N) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, D), torch.randint(0, C, (rows,))


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, times: int = 1) -> None:
    for _ in range(times):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def coupled(out: Tensor) -> Tensor:
    return (out - 3 * out.mean(0)).square().sum(1).mean()


def modes() -> int:
    """That follow a batch."""
    return [type(mode) for mode in torch.overrides._get_current_function_mode_stack()].count(loss_tracking.LossTracking)


@pytest.fixture(autouse=True)
def strictly() -> Any:
    """A loss that was not followed is an error, where a test does not wait for the warning."""
    loss_tracking.stop()  # of what other tests left
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", LossNotFollowedWarning)
        yield


# --------------------------------------------------------------------------- threads


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_loss_in_another_thread_than_the_forward_is_warned_of() -> None:
    (model, optimizer), (x, y) = new(), data()
    for _ in range(2):
        out = in_thread(lambda: model(x))
        with pytest.warns(LossNotFollowedWarning, match="another thread"):
            coupled(out).backward()
        optimizer.step()
    train(model, optimizer, x, y)
    in_thread(lambda: train(model, optimizer, x, y))  # all of it in the other thread


def test_backwards_of_two_threads_are_told_apart() -> None:
    """A backward that nobody followed is not taken for the one that another thread follows at the time."""
    (first, one), (second, two), (x, y) = new(), new(), data()
    unseen = in_thread(lambda: second(x))
    found: list[Any] = []

    def meanwhile(grad: Tensor) -> None:
        def run() -> None:
            with pytest.warns(LossNotFollowedWarning):
                coupled(unseen).backward()
            found.append(True)

        if not found:
            in_thread(run)

    out = first(x)
    out.register_hook(meanwhile)
    F.cross_entropy(out, y).backward()
    assert found
    one.step()
    two.step()


# --------------------------------------------------------------------------- labels and inputs in several steps


# --------------------------------------------------------------------------- a forward without a backward


PREPARED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "standardised": lambda x, y: ((x - x.mean(0)) / x.std(0), y),
    "scaled": lambda x, y: (x * 2, y),
    "flipped": lambda x, y: (x.flip(0), y.flip(0)),
    "shuffled": lambda x, y: (x[torch.arange(N).flip(0)], y[torch.arange(N).flip(0)]),
    "one-hot labels": lambda x, y: (x, F.one_hot(y, C).float()),
    "smooth labels": lambda x, y: (x, 0.9 * F.one_hot(y, C).float() + 0.1 / C),
    "new records": lambda x, y: ((new := torch.randn(N, D) * 2 + 1), (new[:, 0] > 0).long()),
}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", PREPARED)
def test_data_prepared_after_a_look_at_the_loss(name: str, kept: bool, again: bool) -> None:
    """As in a notebook: the loss of a cell is shown, the next one prepares the data, and trains a new model."""
    (model, optimizer), (x, y) = new(), data()
    shown = F.cross_entropy(model(x), y)
    shown.item()
    if not kept:
        del shown
    x2, y2 = PREPARED[name](x, y)
    if not again:
        model, optimizer = new()
    train(model, optimizer, x2, y2, 2)
    train(model, optimizer, *data(), 2)
    train(model, optimizer, x2, y2, 2)


def test_what_outputs_of_such_a_forward_made_stays_refused() -> None:
    for between in (lambda out: out.detach().mean(0), lambda out: out.detach().softmax(1).mean(0)):
        (model, optimizer), (x, y) = new(), data()
        state = between(model(x))
        with pytest.raises(SampleMixingError):
            F.cross_entropy(model(x) - state, y).backward()
        optimizer.detach()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_inputs_made_between_two_forwards_of_one_loss_is_refused(order: tuple[int, int]) -> None:
    (model, optimizer), (x, y) = new(), data()
    first = model(x)
    second = model(x - x.mean(0))
    losses = [F.cross_entropy(first, y), F.cross_entropy(second, y)]
    with pytest.raises(SampleMixingError, match="two forwards"):
        (losses[order[0]] + losses[order[1]]).backward()
    weights = 1 / F.one_hot(y, C).float().mean(0).clamp(min=0.1)
    train(model, optimizer, x, y)
    first = model(x)
    weights = 1 / F.one_hot(y, C).float().mean(0).clamp(min=0.1)
    second = model(2 * x)
    with pytest.raises(SampleMixingError):
        (F.cross_entropy(first, y, weight=weights) + F.cross_entropy(second, y)).backward()


# --------------------------------------------------------------------------- what stays on


def test_the_mode_ends_with_what_it_follows() -> None:
    before = PLAINLY._wanted
    (model, optimizer), (x, y) = new(), data()
    found = weakref.ref(model)
    out = model(x)
    assert modes() == 1
    del model, optimizer, out
    gc.collect()
    assert modes() == 0 and found() is None
    model, optimizer = new()
    found = weakref.ref(model)
    kept = model(x).detach()
    assert modes() == 1
    del model, optimizer
    gc.collect()
    assert modes() == 0 and found() is None and kept.shape == (N, C)
    model, optimizer = new()
    loss = F.cross_entropy(model(x), y)
    assert modes() == 1
    del loss
    assert modes() == 0 and PLAINLY._wanted == before
    in_thread(lambda: model(x).detach().shape)
    assert PLAINLY._wanted == before
    train(model, optimizer, x, y)
    assert modes() == 0


def test_python_may_collect_a_model_while_torch_is_about_to_call_the_mode() -> None:
    """A mode that was taken off the stack just then made torch find nobody to call: TypeError, of any function."""
    (model, _), (x, _) = new(), data()
    cycle: list[Any] = [model(x)]
    cycle.append(cycle)
    del cycle

    class Collecting:
        def __iter__(self) -> Iterator[torch.Tensor]:  # where torch goes through the arguments
            (lambda gc: gc())(gc.collect)
            return iter([weight])

    assert modes() == 1
    weight = nn.Parameter(torch.zeros(3))
    torch.overrides.handle_torch_function(torch.nn.init.ones_, Collecting(), weight)
    assert bool((weight == 1).all())
    with torch.no_grad():
        model(x)  # the next forward takes it off
    assert modes() == 0


# --------------------------------------------------------------------------- two models


@pytest.mark.parametrize("rows", [N, 4])
@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("whole_step", [True, False])
def test_another_model_is_trained_meanwhile(whole_step: bool, refused: bool, rows: int) -> None:
    """Its whole step between the forward and the loss, or two forwards and then two losses."""
    (first, one), (second, two), (x, y) = new(), new(), data()
    out, other = first(x), None if whole_step else second(x[:rows])
    if whole_step:
        train(second, two, x[:rows], y[:rows])
    loss = coupled(out) if refused else F.cross_entropy(out, y)
    if other is not None:
        F.cross_entropy(other, y[:rows]).backward()
        two.step()
    with pytest.raises(SampleMixingError) if refused else contextlib.nullcontext():
        loss.backward()
        one.step()


@pytest.mark.parametrize("verified", [False, True])
def test_another_model_is_verified_or_detached_meanwhile(verified: bool) -> None:
    (first, _), (second, two), (x, y) = new(), new(), data()
    for loss_of in (coupled, lambda out: F.cross_entropy(out, y)):
        out = first(x)
        if verified:
            fastdp.verify(second, lambda model, given: F.cross_entropy(model(given[0]), given[1]), (x, y))
        else:
            two.detach()
        with pytest.raises(SampleMixingError) if loss_of is coupled else contextlib.nullcontext():
            loss_of(out).backward()


def test_two_batches_of_one_model() -> None:
    fastdp.PerSampleGradients(model := nn.Linear(D, C))
    (x, y), (more, labels) = data(), data(6)
    for first in (0, 1):
        losses = [F.cross_entropy(model(x), y), F.cross_entropy(model(more), labels)]
        losses[first].backward()
        losses[1 - first].backward()
        losses = [coupled(model(x)), coupled(model(more))]
        for loss in (losses[first], losses[1 - first]):
            with pytest.raises(SampleMixingError):
                loss.backward()


def test_long_after_it_is_warned_of() -> None:
    (first, _one), (second, two), (x, y) = new(), new(), data()
    out = first(x)
    train(second, two, x, y, 3)
    assert modes() == 0
    with pytest.warns(LossNotFollowedWarning, match="many other forwards"):
        coupled(out).backward()


# --------------------------------------------------------------------------- numbers that come back


@pytest.mark.parametrize(
    "other", [{"rows_per_sample": 3}, {"augmentations": 3}, {"batch_size": 4}, {"batch_first": False}, None]
)
@pytest.mark.parametrize("mixed", [lambda x: x - x.mean(0), lambda x: 0.5 * x + 0.5 * x.flip(0)])
def test_a_batch_is_followed_before_the_model_whatever_other_optimizers_are_told_of_their_rows(
    other: dict[str, Any] | None, mixed: Callable[[Tensor], Tensor]
) -> None:
    """None: the loader's own, with augmentations."""
    own = {"augmentations": 2} if other is None else {}
    beside = fastdp.DPSGD(nn.Linear(2, 2), lr=0.1, noise_multiplier=0.0, expected_batch_size=6, **(other or {}))
    optimizer = fastdp.DPSGD(model := nn.Linear(D, C), lr=0.1, noise_multiplier=0.0, **own)
    loader = fastdp.poisson_loader(torch.utils.data.TensorDataset(torch.randn(20, D)), expected_batch_size=12, **own)
    for (x,) in loader:
        with pytest.raises(SampleMixingError):
            model(mixed(x)).square().sum(1).mean().backward()
            optimizer.step()
        model(x + 1).square().sum(1).mean().backward()
        optimizer.step()
        break
    optimizer.detach()
    beside.detach()


def test_sizes_before_the_model_are_seen_beside_other_optimizers() -> None:
    optimizer = fastdp.DPSGD(model := nn.Linear(D, C), lr=0.1, noise_multiplier=0.0)
    others = [new() for _ in range(40)]  # of which no one is given these batches
    loader = fastdp.poisson_loader(torch.utils.data.TensorDataset(*data(96)), expected_batch_size=8, seed=1)
    with pytest.raises(SampleMixingError, match="made of the number of samples"):
        for x, y in loader:
            train(model, optimizer, x * len(x), y)
    assert len(others) == 40


def attacked(model, x, y, step, reduction="mean"):
    """The model's outputs at inputs that a gradient at them has moved."""
    moved = torch.zeros_like(x).requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + moved), y, reduction=reduction), moved)
    return model(x + step(gradient))


STEPS = {
    "sign": (lambda g: 0.1 * g.sign(), ""),
    "by its own norm": (lambda g: g / g.norm(dim=1, keepdim=True), ""),
    "kept within bounds": (lambda g: (50 * g).clamp(-0.1, 0.1), ""),
    "by the norm of all": (lambda g: g / g.norm(), "norm"),
    "by the largest of all": (lambda g: g / g.abs().max(), "max"),
    "less the mean of all": (lambda g: g - g.mean(0), "mean"),
}


@pytest.mark.parametrize("name", STEPS)
def test_gradients_at_inputs_have_rows_of_the_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adversarial training on a loader's batches: what divides one sample's gradient by others' is refused."""
    monkeypatch.setattr(later_copies, "any_compiled", lambda: False)  # by other tests
    torch.manual_seed(0)
    plain, (step, mixes) = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)), STEPS[name]
    model = copy.deepcopy(plain)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0)
    records = torch.utils.data.TensorDataset(torch.randn(20, D), torch.randint(0, 3, (20,)))
    for x, y in fastdp.poisson_loader(records, sample_rate=0.5, steps=3):
        if mixes:
            with pytest.raises(SampleMixingError, match=rf"{mixes}\(\) combines the samples"):
                F.cross_entropy(attacked(model, x, y, step), y).backward()
            break
        plain.load_state_dict(model.state_dict())
        F.cross_entropy(attacked(model, x, y, step), y).backward()
        own = F.cross_entropy(attacked(plain, x, y, step, "sum"), y, reduction="none")
        exact = [torch.autograd.grad(each, list(plain.parameters()), retain_graph=True) for each in own]
        norms = torch.stack([torch.cat([g.flatten() for g in gradients]).norm() for gradients in exact])
        if name != "kept within bounds":  # (a mean's gradient is smaller)
            torch.testing.assert_close(optimizer.norms, norms, rtol=1e-4, atol=1e-6)
        optimizer.step()


def by_steps(model, x, y):
    moved = x.clone()
    for _ in range(3):
        moved = moved.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
        moved = (moved + 0.05 * gradient.sign_()).clamp(x - 0.1, x + 0.1)
    return moved.detach()


def by_a_change(model, x, y):
    change = torch.empty_like(x).uniform_(-0.1, 0.1).requires_grad_()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + change), y, reduction="sum"), change)
        change = (change + 0.05 * gradient.sign()).clamp_(-0.1, 0.1).detach().requires_grad_()
    return x + change.detach()


def by_one_change_for_all(model, x, y):
    change = torch.zeros(1, D, requires_grad=True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + change), y), change)
    return x + 0.1 * gradient.sign()


def by_weighted_outputs(model, x, y):
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out, x, grad_outputs=out.detach() - out.detach().mean(0))
    return x.detach() + gradient


@pytest.mark.parametrize("attack", [by_steps, by_a_change, by_one_change_for_all, by_weighted_outputs])
def test_attacks_move_each_sample_by_its_own_gradient(attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several steps; a change that all samples share is made of the gradients of all."""
    monkeypatch.setattr(later_copies, "any_compiled", lambda: False)  # by other tests
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0)
    records = torch.utils.data.TensorDataset(torch.randn(9, D), torch.randint(0, 3, (9,)))
    for x, y in fastdp.poisson_loader(records, sample_rate=1.0, steps=3):
        if attack in (by_one_change_for_all, by_weighted_outputs):
            with pytest.raises(SampleMixingError, match=r"sums over the samples|mean\(\) combines the samples"):
                F.cross_entropy(model(attack(model, x, y)), y).backward()
            break
        F.cross_entropy(model(attack(model, x, y)), y).backward()
        optimizer.step()
