"""Tests of independent normal draws: right ones pass, each departure is found in as many draws as an audit has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fastdp.audit import distribution
from fastdp.audit.normality import LEVEL, QUESTIONS, Doubt, groups, over_steps, pairs, shape, worst

from .audit_hand import Hand

STEPS, SIZE = 472, 276
Array = np.ndarray
BLOCKS = [("weight", slice(0, 192)), ("bias", slice(192, 208)), ("head", slice(208, 276))]


def normal(seed: int, steps: int = STEPS, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).normal(size=(steps, size))


def doubts(z: Array) -> dict[str, Doubt]:
    z = z / np.sqrt(np.mean(z**2))
    found = {"shape": shape(z), "groups": groups(z, BLOCKS), "steps": over_steps(z), "pairs": pairs(z)}
    return {name: worst(doubts) for name, doubts in found.items()}


@pytest.mark.parametrize(("steps", "size"), [(STEPS, SIZE), (64, 2000), (560, 8), (24, SIZE), (24, 8), (3, 276)])
def test_right_noise_is_not_doubted(steps: int, size: int) -> None:
    for seed in range(4):
        found = doubts(normal(seed, steps, size))
        assert min(doubt.p_value for doubt in found.values()) > 1e-4, found


@pytest.mark.slow
def test_the_p_value_of_right_noise_is_corrected_for_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    least = np.array([worst(shape(normal(seed, 20, 100))).p_value for seed in range(100)])
    assert np.mean(QUESTIONS * least < 0.05) <= 0.08 < np.mean(least < 0.05)  # of 100
    monkeypatch.setattr(distribution, "shape", lambda z: [Doubt(0.004, "")])
    found = distribution.noise_distribution(Hand())
    assert found.ok and found.p_value == pytest.approx(0.02) and "p = 0.02" in found.sentence


def redrawn(z: Array, edge: float) -> Array:
    draw = np.random.default_rng(99)
    while (beyond := np.abs(z) > edge).any():
        z = np.where(beyond, draw.normal(size=z.shape), z)
    return z


def without(z: Array, chosen: object, factor: float = 0.0) -> Array:
    z = z.copy()
    z[chosen] *= factor
    return z


WRONG: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "cut at 3": ("shape", lambda z: z.clip(-3, 3)),
    "drawn again beyond 3": ("shape", lambda z: redrawn(z, 3)),
    "twelve uniforms": ("shape", lambda z: np.random.default_rng(1).random((12, *z.shape)).sum(0) - 6),
    "a mean": ("shape", lambda z: z + 0.03),
    "some zeros": ("shape", lambda z: z * (np.random.default_rng(1).random(z.shape) > 0.005)),
    "Student": ("shape", lambda z: np.random.default_rng(1).standard_t(20, z.shape)),
    "half on 4 coordinates": ("groups", lambda z: without(z, np.s_[:, -4:], 0.5)),
    "0.97 on a parameter": ("groups", lambda z: without(z, np.s_[:, :192], 0.97)),
    "centred": ("groups", lambda z: z - z.mean(1, keepdims=True)),
    "none at every tenth step": ("steps", lambda z: without(z, np.s_[9::10])),
    "0.9 at every tenth step": ("steps", lambda z: without(z, np.s_[9::10], 0.9)),
    "fading": ("steps", lambda z: z * 0.9998 ** np.arange(len(z))[:, None]),
    "used again": ("pairs", lambda z: np.concatenate([z[:300], z[17 : 17 + len(z) - 300]])),
    "a tenth of the step before": ("pairs", lambda z: z + 0.1 * np.roll(z, 1, 0)),
    "two coordinates alike": ("pairs", lambda z: np.concatenate([z[:, :-1], z[:, :1]], 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_noise_is_doubted(name: str) -> None:
    where, change = WRONG[name]
    for seed in range(3):
        found = doubts(change(normal(seed)))
        assert found[where].p_value < LEVEL and found[where].what, found
