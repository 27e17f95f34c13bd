"""The physical batch size that fits: found on the longest records, and without a trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from fastdp.finetune import batch_size as fitting
from fastdp.finetune.batch_size import Fit, fit, largest_batch
from fastdp.finetune.job import FinetuneError
from fastdp.finetune.training import run
from fastdp.ops.noise import Noise

from .finetune_runs import RECORDS, collate, job_of, loss, model_of, records, weights


class Seen:
    """A collate that notes what it was given."""

    def __init__(self):
        self.batches = []

    def __call__(self, items):
        self.batches.append(items)
        return collate(items)


def job(tmp_path, **changes):
    return job_of(tmp_path / "run", **{"max_physical_batch_size": None, **changes})


def test_it_leaves_nothing_behind(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Noise, "add_scaled_", lambda self, *a: drawn.append(a))
    one = job(tmp_path)
    one.model.eval()
    one.model.norm.register_buffer("batches", torch.zeros(()))
    one.model.norm.register_forward_hook(lambda module, *a: module.batches.add_(1) and None)
    hooks = [len(m._forward_hooks) for m in one.model.modules()]
    before, buffers = weights(one.model), [b.clone() for b in one.model.buffers()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    found = fit(one)
    assert found.size >= 1 and found.seconds_per_sample > 0 and found.seconds_per_step > 0 and found.bytes > 0
    assert torch.equal(weights(one.model), before) and not one.model.training and not drawn
    assert all(torch.equal(a, b) for a, b in zip(buffers, one.model.buffers(), strict=True))
    assert all(p.grad is None for p in one.model.parameters())
    assert [len(m._forward_hooks) for m in one.model.modules()] == hooks
    assert torch.equal(states[0], torch.get_rng_state()) and (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate() and not (tmp_path / "run").exists()


def test_a_run_is_the_same_with_and_without_it(tmp_path):
    ran = []
    for name in ("a", "b"):
        one = job_of(tmp_path / name)
        if name == "b":
            fit(one)
        assert run(one).steps == one.plan.steps
        ran.append(weights(one.model))
    assert torch.equal(*ran)


@pytest.mark.parametrize("told", [True, False])
def test_it_tries_the_longest_records(tmp_path, told):
    seen, data = Seen(), records()
    fit(job(tmp_path, collate=seen, length=(lambda i: len(data[i][0])) if told else None))
    lengths = sorted((len(ids) for ids, _ in data), reverse=True)
    for batch in seen.batches[:-1]:  # the last is of records as they come, for the time
        assert sorted((len(ids) for ids, _ in batch), reverse=True) == lengths[: len(batch)]
    assert len({id(item) for item in seen.batches[-1]}) == len(seen.batches[-1])


def test_no_batch_is_tried_that_could_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "FASTER", float("inf"))  # a larger batch is always worth it
    seen = Seen()
    one = job(tmp_path, collate=seen)
    fit(one)
    assert largest_batch(one) == min(RECORDS, 12 + 21) == max(len(batch) for batch in seen.batches if batch)
    people = job(tmp_path, group_by=[i // 3 for i in range(RECORDS)], max_records_per_group=2, expected_batch_size=4.0)
    assert largest_batch(people) == 32


def test_what_is_given_is_only_measured(tmp_path):
    seen = Seen()
    found = fit(job(tmp_path, collate=seen, max_physical_batch_size=3))
    assert (found.size, found.limit) == (3, "given") and {len(batch) for batch in seen.batches} == {3}


def wide(tmp_path):
    """A job whose samples take about 8 MB each."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (8, 1)), nn.Linear(1, 200_000, bias=False), nn.Tanh())
    model[2].weight.requires_grad_(False)
    data = [torch.ones(8)] * 64
    return job(tmp_path, model=model, data=data, collate=torch.stack, expected_batch_size=16.0,
               loss=lambda model, batch: model(batch).mean((1, 2)).mean())  # fmt: skip


def test_it_stays_within_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "free_memory", lambda device: 200 << 20)  # of which 120 MB are used
    monkeypatch.setattr(fitting, "FASTER", float("inf"))  # a larger batch is always worth it
    seen = []
    one = wide(tmp_path)
    one.collate = lambda items: (seen.append(len(items)), torch.stack(items))[1]
    found = fit(one)
    assert found.limit == "memory" and 1 <= found.size < 20 and max(seen) < 20
    monkeypatch.setattr(fitting, "free_memory", lambda device: 0)
    with pytest.raises(FinetuneError, match="single sample"):
        fit(wide(tmp_path))


def test_on_a_device_it_tries_until_memory_runs_out():
    class Trial:
        tried: list[int] = []

        def fits(self, size):
            self.tried.append(size)
            return size <= 45

    found, limit = fitting._by_trying(Trial(), 500)
    assert limit == "memory" and 40 <= found <= 45 and max(Trial.tried) == 64
    assert fitting._by_trying(Trial(), 33) == (33, "batch")
    assert fitting._by_trying(Trial(), 1) == (1, "batch")
    Trial.fits = lambda self, size: False
    with pytest.raises(FinetuneError, match="single sample"):
        fitting._by_trying(Trial(), 500)


def test_errors_of_the_loss_come_through(tmp_path):
    with pytest.raises(FinetuneError, match="one number"):
        fit(job(tmp_path, loss=lambda model, batch: loss(model, batch)[None]))
    model = model_of()
    with pytest.raises(KeyError):
        fit(job(tmp_path, model=model, loss=lambda model, batch: batch["absent"]))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert isinstance(fit(job(tmp_path, model=model)), Fit)
