"""Clip factors: the bound holds in exact arithmetic, over the whole range of floats."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from fastdp.ops import clip_factors
from fastdp.ops.clip import KINDS, MARGIN

from .backends import CPU, TRITON

SQUARES = [0.0, 5e-324, 1e-300, 1e300, 1.7e308, 1e-45, 1e-38, 2e-38, 1e-8, 0.25, 0.999999, 1.0, 1.000001, 4.0, 1e38,
           math.inf, math.nan]  # fmt: skip


def check_clip_factors(device: str, margin: float = 3e-6) -> None:
    """margin: what must be left for the error of the norm, nearly all of MARGIN."""
    generator = torch.Generator().manual_seed(0)
    usual = torch.logspace(-12, 12, 60, dtype=torch.float64) * (torch.rand(60, generator=generator) + 0.5)
    for dtype in (torch.float64, torch.float32):
        norm_sq = torch.cat([usual, torch.tensor(SQUARES, dtype=torch.float64)]).to(dtype)
        for kind in KINDS:
            for limit in (1.0, 1e-3, 1e6, 1e-20, 1e15):
                for gamma in (0.01, 0.0, 1e-300, 5.0):
                    check_bound(norm_sq, clip_factors(norm_sq.to(device), limit, kind, gamma).cpu(), limit, margin)
                    check_size(norm_sq, clip_factors(norm_sq.to(device), limit, kind, gamma).cpu(), limit, kind, gamma)
    turned = torch.rand(300, 2, dtype=torch.float64)[:, 1].to(device)
    assert torch.equal(clip_factors(turned, 2.0), clip_factors(turned.contiguous(), 2.0))
    assert clip_factors(torch.zeros(0, device=device), 1.0).shape == (0,)


def check_bound(norm_sq: torch.Tensor, found: torch.Tensor, limit: float, margin: float) -> None:
    """c n <= R as c^2 n^2 <= R^2, without rounding."""
    assert found.dtype == torch.float32 and bool(found.isfinite().all())
    assert bool((found[~norm_sq.isfinite()] == 0).all()) and bool(((found == 0) | (found >= 2.0**-126)).all())
    for square, c in zip(norm_sq.tolist(), found.tolist(), strict=True):
        if math.isfinite(square):
            assert Fraction(c) ** 2 * Fraction(square) * (1 + Fraction(margin)) ** 2 <= Fraction(limit) ** 2


def check_size(norm_sq: torch.Tensor, found: torch.Tensor, limit: float, kind: str, gamma: float) -> None:
    """Factors are not needlessly small."""
    norm = norm_sq.double().sqrt()
    wanted = {"local": (limit / norm).clamp(max=1), "global": (norm * (1 + MARGIN) <= limit).double(),
              "automatic": limit / (norm + gamma)}[kind]  # fmt: skip
    usual = (norm > 1e-6) & (norm < 1e6) & (wanted > 1e-30)
    assert bool((found[usual] >= wanted[usual] * (1 - 2 * MARGIN)).all())
    assert kind == "automatic" or bool((found <= 1).all())


@pytest.mark.parametrize("backend", [*CPU[:1], *TRITON[:1]], indirect=True)
def test_no_contribution_exceeds_the_bound(backend: str) -> None:
    check_clip_factors("cpu")


def test_known_values() -> None:
    squares = torch.tensor([0.0, 1.0, 4.0, math.inf, math.nan, -1.0])
    assert clip_factors(squares, 1.0).tolist() == pytest.approx([1, 1 - MARGIN, 0.5, 0, 0, 0], rel=1e-5)
    assert clip_factors(squares, 1.5, "global").tolist() == [1, 1, 0, 0, 0, 0]
    automatic = clip_factors(squares, 1.0, "automatic").tolist()
    assert automatic == pytest.approx([100, 1 / 1.01, 1 / 2.01, 0, 0, 0], rel=1e-5)
    assert clip_factors(squares, 1.0, "automatic", 0.0)[0] == 0


@pytest.mark.parametrize(
    ("error", "given"),
    [(ValueError, (torch.ones(2), 1.0, "other")), (ValueError, (torch.ones(2), -1.0)),
     (ValueError, (torch.ones(2), 0.0)), (TypeError, (torch.ones(2).half(), 1.0))],
)  # fmt: skip
def test_refusals(error: type[Exception], given: tuple) -> None:
    with pytest.raises(error):
        clip_factors(*given)
