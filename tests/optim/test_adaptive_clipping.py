"""Adaptive clipping: the norm follows a private quantile; gradients and count are one Gaussian mechanism together."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import fastdp
from fastdp.errors import ClippingError, StepError
from fastdp.mechanisms import DPFTRL, check_unclipped
from fastdp.ops.noise import key_of
from fastdp.ops.noise_reference import Grid, reference_noise
from fastdp.optim.adaptive_clipping import PLACE, Quantile
from fastdp.schedule import Schedule

from ..by_hand import network, records

SIGMA, START = 1.2, 3.0
OPTIONS = {"noise_multiplier": SIGMA, "max_grad_norm": START, "clipping": "adaptive", "count_noise": 1.5,
           "target_quantile": 0.3, "quantile_rate": 0.4}  # fmt: skip
OF_GRADIENTS = (SIGMA**-2 - (2 * 1.5) ** -2) ** -0.5


def adaptive(model, **options):
    return fastdp.DPSGD(model, lr=0.5, **{**OPTIONS, **options})


class ByHand:
    """Samples one at a time in float64, the paper's update of the norm, and the noise of the seed's generator."""

    def __init__(self, model, seed, expected):
        self.model, self.key, self.expected = copy.deepcopy(model).double(), key_of(seed), expected
        self.norm, self.steps = START, 0
        self.begin()

    def begin(self):
        self.sums, self.count = [torch.zeros_like(p) for p in self.model.parameters()], 0.0

    def see(self, x, y):
        for i in range(len(x)):
            self.model.zero_grad()
            F.cross_entropy(self.model(x[i : i + 1].double()), y[i : i + 1]).backward()
            grads = [p.grad.clone() for p in self.model.parameters()]
            norm = float(torch.stack([g.square().sum() for g in grads]).sum().sqrt())
            if not math.isfinite(norm):
                continue
            for total, grad in zip(self.sums, grads, strict=True):
                total += grad * min(1.0, self.norm / norm)
            self.count += 0.5 if norm <= self.norm else -0.5

    def released(self, total, std, offset):
        noise = reference_noise(total.numel(), self.key, self.steps, offset).view_as(total)
        unit = Grid.of(std, torch.float32).unit
        return ((total + std * noise) / unit).round() * unit

    def step(self):
        offset = 0
        with torch.no_grad():
            for p, total in zip(self.model.parameters(), self.sums, strict=True):
                p -= 0.5 * self.released(total, OF_GRADIENTS * self.norm, offset) / self.expected
                offset += p.numel()
        share = float(self.released(torch.tensor([self.count]), 1.5, PLACE)) / self.expected + 0.5
        self.norm *= math.exp(-0.4 * (share - 0.3))
        self.steps += 1
        self.begin()


def graphed(optimizer):
    return optimizer.graphed(lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"))


@pytest.mark.parametrize("way", ["loop", "graphed"])
def test_the_whole_run_is_that_by_hand(way):
    """Poisson batches, empty ones among them, in physical parts; a sample of NaN; the noise of a seed."""
    x, y = records().tensors
    x = x.clone()
    x[7] = float("nan")
    loader = fastdp.poisson_loader(
        TensorDataset(x, y), sample_rate=0.05, steps=40, max_physical_batch_size=3, seed=2
    )  # fmt: skip
    model = network()
    optimizer, hand = adaptive(model, seed=5), ByHand(model, 5, 2)
    step = graphed(optimizer) if way == "graphed" else None
    steps, empty, parts = 0, 0, 0
    for inputs, labels in loader:
        empty, parts = empty + (len(inputs) == 0), parts + 1
        if step is None:
            if len(inputs):
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            step(inputs, labels)
        hand.see(inputs, labels)
        if optimizer.stepped:
            hand.step()
            steps += 1
            assert optimizer.max_grad_norm == pytest.approx(hand.norm, rel=1e-6)
    assert steps == 40 and empty > 2 and parts > steps and optimizer.nonfinite_samples > 0
    for mine, theirs in zip(model.parameters(), hand.model.parameters(), strict=True):
        assert torch.allclose(mine.double(), theirs, rtol=1e-4, atol=1e-5)
    assert optimizer.history == [(SIGMA, 0.05, 40)]
    assert optimizer.epsilon(1e-2) == fastdp.accounting.epsilon_of([(SIGMA, 0.05, 40)], 1e-2)


def test_multipliers_add_up_and_a_count_that_spends_too_much_is_refused():
    quantile = Quantile(count_noise=2.0)
    z = quantile.of_gradients(1.5, 100)
    assert (z**-2 + (2 * 2.0) ** -2) ** -0.5 == pytest.approx(1.5, rel=1e-12) and z > 1.5
    assert Quantile().noise_of(64) == 3.2 and quantile.of_gradients(0.0, 100) == 0.0
    with pytest.raises(ClippingError, match="count_noise= above 0.6"):
        adaptive(network(), count_noise=None, expected_batch_size=12)
    model = network()
    optimizer = adaptive(model, expected_batch_size=4)
    optimizer.noise_multiplier = 3.0
    before = copy.deepcopy(model.state_dict())
    x, y = records()[:4]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ClippingError, match="count_noise= above 1.5"):
        optimizer.step()
    assert optimizer.history == [] and all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    optimizer.noise_multiplier = 1.0  # and the run goes on, with this batch
    optimizer.step()
    assert optimizer.history == [(1.0, None, 1)]


def test_a_checkpoint_holds_the_norm_and_what_it_follows():
    def steps(model, optimizer, batches):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    data = [records()[4 * i : 4 * i + 4] for i in range(6)]
    model = network()
    optimizer = adaptive(model, expected_batch_size=4, seed=3)
    steps(model, optimizer, data[:3])
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    steps(model, optimizer, data[3:])
    again = network()
    again.load_state_dict(weights)
    other = adaptive(again, expected_batch_size=4, seed=3, max_grad_norm=9.0, quantile_rate=0.1, target_quantile=0.9)
    other.load_state_dict(state)
    steps(again, other, data[3:])
    assert other.max_grad_norm == optimizer.max_grad_norm and other.history == optimizer.history
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    # all or nothing, and no other kind of clipping
    fixed = fastdp.DPSGD(network(), lr=0.5, noise_multiplier=1.0)
    with pytest.raises(StepError, match='with clipping="adaptive"'):
        fixed.load_state_dict(state)
    with pytest.raises(StepError, match='without clipping="adaptive"'):
        other.load_state_dict(fixed.state_dict())
    state["fastdp"]["quantile"]["rate"] = -1.0
    norm = other.max_grad_norm
    with pytest.raises(StepError, match="no state of a fastdp optimizer"):
        other.load_state_dict({**state, "fastdp": {**state["fastdp"], "max_grad_norm": 0.01}})
    assert other.max_grad_norm == norm and fixed.max_grad_norm == 1.0


def test_what_it_is_not_for_is_refused():
    model = network()
    for style in ("layerwise", [{"params": [n for n, _ in model.named_parameters()], "max_grad_norm": 1.0}]):
        with pytest.raises(ClippingError, match="one clipping norm"):
            adaptive(model, style=style, expected_batch_size=4)
    with pytest.raises(ClippingError, match='which is clipping="adaptive"'):
        fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, count_noise=2.0)
    with pytest.raises(ClippingError, match="not for this optimizer"):
        DPFTRL(model, lr=1.0, noise_multiplier=1.0, clipping="adaptive")
    for wrong in ({"target_quantile": 1.0}, {"quantile_rate": 0}, {"count_noise": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            adaptive(model, expected_batch_size=4, **wrong)
    with pytest.raises(ClippingError, match="chosen when the optimizer is made"):
        fastdp.DPSGD(network(), lr=1.0, noise_multiplier=1.0).set_clipping("adaptive")
    optimizer = adaptive(model)
    with pytest.raises(ClippingError, match="follows its quantile"):
        optimizer.set_clipping(max_grad_norm=2.0)
    with pytest.raises(ClippingError, match="follows its quantile"):
        Schedule([(0, {"max_grad_norm": 2.0})]).apply(optimizer)
    x, y = records()[:4]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(StepError, match="a sampler needs a fixed norm"):
        check_unclipped(optimizer)
    with pytest.raises(StepError, match="give expected_batch_size="):
        optimizer.step()


def test_a_norm_that_runs_away_ends_the_run_after_its_step():
    model = network()
    optimizer = adaptive(model, expected_batch_size=4, noise_multiplier=0.0, quantile_rate=100.0, max_grad_norm=1e3)
    x, y = records()[:4]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ClippingError, match="has come to .*make a new optimizer"):
        F.cross_entropy(model(x), y).backward()
    assert len(optimizer.history) == 1
