"""Validators and layers of fastdp.compat.opacus: what couples samples is refused and replaced, what is exact stays."""

from __future__ import annotations

import opacus.layers as their_layers
import opacus.validators as theirs
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import fastdp
from fastdp.compat.opacus import layers
from fastdp.compat.opacus.validators import ModuleValidator, errors, register_module_fixer, register_module_validator


class Derived(nn.BatchNorm2d):
    pass


def convolutional(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4, 2))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.SyncBatchNorm(8), Derived(8)], ids=lambda m: type(m).__name__)
def test_batch_norms_are_refused_by_the_error_of_opacus(norm):
    """Opacus looks at the very class only, so that one derived from BatchNorm passes."""
    model = convolutional(norm).double()
    found = ModuleValidator.validate(model)
    assert [type(e) for e in found] == [errors.ShouldReplaceModuleError]
    with pytest.raises(errors.UnsupportedModuleError):
        ModuleValidator.validate(model, strict=True)
    fixed = ModuleValidator.fix_and_validate(model)
    assert isinstance(fixed[1], nn.GroupNorm) and type(model[1]) is type(norm)  # a copy
    assert fixed(torch.randn(2, 3, 4, 4, dtype=torch.float64)).shape == (2, 2)
    assert ModuleValidator.fix(model, num_groups=2)[1].num_groups == 2
    assert not ModuleValidator.is_valid(nn.Linear(2, 2).eval())


def test_running_statistics_of_instance_norm_are_gone():
    """Opacus leaves the buffers in place, and torch goes on writing averages of the data to them."""
    model = convolutional(nn.InstanceNorm2d(8, affine=True, track_running_stats=True))
    assert isinstance(ModuleValidator.validate(model)[0], errors.IllegalModuleConfigurationError)
    for validator, leaks in ((ModuleValidator, False), (theirs.ModuleValidator, True)):
        fixed = validator.fix(model)
        fixed(torch.randn(4, 3, 4, 4) + 3)
        moved = fixed[1].running_mean is not None and fixed[1].running_mean.abs().max() > 0
        assert bool(moved) == leaks and validator.is_valid(fixed)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8).requires_grad_(False)])
def test_norms_that_train_nothing_are_refused_by_the_forward(norm):
    """They are valid, as in Opacus, which then trains on coupled samples."""
    model = convolutional(norm)
    assert ModuleValidator.is_valid(model)
    fastdp.PerSampleGradients(model)
    with pytest.raises(fastdp.errors.FastDPError, match="'1'"):
        model(torch.randn(4, 3, 4, 4)).sum().backward()


@pytest.mark.parametrize("module", [nn.LSTM(4, 4), nn.GRU(4, 4), nn.MultiheadAttention(4, 2)])
def test_what_is_exact_is_valid_and_stays(module):
    model = nn.Sequential(module, nn.Linear(4, 2))
    assert not theirs.ModuleValidator.is_valid(model) and ModuleValidator.is_valid(model)
    assert type(ModuleValidator.fix(model)[0]) is type(module)


def test_registering(monkeypatch):
    for name in ("VALIDATORS", "FIXERS"):
        monkeypatch.setattr(ModuleValidator, name, dict(getattr(ModuleValidator, name)))
    register_module_validator(nn.Bilinear)(lambda module: [errors.NotYetSupportedModuleError("odd")])
    register_module_fixer([nn.Bilinear])(lambda module, scale: nn.Linear(2, 3 * scale))
    model = nn.Sequential(nn.Bilinear(2, 2, 3))
    assert [str(e) for e in ModuleValidator.validate(model)] == ["odd"]
    assert ModuleValidator.fix_and_validate(model, scale=2)[0].out_features == 6
    assert nn.Bilinear not in theirs.ModuleValidator.VALIDATORS


# ------------------------------------------------------------------ layers


@pytest.mark.parametrize("plain, name", [(nn.LSTM, "DPLSTM"), (nn.GRU, "DPGRU"), (nn.RNN, "DPRNN")])
def test_recurrent_layers_equal_torchs(plain, name):
    positional = (3, 5, 2, True, True, 0.0, True)  # as both libraries order them
    want, found, other = (
        plain(3, 5, 2, batch_first=True, bidirectional=True),
        *(getattr(lib, name)(*positional) for lib in (layers, their_layers)),
    )
    found.load_state_dict(want.state_dict())
    x = torch.randn(4, 6, 3)
    torch.testing.assert_close(found(x)[0], want(x)[0])
    packed = pack_sequence([x[0], x[1, :4], x[2, :2]])
    torch.testing.assert_close(found(packed)[0].data, want(packed)[0].data)
    other.load_state_dict(found.state_dict())
    torch.testing.assert_close(other(x)[0], found(x)[0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_equals_torchs(batch_first):
    want = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    found = layers.DPMultiheadAttention(8, 2, batch_first=batch_first)
    found.load_state_dict(want.state_dict())
    x = torch.randn(3, 5, 8)
    length = 5 if batch_first else 3
    for options in ({}, {"attn_mask": torch.ones(length, length).triu(1).bool()}):
        for a, b in zip(found(x, x, x, **options), want(x, x, x, **options), strict=True):
            torch.testing.assert_close(a, b)


class _First(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x, x, x) if isinstance(self.layer, layers.DPMultiheadAttention) else self.layer(x)
        return self.head(out[0].mean(1))


@pytest.mark.parametrize("name", ["DPLSTM of Opacus", "DPMultiheadAttention"])
def test_layers_of_opacus_are_exact_under_the_engine(name):
    torch.manual_seed(0)
    attention = layers.DPMultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
    layer = attention if name == "DPMultiheadAttention" else their_layers.DPLSTM(8, 8, batch_first=True)
    batch = (torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0]))
    loss = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])
    assert fastdp.verify(_First(layer), loss, batch).ok
