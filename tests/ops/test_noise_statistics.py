"""The noise's distribution, of fixed keys: normal, and independent between elements, slots, parameters and steps."""

import math

import pytest
import torch
from torch import Tensor

from fastdp.ops.noise_reference import LANES, SLOTS, TILE

from .noise_truth import correlation, draw, kolmogorov, released

COUNT = 1 << 20


@pytest.fixture(scope="module")
def samples() -> Tensor:
    return draw(COUNT, offset=12345, dtype=torch.float64)


def test_distribution_of_float_noise_is_normal() -> None:
    single = draw(COUNT, offset=54321).double()
    assert kolmogorov(single) < 1.95 and abs(correlation(single[:-64], single[64:])) < 4.5 / math.sqrt(COUNT)


def test_distribution_of_what_is_released_is_the_rounded_normal_one() -> None:
    assert kolmogorov(released(torch.zeros(COUNT), 1.0, offset=54321).double(), 1 / 64) < 1.95


def test_distribution_is_normal(samples: Tensor) -> None:
    assert kolmogorov(samples) < 1.95
    assert kolmogorov(samples[:: 2 * LANES]) < 1.95
    assert kolmogorov(1.01 * samples) > 1.95 and kolmogorov(samples + 0.01) > 1.95  # the test can fail


def test_moments(samples: Tensor) -> None:
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        error = float((samples**power).mean()) - mean
        assert abs(error) < 4.5 * math.sqrt(variance / COUNT), power
    for sigma in (1, 2, 3, 4):
        share = math.erfc(sigma / math.sqrt(2))
        found = float((samples.abs() > sigma).double().mean())
        assert abs(found - share) < 4.5 * math.sqrt(share / COUNT), sigma


@pytest.mark.parametrize(
    "lag", [1, 2, 32, LANES - 1, LANES, LANES + 1, 2 * LANES, 5 * LANES, 15 * LANES, TILE, 4 * TILE]
)
def test_neighbours_are_independent(samples: Tensor, lag: int) -> None:
    a, b = samples[:-lag], samples[lag:]
    for f in (lambda x: x, lambda x: x**2, lambda x: x.abs(), torch.sign):  # a pair shares its radius
        assert abs(correlation(f(a), f(b))) < 4.5 / math.sqrt(COUNT)


def test_slots_of_a_block_are_independent(samples: Tensor) -> None:
    """Those of a pair, which share a radius, and those of others."""
    whole = samples[-12345 % TILE :]
    slots = whole[: len(whole) // TILE * TILE].view(-1, SLOTS, LANES).transpose(0, 1).flatten(1)  # [16, n]
    for f in (lambda x: x, lambda x: x**2, lambda x: x.abs(), torch.sign):
        found = torch.corrcoef(f(slots)) - torch.eye(SLOTS, dtype=torch.float64)
        assert found.abs().max() < 4.5 / math.sqrt(slots.size(1))
    for slot in slots:
        assert kolmogorov(slot) < 1.95
    angles = torch.atan2(slots[1::2], slots[0::2]) / (2 * math.pi) + 0.5
    for angle in angles:
        assert kolmogorov(torch.special.ndtri(angle)) < 1.95


def test_disjoint_ranges_parameters_steps_are_independent_and_normal() -> None:
    count = 1 << 16
    draws = [
        draw(count, step=step, offset=rank * count + 31, dtype=torch.float64) for step in (0, 1) for rank in range(4)
    ]
    for x in draws:
        assert kolmogorov(x) < 1.95
    for k, x in enumerate(draws):
        assert all(abs(correlation(x, y)) < 4.5 / math.sqrt(count) for y in draws[:k])
    assert kolmogorov(torch.stack(draws).t()[0:8000].flatten()) < 1.95  # the same indices across steps and ranks
