"""p.grad_sample of fastdp.compat.opacus: computed when looked at, right where Opacus is wrong, and its modules."""

from __future__ import annotations

import warnings

import opacus
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.compat.opacus import GradSampleModule
from fastdp.compat.opacus import grad_sample as ours
from fastdp.compat.opacus.grad_sample import samples
from fastdp.errors import StepError

from ..truth import truth

X, Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1, 0])


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def backward(model, x=X, y=Y):
    F.cross_entropy(model(x), y).backward()


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


# ------------------------------------------------------------------ the attribute


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_it_is_computed_when_looked_at_and_exact(mode):
    model = ours.prepare_module(plain(), mode)
    assert all(p.grad_sample is None for p in model.parameters())
    backward(model)
    expected = truth(model._module, (X, Y), losses)
    for name, p in model._module.named_parameters():
        assert isinstance(p.__dict__["grad_sample"], samples.Pending)
        assert torch.allclose(p.grad_sample.double(), expected[name], atol=1e-6)
        assert p.grad_sample is p.grad_sample and p.grad is None


def test_the_reductions_and_a_second_batch():
    model = GradSampleModule(plain(), loss_reduction="sum")
    F.cross_entropy(model(X), Y, reduction="sum").backward()
    F.cross_entropy(model(X[:2]), Y[:2], reduction="sum").backward()
    p = model._module[0].weight
    assert [g.shape[0] for g in p.grad_sample] == [5, 2] and type(p.grad_sample) is list
    assert torch.allclose(p.grad_sample[0][:2], p.grad_sample[1], atol=1e-6)
    kept = p.grad_sample
    F.cross_entropy(model(X), Y, reduction="sum").backward()
    assert len(kept) == 2 and len(p.grad_sample) == 3  # what a user holds does not change


def test_other_parameters_and_opacus_keep_a_plain_attribute():
    GradSampleModule(plain())
    p = nn.Parameter(torch.zeros(2))
    assert not hasattr(p, "grad_sample")
    with pytest.raises(AttributeError):
        p.grad_sample  # noqa: B018
    with pytest.raises(AttributeError):
        del p.grad_sample
    p.grad_sample = 3
    assert p.grad_sample == 3 and p.__dict__ == {"grad_sample": 3}
    del p.grad_sample
    assert not hasattr(p, "grad_sample") and not hasattr(nn.Parameter, "grad_sample")
    theirs = opacus.GradSampleModule(plain())
    backward(theirs)
    mine = GradSampleModule(plain())
    backward(mine)
    for a, b in zip(theirs.parameters(), mine.parameters(), strict=True):
        assert torch.allclose(a.grad_sample, b.grad_sample, atol=1e-6)
    theirs.to_standard_module()


def test_frozen_parameters_have_none():
    model = plain()
    model[0].weight.requires_grad_(False)
    wrapped = GradSampleModule(model)
    backward(wrapped)
    assert not hasattr(model[0].weight, "grad_sample") and model[0].bias.grad_sample.shape == (5, 6)


def test_numbers_of_other_weights_are_never_given():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))
            self.log_scale = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return F.linear(x, self.weight * self.log_scale.exp())

    model = GradSampleModule(Scaled())
    backward(model)
    with torch.no_grad():
        model._module.log_scale.add_(1)
    with pytest.raises(StepError, match="before the weights were"):
        model._module.weight.grad_sample  # noqa: B018
    model = GradSampleModule(nn.Linear(4, 3))  # needs no weights
    backward(model)
    with torch.no_grad():
        model._module.weight.add_(1)
    assert model._module.weight.grad_sample.shape == (5, 3, 4)


# ------------------------------------------------------------------ modules


def test_the_wrapper_is_the_module():
    module = plain()
    module.config = {"a": 1}
    model = GradSampleModule(module)
    assert model._module is module and model.config == {"a": 1} and torch.equal(model(X), module(X))
    assert list(model.state_dict()) == [f"_module.{key}" for key in module.state_dict()]
    assert repr(model) == f"GradSampleModule({module!r})"
    with pytest.raises(AttributeError, match="no_such"):
        model.no_such  # noqa: B018
    assert model.to_standard_module() is module
    assert not hasattr(module[0].weight, "grad_sample") and not module[0]._forward_pre_hooks
    backward(module)
    assert module[0].weight.grad is not None


def test_accumulation_is_refused_where_it_is_forbidden():
    for mode in ("hooks", "ew", "ghost"):
        model = ours.prepare_module(plain(), mode)
        model.forbid_grad_accumulation()
        backward(model)
        with pytest.raises(ValueError, match="Poisson sampling is not compatible with grad accumulation"):
            backward(model)
        model.zero_grad()
        backward(model)
        model.allow_grad_accumulation()
        backward(model)


def test_a_backward_in_eval_mode_is_none_of_training():
    model = GradSampleModule(plain())
    model.forbid_grad_accumulation()
    backward(model.eval())
    backward(model.train())
    assert len(model._module[0].weight.grad_sample) == 5


def test_parameters_unfrozen_later_are_seen():
    module = plain().requires_grad_(False)
    model = GradSampleModule(module)
    model(X)
    module[2].requires_grad_(True)
    backward(model)
    assert module[2].weight.grad_sample.shape == (5, 3, 6)


def test_layers_that_keep_statistics_are_refused():
    with pytest.raises(NotImplementedError, match="BatchNorm1d"):
        GradSampleModule(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    assert len(GradSampleModule.validate(nn.BatchNorm1d(3))) == 1
    tables = nn.Linear(4, 3)
    tables.register_buffer("table", torch.ones(3))
    assert GradSampleModule.validate(tables, strict=True) == []
    with pytest.raises(NotImplementedError):
        ours.GradSampleModuleExpandedWeights(plain(), batch_first=False)


def test_registered_functions_are_accepted_and_said_not_to_be_called():
    class Mine(nn.Linear):
        pass

    @ours.register_grad_sampler([Mine])
    def gradients(layer, activations, backprops):
        raise AssertionError("not called")

    assert ours.GradSampleHooks.GRAD_SAMPLERS[Mine] is gradients
    try:
        with pytest.warns(UserWarning, match="registered by register_grad_sampler for Mine"):
            model = GradSampleModule(Mine(4, 3))
        backward(model)
        ours.GradSampleHooks.GRAD_SAMPLERS[Mine] = lambda *given: gradients(*given)  # another, later on
        model.zero_grad()
        with pytest.warns(UserWarning, match="registered by register_grad_sampler for Mine"):
            backward(model)
        assert torch.allclose(model._module.weight.grad_sample.double(),
                              truth(model._module, (X, Y), losses)["weight"], atol=1e-6)  # fmt: skip
    finally:
        del ours.GradSampleHooks.GRAD_SAMPLERS[Mine]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradSampleModule(Mine(4, 3))


def test_rows_of_unsorted_packed_sequences_are_the_batch_s_in_every_layer():
    """Opacus's own test of these layers wants them in the order of the lengths."""
    from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

    torch.manual_seed(0)
    lengths = (1, 3, 2)
    texts = [torch.randn(n, 4) for n in lengths]
    mask = (torch.arange(3)[None] < torch.tensor(lengths)[:, None])[..., None]

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, packed):
            return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])

    model = Tagger()
    single = []
    for text in texts:
        model.zero_grad()
        model(pack_sequence([text])).square().sum().backward()
        single.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    (wrapped(pack_sequence(texts, enforce_sorted=False)) * mask).square().sum().backward()
    for n, p in enumerate(model.parameters()):
        assert torch.allclose(p.grad_sample, torch.stack([grads[n] for grads in single]), atol=1e-5)
