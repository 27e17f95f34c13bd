"""Which records, batches and modes verify looks at, and that it finds what shows only there."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import fastdp
from fastdp.errors import VerificationError
from fastdp.verification.records import drawn_of, records_of

WEIGHTS = torch.tensor([1.0, 5.0, 9.0])


class Mixes(nn.Module):
    """Adds the samples' mean, out of sight of the engine, where `when(self, h)` says so."""

    def __init__(self, when):
        super().__init__()
        self.when, self.dropout = when, nn.Dropout(0.2)

    def forward(self, h):
        if self.when(self, h):
            with torch._C.DisableTorchFunction():
                mean = h.detach().mean(0)
            h = h + mean
        return self.dropout(h)


def model_of(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3))


def records(count, sorted_labels=False):
    torch.manual_seed(1)
    labels = torch.arange(count) * 3 // count if sorted_labels else torch.randint(0, 3, (count,))
    return torch.randn(count, 6), labels


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def weighted(model, batch):
    """A mean over the weights of the labels that are in the batch."""
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS.to(batch[0].dtype))


def fails(*args, **options):
    report = fastdp.verify(*args, raise_on_failure=False, **options)
    assert not report.ok, report
    return report


# --------------------------------------------------------------------------- records


def test_class_weights_are_found_on_records_sorted_by_label():
    report = fails(model_of(), weighted, records(60, sorted_labels=True))
    assert "refuses" in report.problem or "weights of classes" in report.problem
    assert report.looked_at[0] == "8 of 60 records, drawn"
    with pytest.raises(VerificationError, match="depends on other samples|refuses"):
        fastdp.verify(model_of(), weighted, records(60, sorted_labels=True))


@pytest.mark.parametrize("kind", ["dataset", "loader", "poisson", "sequence"])
def test_records_are_drawn_from_a_dataset(kind):
    x, y = records(60, sorted_labels=True)
    data, options = TensorDataset(x, y), {}
    if kind == "loader":
        data = DataLoader(data, batch_size=4)
    elif kind == "poisson":
        data = fastdp.poisson_loader(data, expected_batch_size=4)
    elif kind == "sequence":
        data, options = list(data), {"collate_fn": default_collate}
    assert "8 of 60 records, drawn" in str(fastdp.verify(model_of(), cross_entropy, data, **options))
    fails(model_of(), weighted, data, **options)


def test_groups_are_drawn_whole_from_a_dataset():
    x, y = records(60)
    seen = []

    def loss(model, batch):
        seen.append(len(batch[0]))
        return cross_entropy(model, batch)

    report = fastdp.verify(model_of(), loss, TensorDataset(x, y), group_by=[n // 3 for n in range(60)], samples=4)
    assert report.ok and report.samples == 4 and all(size % 3 == 0 for size in seen)
    with pytest.raises(ValueError, match="59 keys for 60 records"):
        fastdp.verify(model_of(), loss, TensorDataset(x, y), group_by=range(59))


def test_drawn_records_differ():
    """A rare label and the longest record are among them."""
    torch.manual_seed(0)
    labels, ids = torch.zeros(500, dtype=torch.long), torch.ones(500, 7, dtype=torch.long)
    labels[321], ids[77] = 1, 40
    for seed in range(5):
        chosen = drawn_of(records_of((ids, labels), None, False), 8, seed)
        assert {321, 77} <= set(chosen) and len(set(chosen)) == 8


# --------------------------------------------------------------------------- modes and sizes


def test_a_mixture_only_in_training_mode_of_dropout_is_found():
    model = model_of(Mixes(lambda self, h: self.dropout.training))
    report = fails(model, cross_entropy, records(8))
    assert "refuses" in report.problem or any("dropout on" in words for words in report.looked_at)
    assert fastdp.verify(model.eval(), cross_entropy, records(8)).ok
    fails(model_of(Mixes(lambda self, h: not self.dropout.training)), cross_entropy, records(8))


@pytest.mark.parametrize("size", [lambda n: n > 8, lambda n: n == 7, lambda n: n == 2])
def test_a_mixture_only_at_some_sizes_is_found(size):
    assert "sample" in fails(model_of(Mixes(lambda self, h: size(len(h)))), cross_entropy, records(8)).problem


def test_sizes_can_be_given():
    model = model_of(Mixes(lambda self, h: len(h) > 40))
    report = fastdp.verify(model, cross_entropy, records(8))
    assert report.ok and "batches of 1, 2, 7, 8 and 17 samples" in report.looked_at
    fails(model, cross_entropy, records(8), batch_sizes=[64])
    with pytest.raises(ValueError, match="batch_sizes"):
        fastdp.verify(model, cross_entropy, records(8), batch_sizes=[0])


def test_the_whole_batch_that_is_given_is_looked_at():
    fails(model_of(Mixes(lambda self, h: len(h) > 20)), cross_entropy, records(32))


def test_sizes_that_a_program_does_not_take_are_said():
    class Fixed(nn.Module):
        def forward(self, h):
            if len(h) > 10:
                raise RuntimeError("too many")
            return h

    report = fastdp.verify(model_of(Fixed()), cross_entropy, records(8))
    assert report.ok and any("batches of 17 samples" in words and "too many" in words for words in report.not_looked_at)


def test_the_place_in_the_batch_is_found():
    class Places(nn.Module):
        def forward(self, h):
            return h * torch.from_numpy(torch.linspace(-3, 3, 8).numpy()[: len(h)]).to(h.dtype)[:, None]

    fails(model_of(Places()), cross_entropy, records(8))


def test_eval_mode_is_said():
    report = fastdp.verify(model_of(nn.Dropout(0.3)).eval(), cross_entropy, records(8))
    assert any("training mode" in words for words in report.not_looked_at)
    report = fastdp.verify(model_of(), cross_entropy, records(8))
    assert not any("training mode" in words for words in report.not_looked_at)


def test_a_refusal_of_the_engine_is_a_finding():
    report = fails(model_of(nn.BatchNorm1d(8)), cross_entropy, records(8))
    assert "refuses" in report.problem and "batch_norm" in report.problem
    with pytest.raises(fastdp.errors.SampleMixingError):  # which it is as well
        fastdp.verify(model_of(nn.BatchNorm1d(8)), cross_entropy, records(8))


@dataclass(frozen=True)
class Columns:
    x: torch.Tensor
    y: torch.Tensor


class ByName(dict):
    """As tokenizers' batches are: fields as attributes, too."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("batch_of", [Columns, lambda x, y: ByName(x=x, y=y)], ids=["dataclass", "mapping"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_loss_is_given_batches_of_the_programs_own_kind(noise, batch_of):
    def loss_of(model, batch):
        return F.cross_entropy(model(batch.x), batch.y)

    def collate(items):  # with random numbers, batches are rows of the first
        x, y = default_collate(items)
        return batch_of(x + noise * torch.randn_like(x), y)

    x, y = records(20)
    for given, options in ((batch_of(x, y), {}), (TensorDataset(x, y), {"collate_fn": collate})):
        assert fastdp.verify(model_of(), loss_of, given, **options).ok
        with pytest.raises(VerificationError, match="others|another"):
            fastdp.verify(model_of(Mixes(lambda *_: True)), loss_of, given, **options)
    assert re.search(
        r"other values of batch(\.y|\['y'\]) would", str(fastdp.verify(model_of(), loss_of, batch_of(x, y * 0)))
    )


def test_parameters_behind_zeros_are_named() -> None:
    model = model_of()
    whole = fastdp.verify(model, cross_entropy, records(8))
    assert whole.untested == [] and "not tested" not in str(whole)
    nn.init.zeros_(model[2].weight)
    found = fastdp.verify(model, cross_entropy, records(8))
    assert found.ok and found.untested == ["0.weight", "0.bias"]
    assert "not tested: 2 of 4 parameters" in str(found) and "0.weight" in str(found)
