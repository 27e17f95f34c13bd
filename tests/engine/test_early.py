"""Layerwise clipping within backward: the numbers of its end, what stays until then, and what is held."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.diagnostics import GradientDiagnostics
from fastdp.engine.layerwise import LayerwiseSums
from fastdp.grad_sample.linear import Matmul

B, T, D = 6, 5, 8


@pytest.fixture
def taken(monkeypatch):
    """The groups that were taken early, as numbers of their parameters."""
    made, found = LayerwiseSums._take, []

    def take(self, number, uses, batch):
        found.append(len(self._groups[number]))
        return made(self, number, uses, batch)

    monkeypatch.setattr(LayerwiseSums, "_take", take)
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, one of them used twice, and a head tied to the embedding. how: of checkpointing, None for none."""

    def __init__(self, how=None):
        super().__init__()
        self.embed, self.blocks, self.how = nn.Embedding(11, D), nn.ModuleList([Block(), Block()]), how
        self.head = nn.Linear(D, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return self.head(x)


def batch(seed, count=B):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (count, T + 1), generator=generator)


def loss_of(net, ids):
    logits = net(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(-1, T).mean(1)


def trained(net, steps=4, early=True, step=None, **options):
    """The weights after some steps, and the norms of the last."""
    torch.manual_seed(0)
    options = {"style": "layerwise", "noise_multiplier": 0.3, "max_grad_norm": 0.5, "expected_batch_size": B, **options}
    optimizer = fastdp.DPAdamW(net, lr=0.01, seed=4, **options)
    if not early:
        optimizer._privacy.engine._backward.by_group = None
    for seed in range(steps):
        if step is None:
            loss_of(net, batch(seed)).mean().backward()
        else:
            step(net, seed)
        optimizer.step()
        optimizer.zero_grad()
    norms = optimizer._privacy.norms
    optimizer.detach()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), norms


def net(how=None):
    torch.manual_seed(1)
    return Net(how)


@pytest.mark.parametrize("clipping", ["local", "global", "automatic"])
def test_the_same_bits_as_at_the_end_of_backward(taken, clipping):
    found, norms = trained(net(), clipping=clipping)
    assert len(taken) == 4 * 7  # every layer, also those with two uses, in every step
    expected, known = trained(net(), clipping=clipping, early=False)
    assert len(taken) == 4 * 7 and torch.equal(found, expected)
    assert list(norms) == list(known) and all(torch.equal(norms[name], known[name]) for name in known)


def test_norms_are_those_of_single_samples(taken):
    model = net()
    _, norms = trained(model, steps=1, noise_multiplier=0.0)
    assert taken
    truth = net().double()
    for b, row in enumerate(batch(0)):
        truth.zero_grad()
        loss_of(truth, row[None]).sum().backward()
        for layer, rows in norms.items():
            square = sum(p.grad.square().sum() for p in truth.get_submodule(layer).parameters(recurse=False))
            assert float(rows[b]) == pytest.approx(float(square.sqrt()), rel=1e-4)


@pytest.mark.parametrize("how", ["reentrant", "not"])
def test_checkpointing(taken, how):
    found, _ = trained(net(how))
    early = len(taken)
    expected, _ = trained(net(how), early=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert early == 4 * (7 if how == "not" else 1)  # a region that runs again is not counted: those wait


def test_several_forwards_before_a_backward(taken):
    def both(model, seed):
        (loss_of(model, batch(seed)) + loss_of(model, batch(seed + 50))).mean().backward()

    assert torch.equal(trained(net(), step=both)[0], trained(net(), step=both, early=False)[0])
    assert taken

    def apart(model, seed):
        first, second = loss_of(model, batch(seed)).mean(), loss_of(model, batch(seed + 50)).mean()
        first.backward()
        third = loss_of(model, batch(seed + 90)).mean()
        (second + third).backward()

    with pytest.warns(UserWarning, match="several|more than one|backward"):
        found = trained(net(), step=apart)[0]
    with pytest.warns(UserWarning, match="several|more than one|backward"):
        assert torch.equal(found, trained(net(), step=apart, early=False)[0])


def test_a_forward_whose_graph_is_dropped_makes_layers_wait(taken):
    def step(model, seed):
        if seed == 1:
            loss_of(model, batch(70))
        loss_of(model, batch(seed)).mean().backward()

    assert torch.equal(trained(net(), step=step)[0], trained(net(), step=step, early=False)[0])


def test_what_never_is_complete_is_taken_at_the_end(taken):
    """A layer with a parameter that no backward reaches, one made of two layers, a frozen one."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
            self.unused = nn.Linear(D, D)
            self.c.weight.requires_grad_(False)

        def forward(self, x):
            self.unused(x)
            return self.c(torch.tanh(nn.functional.linear(x, self.a.weight * self.b.weight, self.a.bias + self.b.bias)))

    def step(model, seed):
        x = torch.randn(B, D, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum(1).mean().backward()

    def made():
        torch.manual_seed(2)
        return Odd()

    found, norms = trained(made(), step=step)
    assert taken == [1] * 4  # c
    expected, known = trained(made(), step=step, early=False)
    torch.testing.assert_close(found, expected)
    for name in known:
        torch.testing.assert_close(norms[name], known[name])


@pytest.mark.parametrize("how", ["flat", "groups", "callable", "memory", "diagnostics", "persons"])
def test_where_the_end_is_needed_nothing_is_early(taken, how):
    options = {
        "flat": {"style": "flat"},
        "groups": {"style": [{"params": [name for name, _ in net().named_parameters()], "max_grad_norm": 1.0}]},
        "callable": {"clipping": lambda norms: 0.1 / (norms + 1)},
        "memory": {"memory_budget": 10**9},
    }.get(how, {})
    model = net()
    optimizer = fastdp.DPSGD(
        model, lr=0.1, **{"style": "layerwise", "noise_multiplier": 0.0, "max_grad_norm": 1.0,
                          "expected_batch_size": B, **options},
    )  # fmt: skip
    if how == "diagnostics":
        watching = GradientDiagnostics(optimizer)
    if how == "persons":
        optimizer.group_by([0, 0, 1, 1, 2, 2])
    loss_of(model, batch(0)).mean().backward()
    optimizer.step()
    assert not taken
    if how == "diagnostics":
        assert watching.report()


def test_a_sample_that_is_not_finite_contributes_to_no_layer(taken):
    def step(model, seed):
        factors = torch.ones(B)
        factors[2] = float("nan")
        (loss_of(model, batch(seed)) * factors).mean().backward()

    def without(model, seed):
        losses = loss_of(model, batch(seed)[[0, 1, 3, 4, 5]])
        losses.mean().backward()

    found, norms = trained(net(), step=step)
    assert taken and all(not torch.isfinite(rows[2]) for rows in norms.values())
    expected, _ = trained(net(), step=without)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Steep(torch.autograd.Function):
    """The identity, whose gradient is infinite for the third sample."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[2] = float("inf")
        return grad


def test_a_sample_that_is_not_finite_in_the_first_layers_keeps_its_bound(taken):
    """The last layer is taken before that shows: it contributes there, by no more than the layer's clipping norm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 3))
    optimizer = fastdp.DPSGD(model, lr=1.0, style="layerwise", noise_multiplier=0.0, max_grad_norm=1.0,
                             expected_batch_size=1.0, loss_reduction="sum")  # fmt: skip
    x, before = torch.randn(B, D), [p.detach().clone() for p in model.parameters()]
    model[1](Steep.apply(model[0](x))).square().sum().backward()
    optimizer.step()
    assert taken == [2, 2] and optimizer.nonfinite_samples == 1
    changes = [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]
    for layer, count in ((0, B - 1), (2, B)):
        moved = torch.cat([change.flatten() for change in changes[layer : layer + 2]])
        assert moved.isfinite().all() and 0 < float(moved.norm()) <= count / 2**0.5 * 1.0001


def test_a_parameter_in_compiled_code_and_beside_it(taken):
    """Calls of compiled code are counted too."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    def made():
        torch.manual_seed(2)
        model = Mixed()
        model.first.compile(backend="eager")
        return model

    def step(model, seed):
        x = torch.randn(B, D, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum(1).mean().backward()

    found, _ = trained(made(), steps=6, step=step)
    assert taken == [1, 2] * 6  # the bias of the second, then the first with the weight of both
    expected, _ = trained(made(), steps=6, step=step, early=False)
    torch.testing.assert_close(found, expected)


def test_a_use_that_comes_late_is_refused_and_nothing_is_kept(monkeypatch):
    model = net()
    optimizer = fastdp.DPSGD(model, lr=0.1, style="layerwise", noise_multiplier=0.0, max_grad_norm=1.0,
                             expected_batch_size=B)  # fmt: skip
    backward = optimizer._privacy.engine._backward
    loss = loss_of(model, batch(0)).mean()
    for places in backward.uses_of.values():
        del places[1:]  # as if each parameter were used once
    with pytest.raises(fastdp.errors.StepError, match="norms were taken already"):
        loss.backward()
    assert not optimizer._privacy.busy
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(fastdp.errors.StepError):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    loss_of(model, batch(0)).mean().backward()
    optimizer.step()


def test_data_that_is_written_to_before_the_last_use_arrives(taken):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x):
            first = self.layer(x)
            between = torch.relu(first)
            first.register_hook(lambda grad: (between.detach().mul_(2), None)[1])
            return self.layer(between)

    model = Twice()
    optimizer = fastdp.DPSGD(model, lr=0.1, style="layerwise", noise_multiplier=0.0, max_grad_norm=1.0,
                             expected_batch_size=B)  # fmt: skip
    with pytest.raises((fastdp.errors.StepError, RuntimeError), match="written to in place|inplace operation"):
        model(torch.randn(B, D)).square().sum(1).mean().backward()
    assert not taken and not optimizer._privacy.busy


def test_clipping_that_changes_within_backward_is_refused(taken):
    model = net()
    optimizer = fastdp.DPSGD(model, lr=0.1, style="layerwise", noise_multiplier=0.0, max_grad_norm=1.0,
                             expected_batch_size=B)  # fmt: skip
    model.blocks[1].register_full_backward_hook(lambda *_: optimizer.set_clipping(max_grad_norm=0.1))
    logits = model(batch(0)[:, :-1])
    with pytest.raises(fastdp.errors.StepError, match="changed within backward"):
        logits.square().sum((1, 2)).mean().backward()
    assert taken and not optimizer._privacy.busy


@pytest.mark.parametrize("style", ["layerwise", "flat"])
def test_the_data_of_a_use_is_dropped(style, monkeypatch):
    """Within backward, or as soon as its sum is there: at most one of eight layers holds data while sums are taken."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])  # too wide to store gradients
    optimizer = fastdp.DPSGD(model, lr=0.1, style=style, noise_multiplier=0.0, max_grad_norm=1.0,
                             expected_batch_size=4)  # fmt: skip
    alive: weakref.WeakSet = weakref.WeakSet()
    held, made, summed = [], Matmul.__init__, Matmul.clipped_sum

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        alive.add(self)

    def clipped_sum(self, *args, **kwargs):
        gc.collect()
        held.append(len(alive))
        return summed(self, *args, **kwargs)

    monkeypatch.setattr(Matmul, "__init__", init)
    monkeypatch.setattr(Matmul, "clipped_sum", clipped_sum)
    model(torch.randn(4, 16, 256)).square().sum((1, 2)).mean().backward()
    assert held == ([1] * 8 if style == "layerwise" else [8, 7, 6, 5, 4, 3, 2, 1])
    optimizer.step()
