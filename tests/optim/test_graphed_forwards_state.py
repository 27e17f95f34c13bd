"""`graphed=True`: batches that are mixed before the model, what is run again, what is given up, and what is freed."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fastdp
import fastdp.errors
from fastdp.errors import LossNotFollowedWarning, StepError
from fastdp.graphs.halves import Halves
from fastdp.optim import forward_shapes

from .test_graphed_forwards import B, at_once, batch  # noqa: F401  (at_once is for every test)
from .test_graphed_forwards_changes import FROM, Model, Step, later, loss_of, plain, run, told_of, with_hidden

SCALE = [1.0]  # kept outside of every module
SETTINGS: dict[str, Any] = dict(lr=0.05, noise_multiplier=0.6, expected_batch_size=B, sample_rate=0.1, graphed=True)


def trained(model: Model, step: Callable[[int], Tensor], steps: int) -> Any:
    """What is known of the replays after a run."""
    optimizer = fastdp.DPSGD(model, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(steps):
            step(k).backward()
            optimizer.step()
            optimizer.zero_grad()
    return optimizer._privacy.graphs


def kept_in(name: str) -> Callable[..., Any]:
    def change(m: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            getattr(m, name).copy_(x.mean((0, 1)))
        return x, y

    return change


BEFORE = {
    "nothing": lambda m, x, y: (x, y),
    "centred": lambda m, x, y: (x - x.mean(0), y),
    "other labels": lambda m, x, y: (x, y.flip(0)),
    "mixed up": lambda m, x, y: ((x + x.roll(1, 0)) / 2, y),
    "in a buffer": kept_in("shift"),
    "in a frozen parameter": kept_in("frozen"),
}


@pytest.mark.parametrize("way", ["loop", "step"])
@pytest.mark.parametrize("name", BEFORE)
def test_batches_of_a_loader_that_are_mixed_before_the_model(name: str, way: str) -> None:
    """Also by `optimizer.graphed`."""

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    def run(way: str) -> list[Any]:
        model, found = Model(lambda m, x: plain(m, x + m.shift + m.frozen)), list[Any]()
        optimizer = fastdp.DPSGD(model, lr=0.05, noise_multiplier=0.6, seed=3, graphed=way == "loop")
        loader = fastdp.poisson_loader(TensorDataset(*batch(0, 60)), expected_batch_size=B, seed=2)
        step = optimizer.graphed(losses, batch(1, 20), sizes=(10, 20)) if way == "step" else None
        for k, (x, y) in enumerate(loader):
            given = BEFORE[name](model, x, y) if k == 6 else (x, y)
            try:
                if step is not None:
                    step.backward(*given)
                else:
                    losses(model, *given).mean().backward()
            except fastdp.errors.SampleMixingError:
                return [*found, "mixes"]
            found.append(len(optimizer.norms))
            optimizer.step()
            optimizer.zero_grad()
        assert step is None or (step.replayed > 0 and step.eager == 0)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, replayed = run("plain"), run(way)
    assert wanted == replayed and (wanted[-1] == "mixes") == (name != "nothing")


SUMS: dict[str, tuple[Callable[..., Any], Step]] = {
    "a sum that the model computes": (
        lambda m, x: plain(m, x).square().sum(),
        lambda m, k: m(batch(k)[0]) / len(batch(k)[0]),
    ),
    "shares that it returns": (
        lambda m, x: {"logits": plain(m, x), "share": torch.full((len(x),), 1 / len(x))},
        lambda m, k: (lambda out: (out["logits"].square().sum(1) * out["share"]).sum())(m(batch(k)[0])),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_means_of_sums_are_not_warned_of(name: str) -> None:
    """Not of the loss either that a recording makes of the outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found, _, optimizer = run(*SUMS[name], True)
    assert all(isinstance(each, Tensor) for each in found)
    assert optimizer._privacy.graphs.replayed > 3


def test_what_no_guard_sees_is_found_by_a_look_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", [1.0])
    model = Model(lambda m, x: plain(m, x) * SCALE[0])
    optimizer = fastdp.DPSGD(model, lr=0.05, noise_multiplier=0.6, expected_batch_size=B, sample_rate=0.1, graphed=True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for k in range(12):
            SCALE[0] = 1.0 if k < FROM else 2.0
            loss_of(model(batch(k)[0]), k).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert any("replayed no longer" in str(each.message) for each in heard)
    assert "Python gives other outputs than a replay" in optimizer.explain()


def test_a_hook_on_all_modules_is_called_once() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if isinstance(module, Model) else None
    )
    try:
        assert told_of(plain, later(lambda m: None)).replayed == 0
    finally:
        handle.remove()


def test_halves_that_differ_from_the_recorded_step_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Halves.backward
    monkeypatch.setattr(Halves, "backward", lambda *given: [2 * data for data in right(*given)])
    found = told_of(plain, later(lambda m: None))
    assert found.replayed == 0 and "does not give what the recorded" in found.told()


def test_what_is_written_into_an_output_does_not_reach_the_backward() -> None:
    """Python's backward would take it, and is refused."""

    def step(written: bool) -> Step:
        def loss(m: Model, k: int) -> Tensor:
            out = m(batch(k)[0])
            found = loss_of(out, k)
            if written and k >= FROM:
                out["hidden"].detach().zero_()
            return found

        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [run(with_hidden, step(written), True) for written in (False, True)]
    assert all(optimizer._privacy.graphs.replayed > 3 for _, _, optimizer in runs)
    assert all(torch.equal(a, b) for a, b in zip(*(found for found, _, _ in runs), strict=True))


@pytest.mark.parametrize("what", ["the model", "the batch", "a buffer"])
def test_what_is_run_again_must_not_have_changed(what: str) -> None:
    """The loss takes an output that it did not take before, so the forward is made again, of what there is then."""
    model = Model(lambda m, x: with_hidden(m, x + m.shift))
    settings = dict(lr=0.05, noise_multiplier=0.6, expected_batch_size=B, sample_rate=0.1)
    optimizer = fastdp.DPSGD(model, **settings, graphed=True)
    for k in range(FROM + 1):
        x, y = batch(k, B - 1 if k == FROM else B)  # padded: the batch itself is not what the backward takes
        out = model(x)
        loss = F.cross_entropy(out["logits"], y)
        if k == FROM:
            change = {"the model": model.eval, "the batch": x.zero_, "a buffer": lambda: model.shift.add_(1)}
            change[what]()
            with pytest.raises(StepError, match="cannot be made again"):
                (loss + out["hidden"].square().sum(1).mean()).backward()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer._privacy.graphs.replayed == 3


def test_a_model_that_computes_its_loss_is_followed() -> None:
    """What backward is called on is then an output itself."""
    model = Model(lambda m, x, y: F.cross_entropy(plain(m, x), y))
    optimizer = fastdp.DPSGD(model, lr=0.05, noise_multiplier=0.6, expected_batch_size=B, sample_rate=0.1, graphed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LossNotFollowedWarning)
        for k in range(5):
            model(*batch(k)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer._privacy.graphs.replayed == 3


def test_a_second_optimizer_of_a_model_takes_its_calls() -> None:
    model = Model(plain)
    settings = dict(lr=0.05, noise_multiplier=0.6, expected_batch_size=B, sample_rate=0.1, graphed=True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer = fastdp.DPSGD(model, **settings)
            for k in range(4):
                loss_of(model(batch(k)[0]), k).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert optimizer._privacy.graphs.replayed == 2
    assert not any("compile" in str(each.message) for each in heard)


def test_a_loss_that_is_kept_does_not_keep_its_batch() -> None:
    model, kept = Model(plain), []
    optimizer = fastdp.DPSGD(model, lr=0.05, noise_multiplier=0.6, expected_batch_size=B, sample_rate=0.1, graphed=True)
    for k in range(5):
        x, y = batch(k)
        known = weakref.ref(x)
        kept.append(F.cross_entropy(model(x), y))
        kept[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        del x, y
    assert optimizer._privacy.graphs.replayed and known() is None


def test_a_model_that_was_replayed_is_freed() -> None:
    found, model, optimizer = run(plain, later(lambda m: None), True)
    assert optimizer._privacy.graphs.replayed
    known = weakref.ref(model)
    del found, model, optimizer
    gc.collect()
    assert known() is None


# ---------------------------------------------------------------------- given up, and tried again


def test_a_sparse_buffer_is_in_no_ones_way() -> None:
    """Whisper keeps the numbers of some attention heads in one."""
    model = Model(plain)
    model.register_buffer("heads", torch.eye(2).to_sparse(), persistent=False)
    assert trained(model, lambda k: loss_of(model(batch(k)[0]), k), 4).replayed


def test_what_was_in_the_way_may_be_gone() -> None:
    model = Model(plain)
    handle = model.up.register_forward_hook(lambda module, args, out: None)

    def step(k: int) -> Tensor:
        if k == FROM:
            handle.remove()
        return loss_of(model(batch(k)[0]), k)

    found = trained(model, step, 75)
    assert 0 < found.replayed < 12 and "has a hook" in found.told()


def test_a_model_that_changes_at_every_step_is_not_recorded_for_ever() -> None:
    model = Model(lambda m, x: plain(m, x) * m.alpha)

    def step(k: int) -> Tensor:
        model.alpha = float(k)
        return loss_of(model(batch(k)[0]), k)

    found = trained(model, step, 12)
    assert found.replayed <= forward_shapes.CHANGES + 1 and "'alpha' again and again" in found.told()


def test_a_loss_that_takes_others_at_every_step_is_given_up() -> None:
    model = Model(with_hidden)

    def step(k: int) -> Tensor:
        out = model(batch(k)[0])
        return loss_of(out, k) + (out["hidden"].square().sum(1).mean() if k % 3 else 0)

    found = trained(model, step, 24)
    assert "now these outputs, now others" in found.told()


def recorded_of(sizes: list[int]) -> list[int]:
    """The sizes that are recorded as batches of these come, and count anew."""
    shape, found = forward_shapes.Shape(), list[int]()
    for samples in sizes:
        if shape.fitting(samples) is None and (size := shape.size_to_record(samples)):
            found.append(size)
            made: Any = SimpleNamespace(
                only="", batch=SimpleNamespace(size=size), guards=SimpleNamespace(changed=lambda: "")
            )
            shape.recorded(made)
    assert len(shape.met) <= 64
    return found


def test_the_size_that_serves_most_is_recorded() -> None:
    assert recorded_of([8, 8, 8, 5, 8, 5]) == [8, 5]  # an epoch's last batch when it comes again
    assert recorded_of([30, 32, 30, 31]) == [32]  # with padding it serves both
    assert recorded_of([13, 21, 19, 23, 20, 13, 18, 22]) == [24, 13]  # of sizes at random what larger ones need, too
    assert recorded_of([10, 50, 49, 48, 47, 10]) == [52, 10]
    recorded_of([2**k for k in range(200)])  # none close to another: all are counted, the oldest no longer


def test_a_change_is_counted_once_however_long_a_recording_must_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastdp.optim.graphed_forwards, "PAYS", 20)
    model = Model(plain)

    def step(k: int) -> Tensor:
        if k == 8:
            model.up.bias.requires_grad_(False)
        return loss_of(model(batch(k)[0]), k)

    graphs = trained(model, step, 60)
    assert graphs.replayed > 40 and not graphs.reasons["module 'up' was frozen again and again"]


def test_a_sample_that_is_not_finite_ends_no_replays() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = fastdp.DPSGD(model, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(8):
            x = torch.randn(B - (k > 5), 6)  # padded
            x[0] = torch.nan if k < 4 else 0.0
            F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer._privacy.graphs.replayed == 6
