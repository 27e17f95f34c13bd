"""Clip factors: the bound holds in exact arithmetic, over the whole range of floats."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastdp.ops import clip_factors
from fastdp.ops.clip import KINDS, MARGIN

squares = st.floats().map(abs)
radii = st.floats(min_value=1e-15, max_value=1e15)


@settings(max_examples=400, deadline=None)
@given(square=squares, radius=radii, kind=st.sampled_from(KINDS), gamma=st.sampled_from([0.0, 0.01, 1e-300, 5.0]),
       single=st.booleans())  # fmt: skip
@example(square=5e-324, radius=1e15, kind="automatic", gamma=0.0, single=False)
@example(square=1e-45, radius=1e15, kind="automatic", gamma=0.0, single=True)
@example(square=1.7e308, radius=1e-15, kind="local", gamma=0.0, single=False)
@example(square=1.0, radius=1.0, kind="global", gamma=0.0, single=True)
def test_no_contribution_exceeds_the_bound(square: float, radius: float, kind: str, gamma: float, single: bool) -> None:
    norm_sq = torch.tensor([square], dtype=torch.float32 if single else torch.float64)
    c = clip_factors(norm_sq, radius, kind, gamma)
    assert c.dtype == torch.float32
    factor, given_square = float(c), float(norm_sq)
    assert math.isfinite(factor) and factor >= 0
    if not math.isfinite(given_square):
        assert factor == 0
        return
    assert factor == 0 or factor >= 2.0**-126
    # c n <= R as c^2 n^2 <= R^2, with nearly all of the margin for the error of the norm left
    left = Fraction(factor) ** 2 * Fraction(given_square) * (1 + Fraction(3e-6)) ** 2
    assert left <= Fraction(radius) ** 2
    if kind == "local":
        assert factor <= 1
    elif kind == "global":
        assert factor in (0, 1)
    norm = math.sqrt(given_square)
    if 1e-10 < norm < 1e10 and 1e-10 < radius < 1e10 and kind != "global":  # and it is not needlessly small
        wanted = radius / (norm + gamma) if kind == "automatic" else min(1.0, radius / norm)
        assert factor >= wanted * (1 - 2 * MARGIN)


def test_known_values() -> None:
    squares = torch.tensor([0.0, 1.0, 4.0, math.inf, math.nan, -1.0])
    assert clip_factors(squares, 1.0).tolist() == pytest.approx([1, 1 - MARGIN, 0.5, 0, 0, 0], rel=1e-5)
    assert clip_factors(squares, 1.5, "global").tolist() == [1, 1, 0, 0, 0, 0]
    assert clip_factors(squares, 1.0, "automatic").tolist() == pytest.approx(
        [100, 1 / 1.01, 1 / 2.01, 0, 0, 0], rel=1e-5
    )
    assert clip_factors(squares, 1.0, "automatic", 0.0)[0] == 0


def test_refusals_and_registration() -> None:
    with pytest.raises(ValueError):
        clip_factors(torch.ones(2), 1.0, "other")
    with pytest.raises(ValueError):
        clip_factors(torch.ones(2), -1.0)
    with pytest.raises(TypeError):
        clip_factors(torch.ones(2).half(), 1.0)
    assert clip_factors(torch.ones(0), 1.0).shape == (0,)
    torch.library.opcheck(torch.ops.fastdp.clip_factors.default, (torch.rand(4), 1.0, "automatic", 0.1))
