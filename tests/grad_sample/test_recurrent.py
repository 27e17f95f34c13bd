"""Recurrent layers: all steps as one use, against the formulas, one sample at a time, and steps of linear uses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastdp
from fastdp.grad_sample.recurrent import _AllSteps

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def layer(kind, **options):
    torch.manual_seed(0)
    if kind.startswith("rnn"):
        options["nonlinearity"] = kind[4:]
    return KINDS[kind](5, 6, **options).double()


class Reader(nn.Module):
    def __init__(self, rnn, width, how):
        super().__init__()
        self.rnn, self.head, self.how = rnn, nn.Linear(width, 3).double(), how

    def forward(self, x, lengths=None):
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


def truths(model, x, lengths):
    alone = copy.deepcopy(model)
    rows = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(x)):
        alone.zero_grad()
        alone(x[i : i + 1], lengths[i : i + 1]).sum().backward()
        for name, p in alone.named_parameters():
            rows[name].append(p.grad.clone())
    return {name: torch.stack(each) for name, each in rows.items()}


@pytest.mark.parametrize("how", ["plain", "packed", "states"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_has_its_own_gradient(kind, options, how, monkeypatch):
    calls = []
    plain = _AllSteps.record_uses
    monkeypatch.setattr(_AllSteps, "record_uses", lambda self, *a: calls.append(self.name) or plain(self, *a))
    rnn = layer(kind, batch_first=True, **options)
    model = Reader(rnn, 6 * (2 if options.get("bidirectional") else 1), how)
    x, lengths = torch.randn(4, 7, 5, dtype=torch.float64), torch.tensor([3, 7, 1, 5])
    want = truths(model, x, lengths)
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    model(x, lengths).sum().backward()
    found = engine.materialize()
    norms = torch.stack([rows.flatten(1).square().sum(1) for rows in want.values()]).sum(0).sqrt()
    torch.testing.assert_close(engine.norms().double(), norms, rtol=1e-6, atol=0)
    for name, rows in want.items():
        torch.testing.assert_close(found[name].double(), rows, rtol=1e-9, atol=1e-11)
    factors = torch.tensor([0.5, 0.0, 1.0, 0.25], dtype=torch.float64)
    for name, total in engine.clipped_sum(factors).items():
        truth = torch.einsum("b,b...->...", factors, want[name])
        torch.testing.assert_close(total.double(), truth, rtol=1e-9, atol=1e-11)
    assert len(calls) == rnn.num_layers * (1 + rnn.bidirectional)  # one use a direction, no steps
    engine.detach()


def uses_at_once(monkeypatch, model, *inputs):
    """Whether the layer was captured as a whole."""
    calls = []
    plain = _AllSteps.record_uses
    monkeypatch.setattr(_AllSteps, "record_uses", lambda self, *a: calls.append(1) or plain(self, *a))
    fastdp.verify(model, lambda m, b: m(*b).mean(), inputs, samples=4)
    return bool(calls)


def test_what_is_written_in_steps_instead(monkeypatch):
    """Projections, and a learned first state. Both exact: `verify` raises where they are not."""
    x = torch.randn(4, 7, 5, dtype=torch.float64)
    assert uses_at_once(monkeypatch, Reader(layer("lstm", batch_first=True), 6, "plain"), x)
    assert not uses_at_once(monkeypatch, Reader(layer("lstm", batch_first=True, proj_size=4), 4, "plain"), x)

    class Begins(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.begin = layer("gru", batch_first=True), nn.Parameter(torch.randn(1, 1, 6).double())

        def forward(self, x):
            return self.rnn(x, self.begin.expand(-1, len(x), -1).contiguous())[0].square().sum((1, 2))

    assert not uses_at_once(monkeypatch, Begins(), x)


def test_states_of_other_samples_are_refused():
    class Leaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = layer("gru", batch_first=True)

        def forward(self, x):
            return self.rnn(x, x.mean(1)[:, :1].roll(1, 0).expand(-1, 6).unsqueeze(0).contiguous())[0].sum((1, 2))

    model = Leaks()
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    with pytest.raises(fastdp.errors.SampleMixingError):
        model(torch.randn(4, 7, 5, dtype=torch.float64)).sum().backward()
    engine.detach()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_under_checkpointing(kind, reentrant):
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Reader(layer(kind, batch_first=True), 6, "plain")

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x = Saves(), torch.randn(4, 7, 5, dtype=torch.float64)
    want = truths(model.inner, x, torch.full((4,), 7))
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    model(x.requires_grad_(reentrant)).sum().backward()
    found = engine.materialize()
    for name, rows in want.items():
        torch.testing.assert_close(found[f"inner.{name}"].double(), rows, rtol=1e-9, atol=1e-11)
    engine.detach()


def test_frozen_parts_and_inputs_that_learn():
    """The state's matrix frozen, the input of the layer trained: gradients reach it through all steps."""
    rnn = layer("lstm", batch_first=True)
    rnn.weight_hh_l0.requires_grad_(False)
    rnn.bias_hh_l0.requires_grad_(False)
    first = nn.Linear(5, 5).double()
    report = fastdp.verify(
        nn.Sequential(first, rnn), lambda m, x: m(x)[0].square().mean(), torch.randn(4, 7, 5).double()
    )
    assert report.ok and not report.untested and "0.weight" in report.parameters
    assert "1.weight_hh_l0" not in report.parameters
