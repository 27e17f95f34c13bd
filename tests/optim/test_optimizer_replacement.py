"""A second optimizer for a model: it takes the first one's place, and what the first spent stays counted."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.engine import state
from fastdp.errors import ClippingError, OptimizerReplacedWarning, ParameterError, StepError

from ..runs import backward, data, model_of, steps

OPTIONS = dict(lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1, accountant="rdp")


def private(model, kind=fastdp.DPSGD, **options):
    return kind(model, **{**OPTIONS, **options})


def replaced(match):
    return pytest.warns(OptimizerReplacedWarning, match=match)


def test_one_without_steps_is_replaced_with_a_note():
    model = model_of()
    first = private(model, fastdp.DPAdamW)
    with replaced("this DPSGD takes the place of the DPAdamW that the model had, which had made no step") as seen:
        second = private(model)
    assert seen[0].filename == __file__
    backward(model, data())
    for call in (first.step, lambda: first.norms, lambda: first.explain()):
        with pytest.raises(StepError, match="replaced, since a DPSGD was made for the same model"):
            call()
    first.zero_grad()  # harms nothing
    first.detach()
    second.step()
    assert second.history == [(1.0, 0.1, 1)] and first.history == []


def test_what_the_first_spent_is_said_and_goes_on_being_counted(silent):
    model = model_of()
    first = private(model)
    steps(first, model, 7)
    spent = first.epsilon(1e-4)
    with replaced(rf"7 noised step\(s\) \(epsilon {spent:.4g} at delta 0.0001\).*go on from them"):
        second = private(model, fastdp.DPAdamW, noise_multiplier=2.0)
    assert second.history == first.history and second.epsilon(1e-4) == first.epsilon(1e-4) == spent
    steps(second, model, 3)
    assert second.epsilon(1e-4) == epsilon_of([(1.0, 0.1, 7), (2.0, 0.1, 3)], 1e-4, "rdp") > spent
    second.load_state_dict(copy.deepcopy(second.state_dict()))  # its own checkpoint counts nothing twice
    assert sum(run[2] for run in second.history) == 10
    with replaced(r"10 noised step\(s\) \(epsilon [\d.]+ at delta 0.0001\)"):  # and a third one has them all
        third = private(model)
    assert third.history == second.history


def test_who_detaches_the_first_begins_anew():
    model = model_of()
    first = private(model)
    steps(first, model, 2)
    first.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = private(model)
    assert second.history == []
    with pytest.warns(UserWarning, match=r"2 noised step\(s\) were made on this model's parameters by another"):
        second.epsilon(1e-5)


def test_where_the_second_cannot_be_made_the_first_goes_on():
    model, twin = model_of(), model_of()
    first, other = private(model, seed=1), private(twin, seed=1)
    steps(first, model, 1)
    steps(other, twin, 1)
    backward(model, data())  # waits for its step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for error, wrong in [
            (ClippingError, dict(clipping="flat")), (ClippingError, dict(style=[1])), (ValueError, dict(gamma="x")),
            (TypeError, dict(wrong=1)), (ParameterError, dict(params=[torch.zeros(2, requires_grad=True)])),
            (fastdp.errors.FastDPError, dict(ledger="/nowhere/steps")),
        ]:  # fmt: skip
            with pytest.raises(error):
                private(model, **wrong)
    first.step()
    steps(other, twin, 1)
    assert first.history == [(1.0, 0.1, 2)]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    steps(first, model, 1)


def test_the_second_makes_no_step_on_the_batch_that_the_first_has_stepped_on():
    """Both would count as samples of their own, and are one."""
    model = model_of()
    records = torch.utils.data.TensorDataset(data(12))
    options = dict(sample_rate=None, expected_batch_size=None)
    optimizer = private(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizerReplacedWarning)
        for place, (x,) in enumerate(fastdp.poisson_loader(records, sample_rate=0.9, steps=3)):
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad()
            if place == 1:
                optimizer = private(model, **options)
                with pytest.raises(StepError, match="its samples would contribute twice"):
                    backward(model, x)
                with pytest.raises(StepError):
                    optimizer.step()
    assert optimizer.history == [(1.0, 0.9, 3)]


def test_what_cannot_be_replaced_stands_in_the_way(tmp_path):
    model = model_of()
    first = private(model, ledger=tmp_path / "steps")
    with pytest.raises(ParameterError, match="already has a fastdp engine"):
        private(model)
    steps(first, model, 1)
    first.detach()
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(ParameterError, match="already has a fastdp engine"):
        private(model)
    engine.detach()
    private(model[0])
    with pytest.raises(ParameterError, match="already has a fastdp engine"):  # a part is another model
        private(model)


def test_engines_of_models_that_are_gone_do_not_pile_up(monkeypatch):
    """A backward asks all engines, and they and their models hang in circles: each step of a long search would cost
    more than the one before."""
    monkeypatch.setattr(state, "_MOST", [state.MANY])
    monkeypatch.setattr(state, "ENGINES", weakref.WeakSet())  # other tests' models may be alive
    gc.disable()
    try:
        for _ in range(3 * state.MANY):
            fastdp.DPSGD(nn.Linear(2, 2), lr=0.1, noise_multiplier=1.0)
        assert len(state.ENGINES) <= 2 * state.MANY + 1
    finally:
        gc.enable()
