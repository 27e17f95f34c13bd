"""Poisson samples cut to a largest size: never larger, else as drawn, and paid for in epsilon."""

from __future__ import annotations

import io
import itertools
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import norm
from torch import nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.errors import AccountingError
from fastdp.sampling import max_batch_size_for, truncation

pytestmark = pytest.mark.slow  # `make test-all` runs it

# --------------------------------------------------------------------------- how probable it is


@pytest.mark.parametrize(("samples", "rate", "size"), [(12, 0.3, 7), (40, 0.05, 20), (5, 1.0, 4), (9, 0.5, 0)])
@pytest.mark.filterwarnings("error")
def test_the_probability_is_the_tail_of_one_sample_more(samples: int, rate: float, size: int) -> None:
    q, n = Fraction(rate), samples + 1
    tail = sum(math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(size + 1, n + 1))
    assert truncation(samples, rate, size) == pytest.approx(float(tail), rel=1e-7)
    assert truncation(samples, rate, size) >= float(tail)


def test_the_size_for_a_share_of_delta_is_the_smallest() -> None:
    samples, rate, steps, delta = 60_000, 256 / 60_000, 14_000, 1e-6
    size = max_batch_size_for(samples, rate, steps, delta, epsilon=8.0, share=0.05)
    most = 0.05 * delta / (1 + math.exp(8.0)) / steps
    assert truncation(samples, rate, size) <= most < truncation(samples, rate, size - 1)
    assert 256 < size < 512
    assert max_batch_size_for(3, 0.9, 100, 1e-5) == 4  # cuts nothing: any smaller one costs all of delta
    assert max_batch_size_for(50, 1.0, 10, 1e-5) == 51
    for wrong in (dict(delta=0.0), dict(share=1.0), dict(steps=0), dict(sample_rate=0.0), dict(epsilon=-1.0)):
        with pytest.raises(AccountingError):
            max_batch_size_for(**{**dict(samples=10, sample_rate=0.1, steps=3, delta=1e-5), **wrong})


def test_the_page_has_these_sizes() -> None:
    text = (Path(fastdp.__file__).parent.parent / "docs" / "loops.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (1e-\d) \| (\d+) \| ([\d,]+) \|", text, re.M)
    assert len(rows) == 4
    for row in rows:
        samples, batch, steps, size = (int(row[k].replace(",", "")) for k in (0, 1, 2, 5))
        assert size == max_batch_size_for(samples, batch / samples, steps, float(row[3]), epsilon=float(row[4]))


# --------------------------------------------------------------------------- what it costs


def sums_of(values: list[int], rate: float, largest: int) -> dict[int, float]:
    """The distribution of the sum of a Poisson sample of these values, cut to the largest size."""
    found: dict[int, float] = {}
    for chosen in itertools.product((0, 1), repeat=len(values)):
        chance = math.prod(rate if c else 1 - rate for c in chosen)
        places = [k for k, c in enumerate(chosen) if c]
        kept = list(itertools.combinations(places, min(len(places), largest)))
        for subset in kept:
            total = sum(values[k] for k in subset)
            found[total] = found.get(total, 0.0) + chance / len(kept)
    return found


def delta_between(one: dict[int, float], other: dict[int, float], sigma: float, epsilon: float) -> float:
    """By how much a set can be more probable under one sum with noise than exp(epsilon) times under the other."""
    grid = np.linspace(-12 * sigma - 8, 12 * sigma + 8, 200_001)
    p, q = (sum(w * norm.pdf(grid, loc=mean, scale=sigma) for mean, w in sums.items()) for sums in (one, other))
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (grid[1] - grid[0]))


@pytest.mark.parametrize("values", [[1, 1, 1, 1, -1, -1, -1], [1, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("largest", [4, 5])
def test_epsilon_bounds_what_a_cut_sample_tells(values: list[int], largest: int) -> None:
    """One step, the worst that a record of size 1 can do: against every set of outcomes, by numbers."""
    sigma, rate, delta = 1.0, 0.2, 0.12
    more = [*values, 1]
    chance = truncation(len(values), rate, largest)
    epsilon = epsilon_of([(sigma, rate, 1, chance)], delta, "prv")
    one, other = (sums_of(each, rate, largest) for each in (values, more))
    if math.isfinite(epsilon):
        assert max(delta_between(one, other, sigma, epsilon), delta_between(other, one, sigma, epsilon)) <= delta
    assert largest == 4 or math.isfinite(epsilon)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_epsilon_pays_out_of_delta(accountant: str) -> None:
    run, delta = (1.1, 0.01, 1000), 1e-5
    plain = epsilon_of([run], delta, accountant)
    before = plain
    for chance in (1e-16, 1e-12, 1e-10):
        found = epsilon_of([(*run, chance)], delta, accountant)
        left = delta - (1 + math.exp(found)) * chance * run[2]
        assert before <= found < math.inf
        assert epsilon_of([run], left, accountant) <= found * (1 + 1e-9)
        before = found
    assert epsilon_of([(*run, 1e-16)], delta, accountant) == pytest.approx(plain, rel=1e-3)
    assert epsilon_of([(*run, 1e-6)], delta, accountant) == math.inf
    assert epsilon_of([(*run, 0.0)], delta, accountant) == plain
    parts = [(1.1, 0.01, 400, 1e-12), (1.1, 0.01, 600)]
    assert plain <= epsilon_of(parts, delta, accountant) <= epsilon_of([(*run, 1e-12)], delta, accountant)
    with pytest.raises(AccountingError, match="probability"):
        epsilon_of([(*run, -0.1)], delta, accountant)


# --------------------------------------------------------------------------- what the loader hands out


def drawn(size: int | None, steps: int = 300, **options) -> list[list[int]]:
    data = TensorDataset(torch.arange(20))
    loader = fastdp.poisson_loader(data, sample_rate=0.3, max_batch_size=size, steps=steps, seed=1, **options)
    return [rows.tolist() for (rows,) in loader]


def test_batches_are_never_larger_and_else_as_drawn() -> None:
    whole, cut = drawn(None), drawn(8)
    assert max(map(len, whole)) > 8 == max(map(len, cut))
    for a, b in zip(whole, cut, strict=True):
        assert a == b if len(a) <= 8 else (len(b) == 8 and set(b) < set(a) and b == sorted(b))


def test_sizes_that_no_epsilon_holds_for_are_refused() -> None:
    data = TensorDataset(torch.arange(1000))
    with pytest.raises(ValueError, match=r"finds a size that costs little: 1\d\d here"):
        fastdp.poisson_loader(data, expected_batch_size=100, max_batch_size=100)
    for size in (0, 2.5):
        with pytest.raises(ValueError, match="max_batch_size must be a whole number"):
            fastdp.poisson_loader(data, expected_batch_size=100, max_batch_size=size)
    whole = fastdp.poisson_loader(data, sample_rate=1.0, max_batch_size=1000, steps=1)
    assert [len(rows) for (rows,) in whole] == [1000]


# --------------------------------------------------------------------------- what is counted


def train(steps: int, size: int | None, state=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    loader = fastdp.poisson_loader(data, sample_rate=0.1, max_batch_size=size, steps=steps, seed=3)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    if state is not None:
        optimizer.load_state_dict(state)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_steps_on_cut_samples_are_counted_as_such() -> None:
    chance = truncation(40, 0.1, 12)
    optimizer = train(5, 12)
    assert optimizer.history == [(1.0, 0.1, 5, chance)]
    assert optimizer.epsilon(1e-3) > train(5, None).epsilon(1e-3)
    kept = io.BytesIO()
    torch.save(optimizer.state_dict(), kept)
    kept.seek(0)
    state = torch.load(kept, weights_only=True)
    assert train(2, 12, state).history == [(1.0, 0.1, 7, chance)]
    both = train(2, None, state)
    assert both.history == [(1.0, 0.1, 5, chance), (1.0, 0.1, 2)]
    assert train(1, 13, both.state_dict()).history[-1] == (1.0, 0.1, 1, truncation(40, 0.1, 13))
