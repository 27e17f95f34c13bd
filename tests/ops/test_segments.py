"""Sums by segment whose sizes follow from no number of a tensor: float64 truth, whatever the lengths of segments."""

from __future__ import annotations

import pytest
import torch

from fastdp.ops import routed, segments
from fastdp.ops.registry import OPERATORS

from .test_routed import SIZES, TYPES, rows, squares, truth


@pytest.fixture
def by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators as they run on a device."""
    monkeypatch.setattr(routed, "_by_tiles", lambda a, g, batch: batch > 0 and a.numel() > 0 and g.numel() > 0)


def operator(name: str):
    return OPERATORS[name].reference


@pytest.mark.parametrize("held", [1, 1 << 30])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_truth(size, dtype, held, by_tiles, monkeypatch):
    data, (experts, batch) = rows(size, dtype), size[3:]
    exact, c = truth(*data, experts, batch), torch.rand(batch)
    monkeypatch.setattr(segments, "_HELD", held)
    norms = operator("routed_norm_sq")(*data, experts, batch, dtype=torch.float64)
    each = operator("routed_per_sample")(*data, experts, batch)
    summed = operator("routed_clipped_sum")(*data, c, experts)
    assert each.dtype == summed.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norms, squares(exact), rtol=1e-5, atol=0)
    torch.testing.assert_close(each.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(summed.double(), torch.einsum("b,beoi->eoi", c.double(), exact), rtol=1e-5, atol=1e-4)


def test_no_number_is_asked_for():
    """Tensors without memory have none."""
    data = [t.to("meta") for t in rows((37, 5, 6, 4, 3))]
    assert operator("routed_norm_sq")(*data, 4, 3).shape == (3,)
    assert operator("routed_per_sample")(*data, 4, 3).shape == (3, 4, 6, 5)
    assert operator("routed_clipped_sum")(*data, torch.rand(3, device="meta"), 4).shape == (4, 6, 5)
    assert routed.rounding(*data, 4, 3).shape == (3,)


@pytest.mark.parametrize("lengths", [[7], [0, 0, 40], [40, 0, 0], [1] * 9, [100, 1, 0, 3, 1, 1, 1], [0, 0], [3, 0, 17]])
@pytest.mark.parametrize("left_out", [0, 5])
def test_every_row_is_in_one_tile_of_its_segment(lengths, left_out):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    count = sum(lengths) + left_out
    if not count:
        return
    tiles = segments.tiles_of(starts, count)
    found = sorted(
        (int(row), int(segment)) for places, real, segment in zip(*tiles, strict=True) for row in places[real]
    )
    assert found == [(sum(lengths[:k]) + n, k) for k, length in enumerate(lengths) for n in range(length)]


@pytest.mark.parametrize("where", ["a", "g"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_sample(value, where, by_tiles):
    a, g, ids, owner = rows((60, 6, 5, 3, 3))
    owner = torch.arange(60) % 3
    ids = torch.arange(60) // 3 % 3
    clean = operator("routed_norm_sq")(a, g, ids, owner, 3, 3)
    wanted = operator("routed_clipped_sum")(a, g, ids, owner, torch.tensor([0.5, 1.0, 0.0]), 3)
    {"a": a, "g": g}[where][owner == 2] = value
    norms = operator("routed_norm_sq")(a, g, ids, owner, 3, 3)
    assert torch.equal(norms[:2], clean[:2]) and not norms[2].isfinite()
    assert torch.equal(operator("routed_clipped_sum")(a, g, ids, owner, torch.tensor([0.5, 1.0, 0.0]), 3), wanted)


def test_all_rows_at_one_expert(by_tiles):
    """Tiles are as long as an average segment; one segment may have all rows."""
    a, g, _, owner = rows((300, 5, 4, 8, 3))
    ids = torch.full_like(owner, 6)
    norms = operator("routed_norm_sq")(a, g, ids, owner, 8, 3, dtype=torch.float64)
    exact = [(g[owner == b].double().T @ a[owner == b].double()).square().sum() for b in range(3)]
    torch.testing.assert_close(norms, torch.stack(exact), rtol=1e-5, atol=0)
