"""verify where float32 cannot tell rounding from a fault: float64 decides, and a fault is still found."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import fastdp
from fastdp.engine.gradients import Gradients
from fastdp.errors import VerificationError
from fastdp.verification import float64


class Rounds(nn.Module):
    """What deep models do: every call rounds at other places, by about 6e-4 in float32 and 1e-12 in float64."""

    size, calls = 5e3, itertools.count()  # units of the last place; beyond what verify puts back

    def forward(self, x):
        return x * (1 + self.size * torch.finfo(x.dtype).eps * math.sin(next(Rounds.calls)))


class Couples(nn.Module):
    """Adds to each sample 0.01 of the samples' mean, by a way that the engine does not see."""

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            mean = x.detach().mean(0)
        return x + 0.01 * mean


def model_of(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(1).mean()


def batch():
    torch.manual_seed(1)
    return torch.randn(4, 6), torch.randn(4, 3)


def test_rounding_is_no_fault():
    model = model_of(Rounds())
    report = fastdp.verify(model, loss, batch())
    assert report.ok and max(report.coupling, report.norm_error, report.sum_error) > 1e-4  # float32 alone would fail
    assert 1e-5 < report.rounding < float64.WORST and "float64" in str(report)
    with pytest.raises(VerificationError):  # who asks for a tolerance gets it
        fastdp.verify(model, loss, batch(), tolerance=1e-4)
    assert fastdp.verify(model_of(), loss, batch()).rounding is None  # float32 was enough


def test_coupled_samples_are_found_beneath_rounding():
    with pytest.raises(VerificationError, match="depends on other samples"):
        fastdp.verify(model_of(Rounds(), Couples()), loss, batch())


def test_a_wrong_norm_of_float32_alone_is_found(monkeypatch):
    """float64 takes other routes: it excuses only what plain torch's own float32 shows."""
    right = Gradients.norm_sq

    def wrong(self, *args, **kwargs):
        found = right(self, *args, **kwargs)
        single = next(p for p in model.parameters()).dtype == torch.float32
        return found * 0.95 if single else found

    monkeypatch.setattr(Gradients, "norm_sq", wrong)
    for model in (model_of(Rounds()), model_of()):  # beside rounding, and without
        with pytest.raises(VerificationError, match="wrong per-sample gradients in float32"):
            fastdp.verify(model, loss, batch())


@pytest.mark.parametrize("share", [1.0, 0.95])
def test_a_gradient_that_is_zero_but_for_rounding_excuses_itself_alone(monkeypatch, share):
    """The target is what the model says of the first sample."""
    model, (x, y) = model_of(Rounds()), batch()
    y[0] = model_of()(x[0]).detach() * (1 + 1e-7)
    right = Gradients.norm_sq

    def norm_sq(self, *args, **kwargs):
        single = next(p for p in model.parameters()).dtype == torch.float32
        return right(self, *args, **kwargs) * (share if single else 1.0)

    monkeypatch.setattr(Gradients, "norm_sq", norm_sq)
    monkeypatch.setattr(Rounds, "size", 0.5)
    report = fastdp.verify(model, loss, (x, y), raise_on_failure=False)
    assert report.ok == (share == 1.0), report
    assert not report.ok or any("zero but for rounding" in words for words in report.not_looked_at)


def test_rounding_that_leaves_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(Rounds, "size", 5e5)
    with pytest.raises(VerificationError, match="float32 does not carry this model"):
        fastdp.verify(model_of(Rounds()), loss, batch())


def test_the_model_comes_back_as_it_was():
    model = model_of(nn.GroupNorm(2, 8), Rounds())
    model.register_buffer("scale", torch.ones(3))
    model[0].weight.grad = torch.full_like(model[0].weight, 3.0)
    before = {n: (t, t.data_ptr(), t.detach().clone()) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    assert fastdp.verify(model, loss, batch()).rounding is not None
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        same, place, numbers = before[name]
        assert tensor is same and tensor.data_ptr() == place and tensor.dtype == torch.float32
        assert torch.equal(tensor, numbers)
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 3.0)) and model[0].bias.grad is None


def test_a_model_that_float64_does_not_run_keeps_its_verdict():
    class Single(Rounds):
        def forward(self, x):
            return super().forward(x).float()

    with pytest.raises(VerificationError, match="could tell rounding from a fault"):
        fastdp.verify(model_of(Single()), loss, batch())
