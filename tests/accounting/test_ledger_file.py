"""The ledger on the disk: what it holds when a process dies, what is counted once, and what is refused."""

from __future__ import annotations

import errno
import os
import warnings

import pytest
import torch
from torch import nn

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.errors import AccountingError, StepError

pytestmark = pytest.mark.filterwarnings("ignore::fastdp.errors.NotVerifiedWarning")


def make(path, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 8, "sample_rate": 0.1, **options}
    return fastdp.DPSGD(model, lr=0.1, ledger=path, **given), model


def train(optimizer, model, steps):
    for _ in range(steps):
        model(torch.randn(8, 4)).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def spent(optimizer):
    return sum(run[2] for run in optimizer._privacy.ledger.spent)


def test_steps_after_the_checkpoint_count_and_others_count_once(tmp_path):
    path = tmp_path / "ledger"
    optimizer, model = make(path)
    train(optimizer, model, 3)
    state = optimizer.state_dict()
    optimizer.noise_multiplier = 2.0
    train(optimizer, model, 2)
    once = optimizer.epsilon(1e-5)
    optimizer.detach()
    again, model = make(path)
    with pytest.warns(UserWarning, match=r"2 noised step\(s\) of the ledger file are not in the history"):
        again.load_state_dict(state)
    assert spent(again) == 5 and again.history == [(1.0, 0.1, 3)]
    assert again.epsilon(1e-5) == pytest.approx(once, rel=1e-6)
    train(again, model, 2)  # redone
    assert spent(again) == 7
    state = again.state_dict()
    again.detach()
    third, model = make(path)
    third.load_state_dict(state)  # nothing was made after it
    assert spent(third) == 7


@pytest.mark.parametrize("redone", [False, True])
def test_steps_made_again_on_the_samples_of_a_run_that_died_are_one_release(redone, tmp_path):
    """The file has the samples of all steps: not those of the last checkpoint alone."""

    def begin():
        loader = fastdp.poisson_loader(torch.utils.data.TensorDataset(torch.ones(60, 4)), expected_batch_size=10)
        return *make(tmp_path / "ledger", expected_batch_size=None, sample_rate=None), loader

    def steps(optimizer, model, batches, number):
        for _, (x,) in zip(range(number), batches, strict=False):
            model(x).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer, model, loader = begin()
    batches = iter(loader)
    steps(optimizer, model, batches, 1)
    state, place = optimizer.state_dict(), loader.state_dict(secret=True)
    steps(optimizer, model, batches, 2)
    optimizer.detach()
    optimizer, model, loader = begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(state)
        if redone:
            loader.load_state_dict(place)
        steps(optimizer, model, loader, 2)
        history = [(1.0, 1 / 6, 1), (0.5**0.5, 1 / 6, 2)] if redone else [(1.0, 1 / 6, 5)]
        assert optimizer.epsilon(1e-3) == pytest.approx(epsilon_of(history, 1e-3), rel=1e-6)


def test_what_no_state_holds_is_counted_and_said(tmp_path):
    optimizer, model = make(tmp_path / "ledger")
    train(optimizer, model, 3)
    optimizer.detach()
    other, model = make(tmp_path / "ledger")
    assert spent(other) == 3
    with pytest.warns(UserWarning, match=r"holds 3 noised step\(s\) from before, and no state was loaded"):
        train(other, model, 1)
    assert spent(other) == 4
    other.detach()
    third = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=8, sample_rate=0.1)
    train(third, model, 1)
    with pytest.warns(UserWarning, match=r"^4 noised .*: load .* state_dict\(\), which holds the steps of a ledger"):
        third.epsilon(1e-5)
    third.load_state_dict(other.state_dict())
    assert third.epsilon(1e-5) == epsilon_of([(1.0, 0.1, 5)], 1e-5)


def test_a_line_is_synced_before_the_weights_change(tmp_path, monkeypatch):
    optimizer, model = make(tmp_path / "ledger")
    before, seen = model.weight.detach().clone(), []
    real = os.fsync

    def synced(file):
        real(file)
        seen.append(((tmp_path / "ledger").read_bytes().count(b"\n"), torch.equal(model.weight, before)))

    monkeypatch.setattr(os, "fsync", synced)
    train(optimizer, model, 1)
    assert seen == [(2, True)] and not torch.equal(model.weight, before)


def test_a_step_that_cannot_be_written_is_not_made(tmp_path, monkeypatch):
    optimizer, model = make(tmp_path / "ledger")
    train(optimizer, model, 1)
    before, content = model.weight.detach().clone(), (tmp_path / "ledger").read_bytes()
    real = os.write

    def full(file, data):
        real(file, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StepError, match="could not be written to the ledger .*No space left.* so it was not made"):
        train(optimizer, model, 1)
    assert torch.equal(model.weight, before) and optimizer.history == [(1.0, 0.1, 1)]
    assert (tmp_path / "ledger").read_bytes() == content  # without the half line
    monkeypatch.undo()
    optimizer.zero_grad()
    train(optimizer, model, 1)
    assert optimizer.history == [(1.0, 0.1, 2)]


def test_half_a_line_was_no_step(tmp_path):
    path = tmp_path / "ledger"
    optimizer, model = make(path)
    train(optimizer, model, 2)
    optimizer.detach()
    path.write_bytes(path.read_bytes() + b'00000000 {"maker":"ab')
    again, model = make(path)
    assert spent(again) == 2
    with pytest.warns(UserWarning, match="holds 2 noised"):
        train(again, model, 1)
    again.detach()
    assert spent(make(path)[0]) == 3


@pytest.mark.parametrize("damage, said", [
    (lambda lines: [*lines[:2], lines[2].replace(b"1.0", b"9.0", 1)], "line 3 of the ledger .* is damaged"),
    (lambda lines: [b"hello"], "no ledger of fastdp"),
    (lambda lines: [lines[0].replace(b'"format":1', b'"format":2')], "no ledger of fastdp"),
])  # fmt: skip
def test_a_damaged_file_is_refused_and_left_alone(tmp_path, damage, said):
    path = tmp_path / "ledger"
    optimizer, model = make(path)
    train(optimizer, model, 2)
    optimizer.detach()
    path.write_bytes(b"\n".join(damage(path.read_bytes().splitlines())) + b"\n")
    content = path.read_bytes()
    with pytest.raises(AccountingError, match=said):
        make(path)
    assert path.read_bytes() == content
    path.unlink()
    make(path)  # the failed one holds no lock on a file of this name


def test_two_optimizers_do_not_share_a_file(tmp_path):
    pytest.importorskip("fcntl")
    optimizer, _ = make(tmp_path / "ledger")
    with pytest.raises(AccountingError, match="is in use"):
        make(tmp_path / "ledger")
    optimizer.detach()
    make(tmp_path / "ledger")
