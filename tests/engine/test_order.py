"""Calls in an order that has no private meaning are errors that say what to do; what has one works."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import (
    BatchLayoutError,
    ParameterError,
    SampleMixingError,
    StepError,
    UncapturedUseError,
)

from ..cases import Net, square


def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    options = {"lr": 0.1, "noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 3, **options}
    return model, fastdp.DPSGD(model, **options)


def loss(model, n=3, scale=1.0):
    return (scale * model(torch.ones(n, 4)).square().sum(1)).mean()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_backward_twice_through_one_forward(reentrant):
    again = lambda m, x: m.layer(x) if reentrant is None else checkpoint(m.layer, x, use_reentrant=reentrant)
    model = Net(again, layer=nn.Linear(4, 5))
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, expected_batch_size=1)
    x = torch.randn(3, 4, requires_grad=True)
    for value in (square(model, x).mean(), square(model, x).mean()):  # two forwards with a backward each
        value.backward()
    optimizer.step()
    value = square(model, x).mean()
    value.backward(retain_graph=True)
    with pytest.raises(StepError, match="backward once" if reentrant is None else "twice"):
        value.backward()
    square(model, x).mean().backward()  # and the engine is whole


def two_through_a_trunk(model, optimizer):
    hidden = model(torch.ones(3, 4))
    hidden[:, 0].mean().backward(retain_graph=True)
    hidden[:, 1].mean().backward()


def step_after_detach(model, optimizer):
    optimizer.detach()
    optimizer.detach()  # twice is no error
    optimizer.step()


def two_steps_of_one_backward(model, optimizer):
    loss(model).backward()
    optimizer.step()
    optimizer.step()


def foreign_parameters(model, optimizer):
    fastdp.privatize(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0), nn.Linear(2, 2), noise_multiplier=1.0)


def nothing_to_train(model, optimizer):
    fastdp.DPSGD(nn.Linear(2, 2).requires_grad_(False), lr=1.0, noise_multiplier=1.0)


def used_in_the_loss(model, optimizer):
    (model[0].weight.square().sum() + loss(model)).backward()


def used_without_a_forward(model, optimizer):
    (model[0].weight.square().sum() + 0 * loss(model)).backward()


MISTAKES = {
    "backward twice through a trunk": (two_through_a_trunk, StepError, "Add the losses"),
    "create_graph": (lambda model, _: loss(model).backward(create_graph=True), StepError, "create_graph"),
    "step without backward": (lambda _, optimizer: optimizer.step(), StepError, r"loss.backward\(\)"),
    "two steps of one backward": (two_steps_of_one_backward, StepError, ""),
    "step after detach": (step_after_detach, StepError, "detached"),
    "two batch sizes": (lambda m, _: (loss(m, 2) + loss(m, 3)).backward(), BatchLayoutError, "2 and of 3|3 and of 2"),
    "another model's parameters": (foreign_parameters, ParameterError, "not the model's"),
    "two engines": (lambda model, _: fastdp.PerSampleGradients(model), ParameterError, "detach"),
    "nothing to train": (nothing_to_train, ParameterError, "requires_grad"),
    "a parameter in the loss": (used_in_the_loss, UncapturedUseError, "0.weight"),
    "a parameter without a forward": (used_without_a_forward, UncapturedUseError, "0.weight"),
    "inputs that do not fit": (lambda model, _: model(torch.ones(3, 7)), RuntimeError, ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_training_goes_on(name):
    mistake, error, words = MISTAKES[name]
    model, optimizer = made()
    with pytest.raises(error, match=words):
        mistake(model, optimizer)
    if "step" in name:
        return
    assert all(p.grad is None for p in model.parameters())
    optimizer.zero_grad()
    loss(model).backward()
    fresh, other = made()
    loss(fresh).backward()
    assert torch.equal(optimizer.norms, other.norms)
    optimizer.step()


# --------------------------------------------------------------------------- what is allowed


def test_a_parameter_that_starts_to_require_grad_later():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, expected_batch_size=3)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    loss(model).backward()  # not tracked: ordinary autograd's
    optimizer.step()
    assert model[0].weight.grad is not None and torch.equal(model[0].weight, before)


def test_freezing_between_steps():
    model, optimizer = made(noise_multiplier=1.0)
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    loss(model).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"]), "a frozen parameter gets no noise"
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_eval_and_no_grad_forwards_in_between():
    model, optimizer = made()
    value = loss(model)
    with torch.no_grad():
        attached = model(torch.ones(50, 4))
    model.eval()
    with torch.inference_mode():
        model(torch.ones(7, 4))
    model.train()
    value.backward()
    assert optimizer.norms.shape == (3,)
    optimizer.detach()
    assert torch.equal(attached, model(torch.ones(50, 4)))


def test_detach_restores_the_model_exactly():
    model = nn.Sequential(nn.Linear(4, 5), nn.LSTM(5, 3))
    before = {id(m): (set(vars(m)), m.forward.__func__) for m in model.modules()}
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=3)
    optimizer.detach()
    for m in model.modules():
        assert (set(vars(m)), m.forward.__func__) == before[id(m)]
        assert not m._forward_hooks and not m._forward_pre_hooks
        assert not m._forward_hooks_with_kwargs and not m._forward_hooks_always_called


def test_copies_and_pickles_of_an_attached_model_are_plain():
    model, optimizer = made()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(3, 4)).sum().backward()
        assert other[0].weight.grad is not None, "a copy trains in the ordinary way"
        fastdp.PerSampleGradients(other).detach()  # and may have an engine of its own
    loss(model).backward()
    assert optimizer.norms.shape == (3,)


# --------------------------------------------------------------------------- verify


def test_zero_grad_drops_what_no_step_took():
    moved = []
    for scales in ((100.0, 1.0), (1.0,)):
        model, optimizer = made()
        for scale in scales:
            optimizer.zero_grad()
            loss(model, scale=scale).backward()
        optimizer.step()
        moved.append(model[0].weight.detach())
    assert torch.equal(*moved)


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq"])
def test_embedding_options_that_couple_samples_are_refused(option):
    model = nn.Sequential(nn.Embedding(5, 3, **{option: True}), nn.Linear(3, 2))
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError, match="module '0'"):
        model(torch.tensor([[1, 2], [1, 1]]))
