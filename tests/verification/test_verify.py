"""What `verify` counts as an error."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.engine.gradients import Gradients
from fastdp.errors import VerificationError
from fastdp.losses import DPLoss


def test_samples_that_cancel_are_exact():
    """Two labels on like inputs, as a new head has them at the start: the sum is rounding, each gradient is not."""
    torch.manual_seed(0)
    body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
    torch.nn.init.normal_(head.weight, std=1e-6)
    torch.nn.init.zeros_(head.bias)
    model = torch.nn.Sequential(body, torch.nn.Tanh(), head)
    x = torch.randn(1, 8).expand(4, 8) + 1e-6 * torch.randn(4, 8)
    loss = lambda m, batch: F.cross_entropy(m(batch[0]), batch[1])
    report = fastdp.verify(model, loss, (x, torch.tensor([0, 1, 0, 1])))
    assert report.sum_error < 1e-5 and report.norm_error < 1e-5
    with pytest.raises(VerificationError):  # and what is wrong is still found
        fastdp.verify(model, lambda m, b: loss(m, b) * 1.001, (x, torch.tensor([0, 1, 0, 1])), loss_reduction="sum")


class Scaled(nn.Linear):
    """Of a parameter without dimensions."""

    def __init__(self):
        super().__init__(6, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return super().forward(x) * self.scale


def test_parameters_without_dimensions_are_compared():
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1])
    assert fastdp.verify(Scaled(), loss, (torch.randn(4, 6), torch.randint(0, 2, (4,)))).ok


@pytest.mark.parametrize("part", ["norm_sq", "clipped_sum"])
def test_the_routes_that_training_takes_are_compared(monkeypatch, part):
    """Not only the per-sample gradients themselves, which training never forms."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    batch = (torch.randn(4, 6), torch.randint(0, 2, (4,)))

    def loss(m, b):
        return F.cross_entropy(m(b[0]), b[1])

    assert fastdp.verify(model, loss, batch).ok
    right = getattr(Gradients, part)

    def wrong(self, *args, **kwargs):
        found = right(self, *args, **kwargs)
        return found * 0.98 if part == "norm_sq" else {key: total * 1.01 for key, total in found.items()}

    monkeypatch.setattr(Gradients, part, wrong)
    with pytest.raises(fastdp.errors.VerificationError, match="wrong norms .* or clipped sums .* routes"):
        fastdp.verify(model, loss, batch)


# --------------------------------------------------------------------------- gradients that are rounding


def small(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *extra, nn.Linear(16, 3))


def data(count=24):
    torch.manual_seed(1)
    return torch.randn(count, 8), torch.randint(0, 3, (count,))


def distilled(model, batch):
    """The gradient is what the model says less what it says itself."""
    with torch.no_grad():
        said = model(batch[0]).softmax(1)
    return -(said * model(batch[0]).log_softmax(1)).sum(1).mean()


ZEROS = {
    "softmax": (small, lambda m, b: m(b[0]).softmax(1).sum(1).mean()),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4, elementwise_affine=False)),
        lambda m, b: m(b[0]).sum(1).mean(),
    ),
    "distilled": (lambda: small(nn.Dropout(0.3)), distilled),
}


@pytest.mark.parametrize("name", ZEROS)
def test_gradients_that_are_zero_but_for_rounding(name):
    made, loss = ZEROS[name]
    report = fastdp.verify(made(), loss, data())
    assert report.ok and any("zero but for rounding" in words for words in report.not_looked_at) or name == "distilled"


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_rounding_hides_no_error_that_is_larger(size):
    """Terms that cancel to a thousandth of themselves: what is left is a gradient, and is compared."""
    part = lambda m, b: ZEROS["softmax"][1](m, b) + size * F.cross_entropy(m(b[0]), b[1])
    assert fastdp.verify(small(), part, data()).ok
    wrong = lambda m, b: part(m, b) + size * 1e-2 * F.cross_entropy(m(b[0]), b[1]).item() * m(b[0]).sum(1).mean()
    with pytest.raises(VerificationError):
        fastdp.verify(small(), wrong, data())


@pytest.mark.parametrize("size", [0.0, 1.0])
def test_rounding_hides_no_mixture_of_zeros(size):
    """Each sample's own gradient is zero, or rounding; that of several is not."""

    def loss(m, b):
        h = m(b[0])
        with torch._C.DisableTorchFunction():
            mean = h.detach().mean(0)
        return (size * h.softmax(1).sum(1) + (h - mean).square().sum(1)).mean()

    with pytest.raises(VerificationError, match="depends on other samples|wrong per-sample"):
        fastdp.verify(small(), loss, data())


# --------------------------------------------------------------------------- samples in another order


class Sorted(nn.Module):
    """Takes sequences by falling length, as packing once asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(self.lstm(packed)[1][0][-1])


def by_sort(x, lengths, y):
    lengths, order = lengths.sort(descending=True)
    return x[order], lengths, y[order]


def by_python(x, lengths, y):
    order = sorted(range(len(lengths)), key=lambda i: -int(lengths[i]))
    return x[order], lengths[order], y[order]


def shuffled_first(x, lengths, y):
    order = torch.randperm(len(x))
    return by_sort(x[order], lengths[order], y[order])


def sequences(count=24):
    torch.manual_seed(0)
    return torch.randn(count, 9, 4), torch.randint(2, 10, (count,)), torch.randint(0, 3, (count,))


@pytest.mark.parametrize("order", [by_sort, by_python, shuffled_first])
def test_samples_in_another_order_are_no_coupling(order):
    def loss(m, b):
        x, lengths, y = order(*b)
        return F.cross_entropy(m(x, lengths), y)

    report = fastdp.verify(Sorted(), loss, sequences())
    assert report.ok and "gradients as a set" in str(report)


@pytest.mark.parametrize("dropout", ["module", "function"])
def test_draws_by_place_in_another_order_are_not_called_coupling(dropout):
    class Drops(Sorted):
        def __init__(self):
            super().__init__()
            if dropout == "module":
                self.dropout = nn.Dropout(0.3)

        def forward(self, x, lengths):
            return super().forward(
                self.dropout(x) if dropout == "module" else F.dropout(x, 0.3, self.training), lengths
            )

    def loss(m, b):
        x, lengths, y = by_sort(*b)
        return F.cross_entropy(m(x, lengths), y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = fastdp.verify(Drops(), loss, sequences(), raise_on_failure=False)
    words = report.problem + " ".join(report.not_looked_at)
    assert "into another order and then draws" in words and "depends on other samples" not in words
    assert report.ok == (dropout == "module")


@pytest.mark.parametrize("right", [True, False])
def test_a_collate_fn_that_sorts(right):
    torch.manual_seed(0)
    records = [(torch.randn(int(torch.randint(2, 10, ())), 4), number % 3) for number in range(30)]

    def collate(chosen):
        chosen = sorted(chosen, key=lambda record: -len(record[0]))
        x = nn.utils.rnn.pad_sequence([x for x, _ in chosen], batch_first=True)
        return x, torch.tensor([len(x) for x, _ in chosen]), torch.tensor([label for _, label in chosen])

    model = Sorted()
    loss = lambda m, b: F.cross_entropy(m(b[0], b[1]) if right else m.head(m.lstm(b[0])[0][:, -1]), b[2])
    assert fastdp.verify(model, loss, records, collate_fn=collate, raise_on_failure=False).ok == right


@pytest.mark.parametrize("fault", ["labels stay", "lengths mixed", "by place"])
def test_faults_beside_another_order_are_found(fault):
    def loss(m, b):
        x, lengths, y = by_sort(*b)
        if fault == "labels stay":
            y = b[2]
        elif fault == "lengths mixed":
            x = x - torch.from_numpy(x.numpy().mean(0))
        each = F.cross_entropy(m(x, lengths), y, reduction="none")
        if fault == "by place":
            each = each * torch.linspace(1, 2, len(each))
        return each.mean()

    with pytest.raises(VerificationError):
        fastdp.verify(Sorted(), loss, sequences())


# --------------------------------------------------------------------------- DPLoss


@pytest.mark.parametrize("kind", ["flat", "sequence first"])
def test_dp_loss_where_only_the_engine_knows_the_rows(kind):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.first, self.tanh = nn.Embedding(20, 8), nn.Linear(8, 16), nn.Tanh()
            self.head = nn.Linear(16, 3)

        def forward(self, ids):
            h = self.embedding(ids)
            h = h.flatten(0, 1) if kind == "flat" else h.transpose(0, 1)
            h = self.tanh(self.first(h))
            return self.head(h.view(*ids.shape, 16).mean(1) if kind == "flat" else h.mean(0))

    model = Tokens()
    loss = DPLoss(model, threshold=2, beta=11.0)
    ids = torch.randint(0, 20, (12, 5), generator=torch.Generator().manual_seed(0))
    assert fastdp.verify(model, lambda m, b: loss(m(b[0]), b[1]), (ids, torch.arange(12) % 3)).ok
    engine = fastdp.PerSampleGradients(model)  # and a batch of one trains
    loss(model(ids[:1]), torch.zeros(1, dtype=torch.long)).backward()
    assert len(engine.norms()) == 1
    engine.detach()
