"""Calls in an order that has no private meaning are errors that say what to do; what has one works."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fastdp
from fastdp.errors import (
    BatchLayoutError,
    ClippingError,
    ParameterError,
    SampleMixingError,
    StepError,
    UncapturedUseError,
)


def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    options = {"lr": 0.1, "noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 3, **options}
    return model, fastdp.DPSGD(model, **options)


def loss(model, n=3, scale=1.0):
    return (scale * model(torch.ones(n, 4)).square().sum(1)).mean()


def test_backward_twice_through_one_forward():
    model, _ = made()
    value = loss(model)
    value.backward(retain_graph=True)
    with pytest.raises(StepError, match="backward once"):
        value.backward()
    loss(model).backward()  # and the engine is whole


def test_two_backwards_through_a_shared_trunk():
    model, _ = made()
    hidden = model(torch.ones(3, 4))
    hidden[:, 0].mean().backward(retain_graph=True)
    with pytest.raises(StepError, match="Add the losses"):
        hidden[:, 1].mean().backward()


def test_create_graph():
    model, _ = made()
    with pytest.raises(StepError, match="create_graph"):
        loss(model).backward(create_graph=True)


def test_step_without_backward():
    model, optimizer = made()
    with pytest.raises(StepError, match=r"loss.backward\(\)"):
        optimizer.step()
    loss(model).backward()
    optimizer.step()
    with pytest.raises(StepError):
        optimizer.step()


def test_step_after_detach():
    model, optimizer = made()
    optimizer.detach()
    with pytest.raises(StepError, match="detached"):
        optimizer.step()
    optimizer.detach()  # twice is no error


def test_batch_sizes_that_disagree():
    model, _ = made()
    with pytest.raises(BatchLayoutError, match="2 and of 3|3 and of 2"):
        (loss(model, 2) + loss(model, 3)).backward()


def test_a_parameter_that_the_model_does_not_have():
    model, _ = made()
    other = nn.Linear(2, 2)
    fresh = nn.Linear(2, 2)
    with pytest.raises(ParameterError, match="not the model's"):
        fastdp.privatize(torch.optim.SGD(other.parameters(), lr=1.0), fresh, noise_multiplier=1.0)


def test_two_engines_on_one_model():
    model, optimizer = made()
    with pytest.raises(ParameterError, match="detach"):
        fastdp.PerSampleGradients(model)
    optimizer.detach()
    fastdp.PerSampleGradients(model).detach()


def test_nothing_to_train():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ParameterError, match="requires_grad"):
        fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0)


def test_a_parameter_that_starts_to_require_grad_later():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, expected_batch_size=3)
    model[0].requires_grad_(True)
    loss(model).backward()  # not tracked: ordinary autograd's
    optimizer.step()
    assert "0.weight" not in optimizer._privacy.engine.named_parameters()


def test_freezing_between_steps():
    model, optimizer = made(noise_multiplier=1.0)
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    loss(model).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"]), "a frozen parameter gets no noise"
    assert not torch.equal(model[2].weight, before["2.weight"])


@pytest.mark.parametrize("where", ["loss", "loss and forward"])
def test_a_parameter_used_outside_of_the_forward(where):
    model, optimizer = made()
    value = model[0].weight.square().sum() + (loss(model) if where != "loss" else 0)
    if where == "loss":
        value = value + 0 * loss(model)
    with pytest.raises(UncapturedUseError, match="0.weight"):
        value.backward()
    assert model[0].weight.grad is None
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def test_an_exception_in_the_forward_leaves_the_engine_whole():
    model, optimizer = made()
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 7))
    assert not torch.overrides._get_current_function_mode_stack()
    loss(model).backward()
    optimizer.step()


def test_an_exception_in_the_backward_leaves_the_engine_whole():
    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ArithmeticError("boom")

    model, optimizer = made()
    hidden = Explodes.apply(model[0](torch.ones(3, 4)))
    with pytest.raises(ArithmeticError):
        model[2](hidden).mean().backward()
    loss(model).backward()
    reference = optimizer.norms
    fresh, other = made()
    loss(fresh).backward()
    assert torch.equal(reference, other.norms)


def test_zero_grad_drops_what_no_step_took():
    model, optimizer = made()
    loss(model, scale=100.0).backward()
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()
    once = model[0].weight.detach().clone()
    model, optimizer = made()
    loss(model).backward()
    optimizer.step()
    assert torch.equal(once, model[0].weight)


def test_accumulation_adds_clipped_sums():
    model, optimizer = made(max_grad_norm=0.1)
    x = torch.randn(6, 4)
    for part in (x[:3], x[3:]):
        model(part).square().sum(1).mean().backward()
    optimizer.step()
    twice = model[0].weight.detach().clone()
    model, optimizer = made(max_grad_norm=0.1)
    model(x).square().sum(1).mean().backward()
    optimizer.step()
    assert torch.allclose(twice, model[0].weight, atol=1e-7)


def test_eval_and_no_grad_forwards_in_between():
    model, optimizer = made()
    value = loss(model)
    with torch.no_grad():
        model(torch.ones(50, 4))
    model.eval()
    with torch.inference_mode():
        model(torch.ones(7, 4))
    model.train()
    value.backward()
    assert optimizer.norms.shape == (3,)


def test_untouched_without_grad():
    model, optimizer = made()
    x = torch.randn(3, 4)
    with torch.no_grad():
        attached = model(x)
    optimizer.detach()
    assert torch.equal(attached, model(x))


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
    loss(model).backward()
    assert optimizer.norms.shape == (3,)


def test_token_mean_over_the_batch_is_found_by_verify():
    """A loss over all tokens of the batch: the others' lengths change my gradient."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    ids = torch.randint(0, 7, (4, 6))
    labels = ids.clone()
    labels[0, 2:] = -100

    def coupled(m, batch):
        return F.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    with pytest.raises(fastdp.errors.VerificationError, match="each sample's own loss"):
        fastdp.verify(model, coupled, (ids, labels))
    report = fastdp.verify(model, coupled, (ids, labels), raise_on_failure=False)
    assert not report.ok and report.coupling > 0.01

    def own(m, batch):
        ce = F.cross_entropy(m(batch[0]).mT, batch[1], reduction="none", ignore_index=-100)
        return ce.sum(1) / (batch[1] != -100).sum(1)

    assert fastdp.verify(model, own, (ids, labels)).ok


def test_verify_names_the_module_that_couples():
    class Hidden(torch.autograd.Function):  # unseen by the engine's layouts
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.numpy() - 0.5 * x.numpy().mean(0))

        @staticmethod
        def backward(ctx, g):
            return g - 0.5 * g.mean(0)

    class Coupler(nn.Module):
        def forward(self, x):
            return Hidden.apply(x)

    model = nn.Sequential(nn.Linear(4, 5), Coupler(), nn.Linear(5, 2))
    with pytest.raises(fastdp.errors.VerificationError, match="module '1'"):
        fastdp.verify(model, lambda m, x: m(x).square().sum(1), torch.randn(3, 4))


def test_verify_finds_the_wrong_reduction():
    model = nn.Linear(4, 2)
    with pytest.raises(fastdp.errors.VerificationError, match="loss_reduction"):
        fastdp.verify(model, lambda m, x: m(x).square().sum(), torch.randn(3, 4))
    assert fastdp.verify(model, lambda m, x: m(x).square().sum(), torch.randn(3, 4), loss_reduction="sum").ok


def test_verify_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 2))
    before = copy.deepcopy(model.state_dict())
    assert "exact" in str(fastdp.verify(model, lambda m, x: m(x).square().sum(1), torch.randn(3, 4)))
    assert model[1].training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "options, error",
    [
        ({"noise_multiplier": -1}, ValueError),
        ({"noise_multiplier": float("nan")}, ValueError),
        ({"max_grad_norm": 0}, ClippingError),
        ({"max_grad_norm": float("inf")}, ClippingError),
        ({"max_grad_norm": [1.0, 2.0]}, ClippingError),
        ({"clipping": "lokal"}, ClippingError),
        ({"style": "per_layer"}, ClippingError),
        ({"style": [{"params": ["0.weight"], "max_grad_norm": 1.0}]}, ClippingError),
        ({"style": [{"params": ["nothing"], "max_grad_norm": 1.0}]}, ClippingError),
        ({"loss_reduction": "none"}, ValueError),
        ({"expected_batch_size": 0}, ValueError),
        ({"sample_rate": 1.5}, fastdp.errors.AccountingError),
        ({"accountant": "moments"}, fastdp.errors.AccountingError),
    ],
)
def test_bad_options_are_named(options, error):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(error) as caught:
        fastdp.DPSGD(model, **{"lr": 0.1, "noise_multiplier": 1.0, "expected_batch_size": 3, **options})
    assert str(caught.value)
    fastdp.PerSampleGradients(model).detach()  # nothing was left on the model


def test_embedding_options_that_couple_samples_are_refused():
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        model = nn.Sequential(nn.Embedding(5, 3, **options), nn.Linear(3, 2))
        fastdp.PerSampleGradients(model)
        with pytest.raises(SampleMixingError, match="module '0'"):
            model(torch.tensor([[1, 2], [1, 1]]))


def test_a_model_compiled_afterwards_is_refused():
    model, optimizer = made()
    with pytest.raises(StepError, match="compiled after"):
        torch.compile(model, backend="eager")(torch.ones(3, 4))
    loss(model).backward()
    optimizer.step()
