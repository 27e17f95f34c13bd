"""Samples that global clipping drops: their part of the sum is neither computed nor read."""

from __future__ import annotations

import pytest
import torch

from fastdp import ops
from fastdp.ops.common import of_kept
from fastdp.ops.geometry import Geometry


def test_what_is_kept():
    c, a = torch.tensor([0.0, 2.0, 0.0, 0.5]), torch.arange(8.0).view(4, 2)
    factors, rows = of_kept(c, a)
    assert factors.tolist() == [2.0, 0.5] and rows.tolist() == [[2.0, 3.0], [6.0, 7.0]]
    whole = torch.ones(4)
    assert of_kept(whole, a)[1] is a  # no copy where all count


@pytest.mark.parametrize("wide", [3, 9])  # the narrower side is scaled
@pytest.mark.parametrize("factors", [[0.0, 1.0, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0], [0.5, 1.0, 1.0, 0.25]])
def test_linear(wide, factors):
    torch.manual_seed(0)
    a, g, c = torch.randn(4, 6, wide), torch.randn(4, 6, 5), torch.tensor(factors)
    want = torch.einsum("b,bti,bto->oi", c.double(), a.double(), g.double())
    a[c == 0], g[c == 0] = float("nan"), float("inf")
    torch.testing.assert_close(ops.linear_clipped_sum(a, g, c).double(), want, rtol=1e-5, atol=1e-5)
    into = torch.full((5, wide), 7.0)
    torch.testing.assert_close(ops.linear.overwrite_clipped_sum(a, g, c, into).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factors", [[0.0, 1.0, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0]])
def test_conv(factors):
    torch.manual_seed(0)
    x, g, c = torch.randn(4, 1, 2, 5, 5), torch.randn(4, 1, 3, 3, 3), torch.tensor(factors)
    geometry = Geometry((3, 2, 3, 3), (1, 1), (0, 0), (1, 1))
    each = torch.stack([ops.conv.per_sample(x[b : b + 1], g[b : b + 1], geometry)[0] for b in range(4)])
    want = torch.einsum("b,b...->...", c.double(), each.double())
    x[c == 0], g[c == 0] = float("nan"), float("inf")
    torch.testing.assert_close(ops.conv.clipped_sum(x, g, c, geometry).double(), want, rtol=1e-5, atol=1e-5)
