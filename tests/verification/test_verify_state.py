"""verify leaves the program as it was, knows what it keeps from batch to batch, and notes what it has verified."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import VerificationError
from fastdp.optim.verification_record import verified_on, was_verified
from fastdp.verification.report import VerifyReport, largest


def model_of(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3))


def batch(count=6):
    torch.manual_seed(1)
    return torch.randn(count, 6), torch.arange(count) % 3


def cross_entropy(model, given):
    return F.cross_entropy(model(given[0]), given[1])


# --------------------------------------------------------------------------- reentrant checkpointing, several rows


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.inner = reentrant, nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, h):
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    model = model_of(Checkpointed(reentrant))
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    grads = [p.grad for p in model.parameters()]
    outside = torch.ones(3, requires_grad=True)
    outside.grad = torch.full((3,), 7.0)
    report = fastdp.verify(model, lambda m, b: cross_entropy(lambda x: m(x) * outside, b), batch())
    assert report.ok and all(
        a is p.grad and bool((a == 2).all()) for a, p in zip(grads, model.parameters(), strict=True)
    )
    assert bool((outside.grad == 7).all())
    with pytest.raises(VerificationError):  # and a fault behind it is found
        fastdp.verify(model, lambda m, b: cross_entropy(m, b) * 1.001, batch(), loss_reduction="sum")


def twice(given):
    return tuple(t.repeat_interleave(2, 0) for t in given)


@pytest.mark.parametrize("options", [{"rows_per_sample": 2}, {"batch_size": 6}])
def test_rows_doubled_in_the_batch(options):
    report = fastdp.verify(model_of(nn.Dropout(0.3)), cross_entropy, twice(batch()), **options)
    assert report.ok and report.samples == 6


def test_rows_doubled_in_the_loss():
    report = fastdp.verify(model_of(), lambda m, b: cross_entropy(m, twice(b)), batch(), rows_per_sample=2)
    assert report.ok and report.samples == 6
    with pytest.raises(ValueError, match="no multiple"):
        fastdp.verify(model_of(), cross_entropy, batch(7), rows_per_sample=2)


@pytest.mark.parametrize("one", [lambda t: t[:1], lambda t: t[0]])
def test_one_record_is_too_few(one):
    with pytest.raises((ValueError, VerificationError), match="at least two"):
        fastdp.verify(model_of(), cross_entropy, tuple(map(one, batch())))


@pytest.mark.parametrize("double", [twice, lambda b: tuple(torch.cat([t, t]) for t in b)])
def test_doubled_rows_of_which_nothing_is_said(double):
    """Each record would be clipped as two samples, and contribute 2 R."""
    with pytest.raises(VerificationError, match="rows_per_sample=2"):
        fastdp.verify(model_of(), lambda m, b: cross_entropy(m, double(b)), batch())


# --------------------------------------------------------------------------- what a program keeps


class Keeps(nn.Module):
    """Adds to each sample what an earlier batch left: in a buffer, an attribute, or a list."""

    def __init__(self, how):
        super().__init__()
        self.how, self.last, self.queue = how, None, []
        self.register_buffer("average", torch.zeros(8))

    def forward(self, h):
        before = {"buffer": self.average, "attribute": self.last, "list": self.queue[-1] if self.queue else None}
        now = torch.from_numpy(h.detach().numpy().mean(0))
        seen = before[self.how]
        if self.how == "buffer":
            seen = torch.from_numpy(self.average.numpy().copy())
            self.average = 0.5 * self.average + now
        self.last = now
        self.queue.append(now)
        return h if seen is None else h + seen.to(h.dtype)


@pytest.mark.parametrize("how", ["buffer", "attribute", "list"])
def test_samples_of_earlier_batches_are_found(how):
    model = model_of(Keeps(how))
    with pytest.raises(VerificationError):
        fastdp.verify(model, cross_entropy, batch())
    report = fastdp.verify(model, cross_entropy, batch(), raise_on_failure=False)
    assert "earlier batches" in report.problem or "refuses" in report.problem
    kept = model[2]
    assert kept.last is None and kept.queue == [] and not kept.average.any()


class Counts(nn.Module):
    """What it does depends on how often it was called, not on data."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, h):
        self.calls += 1
        self.steps += 1
        return h * (1 + self.calls + self.steps)


def test_a_count_of_the_calls_is_no_coupling():
    model = model_of(Counts())
    report = fastdp.verify(model, cross_entropy, batch())
    assert report.ok and "carries nothing" in str(report)
    assert model[2].calls == 0 and model[2].steps == 0


def test_spectral_norm():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3))
    before = copy.deepcopy(model.state_dict())
    assert fastdp.verify(model, cross_entropy, batch()).ok
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --------------------------------------------------------------------------- as it was


@pytest.mark.parametrize("fault", ["", "loss", "model"])
def test_all_is_as_it_was(fault):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.by_name, self.number = [], {}, 0
            self.register_buffer("total", torch.zeros(()))

        def forward(self, h):
            self.seen.append(len(h))
            self.by_name[len(h)] = h
            self.number, self.new = self.number + 1, h
            self.total.add_(1)
            if fault == "model" and len(h) == 1:
                raise KeyError("broken")
            return h

    def loss(m, b):
        if fault == "loss" and len(b[0]) == 1:
            raise KeyError("broken")
        return cross_entropy(m, b)

    model = model_of(Writes(), nn.Dropout(0.5), nn.Dropout(0.5))
    model[3].eval()
    x, y = batch()
    x.requires_grad_()
    x.grad = torch.ones_like(x)
    model[0].weight.grad = grad = torch.ones_like(model[0].weight)
    before, hooks = copy.deepcopy(model.state_dict()), [len(m._forward_hooks) for m in model.modules()]
    torch.manual_seed(4)
    state = torch.get_rng_state()
    if fault:
        with pytest.raises(KeyError, match="broken"):
            fastdp.verify(model, loss, (x, y))
    else:
        fastdp.verify(model, loss, (x, y))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and not model[3].training and model[4].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is grad and bool((grad == 1).all()) and model[0].bias.grad is None
    assert bool((x.grad == 1).all())
    writes = model[2]
    assert (writes.seen, writes.by_name, writes.number) == ([], {}, 0) and "new" not in writes.__dict__
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("graphed", [False, True])
def test_an_optimizer_that_is_attached_stays_as_it_is(graphed):
    def step(look):
        model = model_of()
        optimizer = fastdp.DPSGD(
            model, lr=0.1, max_grad_norm=1.0, noise_multiplier=0.0, expected_batch_size=6, graphed=graphed
        )
        for number in range(6):
            cross_entropy(model, batch()).backward()
            if look and number % 4 == 0:  # as epsilon() advises, where the optimizer is there already
                assert fastdp.verify(model, cross_entropy, batch()).ok and was_verified(model)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()], optimizer.explain().split("replayed")[1:]

    (plain, told), (looked, same) = step(False), step(True)
    assert told == same and ("4 forwards of 6" in str(told)) == graphed  # what was recorded serves on
    assert all(torch.equal(a, b) for a, b in zip(plain, looked, strict=True))


# --------------------------------------------------------------------------- the note


def test_what_was_verified_is_noted():
    model, other = model_of(), model_of()
    assert not was_verified(model) and verified_on(model) == ""
    fastdp.verify(model, cross_entropy, batch())
    assert was_verified(model) and "6 records" in verified_on(model)
    assert not was_verified(other) and not was_verified(copy.deepcopy(model)) and not was_verified(model[0])
    with pytest.raises(VerificationError):
        fastdp.verify(model, lambda m, b: m(b[0]).square().sum(), batch())
    assert not was_verified(model)  # the last word counts
    fastdp.verify(model, cross_entropy, batch())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_number_that_is_none_is_no_pass():
    assert largest([0.0, float("nan")]) == float("inf") and largest([]) == 0.0
    assert not VerifyReport(2, 0.0, float("nan"), 0.0, 1e-4).worst() <= 1e-4
    with pytest.raises(VerificationError):
        fastdp.verify(model_of(), lambda m, b: (m(b[0]) * float("nan")).sum(1), batch())


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()])
def test_a_loss_of_outputs_and_targets_is_told_what_it_is_called_with(loss):
    with pytest.raises(TypeError, match="loss_fn is called with the model and a batch, and (cross_entropy|Cross)"):
        fastdp.verify(nn.Linear(3, 2), loss, (torch.randn(8, 3), torch.zeros(8).long()))


class Sparse(nn.Module):
    """A buffer that is sparse, and a table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3)
        self.register_buffer("heads", torch.eye(3).to_sparse(), persistent=False)

    def forward(self, ids):
        return self.head(self.table(ids).tanh().mean(1))


def test_sparse_tensors_are_compared():
    batch = torch.randint(0, 7, (6, 3)), torch.randint(0, 3, (6,))
    assert fastdp.verify(Sparse(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch).ok


# --------------------------------------------------------------------------- averages in frozen parameters


class Averaged(nn.Module):
    """An encoder, and its average, which every forward moves on (BYOL, MoCo)."""

    def __init__(self, by_data):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.average, self.by_data = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False), by_data

    def forward(self, x):
        with torch.no_grad():
            for mine, other in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
                if self.by_data:
                    mine.data = mine.data * 0.9 + other.data * 0.1
                else:
                    mine.mul_(0.9).add_(other, alpha=0.1)
        return self.encoder(x), self.average(x)


@pytest.mark.parametrize("by_data", [False, True])
def test_averages_that_a_forward_moves_are_put_back(by_data):
    def loss(model, given):
        mine, other = model(given[0])
        return (mine - other).square().sum(1).mean()

    model = Averaged(by_data)
    before = [p.detach().clone() for p in model.parameters()]
    memory = [p.data_ptr() for p in model.parameters()]
    assert fastdp.verify(model, loss, batch()).ok
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == memory
