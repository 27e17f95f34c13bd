"""verify makes every batch anew, so that padding which counts is found, and is not taken for what it is not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

import fastdp
from fastdp.errors import VerificationError

pytestmark = pytest.mark.slow  # `make test-all` runs it


def texts(count=40):
    torch.manual_seed(0)
    return [(torch.randint(1, 50, (int(torch.randint(3, 14, ())),)), number % 3) for number in range(count)]


def padded(records):
    ids = pad_sequence([ids for ids, _ in records], batch_first=True)
    return ids, torch.tensor([len(ids) for ids, _ in records]), torch.tensor([label for _, label in records])


class Texts(Dataset):
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]


class PythonReads(nn.Module):
    """A text model; right: padding does not count."""

    def __init__(self, kind, right, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.right = kind, right
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.conv = nn.Conv1d(16, 16, 5)

    def forward(self, ids, lengths):
        h = self.embedding(ids)
        if self.kind == "mean":
            mask = (ids != 0)[..., None].to(h.dtype)
            h = (h * mask).sum(1) / mask.sum(1) if self.right else h.tanh().mean(1)
        elif self.kind == "lstm":
            packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
            h = self.lstm(packed)[1][0][-1] if self.right else self.lstm(h)[0][:, -1]
        elif self.kind == "attention":
            h = self.layer(h, src_key_padding_mask=ids == 0 if self.right else None)[:, 0]
        else:  # takes no text shorter than its kernel
            h = self.conv(h.transpose(1, 2)).relu().mean(2)
        return self.head(h)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


def source(kind):
    records = texts()
    if kind == "records":
        return records, {"collate_fn": padded}
    if kind == "loader":
        return DataLoader(Texts(records), batch_size=8, collate_fn=padded), {}
    if kind == "data set":
        return Texts(records), {"collate_fn": padded}
    if kind == "poisson":
        return fastdp.poisson_loader(Texts(records), expected_batch_size=8, collate_fn=padded), {}
    raise ValueError(kind)


CASES = [("records", "mean"), ("loader", "lstm"), ("data set", "attention"), ("poisson", "mean")]


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_padding_that_counts_is_found(kind, model):
    batch, options = source(kind)
    with pytest.raises(VerificationError, match="padding counts.*own length"):
        fastdp.verify(PythonReads(model, False), cross_entropy, batch, **options)


@pytest.mark.parametrize("model", ["mean", "lstm", "attention"])
def test_padding_that_does_not_count(model):
    report = fastdp.verify(PythonReads(model, True), cross_entropy, texts(), collate_fn=padded)
    assert report.ok and any("collated by itself" in words for words in report.looked_at)


@pytest.mark.parametrize("right", [True, False])
def test_with_dropout_that_eval_mode_switches_off(right):
    """Attention draws masks of [T, T]: padding is judged without them."""
    model = PythonReads("attention", right, dropout=0.1)
    report = fastdp.verify(model, cross_entropy, texts(), collate_fn=padded, raise_on_failure=False)
    assert report.ok == right and model.training and model.layer.training
    assert right or "in eval mode, padding counts" in report.problem


def test_texts_that_the_model_does_not_take_alone():
    """Its kernel is longer than some."""
    report = fastdp.verify(PythonReads("conv", False), cross_entropy, texts(), collate_fn=padded)
    assert any("takes no batch of another length" in words for words in report.not_looked_at)


def test_a_collate_fn_that_couples_records():
    records = [(torch.randn(6), number % 3) for number in range(30)]

    def centred(chosen):
        x = torch.stack([x for x, _ in chosen])
        return x - x.mean(0), torch.tensor([label for _, label in chosen])

    with pytest.raises(VerificationError, match="collate_fn makes of a record something else"):
        fastdp.verify(nn.Linear(6, 3), lambda m, b: F.cross_entropy(m(b[0]), b[1]), records, collate_fn=centred)


def test_a_collate_fn_that_draws_is_run_once():
    def masked(records):
        ids, lengths, labels = padded(records)
        return torch.where((torch.rand(ids.shape) < 0.2) & (ids != 0), 49, ids), lengths, labels

    model, records = PythonReads("mean", True), texts()
    state = torch.get_rng_state()
    report = fastdp.verify(model, cross_entropy, records, collate_fn=masked)
    assert torch.equal(state, torch.get_rng_state())
    assert any("draws random numbers, so it was run once" in words for words in report.not_looked_at)


def test_a_collate_fn_that_takes_no_single_record():
    def several(records):
        assert len(records) > 1
        return padded(records)

    report = fastdp.verify(PythonReads("mean", True), cross_entropy, texts(), collate_fn=several)
    assert any("takes no single record (AssertionError" in words for words in report.not_looked_at)


def test_records_that_collate_fn_writes_into():
    """As those of transformers do, which take the labels out of each record."""
    records = [{"ids": ids, "label": label} for ids, label in texts()]
    kept = copy.deepcopy(records)

    def popping(chosen):
        labels = [record.pop("label") for record in chosen]
        return padded(list(zip([record["ids"] for record in chosen], labels, strict=True)))

    assert fastdp.verify(PythonReads("mean", True), cross_entropy, records, collate_fn=popping).ok
    assert all(torch.equal(a["ids"], b["ids"]) and a["label"] == b["label"] for a, b in zip(records, kept, strict=True))


def test_the_longest_record_of_a_list_is_looked_at():
    torch.manual_seed(0)
    records = [(torch.randint(1, 50, (5,)), number % 3) for number in range(300)]
    records[241] = (torch.randint(1, 50, (9,)), 1)
    for seed in range(3):
        with pytest.raises(VerificationError, match="padding counts"):
            fastdp.verify(PythonReads("mean", False), cross_entropy, records, collate_fn=padded, seed=seed)


def test_what_cannot_be_told_of_a_collated_batch_is_said():
    ids = torch.randint(1, 50, (12, 5), generator=torch.Generator().manual_seed(0))
    batch = (ids, torch.full((12,), 5), torch.arange(12) % 3)
    report = fastdp.verify(PythonReads("mean", False), cross_entropy, batch)
    assert any("padding, if there is some" in words for words in report.not_looked_at)
