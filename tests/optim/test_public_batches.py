"""Public batches beside private ones: `optimizer.public()`."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.errors import StepError
from fastdp.mechanisms import DPFTRL, ftrl_loader

R, B = 0.5, 6
KINDS = {
    "sgd": (fastdp.DPSGD, torch.optim.SGD, {"momentum": 0.9}),
    "adamw": (fastdp.DPAdamW, torch.optim.AdamW, {}),
    "in two passes": (fastdp.DPAdam, torch.optim.Adam, {"amsgrad": True}),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(seed, size=B):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def loss(model, data):
    return F.cross_entropy(model(data[0]), data[1])


def private(model, kind=fastdp.DPSGD, **options):
    return kind(model, lr=0.1, **{"noise_multiplier": 0.0, "max_grad_norm": R, "expected_batch_size": B, **options})


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


class Truth:
    """The same steps by an ordinary optimizer in float64, of gradients that are made one sample at a time."""

    def __init__(self, model, kind=torch.optim.SGD, **options):
        self.model = copy.deepcopy(model).double()
        self.optimizer = kind(self.model.parameters(), lr=0.1, **options)

    def gradient(self, data):
        return torch.autograd.grad(loss(self.model, (data[0].double(), data[1])), list(self.model.parameters()))

    def clipped(self, data):
        rows = [self.gradient((data[0][i : i + 1], data[1][i : i + 1])) for i in range(len(data[0]))]
        factors = [min(1.0, R / float(torch.cat([g.flatten() for g in row]).norm())) / B for row in rows]
        return [sum(f * g for f, g in zip(factors, each, strict=True)) for each in zip(*rows, strict=True)]

    def step(self, *gradients):
        for p, *parts in zip(self.model.parameters(), *gradients, strict=True):
            p.grad = sum(parts)
        self.optimizer.step()
        return flat(self.model)


def before(optimizer, model, public, data):
    with optimizer.public():
        loss(model, public).backward()
    loss(model, data).backward()


def between(optimizer, model, public, data):
    own = loss(model, data)
    with optimizer.public():
        loss(model, public).backward()
    own.backward()


def after(optimizer, model, public, data):
    loss(model, data).backward()
    with optimizer.public():
        loss(model, public).backward()


@pytest.mark.parametrize(("kind", "order"), list(zip(KINDS, (before, between, after), strict=True)))
def test_a_mixed_step_is_of_the_clipped_gradient_and_the_public_one(kind, order, silent):
    ours, theirs, options = KINDS[kind]
    model, data = network(), batch(4)
    optimizer, truth = private(model, ours, **options), Truth(model, theirs, **options)
    for seed, size in ((2, B), (3, 9), (5, 1)):
        public = batch(seed, size)
        order(optimizer, model, public, data)
        want = truth.step(truth.clipped(data), truth.gradient(public))
        optimizer.step()
        torch.testing.assert_close(flat(model), want, atol=2e-5, rtol=1e-4)
        want = truth.step(truth.clipped(data))  # of the public gradient nothing is left, though nobody calls zero_grad
        loss(model, data).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), want, atol=2e-5, rtol=1e-4)
    assert optimizer.history == [(0.0, None, 6)] and optimizer.norms.shape == (B,)


def test_public_gradients_add_up_over_physical_batches_and_take_no_noise(silent):
    x, y = batch(4, 20)
    found = {}
    for mixed in (False, True):
        model = network()
        optimizer = private(model, noise_multiplier=1.0, seed=1, expected_batch_size=None)
        start, total = flat(model), 0.0
        for a, b in fastdp.poisson_loader(TensorDataset(x, y), sample_rate=1.0, steps=1, max_physical_batch_size=8):
            if mixed:
                with optimizer.public():
                    for seed in (1, 2):
                        loss(model, batch(seed)).backward()
                        total = total + flat_of(Truth(model).gradient(batch(seed)))
            loss(model, (a, b)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[mixed] = flat(model) - start + 0.1 * total
    torch.testing.assert_close(found[True], found[False], atol=1e-5, rtol=1e-4)


def flat_of(gradient):
    return torch.cat([g.flatten() for g in gradient])


def step_within(optimizer, ordinary, model, public):
    with optimizer.public():
        loss(model, public).backward()
        ordinary.step()


def step_behind(optimizer, ordinary, model, public):
    with optimizer.public():
        loss(model, public).backward()
    ordinary.step()


@pytest.mark.parametrize("make", [step_within, step_behind])
def test_an_ordinary_optimizer_steps_on_public_batches_and_the_private_step_has_nothing_of_it(make, silent):
    optimizer, truth = private(model := network()), Truth(model)
    ordinary = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (1, 2):
        make(optimizer, ordinary, model, batch(seed))
        torch.testing.assert_close(flat(model), truth.step(truth.gradient(batch(seed))), atol=1e-5, rtol=1e-4)
        loss(model, batch(4)).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), truth.step(truth.clipped(batch(4))), atol=1e-5, rtol=1e-4)


def test_public_gradients_that_are_dropped_do_not_come_back(silent):
    optimizer, truth = private(model := network()), Truth(model)
    for drop in (optimizer.zero_grad, model.zero_grad, lambda: model.zero_grad(set_to_none=False), None):
        with contextlib.suppress(KeyError), optimizer.public():
            loss(model, batch(1)).backward()
            if drop is None:
                raise KeyError
        if drop is not None:
            drop()
        loss(model, batch(4)).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), truth.step(truth.clipped(batch(4))), atol=1e-5, rtol=1e-4)


def ordinary_step(optimizer, model):
    loss(model, batch(1)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def private_batch(optimizer, model):
    other = fastdp.PerSampleGradients(network(), rows_per_sample=2)  # beside which batches are not followed
    try:
        for data in fastdp.poisson_loader(TensorDataset(*batch(1, 20)), sample_rate=1.0, steps=1):
            with optimizer.public():
                loss(model, data)
    finally:
        other.detach()


def within_public(use):
    def case(optimizer, model):
        for x, y in fastdp.poisson_loader(TensorDataset(*batch(1, 20)), sample_rate=1.0, steps=1):
            with optimizer.public():
                use(model, x, y, *batch(1, 20)).backward()

    return case


def penalty(model, x, y, fake, _):
    """Of points between private and generated ones."""
    points = (fake + torch.rand(len(x), 1) * (x - fake)).requires_grad_()
    (gradient,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def written_to(model, x, y, fake, _):
    fake = fake.clone()
    fake[: len(x) // 2] = x[: len(x) // 2]
    return model(fake).square().mean()


def through_a_view(model, x, y, fake, _):
    buffer = torch.zeros(64, 4)
    rows = buffer.view(-1)
    buffer[: len(x)].copy_(x)
    return model(rows.view(-1, 4)).square().mean()


def gradients(model, x, y, fake, _):
    return torch.stack([g.sum() for g in torch.autograd.grad(loss(model, (fake, y)), list(model.parameters()))]).sum()


def scaled(model, x, y, fake, labels):
    loss(model, (fake, labels)).backward()
    model[0].weight.grad.mul_(y.float().mean())


def backward_without(optimizer, model):
    with optimizer.public():
        found = loss(model, batch(1))
    found.backward()


def forward_without(optimizer, model):
    found = loss(model, batch(1))
    with optimizer.public():
        found.backward()


def written(optimizer, model):
    before(optimizer, model, batch(1), batch(4))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def within_a_forward(optimizer, model):
    def public(*_):
        with optimizer.public():
            pass

    handle = model[1].register_forward_hook(public)
    try:
        model(batch(1)[0])
    finally:
        handle.remove()


REFUSED = {
    ordinary_step: r"SGD.step\(\) found no gradient.*public\(\):",
    private_batch: "batch of a poisson_loader, or what was made of one, within public",
    within_public(lambda model, x, y, *_: loss(model, (x * 2, y))): "or what was made of one, within public",
    within_public(penalty): "or what was made of one, within public",
    within_public(written_to): "or what was made of one, within public",
    within_public(through_a_view): "or what was made of one, within public",
    within_public(lambda model, x, y, fake, _: loss(model, (fake, y.clone()))): "its labels, perhaps",
    within_public(lambda model, x, *_: (model[0].weight - x.mean(0)).square().sum()): "its labels, perhaps",
    within_public(gradients): "its labels, perhaps",
    within_public(scaled): "or its .grad, is written to with a batch",
    backward_without: "backward outside of public.*within it",
    forward_without: "within public.*made outside of it",
    written: r"written to since.*zero_grad\(\)",
    within_a_forward: "within a forward",
}


def test_what_would_mix_them_unnoticed_is_refused_and_leaves_nothing_behind():
    for case, text in REFUSED.items():
        optimizer, truth = private(model := network()), Truth(model)
        with pytest.raises(StepError, match=text):
            case(optimizer, model)
        optimizer.zero_grad()
        loss(model, batch(4)).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), truth.step(truth.clipped(batch(4))), atol=1e-5, rtol=1e-4)


NOISE = {
    "made first": lambda x: torch.randn(len(x), 3),
    "picked": lambda x: torch.ones(50, 3)[torch.randint(0, 50, (x.size(0),))],
    "of its type": lambda x: torch.randn(len(x), 3).to(x),
}


@pytest.mark.parametrize("name", NOISE)
def test_generated_records_may_have_the_sizes_of_private_ones(name):
    """Nothing of a record is in a shape, a type or a number of rows, nor in labels made like outputs."""
    torch.manual_seed(0)
    generator, model = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizer = private(model, expected_batch_size=None)
    for x, _ in fastdp.poisson_loader(TensorDataset(*batch(1, 20)), sample_rate=0.5, steps=3):
        fake, out = generator(NOISE[name](x)), model(x)
        real, soft = torch.ones_like(out), torch.rand(len(x), 1)
        F.binary_cross_entropy_with_logits(out, real - 0.1 * soft).backward()
        optimizer.step()
        with optimizer.public():
            same = [torch.randn_like(x), x.new_zeros(x.shape), torch.full(x.shape, 2.0), torch.ones(len(x), 4).to(x)]
            model(soft.expand(-1, 4)).mean().backward()  # labels that the private loss took
            out = model(torch.cat([fake, *same]))
            F.binary_cross_entropy_with_logits(out, torch.cat([real, *[torch.zeros_like(real)] * 4])).backward()
        assert model.weight.grad.any() and generator.weight.grad.any()
        optimizer.zero_grad()


def test_a_mechanism_takes_private_gradients_alone():
    model = network()
    optimizer = DPFTRL(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=R)
    for data in ftrl_loader(TensorDataset(*batch(1, 20)), batch_size=10):
        before(optimizer, model, batch(2), data)
        with pytest.raises(StepError, match="DP-FTRL.*private gradients alone"):
            optimizer.step()
        break


def control_variate(optimizer, model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def added_to(optimizer, model):
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # left by the step before
        p.grad += 0.1 * p.detach()


@pytest.mark.parametrize("write", [control_variate, added_to])
def test_what_is_written_to_grad_before_a_step_does_not_get_lost_unseen(write):
    optimizer, truth = private(model := network()), Truth(model)
    for seed in (4, 5):
        loss(model, batch(seed)).backward()
        write(optimizer, model)
        with pytest.raises(StepError, match=r"\.grad of \['0.weight', '0.bias', '2.weight'\] was written to"):
            optimizer.step()
        for p in model.parameters():
            p.grad = None
        optimizer.step()
        torch.testing.assert_close(flat(model), truth.step(truth.clipped(batch(seed))), atol=1e-5, rtol=1e-4)
    waiting = loss(model, batch(6))
    model.zero_grad(set_to_none=False)
    waiting.backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
