"""BatchMemoryManager: physical batches of one logical batch are one batch, in every mode, whatever the loop does."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fastdp.compat.opacus.utils.batch_memory_manager import BatchMemoryManager, BatchSplittingSampler, wrap_data_loader

from .compat_runs import clipped_sum, model, private, weights


def train(mode, limit=None, **options):
    """Weights after two passes, accountant's history, sizes of the batches handed out."""
    engine, module, optimizer, criterion, loader = private(mode, **options)
    sizes = []

    def loop(batches):
        for x, y in batches:
            sizes.append(len(x))
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()

    for _ in range(2):
        if limit is None:
            loop(loader)
            continue
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=limit, optimizer=optimizer) as batches:
            loop(batches)
    return weights(module), engine.accountant.history, sizes


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("poisson", [False, True])
def test_equals_whole_batches(mode, poisson):
    def run(limit):
        torch.manual_seed(5)
        return train(mode, limit, noise_multiplier=0.3, poisson_sampling=poisson, lr=0.1)

    whole, steps, _ = run(None)
    parts, steps_in_parts, sizes = run(3)
    assert max(sizes) <= 3 and steps == steps_in_parts and sum(n for *_, n in steps) == 8
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.filterwarnings("ignore")
def test_empty_batches_are_noise_only_steps(mode):
    torch.manual_seed(3)
    data_ = TensorDataset(torch.randn(12, 3), torch.randint(0, 2, (12,)))
    history, sizes = train(mode, 2, data=data_, batch_size=1, noise_multiplier=1.0, poisson_sampling=True)[1:]
    assert 0 in sizes and max(sizes) <= 2
    assert sum(steps for *_, steps in history) == 24


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_left_early_spoils_nothing(mode, workers):
    """Opacus's signals are sent when indices are drawn: after a break they belong to batches nobody got."""
    _, module, optimizer, criterion, loader = private(mode, batch_size=8)
    loader = DataLoader(loader.dataset, batch_size=8, num_workers=workers)
    batches = wrap_data_loader(data_loader=loader, max_batch_size=3, optimizer=optimizer)

    def body(x, y):
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()

    for x, y in batches:
        body(x, y)
        break  # in the middle of a logical batch
    start = weights(module)
    plain = model()
    plain.load_state_dict(module._module.state_dict())
    taken = []
    with pytest.warns(UserWarning, match="dropped"):
        for n, (x, y) in enumerate(batches):
            body(x, y)
            taken.append((x, y))
            assert (weights(module) == start).all() == (n < 2)
            if n == 2:
                break
    x, y = (torch.cat(parts) for parts in zip(*taken, strict=True))
    want = start - clipped_sum(plain, x, y, 0.5) / 8
    torch.testing.assert_close(weights(module), want, rtol=1e-5, atol=1e-6)


def test_a_part_without_a_step_does_not_shift_the_others():
    _, module, optimizer, criterion, loader = private("hooks", batch_size=8)
    batches = wrap_data_loader(data_loader=loader, max_batch_size=4, optimizer=optimizer)
    moved = []
    for n, (x, y) in enumerate(batches):
        if n == 1:
            continue  # a loop that leaves a batch out
        before = weights(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.zero_grad()
            criterion(module(x), y).backward()
        optimizer.step()
        moved.append(bool((weights(module) != before).any()))
    assert moved == [False, False, True, False, True, False, True]


class _Signals:
    """An optimizer as the sampler sees it."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []

    def signal_skip_step(self, do_skip: bool = True) -> None:
        self.skipped.append(do_skip)


def test_the_sampler_by_itself_signals_as_opacus():
    signals = _Signals()
    sampler = BatchSplittingSampler(sampler=[[1, 2, 3, 4, 5], [], [6, 7]], max_batch_size=2, optimizer=signals)
    parts = list(sampler)
    assert [i for part in parts for i in part] == [1, 2, 3, 4, 5, 6, 7] and [] in parts
    assert max(map(len, parts)) <= 2 and signals.skipped == [True, True, False, False, False]
