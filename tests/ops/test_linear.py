"""Weight gradients of matrix products: kernels and reference against float64, a sample at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdp.ops import linear, linear_clipped_sum, linear_norm_sq, linear_per_sample, registry

pytestmark = pytest.mark.usefixtures("poison")
NATIVE = not isinstance(registry.native(), str)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# (B, T, I, O): one position, odd sizes, whole tiles, several blocks of positions, several blocks of outputs
SHAPES = [(3, 1, 5, 7), (2, 37, 50, 20), (2, 128, 48, 32), (2, 300, 21, 33), (1, 130, 17, 400), (3, 9, 700, 300),
          (2, 600, 3, 40), (5, 2, 1, 1), (1, 70, 16, 8)]  # fmt: skip


def data(b: int, t: int, i: int, o: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(b, t, n, generator=generator, dtype=torch.float64).to(dtype) for n in (i, o))  # type: ignore


def truth(a: Tensor, g: Tensor) -> Tensor:
    """[B,O,I] in float64, by autograd through each sample alone."""
    weight = torch.zeros(g.size(-1), a.size(-1), dtype=torch.float64, requires_grad=True)
    rows = []
    for x, y in zip(a.double(), g.double(), strict=True):
        rows.append(torch.autograd.grad(torch.nn.functional.linear(x, weight), weight, y)[0])
    return torch.stack(rows)


def plain(a: Tensor, g: Tensor) -> Tensor:
    """[B,O,I] by PyTorch in the inputs' own type."""
    return torch.bmm(g.mT, a)


def close(found: Tensor, exact: Tensor, rough: Tensor) -> bool:
    error, allowed = (found.double() - exact).abs(), 4 * (rough.double() - exact).abs()
    return bool((error <= allowed + 1e-5 * exact.abs().max()).all())


@pytest.mark.parametrize("method", ["auto", "gram", "direct"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(backend: str, shape: tuple[int, ...], dtype: torch.dtype, method: str) -> None:
    a, g = data(*shape, dtype)
    exact = truth(a, g).square().sum((1, 2))
    found = linear_norm_sq(a, g, method)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # whatever the inputs' type, sums are those of float32 at least; the reference squares in float32, too
    limit = 1e-12 if dtype == torch.float64 else 6e-6 if backend == "reference" else 2e-6
    torch.testing.assert_close(found.double(), exact, rtol=limit, atol=0)
    assert linear_norm_sq(a, g, method, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_per_sample_and_clipped_sum(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, g = data(*shape, dtype)
    exact, rough = truth(a, g), plain(a, g)
    assert close(linear_per_sample(a, g), exact, rough)
    c = torch.rand(shape[0])
    c[0] = 0
    total = torch.einsum("b,boi->oi", c.double(), exact)
    found = linear_clipped_sum(a, g, c)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert close(found, total, torch.einsum("b,boi->oi", c.to(rough.dtype), rough))
    out = torch.ones_like(found)
    assert linear_clipped_sum(a, g, c, out) is out
    torch.testing.assert_close(out, found + 1, rtol=2e-5, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 150), st.integers(1, 70), st.integers(1, 70), st.sampled_from(DTYPES))
def test_any_size(b: int, t: int, i: int, o: int, dtype: torch.dtype) -> None:
    a, g = data(b, t, i, o, dtype, seed=t)
    exact = truth(a, g).square().sum((1, 2))
    for method in ("gram", "direct"):
        torch.testing.assert_close(linear_norm_sq(a, g, method).double(), exact, rtol=5e-6, atol=1e-9 * t)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_strides_are_only_strides(backend: str, dtype: torch.dtype) -> None:
    a, g = data(6, 40, 35, 18, dtype)
    views = [
        (a.mT.contiguous().mT, g),
        (a, g.mT.contiguous().mT),
        (a.transpose(0, 1).contiguous().transpose(0, 1), g),
        (a[:1].expand(6, 40, 35), g),
        (a[:, :1].expand(6, 40, 35), g),
        (a[::2, ::2, ::2], g[::2, ::2, ::3]),
        (a[..., :1].expand(6, 40, 35), g),
    ]
    for x, y in views:
        for method in ("gram", "direct"):
            whole = linear_norm_sq(x.contiguous(), y.contiguous(), method)
            torch.testing.assert_close(linear_norm_sq(x, y, method), whole, rtol=2e-6, atol=0)
            exact = truth(x, y).square().sum((1, 2))
            torch.testing.assert_close(whole.double(), exact, rtol=4e-6, atol=0)


def test_two_dimensions_and_nothing(backend: str) -> None:
    a, g = data(4, 1, 5, 6)
    exact = truth(a, g)
    torch.testing.assert_close(linear_norm_sq(a[:, 0], g[:, 0]).double(), exact.square().sum((1, 2)), rtol=2e-6, atol=0)
    for b, t, i, o in ((0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0)):
        a, g = torch.ones(b, t, i), torch.ones(b, t, o)
        for method in ("auto", "gram", "direct"):
            assert linear_norm_sq(a, g, method).tolist() == [0.0] * b
        assert linear_per_sample(a, g).shape == (b, o, i)
        assert torch.equal(linear_clipped_sum(a, g, torch.ones(b)), torch.zeros(o, i))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["gram", "direct"])
def test_a_bad_sample_stays_alone(backend: str, method: str, bad: float) -> None:
    a, g = data(4, 40, 20, 30)
    clean = linear_norm_sq(a, g, method)
    a[2, 7, 3], g[0, 39, 29] = bad, bad
    found = linear_norm_sq(a, g, method)
    assert not found[[0, 2]].isfinite().any()
    assert torch.equal(found[[1, 3]], clean[[1, 3]])
    c = torch.tensor([0.0, 1.0, 0.0, 0.5])
    total = linear_clipped_sum(a, g, c)
    assert total.isfinite().all()
    torch.testing.assert_close(total, linear_clipped_sum(a[[1, 3]], g[[1, 3]], c[[1, 3]]))


@pytest.mark.parametrize("shape", [(8, 40, 64, 64), (1, 128, 40, 50), (2, 300, 33, 20), (3, 64, 1000, 300)])
@pytest.mark.parametrize("method", ["gram", "direct"])
def test_threads_and_repetition_change_no_bit(shape: tuple[int, ...], method: str) -> None:
    a, g = data(*shape)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            found.append(linear_norm_sq(a, g, method, dtype=torch.float64))
    finally:
        torch.set_num_threads(before)
    if NATIVE:
        assert all(torch.equal(f, found[0]) for f in found)
    assert torch.equal(found[1], found[2])


@pytest.mark.skipif(not NATIVE, reason="needs the compiled extension")
def test_constant_data_does_not_shrink() -> None:
    """Rounding in one direction: a long float32 sum of equal terms loses far more than a random one."""
    for value in (0.1, 0.3, 1 / 3, 0.7071, 1.1):
        a, g = torch.full((1, 600, 4000), value), torch.full((1, 600, 50), value)
        exact = float(torch.tensor(value).double() ** 4) * 600**2 * 4000 * 50
        for method in ("gram", "direct"):
            ratio = float(linear_norm_sq(a, g, method, dtype=torch.float64)) / exact
            assert abs(ratio - 1) < 8e-6, (value, method, ratio)  # what clip factors allow for: 4e-6 of the norm


def test_cancelling_summands_are_found_out(backend: str) -> None:
    torch.manual_seed(0)
    a = torch.randn(8, 64, 40) * 0.01 + 1000
    g = torch.randn(8, 64, 40)
    g -= g.mean(1, keepdim=True)
    exact = truth(a, g).square().sum((1, 2))
    direct = linear_norm_sq(a, g, "direct")
    assert torch.allclose(direct.double(), exact, rtol=1e-2)
    assert torch.equal(linear_norm_sq(a, g, "gram"), direct)


def test_small_and_large_numbers(backend: str) -> None:
    a, g = data(3, 20, 9, 8)
    exact = truth(a, g).square().sum((1, 2))
    for scale in (1e-12, 1e-8, 1e8, 1e12):
        for method in ("gram", "direct"):
            found = linear_norm_sq(a * scale, g, method, dtype=torch.float64)
            torch.testing.assert_close(found, exact * scale**2, rtol=1e-5, atol=0)


def test_refusals(backend: str) -> None:
    a, g = data(2, 3, 4, 5)
    with pytest.raises(ValueError, match="method"):
        linear_norm_sq(a, g, "fast")
    with pytest.raises(ValueError, match="expected a"):
        linear_norm_sq(a, g[:, :2])
    with pytest.raises(ValueError, match="float32 or float64"):
        linear_norm_sq(a, g, dtype=torch.float16)
    with pytest.raises(ValueError, match="expected a"):
        linear_clipped_sum(a, g[:1], torch.ones(2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype: torch.dtype) -> None:
    a, g = data(2, 3, 4, 5, dtype)
    c, ops = torch.ones(2), torch.ops.fastdp
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    for method in ("auto", "gram", "direct"):
        torch.library.opcheck(ops.linear_norm_sq.default, (a, g, method))
    torch.library.opcheck(ops.linear_norm_sq.default, (a, g), {"dtype": torch.float64})
    torch.library.opcheck(ops.linear_per_sample.default, (a, g))
    torch.library.opcheck(ops.linear_clipped_sum.default, (a, g, c))
    torch.library.opcheck(ops.linear_clipped_sum.out, (a, g, c, torch.zeros(5, 4, dtype=kind)))


def test_the_compiled_kernel_serves_where_it_is_built() -> None:
    operator = registry.OPERATORS["linear_norm_sq"]
    assert (operator.implementation("cpu") is not linear.reference_norm_sq) == NATIVE
    with registry.forced("reference"):
        assert operator.implementation("cpu") is linear.reference_norm_sq
