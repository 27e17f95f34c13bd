"""Noise of fastdp.compat.opacus is drawn once: copies and a generator seeded again are refused. And sample rates."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import fastdp
from fastdp.compat.opacus import PrivacyEngine
from fastdp.compat.opacus.data_loader import DPDataLoader
from fastdp.compat.opacus.utils.uniform_sampler import UniformWithReplacementSampler
from fastdp.errors import StepError

from .compat_runs import data, private

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
X, Y = data().tensors


def step(module, optimizer, criterion):
    """The gradient of a step, all parameters."""
    optimizer.zero_grad()
    criterion(module(X), Y).backward()
    optimizer.step()
    return torch.cat([p.grad.flatten() for p in optimizer.params])


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_copies_of_an_optimizer_are_refused(how):
    """With a copy of its generator or key it would repeat the noise."""
    _, module, optimizer, criterion, _ = private("hooks", noise_multiplier=1.0)
    step(module, optimizer, criterion)
    with pytest.raises(NotImplementedError, match="repeat its noise"):
        how(optimizer)
    twin = copy.deepcopy(module)  # of a module, with what waits on it: an engine of its own, and no gradients
    criterion(twin(X), Y).backward()
    assert len(next(twin.parameters()).grad_sample) == len(X)
    pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_noise_of_a_step_before_is_refused(mode):
    _, module, optimizer, criterion, _ = private(mode, noise_multiplier=1.0)
    torch.manual_seed(3)
    step(module, optimizer, criterion)
    step(module, optimizer, criterion)
    torch.manual_seed(3)
    with pytest.raises(StepError, match="seeded again"):
        step(module, optimizer, criterion)
    optimizer.noise_multiplier = 0.0
    torch.manual_seed(3)
    step(module, optimizer, criterion)  # no noise, none to repeat


# ------------------------------------------------------------------ what is accounted for without Poisson sampling


def rate_of(loader):
    net = nn.Linear(3, 2)
    made = PrivacyEngine(accountant="rdp").make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    module, optimizer, _ = made
    nn.functional.cross_entropy(module(X), Y).backward()
    seen = []
    optimizer.attach_step_hook(lambda o, told=optimizer.step_hook: (told(o), seen.append(told.__closure__)))
    optimizer.step()
    accountant = next(c.cell_contents for c in seen[0] if hasattr(c.cell_contents, "history"))
    return accountant.history[0][1], optimizer.expected_batch_size


def test_the_rate_of_loaders_that_draw_a_record_more_often_than_once_a_pass():
    records = TensorDataset(X, Y)  # 32
    assert rate_of(DataLoader(records, 8)) == (0.25, 8)
    assert rate_of(DataLoader(records, 5, shuffle=True)) == (pytest.approx(1 / 7), 4)  # as Opacus says it
    again = RandomSampler(records, replacement=True, num_samples=3200)
    assert rate_of(DataLoader(records, 8, sampler=again)) == (pytest.approx(0.25), 8)
    weighted = WeightedRandomSampler(torch.ones(32), 320)
    assert rate_of(DataLoader(records, 8, sampler=weighted)) == (pytest.approx(0.25), 8)
    poisson = UniformWithReplacementSampler(num_samples=32, sample_rate=0.25, steps=1000)
    assert rate_of(DataLoader(records, batch_sampler=poisson)) == (0.25, 8)
    assert rate_of(DPDataLoader(records, sample_rate=0.25)) == (0.25, 8)
    assert rate_of(fastdp.poisson_loader(records, sample_rate=0.25, steps=1000)) == (0.25, 8)


def test_noise_for_an_epsilon_is_for_the_rate_that_is_accounted():
    records = TensorDataset(X, Y)
    loader = DataLoader(records, 8, sampler=RandomSampler(records, replacement=True, num_samples=320))
    net, engine = nn.Linear(3, 2), PrivacyEngine(accountant="rdp")
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=loader, target_epsilon=2.0,
        target_delta=1e-3, epochs=1, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(optimizer.noise_multiplier, 0.25, 40)]
    assert 1.9 < engine.get_epsilon(1e-3) <= 2.0


def test_samplers_that_draw_some_records_more_often_are_refused():
    records = TensorDataset(torch.randn(320, 3), torch.randint(0, 2, (320,)))
    often = WeightedRandomSampler(torch.where(torch.arange(320) < 32, 30.0, 1.0), 320)
    for asked in ({"batch_size": 8, "sampler": often}, {"batch_sampler": BatchSampler(often, 8, False)}):
        with pytest.raises(ValueError, match=r"one.*times.*shuffle=True.*weight\[y\]"):
            rate_of(DataLoader(records, **asked))
        with pytest.warns(UserWarning, match="takes the place of the loader's.*same probability"):
            DPDataLoader.from_data_loader(DataLoader(records, **asked))
