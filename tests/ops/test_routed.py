"""Operators and uses of routed rows: float64 truth row by row, every backend, every order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastdp
from fastdp import ops
from fastdp.grad_sample.cost_model import DEFAULT
from fastdp.grad_sample.routed_rows import Routed
from fastdp.ops.registry import forced
from fastdp.ops.routed import longest_gram, overwrite_routed_sum

# rows, inputs, outputs, matrices, samples
SIZES = ((37, 5, 6, 4, 3), (300, 40, 33, 3, 2), (300, 10, 300, 1, 2), (150, 16, 8, 5, 7), (8, 8, 8, 8, 8),
         (1, 3, 2, 1, 1), (600, 200, 220, 2, 2), (0, 3, 4, 2, 2))  # fmt: skip
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def rows(size: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """a, g, ids (some of no matrix), owner (sample 1 has no row, where there are several)."""
    s, i, o, experts, batch = size
    torch.manual_seed(seed)
    a, g = torch.randn(s, i).to(dtype), torch.randn(s, o).to(dtype)
    ids, owner = torch.randint(-1, experts + 1, (s,)), torch.randint(0, batch, (s,))
    if batch > 1:
        owner[owner == 1] = 0
    return a, g, ids, owner


def truth(a: Tensor, g: Tensor, ids: Tensor, owner: Tensor, experts: int, batch: int) -> Tensor:
    out = torch.zeros(batch, experts, g.size(1), a.size(1), dtype=torch.float64)
    for x, y, e, b in zip(a.double(), g.double(), ids.tolist(), owner.tolist(), strict=True):
        if 0 <= e < experts:
            out[b, e] += torch.outer(y, x)
    return out


def squares(gradients: Tensor) -> Tensor:
    return gradients.flatten(1).square().sum(1)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_truth(size, dtype, backend):
    data, (experts, batch) = rows(size, dtype), size[3:]
    exact, c = truth(*data, experts, batch), torch.rand(batch)
    with forced(backend):
        norms = ops.routed_norm_sq(*data, experts, batch, dtype=torch.float64)
        each = ops.routed_per_sample(*data, experts, batch)
        summed = ops.routed_clipped_sum(*data, c, experts)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    assert each.dtype == summed.dtype == kind
    torch.testing.assert_close(norms, squares(exact), rtol=1e-6, atol=0)
    torch.testing.assert_close(each.double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(summed.double(), torch.einsum("b,beoi->eoi", c.double(), exact), rtol=1e-5, atol=1e-4)


def test_both_routes_are_met():
    """Of the sizes above, segments lie on both sides of the length that changes the route."""
    lengths = [(s / max(experts * batch, 1), longest_gram(i, o)) for s, i, o, experts, batch in SIZES]
    assert any(1 < n < limit for n, limit in lengths) and any(n > limit > 0 for n, limit in lengths)


def test_summands_that_cancel():
    """Pairs of rows whose gradients are nearly opposite: the gram route loses all digits, and is not believed."""
    pairs = 30
    a, g = torch.randn(2 * pairs, 200), torch.randn(2 * pairs, 220)
    a[1::2], g[1::2] = a[::2], -g[::2] * (1 + 1e-5)
    owner = torch.arange(pairs).repeat_interleave(2)
    ids = owner % 3
    exact = squares(truth(a, g, ids, owner, 3, pairs))
    found = ops.routed_norm_sq(a, g, ids, owner, 3, pairs, dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=0)  # of what float32 leaves of such a sum


def test_small_and_vanishing_numbers():
    a, g, ids, owner = rows((60, 200, 220, 2, 3))
    a[:30] *= 1e-18
    g[:30] *= 1e-3
    exact = truth(a, g, ids, owner, 2, 3)
    torch.testing.assert_close(
        ops.routed_norm_sq(a * 1e-19, g * 1e-2, ids, owner, 2, 3, dtype=torch.float64), squares(exact) * 1e-42,
        rtol=1e-4, atol=0,
    )  # fmt: skip
    assert ops.routed_norm_sq(torch.zeros_like(a), g, ids, owner, 2, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("where", ["a", "g"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_is_not_finite_stays_with_its_sample(value, where, backend):
    data = dict(zip(("a", "g", "ids", "owner"), rows((300, 40, 33, 3, 3)), strict=True))
    clean = truth(*data.values(), 3, 3)
    row = int(((data["owner"] == 2) & (data["ids"] == 1)).nonzero()[0])
    data[where][row, 3] = value
    other = "g" if where == "a" else "a"
    data[other][(data["owner"] == 2) & (data["ids"] == 1)] = 0  # 0 * inf must not pass for 0
    with forced(backend):
        norms = ops.routed_norm_sq(*data.values(), 3, 3, dtype=torch.float64)
        summed = ops.routed_clipped_sum(*data.values(), torch.tensor([0.5, 1.0, 0.0]), 3)
    assert not norms[2].isfinite()
    torch.testing.assert_close(norms[:1], squares(clean)[:1], rtol=1e-6, atol=0)
    torch.testing.assert_close(summed.double(), 0.5 * clean[0], rtol=1e-5, atol=1e-4)


def test_into_memory_with_anything_in_it():
    data = rows((20, 5, 6, 9, 3))
    into, c = torch.full((9, 6, 5), float("nan")), torch.rand(3)
    found = overwrite_routed_sum(*data, c, into)
    assert found.data_ptr() == into.data_ptr()
    assert torch.equal(found, ops.routed_clipped_sum(*data, c, 9))


def test_order_and_threads_change_no_bit_of_a_norm():
    data = rows((600, 64, 70, 3, 4))
    order = torch.sort(data[2] * 4 + data[3], stable=True)[1]
    ordered = tuple(t[order] for t in data)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [ops.routed_norm_sq(*d, 3, 4, dtype=torch.float64) for d in (data, ordered)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], norms) for norms in found[1:])


def test_a_sample_does_not_feel_the_others():
    a, g, ids, owner = rows((300, 40, 33, 3, 4))
    whole, alone = ops.routed_norm_sq(a, g, ids, owner, 3, 4), owner == 2
    found = ops.routed_norm_sq(a[alone], g[alone], ids[alone], owner[alone] - 2, 3, 1)
    assert torch.equal(whole[2:3], found)


def test_opcheck():
    data, c = rows((37, 5, 6, 4, 3)), torch.rand(3)
    torch.library.opcheck(torch.ops.fastdp.routed_norm_sq.default, (*data, 4, 3), {"dtype": torch.float64})
    torch.library.opcheck(torch.ops.fastdp.routed_per_sample.default, (*data, 4, 3))
    torch.library.opcheck(torch.ops.fastdp.routed_clipped_sum.default, (*data, c, 4))


def test_shapes_are_checked():
    a, g, ids, owner = rows((37, 5, 6, 4, 3))
    with pytest.raises(ValueError, match=r"expected a \[S,I\], g \[S,O\]"):
        ops.routed_norm_sq(a, g[1:], ids, owner, 4, 3)
    with pytest.raises(ValueError, match="owner"):
        ops.routed_clipped_sum(a, g, ids, owner[1:], torch.ones(3), 4)


@pytest.mark.parametrize("low,high", [(0, 3), (1, 3), (0, 1), (2, 3)])
def test_a_use_of_one_matrix_and_a_range_of_samples(low, high):
    a, g, _, _ = rows((37, 5, 6, 1, 3))
    owner = torch.randint(0, 3, (37,))
    ids = torch.zeros_like(owner)
    use = Routed(torch.zeros(6, 5), a, g, ids, owner, 3, "test")
    exact = truth(a, g, ids, owner, 1, 3)[:, 0]
    torch.testing.assert_close(use.per_sample(low, high).double(), exact[low:high], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(use.transposed(torch.zeros(5, 6)).per_sample(low, high), use.per_sample(low, high).mT)
    assert use.clipped_sum(torch.ones(3)).shape == (6, 5)


def test_units_of_a_use():
    """Of 4 segments: none, one row (no product), four rows by gram, and enough rows for the direct route."""
    rows_of = [0, 1, 4, 50]
    ids = torch.arange(4).repeat_interleave(torch.tensor(rows_of)) // 2
    owner = torch.arange(4).repeat_interleave(torch.tensor(rows_of)) % 2
    use = Routed(torch.zeros(2, 6, 5), torch.randn(55, 5), torch.randn(55, 6), ids, owner, 2, "test")
    found = use.segments()
    assert found.rows.tolist() == rows_of
    assert found.norm_units() == pytest.approx((4 * 4 * 11 / 2 + 50 * 30) / (55 * 30))
    assert found.seconds(DEFAULT) > 0


def test_the_table_tells_rows_and_units():
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 48, bias=False)
    engine = fastdp.PerSampleGradients(Masked(net))
    engine.model(torch.randn(4, 9, 64)).square().sum((1, 2)).mean().backward()
    plan = engine.explain()
    engine.detach()
    line = next(line for line in plan.splitlines() if "routed" in line)
    assert "of B=4 E=1 I=64 O=48" in line and 1.0 < float(line.split("routed")[1].split()[0]) < 1.2, plan


class Masked(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        kept = x[..., 0] > 0
        return torch.zeros(*x.shape[:2], 48).index_put((kept,), self.layer(x[kept]))
