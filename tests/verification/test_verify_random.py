"""verify of programs that draw random numbers: sample by sample, so that randomness is not taken for coupling."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import VerificationError

GENERATOR = torch.Generator().manual_seed(5)
NUMPY = np.random.default_rng(0)


class Does(nn.Module):
    """A module whose forward is a function of itself and its input."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.function(self, h)


def model_of(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3))


def within(function):
    return model_of(Does(lambda _, h: function(h)))


def batch(*shape):
    torch.manual_seed(1)
    return torch.randn(6, *shape, 6), torch.randint(0, 3, (6,))


def cross_entropy(model, given):
    return F.cross_entropy(model(given[0]), given[1])


def sees_mean(h):
    return h + torch.from_numpy(h.detach().numpy().mean(0))


def vae() -> nn.Module:
    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, 1)
        z = mean + spread.exp() * torch.randn_like(mean)
        return self.decoder(z)

    torch.manual_seed(0)
    return Does(forward, encoder=nn.Linear(6, 8), decoder=nn.Linear(4, 3))


def repeated(major: bool) -> nn.Module:
    """Three draws of noise for each sample, its rows side by side or apart."""

    def forward(self, x):
        h = self.a(x)
        rows = h.repeat_interleave(3, 0) if major else h.repeat(3, 1)
        rows = torch.tanh(rows * torch.randn(3 * len(x), 8))
        return self.b(rows.view(-1, 3, 8).mean(1) if major else rows.view(3, -1, 8).mean(0))

    torch.manual_seed(0)
    return Does(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3))


def checkpointed(reentrant: bool) -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4))
    return model_of(Does(lambda self, h: checkpoint(self.inner, h, use_reentrant=reentrant), inner=inner))


EXACT = {
    "dropout": lambda: model_of(nn.Dropout(0.4)),
    "dropout function": lambda: within(lambda h: F.dropout(h, 0.4, training=True)),
    "drop path": lambda: within(lambda h: h + h.tanh() * h.new_empty((len(h), 1)).bernoulli_(0.7) / 0.7),
    "drop path by rand": lambda: within(lambda h: h * torch.floor(0.7 + torch.rand((h.shape[0], 1)))),
    "noise": lambda: within(lambda h: h + torch.randn_like(h)),
    "variational": vae,
    "gumbel": lambda: within(lambda h: h * F.gumbel_softmax(h, hard=True)),
    "categorical": lambda: within(lambda h: h * torch.multinomial(h.detach().softmax(1), 8, replacement=True)),
    "for all samples": lambda: within(lambda h: h * torch.randn(8)),
    "skipped layer": lambda: within(lambda h: h if torch.rand([]) < 0.5 else 2 * h),
    "dropped weights": lambda: Does(lambda s, x: F.linear(x, F.dropout(s.a.weight, 0.3)), a=nn.Linear(6, 3)),
    "own generator": lambda: within(lambda h: h * torch.randn(h.shape, generator=GENERATOR)),
    "rows side by side": lambda: repeated(True),
    "rows apart": lambda: repeated(False),
    "python": lambda: within(lambda h: h * random.random()),
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
}


@pytest.mark.parametrize("name", EXACT)
def test_randomness_is_no_coupling(name):
    report = fastdp.verify(EXACT[name](), cross_entropy, batch(), raise_on_failure=False)
    if name == "own generator" and "refuses" in report.problem:
        return  # the engine may take it for a constant
    assert report.ok, report
    assert max(report.norm_error, report.sum_error, report.coupling) < 1e-5
    assert "one seed" in str(report)


@pytest.mark.parametrize("first", [True, False])
def test_recurrent_dropout_and_attention(first):
    lstm = nn.LSTM(6, 8, 2, dropout=0.4, batch_first=first)
    turned = (lambda x: x) if first else (lambda x: x.transpose(0, 1))
    recurrent = Does(lambda s, x: s.b(turned(s.a(turned(x))[0])[:, -1]), a=lstm, b=nn.Linear(8, 3))
    assert fastdp.verify(recurrent, cross_entropy, batch(4)).ok
    attention = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True)
    attends = Does(lambda s, x: s.b(s.a(x, x, x, need_weights=False)[0].mean(1)), a=attention, b=nn.Linear(6, 3))
    report = fastdp.verify(attends, cross_entropy, batch(4))
    assert report.ok and "module 'a'" in str(report)


def diffusion(model, given):
    """A random time and noise for each sample, in the loss function."""
    x = given[0]
    share = (torch.randint(1, 10, (len(x),)).to(x.dtype) / 10)[:, None]
    noise = torch.randn_like(x)
    return F.mse_loss(model(torch.cat([x * (1 - share) + noise * share, share], 1)), noise)


def test_a_diffusion_loss():
    torch.manual_seed(0)
    report = fastdp.verify(nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 6)), diffusion, batch())
    assert report.ok and "outside of the model" in str(report)


def test_double_and_half_precision():
    for dtype in (torch.float64, torch.bfloat16):
        x, y = batch()
        assert fastdp.verify(model_of(nn.Dropout(0.4)).to(dtype), cross_entropy, (x.to(dtype), y)).ok


def mixed_up(model, given):
    order = torch.randperm(len(given[0]))
    return F.cross_entropy(model(0.7 * given[0] + 0.3 * given[0][order]), given[1])


def test_coupling_of_random_programs_is_still_found():
    with pytest.raises(VerificationError, match="depends on other samples|refuses"):
        fastdp.verify(within(lambda h: sees_mean(h * torch.rand(len(h), 1))), cross_entropy, batch())
    report = fastdp.verify(model_of(), mixed_up, batch(), raise_on_failure=False)
    assert not report.ok and ("random order" in report.problem or "refuses" in report.problem)


def seeded(h):
    torch.manual_seed(7)
    return h * torch.randn(h.shape)


@pytest.mark.parametrize("function", [seeded, lambda h: h * torch.randn(h.shape, generator=GENERATOR.manual_seed(1)),
                                      lambda h: h * torch.randn(h.shape, generator=torch.Generator().manual_seed(1))],
                         ids=["in the forward", "own generator", "new generator"])  # fmt: skip
def test_noise_after_one_seed_is_a_constant_of_the_place(function):
    """The first sample of every batch has the same noise: who is removed changes all others'."""
    report = fastdp.verify(within(function), cross_entropy, batch(), raise_on_failure=False)
    assert not report.ok and "not judged" not in report.problem
    assert "refuses" in report.problem or "place in the batch" in report.problem and "one seed" in report.problem


UNJUDGED = {
    "a loop": lambda h: torch.stack([F.dropout(row, 0.4) for row in h]),
    "python": lambda h: h * torch.tensor([[random.random()] for _ in h]),
    "numpy": lambda h: h * torch.from_numpy(np.random.rand(*h.shape)).to(h.dtype),
    "a generator of numpy": lambda h: h * torch.from_numpy(NUMPY.random(h.shape)).to(h.dtype),
    "a new generator of numpy": lambda h: h * torch.from_numpy(np.random.default_rng().random(h.shape)).to(h.dtype),
}


@pytest.mark.parametrize("name", UNJUDGED)
def test_what_cannot_be_judged_is_said_and_not_called_coupling(name):
    report = fastdp.verify(within(UNJUDGED[name]), cross_entropy, batch(), raise_on_failure=False)
    assert not report.ok and ("not judged" in report.problem or "refuses" in report.problem)
    if "refuses" in report.problem:
        return
    assert "random numbers" in report.problem
    assert "depends on" not in report.problem and "bug" not in report.problem
    if name == "a loop":
        assert "test_verify_random.py, line" in report.problem and "module '2'" in report.problem


def test_dropout_that_cannot_be_judged_is_warned_of():
    model = model_of(Does(lambda self, h: torch.stack([self.drop(row) for row in h]), drop=nn.Dropout(0.4)))
    with pytest.warns(UserWarning, match="with dropout on it could not be judged"):
        report = fastdp.verify(model, cross_entropy, batch())
    assert report.ok and any("dropout on" in words for words in report.not_looked_at)
    assert "dropout off" in report.looked_at


def test_all_generators_are_left_as_they_were():
    model = model_of(
        nn.Dropout(0.4), Does(lambda _, h: h * torch.randn(h.shape, generator=GENERATOR) * random.random())
    )

    def states():
        return [torch.get_rng_state().tolist(), GENERATOR.get_state().tolist(), random.getstate(),
                NUMPY.bit_generator.state, np.random.get_state()[1].tolist()]  # fmt: skip

    torch.manual_seed(3)
    before = states()
    given = torch.ones(6, 6), torch.arange(6) % 3
    fastdp.verify(model, cross_entropy, given, raise_on_failure=False)
    assert states() == before
    for name in ("python", "numpy", "a generator of numpy"):
        other = within(UNJUDGED[name])
        torch.manual_seed(3)
        fastdp.verify(other, cross_entropy, given, raise_on_failure=False)
        assert states() == before
