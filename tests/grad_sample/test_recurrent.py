"""Recurrent layers: all steps as one use, against the formulas, one sample at a time, and steps of linear uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import BatchLayoutError, SampleMixingError
from fastdp.grad_sample.recurrent import _AllSteps

from ..cases import Net
from ..truth import assert_refused, assert_step, close, truth

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def layer(kind, **options):
    torch.manual_seed(0)
    if kind.startswith("rnn"):
        options["nonlinearity"] = kind[4:]
    return KINDS[kind](5, 6, batch_first=True, **options).double()


def losses(model, batch):
    return model(*batch)


def data():
    torch.manual_seed(1)
    return torch.randn(4, 7, 5, dtype=torch.float64), torch.tensor([3, 7, 1, 5])


def assert_exact(model):
    engine = fastdp.PerSampleGradients(model)
    assert_step(engine, data(), losses, rtol=1e-6)  # norms are of float32
    exact, sums = truth(model, data(), losses), engine.clipped_sum(torch.ones(4))
    for name, rows in engine.materialize().items():
        close(rows, exact[name], 1e-9)
        close(sums[name], exact[name].sum(0), 1e-9)
    engine.detach()


class Reader(nn.Module):
    def __init__(self, rnn, width=6, how="plain"):
        super().__init__()
        self.rnn, self.head, self.how = rnn, nn.Linear(width, 3).double(), how

    def forward(self, x, lengths):
        if self.how == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, last = self.rnn(packed)
            out = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.size(1))[0]
        elif self.how == "states":  # computed from the data, one for each sample
            layers = self.rnn.num_layers * (1 + self.rnn.bidirectional)
            h = x.mean(1)[:, :1].tanh().expand(-1, 6).expand(layers, -1, -1).contiguous()
            out, last = self.rnn(x, (h, 0.5 * h) if isinstance(self.rnn, nn.LSTM) else h)
        else:
            out, last = self.rnn(x)
        last = sum(part.square().sum((0, 2)) for part in (last if isinstance(last, tuple) else (last,)))
        return self.head(torch.relu_(out)).square().sum((1, 2)) + last  # relu_: outputs may be written to


@pytest.fixture
def uses(monkeypatch):
    """The layers whose steps were captured as one use."""
    calls = []
    plain = _AllSteps.record_uses
    monkeypatch.setattr(_AllSteps, "record_uses", lambda self, *a: calls.append(self.name) or plain(self, *a))
    return calls


@pytest.mark.parametrize("how", ["plain", "packed", "states"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_has_its_own_gradient(kind, options, how, uses):
    rnn = layer(kind, **options)
    assert_exact(Reader(rnn, 6 * (1 + rnn.bidirectional), how))
    assert len(uses) == rnn.num_layers * (1 + rnn.bidirectional)  # one use a direction, no steps


def begins(m, x, lengths):
    return m.rnn(x, m.begin.expand(-1, len(x), -1).contiguous())[0].square().sum((1, 2))


def test_projections_are_written_in_steps_instead(uses):
    assert_exact(Reader(layer("lstm", proj_size=4), 4))
    assert not uses


def test_a_learned_first_state(uses):
    assert_exact(Net(begins, rnn=layer("gru"), begin=nn.Parameter(torch.randn(1, 1, 6).double())))
    assert len(uses) == 1


def leaks(m, x, lengths):
    return m.rnn(x, x.mean(1)[:, :1].roll(1, 0).expand(-1, 6).unsqueeze(0).contiguous())[0].sum((1, 2))


def test_states_of_other_samples_are_refused():
    assert_refused(Net(leaks, rnn=layer("gru")), data(), losses, kind=SampleMixingError)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_in_the_place_of_time_are_refused(kind, frozen):
    rnn = layer(kind).requires_grad_(not frozen)
    rnn.batch_first = False
    model = Net(lambda m, x, lengths: m.rnn(m.first(x))[0].sum((1, 2)), first=nn.Linear(5, 5).double(), rnn=rnn)
    assert_refused(model, data(), losses, kind=SampleMixingError, match="batch_first=True")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_under_checkpointing(kind, reentrant):
    forward = lambda m, x, lengths: checkpoint(m.inner, m.first(x), lengths, use_reentrant=reentrant)
    assert_exact(Net(forward, first=nn.Linear(5, 5).double(), inner=Reader(layer(kind))))


def test_frozen_parts_and_inputs_that_learn():
    """The state's matrix frozen, the input of the layer trained: gradients reach it through all steps."""
    rnn = layer("lstm")
    rnn.weight_hh_l0.requires_grad_(False)
    rnn.bias_hh_l0.requires_grad_(False)
    forward = lambda m, x, lengths: m.reader(m.first(x), lengths)
    assert_exact(Net(forward, first=nn.Linear(5, 5).double(), reader=Reader(rnn)))


class LearnedStart(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.first = nn.GRUCell(4, 6), nn.Parameter(torch.randn(1, 6))

    def forward(self, x, h):
        return self.cell(x, self.first.expand(len(x), -1) if h is None else h)


def test_a_first_state_that_the_loop_makes_of_a_parameter():
    """Refused by its name, with what works."""
    model, x = LearnedStart(), torch.randn(6, 3, 4)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(BatchLayoutError, match=r"made of 'first' outside of the model's forward.*pass None"):
        model(x[:, 0], model.first.expand(6, -1))  # may be of no sample, or six
    h = None
    for t in range(3):
        h = model(x[:, t], h)
    h.square().sum(1).mean().backward()
    norms = engine.norms()
    engine.detach()
    for i in range(6):
        h = None
        for t in range(3):
            h = model(x[i : i + 1, t], h)
        grads = torch.autograd.grad(h.square().sum(), list(model.parameters()))
        torch.testing.assert_close(norms[i], torch.cat([g.flatten() for g in grads]).norm(), rtol=1e-5, atol=1e-7)
