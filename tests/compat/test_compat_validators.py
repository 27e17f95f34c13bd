"""fastdp.compat.opacus.validators: what couples samples is refused and replaced, what is exact is left alone."""

from __future__ import annotations

import warnings

import opacus.validators as theirs
import pytest
import torch
from opacus.validators import errors as their_errors
from torch import nn

import fastdp
from fastdp.compat.opacus import layers
from fastdp.compat.opacus.validators import ModuleValidator, errors, register_module_fixer, register_module_validator


class Derived(nn.BatchNorm2d):
    pass


def convolutional(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 2))


NORMS = [nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.BatchNorm3d(8), nn.SyncBatchNorm(8)]


@pytest.mark.parametrize("norm", NORMS, ids=lambda m: type(m).__name__)
def test_batch_norms_are_refused_by_the_error_of_opacus(norm):
    model = nn.Sequential(nn.Linear(3, 8), norm)
    found = ModuleValidator.validate(model)
    assert [type(e) for e in found] == [their_errors.ShouldReplaceModuleError]
    assert [type(e) for e in found] == [type(e) for e in theirs.ModuleValidator.validate(model)]
    assert not ModuleValidator.is_valid(model)
    with pytest.raises(errors.UnsupportedModuleError):
        ModuleValidator.validate(model, strict=True)
    fixed = ModuleValidator.fix(model)
    assert isinstance(fixed[1], nn.GroupNorm) and fixed[1].num_groups == 8 and ModuleValidator.is_valid(fixed)
    assert type(model[1]) is type(norm)  # a copy
    assert repr(fixed) == repr(theirs.ModuleValidator.fix(model))


def test_options_of_fix():
    model = nn.Sequential(convolutional(nn.BatchNorm2d(8)), nn.LSTM(2, 2))
    assert ModuleValidator.fix(model, num_groups=2)[0][1].num_groups == 2
    assert isinstance(ModuleValidator.fix(model, replace_bn_with_in=True)[0][1], nn.InstanceNorm2d)
    with pytest.raises(ValueError, match="exclusive"):
        ModuleValidator.fix(model, replace_bn_with_in=True, num_groups=2)
    with pytest.raises(errors.UnsupportableModuleError):
        ModuleValidator.fix(nn.Sequential(nn.SyncBatchNorm(4)), replace_bn_with_in=True)
    fixed = ModuleValidator.fix_and_validate(nn.BatchNorm1d(4))  # the root itself
    assert isinstance(fixed, nn.GroupNorm)


def test_a_model_in_eval_mode_is_not_valid():
    model = nn.Sequential(nn.Linear(2, 2)).eval()
    assert isinstance(ModuleValidator.validate(model)[0], errors.IllegalModuleConfigurationError)
    with pytest.raises(errors.UnsupportedModuleError):
        ModuleValidator.fix_and_validate(model)
    assert ModuleValidator.validate(model.train()) == []


def test_running_statistics_of_instance_norm_are_gone():
    """Opacus leaves the buffers in place, and torch goes on writing averages of the data to them."""
    model = convolutional(nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
    assert isinstance(ModuleValidator.validate(model)[0], errors.IllegalModuleConfigurationError)
    x = torch.randn(4, 3, 4, 4) + 3
    for validator, leaks in ((ModuleValidator, False), (theirs.ModuleValidator, True)):
        fixed = validator.fix(model)
        assert validator.is_valid(fixed) and not fixed[1].track_running_stats
        fixed(x)
        moved = fixed[1].running_mean is not None and fixed[1].running_mean.abs().max() > 0
        assert bool(moved) == leaks
    untouched = nn.InstanceNorm2d(8, affine=True)
    assert ModuleValidator.FIXERS[nn.InstanceNorm2d](untouched) is untouched


def test_derived_classes_are_seen():
    """Opacus looks at the very class only: a class derived from BatchNorm passes."""

    model = convolutional(Derived(8))
    assert theirs.ModuleValidator.is_valid(model)
    assert not ModuleValidator.is_valid(model)
    assert isinstance(ModuleValidator.fix(model)[1], nn.GroupNorm)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8).requires_grad_(False),
        nn.InstanceNorm2d(8, track_running_stats=True),
    ],
)
def test_norms_that_train_nothing_are_warned_of_and_refused_by_the_forward(norm):
    """is_valid as Opacus's, which then trains on coupled samples; here the engine refuses."""
    model = convolutional(norm)
    with pytest.warns(UserWarning, match="'1', a .*statistics of the batch"):
        assert ModuleValidator.is_valid(model)
    fastdp.PerSampleGradients(model)
    with pytest.raises(fastdp.errors.FastDPError, match="'1'"):
        model(torch.randn(4, 3, 4, 4)).sum().backward()
    frozen = convolutional(norm)
    frozen[1].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModuleValidator.is_valid(frozen)


MODULES = [(nn.LSTM(4, 4), layers.DPLSTM), (nn.GRU(4, 4), layers.DPGRU)]
MODULES += [(nn.MultiheadAttention(4, 2), layers.DPMultiheadAttention)]


@pytest.mark.parametrize("module, replacement", MODULES, ids=lambda m: getattr(m, "__name__", ""))
def test_what_is_exact_is_valid_and_stays(module, replacement):
    model = nn.Sequential(module, nn.Linear(4, 2))
    assert not theirs.ModuleValidator.is_valid(model)
    assert ModuleValidator.is_valid(model)
    assert type(ModuleValidator.fix(model)[0]) is type(module)
    replaced = ModuleValidator.fix(model, replace_supported=True)[0]
    assert type(replaced) is replacement
    x = torch.randn(5, 3, 4)
    args = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    torch.testing.assert_close(replaced(*args)[0], module(*args)[0])
    refusal = ModuleValidator.VALIDATORS[type(module)](module)
    assert [type(e) for e in refusal] == [errors.ShouldReplaceModuleError]


def test_replacements_keep_type_mode_and_what_trains():
    """Opacus's are float32, in training mode, and train what was frozen."""
    lstm = nn.LSTM(3, 4).double()
    lstm.weight_ih_l0.requires_grad_(False)
    new = ModuleValidator.fix(nn.Sequential(lstm), replace_supported=True)[0]
    assert [p.requires_grad for p in new.parameters()] == [False, True, True, True]
    assert {p.dtype for p in new.parameters()} == {torch.float64}
    old = theirs.ModuleValidator.fix(nn.Sequential(lstm))[0]
    assert all(p.requires_grad for p in old.parameters()) and {p.dtype for p in old.parameters()} == {torch.float32}
    projected = nn.LSTM(3, 4, proj_size=2)
    assert ModuleValidator.fix(nn.Sequential(projected), replace_supported=True)[0].proj_size == 2
    half = ModuleValidator.fix(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double())
    assert half(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64
    eval_norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    assert not ModuleValidator.fix(eval_norm)[1].training


class Odd(nn.Linear):
    pass


def test_registering(monkeypatch):
    for name in ("VALIDATORS", "FIXERS"):
        monkeypatch.setattr(ModuleValidator, name, dict(getattr(ModuleValidator, name)))
    register_module_validator(Odd)(lambda module: [errors.NotYetSupportedModuleError("odd")])
    register_module_fixer([Odd])(lambda module, scale: nn.Linear(module.in_features, module.out_features * scale))
    model = nn.Sequential(Odd(2, 3))
    assert [str(e) for e in ModuleValidator.validate(model)] == ["odd"]
    assert ModuleValidator.fix_and_validate(model, scale=2)[0].out_features == 6
    assert Odd not in theirs.ModuleValidator.VALIDATORS
