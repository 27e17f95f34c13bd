"""Layerwise clipping within backward: the numbers of its end, what stays until then, and what is held."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastdp
import fastdp.engine.layerwise as layerwise_module
from fastdp.diagnostics import GradientDiagnostics
from fastdp.engine.layerwise import LayerwiseSums
from fastdp.grad_sample.linear import Matmul

from .. import cases

B, T, D = 6, 5, 8


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No layer that is ready waits for another."""
    monkeypatch.setattr(layerwise_module, "WINDOW", 0)


@pytest.fixture
def taken(monkeypatch):
    """The groups that were taken early, as numbers of their parameters."""
    made, found = LayerwiseSums._take, []

    def take(self, numbers, uses, batch):
        found.extend(len(self._groups[number]) for number in numbers)
        return made(self, numbers, uses, batch)

    monkeypatch.setattr(LayerwiseSums, "_take", take)
    return found


class Calls(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


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


def layerwise(model, count=B):
    return fastdp.DPSGD(
        model, lr=0.1, style="layerwise", noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=count
    )


def net(how=None):
    torch.manual_seed(1)
    return Net(how)


def taken_early(taken, make, step=None, digits=None, **options):
    """Sizes of the groups that were taken early, in steps with the weights and norms of those without any."""
    found, norms = trained(make(), step=step, **options)
    early = list(taken)
    expected, known = trained(make(), step=step, early=False, **options)
    assert taken == early and list(norms) == list(known)
    for a, b in ((found, expected), *((norms[name], known[name]) for name in known)):
        torch.testing.assert_close(a, b, rtol=digits or 0, atol=(digits or 0) / 10)
    return early


@pytest.mark.parametrize("clipping", ["local", "global", "automatic"])
def test_the_same_bits_as_at_the_end_of_backward(taken, clipping):
    assert len(taken_early(taken, net, clipping=clipping)) == 4 * 7  # every layer, also those with two uses


@pytest.mark.parametrize("clipping", ["local", "global", "automatic"])
def test_layers_that_wait_for_each_other(taken, monkeypatch, clipping):
    """Some are taken together within backward; those of small models all at its end."""
    expected, norms = trained(net(), clipping=clipping)
    assert len(taken) == 4 * 7
    made, together = layerwise_module.Gradients, []
    monkeypatch.setattr(layerwise_module, "Gradients", lambda *args: together.append(1) or made(*args))
    for window, early, times in ((4_000, 28, 16), (12_000, 16, 4), (1 << 20, 0, 0)):
        monkeypatch.setattr(layerwise_module, "WINDOW", window)
        taken.clear()
        together.clear()
        found, others = trained(net(), clipping=clipping)
        assert (len(taken), len(together)) == (early, times)
        for a, b in ((found, expected), *((others[name], norms[name]) for name in norms)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_small_layers_cost_the_calls_of_flat_clipping(monkeypatch):
    monkeypatch.setattr(layerwise_module, "WINDOW", 1 << 20)
    counts = {}
    for style in ("flat", "layerwise"):
        model = net()
        optimizer = fastdp.DPSGD(model, lr=0.1, style=style, noise_multiplier=0.0, max_grad_norm=1.0,
                                 expected_batch_size=B)  # fmt: skip
        for seed in range(2):
            loss_of(model, batch(seed)).mean().backward()
            optimizer.step()
        with Calls() as calls:
            loss_of(model, batch(2)).mean().backward()
        counts[style] = calls.count
    assert counts["layerwise"] < 1.1 * counts["flat"]


@pytest.mark.parametrize("how", ["reentrant", "not"])
def test_checkpointing(taken, how):
    early = taken_early(taken, lambda: net(how), digits=1e-5)
    assert len(early) == 4 * (7 if how == "not" else 1)  # a region that runs again is not counted: those wait


def of_rows(model, seed):
    x = torch.randn(B, D, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum(1).mean().backward()


def odd():
    """A layer with a parameter that no backward reaches, one made of two layers, a frozen one."""
    torch.manual_seed(2)
    product = lambda m, x: F.linear(x, m.a.weight * m.b.weight, m.a.bias + m.b.bias)
    forward = lambda m, x: (m.unused(x), m.c(torch.tanh(product(m, x))))[1]
    model = cases.Net(forward, **{name: nn.Linear(D, D) for name in ("a", "b", "c", "unused")})
    model.c.weight.requires_grad_(False)
    return model


def test_what_never_is_complete_is_taken_at_the_end(taken):
    assert taken_early(taken, odd, of_rows, digits=1e-5) == [1] * 4


def alone(model, rows, limit):
    """The clipped sum of a layerwise step, one sample at a time by plain autograd, by name."""
    model = copy.deepcopy(model).double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers = {name.rpartition(".")[0]: [] for name in named}
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for name in named:
        layers[name.rpartition(".")[0]].append(name)
    for row in rows.double():
        out = torch.func.functional_call(model, named, (row[None],))
        grads = dict(
            zip(named, torch.autograd.grad(out.square().sum(), named.values(), allow_unused=True), strict=True)
        )
        for names in layers.values():
            own = {name: grads[name] for name in names if grads[name] is not None}
            norm = float(torch.cat([torch.zeros(1), *(g.flatten() for g in own.values())]).norm())
            for name, g in own.items():
                total[name] += min(1.0, limit / len(layers) ** 0.5 / max(norm, 1e-30)) * g
    return total


@pytest.mark.parametrize("window", [0, 500, 1 << 20])
def test_a_weight_made_of_two_layers_has_the_factors_of_each(window, monkeypatch):
    monkeypatch.setattr(layerwise_module, "WINDOW", window)
    model, rows = odd(), torch.randn(B, D, generator=torch.Generator().manual_seed(0))
    optimizer = fastdp.DPSGD(model, lr=0.0, style="layerwise", noise_multiplier=0.0, max_grad_norm=0.4,
                             loss_reduction="sum")  # fmt: skip
    model(rows).square().sum().backward()
    optimizer.step()
    expected = alone(model, rows, 0.4)
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_what_other_parameters_need_stays_until_they_were_asked_for():
    """Parts of a model are asked for one after the other, where each is gathered apart."""
    rows, factors, found = torch.randn(B, D), torch.rand(B), []
    for names in (["a.weight", "b.weight"],), (["a.weight"], ["b.weight"]):
        model = odd()
        engine = fastdp.PerSampleGradients(model)
        model(rows).square().sum(1).mean().backward()
        sums = {}
        for some in names:
            parameters = [model.get_parameter(name) for name in some]
            with torch.no_grad():
                sums.update(engine._backward.gradients.clipped_sum(factors, parameters, last=True))
        found.append([sums[id(model.get_parameter(name))] for name in ("a.weight", "b.weight")])
        engine.detach()
    for joint, apart in zip(*found, strict=True):
        assert torch.equal(joint, apart) and joint.any()


def test_layers_of_a_step_that_was_flat_do_not_wait(taken):
    """The next backward is like it, but for what may be taken early."""
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D))
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=B)
    for style in ("flat", "layerwise", "flat", "layerwise"):
        optimizer.set_clipping(style=style)
        taken.clear()
        for seed in range(2):
            of_rows(model, seed)
            optimizer.step()
        assert len(taken) == (2 * 3 if style == "layerwise" else 0)


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


NAMES = [name for name, _ in Net().named_parameters()]
GROUPS = [{"params": NAMES[:3], "max_grad_norm": 0.3}, {"params": NAMES[3:], "max_grad_norm": 0.4}]


@pytest.mark.parametrize("style", ["layerwise", GROUPS])
def test_a_sample_that_is_not_finite_contributes_to_no_layer(taken, style):
    def step(model, seed):
        factors = torch.ones(B)
        factors[2] = float("nan")
        (loss_of(model, batch(seed)) * factors).mean().backward()

    def without(model, seed):
        losses = loss_of(model, batch(seed)[[0, 1, 3, 4, 5]])
        losses.mean().backward()

    found, norms = trained(net(), step=step, style=style)
    assert bool(taken) == (style == "layerwise")
    assert all(not torch.isfinite(rows[2]) for rows in norms.values()) or style is GROUPS
    expected, _ = trained(net(), step=without, style=style)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_use_that_comes_late_is_refused_and_nothing_is_kept(monkeypatch):
    model = net()
    optimizer = layerwise(model)
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


def test_clipping_that_changes_within_backward_is_refused(taken):
    model = net()
    optimizer = layerwise(model)
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
