"""Operators of routed rows (experts): every backend against float64 row by row, whatever their order and lengths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fastdp
from fastdp import ops
from fastdp.ops import routed, segments
from fastdp.ops.routed import longest_gram, overwrite_routed_sum, rounding

from .backends import CPU, TRITON, asked, assert_equal_bits, random, sum_of

pytestmark = pytest.mark.slow  # `make test-all` runs it

# rows, inputs, outputs, matrices, samples
SIZES = [(37, 5, 6, 4, 3), (150, 16, 8, 5, 7), (60, 40, 50, 2, 2), (8, 8, 8, 8, 8), (1, 3, 2, 1, 1), (0, 3, 4, 2, 2)]
LARGE = [(300, 40, 33, 3, 2), (300, 10, 300, 1, 2), (600, 200, 220, 2, 2)]


def rows(size: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """a, g, ids (some of no matrix), owner (sample 1 has no row, where there are several)."""
    s, i, o, experts, batch = size
    generator = torch.Generator().manual_seed(s)
    ids = torch.randint(-1, experts + 1, (s,), generator=generator)
    owner = torch.randint(0, batch, (s,), generator=generator)
    if batch > 1:
        owner[owner == 1] = 0
    return random(s, i, dtype=dtype), random(s, o, dtype=dtype, seed=1), ids, owner


def truth(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int) -> Tensor:
    out = torch.zeros(batch, experts, g.size(1), a.size(1), dtype=torch.float64)
    for x, y, e, b in zip(a.double(), g.double(), ids.tolist(), owner.tolist(), strict=True):
        if 0 <= e < experts:
            out[b, e] += torch.outer(y, x)
    return out


def squares(gradients: Tensor) -> Tensor:
    return gradients.flatten(1).square().sum(1)


def by_tiles(backend: str, patch: pytest.MonkeyPatch, tiles: bool = True) -> None:
    """As on a device, where a look at the lengths of segments would stop the stream."""
    if backend != "C++":
        patch.setattr(routed, "_by_tiles", lambda a, g, batch: tiles and batch > 0 and a.numel() > 0 and g.numel() > 0)


@pytest.mark.parametrize("tiles", [False, True])
@asked(SIZES, LARGE)
def test_norms_gradients_and_sums(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (backend == "C++" and tiles) or (backend in TRITON and not tiles):
        return
    by_tiles(backend, monkeypatch, tiles)
    monkeypatch.setattr(segments, "_HELD", 1 if shape[0] < 100 else 1 << 30)  # of products at a time
    if backend in TRITON[1:]:
        monkeypatch.setattr("fastdp.kernels.segments.chunk_of", lambda x: 32)
    data, (experts, batch) = rows(shape, dtype), shape[3:]
    exact, c = truth(*data, experts, batch), torch.linspace(0.5, 1 + 2**-9, batch)
    norms = ops.routed_norm_sq(*data, experts, batch, dtype=torch.float64)
    torch.testing.assert_close(norms, squares(exact), rtol=1e-6 if backend == "C++" else 2e-5, atol=0)
    each = ops.routed_per_sample(*data, experts, batch)
    summed = ops.routed_clipped_sum(*data, c, experts)
    assert each.dtype == summed.dtype == sum_of(dtype)
    torch.testing.assert_close(each.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(summed.double(), torch.einsum("b,beoi->eoi", c.double(), exact), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lengths", [[7], [0, 0, 40], [40, 0, 0], [1] * 9, [100, 1, 0, 3, 17, 16, 15], [0, 0]])
def test_segments_of_any_lengths(backend: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of no matrix are not read; those of a dropped sample neither."""
    by_tiles(backend, monkeypatch)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ids = torch.cat([ids, torch.full((5,), -1)])
    owner, experts = torch.arange(len(ids)) % 2, len(lengths)
    a, g = random(len(ids), 37, dtype=torch.bfloat16), random(len(ids), 50, dtype=torch.bfloat16, seed=1)
    exact, c = truth(a, g, ids, owner, experts, 2), torch.tensor([1 + 2**-9, 0.0])
    a[-5:] = math.nan
    norms = ops.routed_norm_sq(a, g, ids, owner, experts, 2, dtype=torch.float64)
    torch.testing.assert_close(norms, squares(exact), rtol=2e-5, atol=0)
    g[owner == 1] = math.inf
    into = torch.full((experts, 37, 50), math.nan).mT  # strides that are not the result's
    if backend == "C++":
        into = into.contiguous()
    found = overwrite_routed_sum(a, g, ids, owner, c, into)
    assert found.data_ptr() == into.data_ptr()
    torch.testing.assert_close(found.double(), c[0].double() * exact[0], rtol=1e-6, atol=2e-5)


def test_both_routes_are_met() -> None:
    """Of the sizes above, segments lie on both sides of the length that changes the route."""
    lengths = [(s / max(experts * batch, 1), longest_gram(i, o)) for s, i, o, experts, batch in [*SIZES, *LARGE]]
    assert any(1 < n < limit for n, limit in lengths) and any(n > limit > 0 for n, limit in lengths)


def test_no_number_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory have none."""
    data = [t.to("meta") for t in rows((37, 5, 6, 4, 3))]
    reference = {name: ops.registry.OPERATORS[name].reference for name in ops.registry.OPERATORS}
    assert reference["routed_norm_sq"](*data, 4, 3).shape == (3,)
    assert reference["routed_per_sample"](*data, 4, 3).shape == (3, 4, 6, 5)
    assert reference["routed_clipped_sum"](*data, torch.rand(3, device="meta"), 4).shape == (4, 6, 5)
    found = rounding(*data, 4, 3)
    assert found is not None and found.shape == (3,)


@pytest.mark.parametrize("backend", CPU, indirect=True)
def test_summands_that_cancel_or_vanish(backend: str) -> None:
    """Pairs of rows whose gradients are nearly opposite: the gram route loses all digits, and is not believed."""
    pairs = 30
    a, g = random(2 * pairs, 200), random(2 * pairs, 220)
    a[1::2], g[1::2] = a[::2], -g[::2] * (1 + 1e-5)
    owner = torch.arange(pairs).repeat_interleave(2)
    exact = squares(truth(a, g, owner % 3, owner, 3, pairs))
    found = ops.routed_norm_sq(a, g, owner % 3, owner, 3, pairs, dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)  # of what float32 leaves of such a sum
    a, g, ids, owner = rows((60, 200, 220, 2, 3))
    a[:30] *= 1e-18
    g[:30] *= 1e-3
    exact = squares(truth(a, g, ids, owner, 2, 3)) * 1e-42
    found = ops.routed_norm_sq(a * 1e-19, g * 1e-2, ids, owner, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)
    assert ops.routed_norm_sq(torch.zeros_like(a), g, ids, owner, 2, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_stays_with_its_sample(backend: str, where: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_tiles(backend, monkeypatch)
    data = rows((60, 40, 33, 3, 3))
    clean, of_sample = truth(*data, 3, 3), (data[3] == 2) & (data[2] == 1)
    data[where][of_sample.nonzero()[0], 3] = math.inf
    data[1 - where][of_sample] = 0  # 0 * inf must not pass for 0
    norms = ops.routed_norm_sq(*data, 3, 3, dtype=torch.float64)
    summed = ops.routed_clipped_sum(*data, torch.tensor([0.5, 1.0, 0.0]), 3)
    assert not norms[2].isfinite()
    torch.testing.assert_close(norms[:1], squares(clean)[:1], rtol=2e-5, atol=0)
    torch.testing.assert_close(summed.double(), 0.5 * clean[0], rtol=1e-5, atol=1e-4)


def test_order_threads_and_other_samples_change_no_bit_of_a_norm() -> None:
    data = rows((600, 64, 70, 3, 4))
    order = torch.sort(data[2] * 4 + data[3], stable=True)[1]
    norms = lambda d: ops.routed_norm_sq(*d, 3, 4, dtype=torch.float64)
    assert_equal_bits(lambda: [norms(data)])
    assert torch.equal(norms(tuple(t[order] for t in data)), norms(data))
    a, g, ids, owner = (t[data[3] == 2] for t in data)
    assert torch.equal(ops.routed_norm_sq(a, g, ids, owner - 2, 3, 1, dtype=torch.float64), norms(data)[2:3])


def test_shapes_are_checked() -> None:
    a, g, ids, owner = rows((37, 5, 6, 4, 3))
    with pytest.raises(ValueError, match=r"expected a \[S,I\], g \[S,O\]"):
        ops.routed_norm_sq(a, g[1:], ids, owner, 4, 3)
    with pytest.raises(ValueError, match="owner"):
        ops.routed_clipped_sum(a, g, ids, owner[1:], torch.ones(3), 4)


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[..., 0] > 0
        return torch.zeros(*x.shape[:2], 48).index_put((kept,), self.layer(x[kept]))


def test_the_plan_tells_rows_and_units() -> None:
    torch.manual_seed(0)
    engine = fastdp.PerSampleGradients(Masked())
    engine.model(torch.randn(4, 9, 64)).square().sum((1, 2)).mean().backward()
    plan = engine.explain()
    engine.detach()
    line = next(line for line in plan.splitlines() if "routed" in line)
    assert "of B=4 E=1 I=64 O=48" in line and 1.0 < float(line.split("routed")[1].split()[0]) < 1.2, plan
