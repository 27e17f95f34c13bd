"""One step a logical batch, whatever the loop does: what a review of the sampling and the optimizer found."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn as nn
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import fastdp
from fastdp.errors import ParameterError, StepError
from fastdp.mechanisms import ftrl_loader

R = 1.0


def run(n=10, q=1.0, limit=None, steps=1, **options):
    model = nn.Linear(4, 3)
    loader = fastdp.poisson_loader(
        TensorDataset(torch.ones(n, 4)), sample_rate=q, max_physical_batch_size=limit, steps=steps
    )
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=R, loss_reduction="sum", **options)
    return model, loader, optimizer


def backward(model, x):
    (1e3 * model(x)).square().sum().backward()


def size_of_sum(model):
    return float(torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt())


def test_a_second_step_or_backward_on_one_batch():
    model, loader, optimizer = run()
    for (x,) in loader:
        backward(model, x)
        with pytest.raises(StepError, match="second backward"):
            backward(model, x)
        optimizer.step()
        assert size_of_sum(model) <= 10 * R * (1 + 1e-6)
        with pytest.raises(StepError):
            backward(model, x)
        with pytest.raises(StepError):
            optimizer.step()
    assert len(optimizer.history) == 1 and optimizer.history[0][2] == 1


def test_a_logical_batch_left_in_the_middle_is_dropped():
    model, loader, optimizer = run(limit=6)
    for (x,) in loader:
        backward(model, x)
        optimizer.step()
        break
    with pytest.raises(StepError):
        optimizer.step()
    with pytest.warns(UserWarning, match="dropped"):
        for (x,) in loader:
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad()
    backward(model, torch.ones(1, 4))
    model2, loader2, optimizer2 = run(limit=6)
    with pytest.raises(StepError, match="last batch"):
        for number, (x,) in enumerate(loader2):
            backward(model2, x)
            if number == 0:
                optimizer2.step()
    assert optimizer.history == [(0.0, 1.0, 1)] and optimizer2.history == []


def test_two_loaders_at_once_are_told_apart_by_what_the_model_is_given_or_refused():
    model, loader, optimizer = run()
    before, after = (fastdp.poisson_loader(TensorDataset(torch.ones(60, 4)), sample_rate=0.5) for _ in range(2))
    model2, _, optimizer2 = run()
    (y,) = next(other := iter(before))
    for (x,) in loader:
        with pytest.raises(StepError, match="does not show of which it is"):
            backward(model, torch.tensor(x.numpy()))
        backward(model, x)
        optimizer.step()
        backward(model2, x)  # the other's batch, counted at its own rate
        optimizer2.step()
        with pytest.raises(StepError, match="another loader has handed out a batch since"):
            backward(model2, y)  # had the loop mixed it, nothing would have seen that
        (y,) = next(other := iter(after))
        backward(model2, y)
        optimizer2.step()
        with pytest.raises(StepError, match="second backward on the same batch"):
            backward(model2, y)
    del other
    assert optimizer.history == [(0.0, 1.0, 1)] and [rate for _, rate, _ in optimizer2.history] == [1.0, 0.5]


def test_loaders_in_turn_are_told_apart_by_what_was_made_of_their_batches_too():
    """As `x.to(device)` is on a GPU: the remedy for loaders in lockstep."""
    (model, loader, optimizer), (model2, loader2, optimizer2) = run(steps=3), run(n=60, q=0.5, steps=3)
    batches = iter(loader2)
    for (x,) in loader:
        backward(model, x.double().float())
        optimizer.step()
        (y,) = next(batches)
        backward(model2, y * 2 - 1)
        optimizer2.step()
    assert optimizer.history == [(0.0, 1.0, 3)] and optimizer2.history == [(0.0, 0.5, 3)]


def test_a_step_is_of_the_batch_of_its_backward_whatever_the_model_saw_since():
    """A look at a batch of another loader, with gradients on, between backward and step."""
    model, loader, optimizer = run()
    other = iter(fastdp.poisson_loader(TensorDataset(torch.ones(60, 4)), sample_rate=0.5))
    for (x,) in loader:
        backward(model, x)
        (y,) = next(other)
        model(y)
        optimizer.step()
    assert optimizer.history == [(0.0, 1.0, 1)]


def test_a_list_of_a_loaders_batches_is_no_loop_over_it():
    loader = ftrl_loader(TensorDataset(torch.ones(10, 4)), batch_size=5)
    for options in ({}, {"noise": fastdp.mechanisms.Lambda(0.5)}):
        model = nn.Linear(4, 3)
        optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, **options)
        with pytest.raises(StepError, match="loop over the loader, not over a list of its batches"):
            for (x,) in list(loader):
                backward(model, x)
                optimizer.step()
        optimizer.detach()


def test_an_iteration_begun_before_the_optimizer_is_not_what_it_trains_on():
    """A look at the shapes of another dataset's batches, whose iterator lives on."""
    looking = iter(fastdp.poisson_loader(TensorDataset(torch.ones(100, 4)), sample_rate=0.5))
    (x,) = next(looking)
    model, loader, optimizer = run(len(x))
    for (own,) in DataLoader(loader.dataset, len(x)):
        backward(model, own)
        optimizer.step()
    assert optimizer.history == [(0.0, None, 1)]
    for (own,) in loader:
        backward(model, own)
        optimizer.step()
    assert optimizer.history[1:] == [(0.0, 1.0, 1)]
    model2, optimizer2 = nn.Linear(4, 3), None
    del looking
    for (own,) in fastdp.poisson_loader(loader.dataset, sample_rate=0.5, steps=1):  # one that is made within the loop
        optimizer2 = optimizer2 or fastdp.DPSGD(model2, lr=1.0, noise_multiplier=0.0, loss_reduction="sum")
        backward(model2, own)
        optimizer2.step()
    assert optimizer2.history == [(0.0, 0.5, 1)]


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    names: list


def test_an_empty_batch_has_the_structure_of_the_others():
    def collate(items):
        x, names = torch.stack([item[0] for item in items]), ["a"] * len(items)
        return {"x": x, "pair": [x, (x, x.numpy())], "names": names, "data": Batch(x, names), "size": 5, "none": None}

    (batch,) = fastdp.poisson_loader(TensorDataset(torch.ones(3, 4)), sample_rate=1e-9, steps=1, collate_fn=collate)
    one, (two, three) = batch["pair"]
    assert {x.shape for x in (batch["x"], one, two, three, batch["data"].x)} == {(0, 4)}
    assert batch["names"] == batch["data"].names == [] and (batch["size"], batch["none"]) == (5, None)


def test_loaders_that_sample_in_their_own_way():
    data = TensorDataset(torch.ones(10, 4))
    with pytest.raises(StepError, match="Subset"):
        fastdp.poisson_loader(DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(5))))
    weighted = WeightedRandomSampler([9.0] + [1.0] * 9, 10)
    for loader in (DataLoader(data, sampler=weighted), DataLoader(data, batch_sampler=BatchSampler(weighted, 2, True))):
        for make, size in ((fastdp.poisson_loader, "expected_batch_size"), (ftrl_loader, "batch_size")):
            with pytest.raises(StepError, match="draws by WeightedRandomSampler"):
                make(loader, **{size: 2})
    assert fastdp.poisson_loader(DataLoader(data, batch_size=20)).expected_batch_size == 10
    assert fastdp.poisson_loader(DataLoader(data, batch_size=2, shuffle=True)).sample_rate == 0.2


@pytest.mark.parametrize(
    "radius, x, g", [(1e-5, 1e19, 2e-23), (1e-7, 1e18, 1e-23), (1e-10, 1e-3, 1e-22), (1.0, 1e20, 1e10)]
)
@pytest.mark.parametrize("clipping", ["local", "global", "automatic"])
def test_the_bound_holds_where_squares_under_or_overflow(radius, x, g, clipping):
    model = nn.Linear(3, 2)
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, max_grad_norm=radius, loss_reduction="sum", clipping=clipping
    )
    (model(torch.full((2, 3), x)) * g).sum().backward()
    optimizer.step()
    total = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
    assert float(total) <= 2 * radius * (1 + 1e-6)


def test_a_refused_group_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = fastdp.DPSGD(model, params=model[0].parameters(), lr=1.0, noise_multiplier=0.0, expected_batch_size=2)
    with pytest.raises(ParameterError):
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    backward(model, torch.ones(2, 4))
    optimizer.step()
    assert set(optimizer._privacy.engine.named_parameters()) == {"0.weight", "0.bias"}


def test_unfreezing_a_parameter_of_the_groups():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = fastdp.privatize(inner, model, noise_multiplier=0.0, expected_batch_size=2)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    backward(model, torch.ones(2, 4))
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_expected_batch_size_that_is_not_the_loaders():
    model, loader, optimizer = run(expected_batch_size=1)
    for (x,) in loader:
        backward(model, x)
        with pytest.raises(StepError, match="expected_batch_size"):
            optimizer.step()
        break  # on which the loader would refuse to go on without a step


def test_unusable_optimizers():
    model = nn.Linear(2, 2)
    with pytest.raises(ParameterError, match="Sparse"):
        fastdp.privatize(torch.optim.SparseAdam(model.parameters()), model, noise_multiplier=1.0)
    with pytest.raises(ParameterError, match="then the model"):
        fastdp.privatize(model, torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0)
    with pytest.raises(ValueError, match="noise_multiplier"):
        fastdp.DPSGD(model, lr=1.0, noise_multiplier="1")
