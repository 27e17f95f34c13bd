"""Weight gradients of convolutions: every backend against float64, a sample at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdp.ops import bounds, conv, conv_clipped_sum, conv_norm_sq, conv_per_sample, registry
from fastdp.ops.geometry import Geometry, geometry_of, spatial
from fastdp.ops.linear import METHODS

from .backends import (
    DTYPES,
    NATIVE,
    TRITON,
    asked,
    assert_equal_bits,
    assert_norms,
    assert_sums,
    random,
    sum_of,
    weighted,
)

pytestmark = pytest.mark.slow  # `make test-all` runs it

FORWARD = [F.conv1d, F.conv2d, F.conv3d]
TRANSPOSED = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]
# sizes of x, outputs, kernel, stride, padding, dilation, groups
CASES: dict[str, tuple[Any, ...]] = {
    "groups": ((2, 6, 9, 11), 10, (3, 2), (2, 1), (1, 0), (1, 2), 2),
    "line": ((3, 6, 23), 10, 3, 2, 1, 1, 1),
    "plane": ((2, 3, 6, 7), 17, 3, 1, 1, 1, 1),
    "volume": ((2, 4, 3, 4, 5), 6, 3, (1, 2, 2), (1, 1, 0), 1, 1),
    "point": ((3, 20, 5, 4), 18, 1, 1, 0, 1, 1),
    "strided point": ((2, 16, 5, 4), 18, 1, 2, 0, 1, 1),
    "one position": ((3, 3, 4, 4), 18, 4, 4, 0, 1, 1),
    "wide padding": ((2, 2, 3, 3), 3, 3, 3, 4, 1, 1),
    # channels of whole vectors: with 16 bits the inner elements of patches
    "wide": ((2, 16, 7, 5), 17, 3, 1, 1, 1, 1),
    "wide groups": ((2, 32, 7, 6), 32, (3, 2), (2, 1), (1, 0), (1, 2), 2),
    "wide line": ((2, 16, 13), 10, 3, 2, 1, 1, 1),
    "wide volume": ((2, 16, 2, 3, 3), 16, 2, 1, (1, 0, 1), 1, 1),
    "depthwise": ((2, 5, 7, 6), 5, 3, 2, 2, 2, 5),
    "depthwise line of many channels": ((2, 70, 9), 70, 3, 2, 1, 2, 70),
    "depthwise of many taps": ((2, 16, 9, 8), 16, 7, 1, 3, 1, 16),
    "depthwise, one side padded": ((2, 33, 8, 5), 33, (3, 2), (2, 1), (0, 1), (1, 2), 33),
    "depthwise volume": ((2, 4, 3, 4, 5), 4, 3, (1, 2, 2), (1, 1, 0), 1, 4),
    "depthwise of one position": ((2, 3, 4, 4), 3, 4, 1, 0, 1, 3),
    "depthwise column": ((2, 2, 12, 1), 2, (3, 1), 1, (1, 0), 1, 2),
}
# of the compiled kernels: whole tiles, several of them, bands
LARGE: dict[str, tuple[Any, ...]] = {
    "stem": ((3, 3, 12, 12), 8, 3, 1, 1, 1, 1),
    "more positions than a tile": ((2, 16, 12, 12), 24, 3, 1, 1, 1, 1),
    "whole tiles": ((2, 32, 8, 8), 32, 3, 1, 1, 1, 1),
    "strided": ((2, 17, 9, 11), 21, 3, 2, 1, 1, 1),
    "point line": ((2, 3, 1), 4, 1, 1, 0, 1, 1),
    "long line": ((3, 18, 300), 7, 5, 1, 2, 1, 1),
    "wide padding of a point": ((2, 2, 2, 3), 3, 1, 3, 2, 1, 1),
    "many outputs": ((1, 16, 4, 4), 150, 3, 1, 1, 1, 1),
    "long enough for bands": ((1, 64, 80, 80), 16, 3, 1, 1, 1, 1),
    "multiplied depthwise": ((2, 4, 9, 9), 12, 3, 2, 1, 1, 4),
    "depthwise line": ((3, 17, 300), 17, 4, 1, 2, 3, 17),
    "depthwise bands": ((2, 2, 1100, 16), 2, 3, 1, 1, 1, 2),
}
EVERY = CASES | LARGE
TILED = ["groups", "line", "plane", "volume", "point", "wide groups", "depthwise line of many channels"]


def data(case: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    sizes, outputs, kernel, *rest = case
    weight = torch.empty(outputs, sizes[1] // rest[3], *spatial(kernel, len(sizes) - 2), device="meta")
    shape = FORWARD[len(sizes) - 3](torch.empty(sizes, device="meta"), weight, None, *rest).shape
    return random(*sizes, dtype=dtype), random(*shape, dtype=dtype, seed=1), (kernel, *rest)


def truth(x: Tensor, g: Tensor, kernel: Any, *rest: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """The weight gradient of each sample, by autograd through the sample alone; rest: stride, padding, dilation,
    groups."""
    n, groups = x.dim() - 2, rest[3]
    weight = torch.zeros(g.size(1), x.size(1) // groups, *spatial(kernel, n), dtype=dtype, requires_grad=True)
    rows = []
    for some, grad in zip(x.to(dtype).split(1), g.to(dtype).split(1), strict=True):
        y = FORWARD[n - 1](some, weight, None, *rest)
        rows.append(torch.autograd.grad(y, weight, grad)[0])
    return torch.stack(rows)


@asked(CASES, LARGE, tiled=TILED)
def test_norms_gradients_and_sums(backend: str, shape: str, dtype: torch.dtype) -> None:
    x, g, args = data(EVERY[shape], dtype)
    exact, plain = truth(x, g, *args), truth(x, g, *args, dtype=torch.float32)
    geometry = geometry_of(x, g, *(spatial(value, x.dim() - 2) for value in args[:4]), args[4])
    for method in METHODS:
        if method == "gram" and g[0, 0].numel() > 6000:
            continue
        found = conv_norm_sq(x, g, *args, method)
        assert found.dtype == sum_of(dtype)
        assert_norms(backend, found, exact, dtype)
        bounded = conv.bounded_norm_sq(x.unsqueeze(1), g.unsqueeze(1), geometry, method)
        most = bounds.enlarged(exact.flatten(1).square().sum(1), conv.rounding(x[:, None], g[:, None], geometry))
        assert bounded.dtype == torch.float64 and bool((bounded <= most * (1 + 2e-5)).all())
        assert bool((bounded >= exact.flatten(1).square().sum(1) * (1 - 6e-6)).all())
    assert_sums(conv_per_sample(x, g, *args), exact, plain)
    c = torch.linspace(0.1, 1 + 2**-9, x.size(0))
    c[1:2] = 0
    total, rough = weighted(exact, c), weighted(plain, c)
    x[1:2, -1], g[1:2, 0] = math.nan, math.inf  # of a dropped sample
    assert_sums(conv_clipped_sum(x, g, c, *args), total, rough)
    out = torch.ones(total.shape, dtype=sum_of(dtype))
    assert conv_clipped_sum(x, g, c, *args, out) is out
    assert_sums(out, total + 1, rough + 1)


@asked(["wide", "groups", "depthwise"], dtypes=DTYPES[:2], tiled=["groups"])
def test_strides_are_only_strides(backend: str, shape: str, dtype: torch.dtype) -> None:
    x, g, args = data(CASES[shape], dtype)
    exact, c = truth(x, g, *args), torch.tensor([0.5, 2.0])
    last = [t.to(memory_format=torch.channels_last) for t in (x, g)]
    turned = [t.mT.contiguous().mT for t in (x, g)]
    sparse = [torch.zeros(*t.shape, 2, dtype=dtype).select(-1, 1).copy_(t) for t in (x, g)]
    for some, grad in (last, turned, sparse, (last[0], g), (x, turned[1])):
        for method in ("gram", "direct"):
            assert_norms(backend, conv_norm_sq(some, grad, *args, method), exact)
        assert_sums(conv_per_sample(some, grad, *args), exact, exact.float())
        assert_sums(conv_clipped_sum(some, grad, c, *args), weighted(exact, c), weighted(exact, c).float())
    expanded = g[:, :, :1].expand_as(g)
    assert_norms(backend, conv_norm_sq(x, expanded, *args), truth(x, expanded, *args))


SIZE = st.integers(1, 3)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_geometry(draw: st.DataObject) -> None:
    """F images a sample, groups, transposed, 1 to 3 dimensions: as the engine calls."""
    n, groups, batch, images = (draw.draw(s) for s in (SIZE, SIZE, SIZE, st.integers(1, 2)))
    inputs, outputs = (groups * draw.draw(st.sampled_from([1, 2, 3, 16, 17])) for _ in range(2))
    kernel, stride, dilation = ([draw.draw(SIZE) for _ in range(n)] for _ in range(3))
    transposed = draw.draw(st.booleans())
    most = [d * (k - 1) // (2 if transposed else 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = [draw.draw(st.integers(0, m)) for m in most]
    size = [(k - 1) * d + draw.draw(st.integers(1, 6)) for k, d in zip(kernel, dilation, strict=True)]
    extra = [draw.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    x = random(batch, images, inputs, *size)
    shape = (inputs, outputs // groups, *kernel) if transposed else (outputs, inputs // groups, *kernel)
    extra = extra if transposed else [0] * n
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)

    def forward(some: Tensor) -> Tensor:
        if transposed:
            return TRANSPOSED[n - 1](some, weight, None, stride, padding, extra, groups, dilation)
        return FORWARD[n - 1](some, weight, None, stride, padding, dilation, groups)

    g = random(batch, images, *forward(x.double().flatten(0, 1)).shape[1:], seed=1)
    geometry = Geometry(shape, tuple(stride), tuple(padding), tuple(dilation), groups, transposed, tuple(extra))
    exact = torch.stack([torch.autograd.grad(forward(some), weight, grad)[0]
                         for some, grad in zip(x.double(), g.double(), strict=True)])  # fmt: skip
    c = torch.rand(batch)
    for force in ("auto", "reference"):
        with registry.forced(force):
            assert_sums(conv.per_sample(x, g, geometry), exact, exact.float())
            for method in METHODS:
                found = conv.norm_sq(x, g, geometry, method)
                torch.testing.assert_close(found, exact.flatten(1).square().sum(1), rtol=1e-5, atol=1e-8)
            assert_sums(conv.clipped_sum(x, g, c, geometry), weighted(exact, c), weighted(exact, c).float())


def test_nothing(backend: str) -> None:
    for b, c, o in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x, g = torch.ones(b, c, 5, 5).bfloat16(), torch.ones(b, o, 3, 3).bfloat16()
        for method in METHODS:
            assert conv_norm_sq(x, g, 3, method=method).tolist() == [0.0] * b
        assert torch.equal(conv_per_sample(x, g, 3), torch.zeros(b, o, c, 3, 3))
        assert torch.equal(conv_clipped_sum(x, g, torch.ones(b), 3), torch.zeros(o, c, 3, 3))


@pytest.mark.parametrize("name", ["plane", "wide groups", "depthwise"])
def test_a_bad_sample_stays_alone(backend: str, name: str) -> None:
    x, g, args = data(CASES[name], torch.bfloat16)
    x, g = (torch.cat([t, t.flip(0)]) for t in (x, g))
    broken, grads = x.clone(), g.clone()
    broken[0, 1, 2, 2], grads[2, 0, 0, 0] = math.nan, math.inf
    for method in ("gram", "direct"):
        clean, found = conv_norm_sq(x, g, *args, method), conv_norm_sq(broken, grads, *args, method)
        assert not found[[0, 2]].isfinite().any() and torch.equal(found[[1, 3]], clean[[1, 3]])
    rows, intact = conv_per_sample(broken, grads, *args), conv_per_sample(x, g, *args)
    torch.testing.assert_close(rows[[1, 3]], intact[[1, 3]])


@pytest.mark.skipif(not NATIVE, reason="needs the compiled extension")
@pytest.mark.parametrize("name", ["whole tiles", "stem", "many outputs", "depthwise", "long line"])
def test_threads_and_repetition_change_no_bit(name: str) -> None:
    x, g, args = data(EVERY[name])
    norms = lambda: [conv_norm_sq(x, g, *args, method, dtype=torch.float64) for method in ("gram", "direct")]
    assert_equal_bits(lambda: [*norms(), conv_per_sample(x, g, *args)])


# ---------------------------------------------------------------------- rounding


@pytest.mark.parametrize("side", [20, 120])
def test_constant_data_does_not_shrink(side: int) -> None:
    for force in ("auto", "reference"):
        for value in (0.1, 1 / 3, 0.7071):
            x, g = torch.full((1, 16, side, side), value), torch.full((1, 8, side, side), value)
            exact = float(truth(x, g, 3, 1, 1, 1, 1).square().sum())
            with registry.forced(force):
                ratio = float(conv_norm_sq(x, g, 3, 1, 1, method="direct", dtype=torch.float64)) / exact
            assert abs(ratio - 1) < 4e-6, (value, ratio)  # 3.2e-6 MEASURED: summands of one sign


@pytest.mark.parametrize("method", ["gram", "direct"])
def test_norms_are_enlarged_where_terms_cancel(backend: str, method: str) -> None:
    """A constant image and gradients whose sum is 0: what is left of the sum is rounding, which the norm must bound."""
    x, g, args = data(((3, 4, 6, 7), 6, 3, 1, 0, 1, 1))
    x[1] = 1000.0
    g[1] -= g[1].mean((1, 2), keepdim=True)
    exact, geometry = truth(x, g, *args), geometry_of(x, g, [3, 3], [1, 1], [0, 0], [1, 1], 1)
    bound = conv.rounding(x[:, None], g[:, None], geometry)
    norms = exact.flatten(1).norm(dim=1)
    assert bound is not None and norms[1] < 20 * bound[1]
    found = conv.bounded_norm_sq(x[:, None], g[:, None], geometry, method).sqrt()
    share = 0.99 if method == "direct" else 0.5  # by gram the bound is of the patches' own sizes
    assert found[1] > norms[1] + share * bound[1]
    torch.testing.assert_close(found[[0, 2]], norms[[0, 2]], rtol=1e-5, atol=0)
    plain = conv_norm_sq(x, g, *args, method)
    assert bool((plain >= norms.square() * 0.98).all()), "what is in doubt is computed again, or rather too large"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_patches_that_underflow(backend: str, dtype: torch.dtype) -> None:
    """The gram matrix of small patches loses all its numbers: the norm may come out too large, never as 0."""
    x, g, args = data(((2, 4, 5, 5), 6, 3, 1, 1, 1, 2), dtype)
    x, g = x * 1e-24, g * 1e17
    exact = truth(x, g, *args).flatten(1).norm(dim=1)
    geometry = geometry_of(x, g, [3, 3], [1, 1], [1, 1], [1, 1], 2)
    for found in (conv_norm_sq(x, g, *args, "gram"), conv.bounded_norm_sq(x[:, None], g[:, None], geometry, "gram")):
        assert bool((found.double().sqrt() >= exact * (1 - 3e-6)).all()) and bool((exact > 1e-7).all())


# ---------------------------------------------------------------------- refusals


def test_refusals(backend: str) -> None:
    x, g = torch.ones(2, 4, 5, 5), torch.ones(2, 6, 3, 3)
    with pytest.raises(ValueError, match="method"):
        conv_norm_sq(x, g, 3, method="fast")
    with pytest.raises(ValueError, match="groups|multiples of 3"):
        conv_norm_sq(x, g, 3, groups=3)
    with pytest.raises(ValueError, match="expected g|g has"):
        conv_per_sample(x, g, 2)
    with pytest.raises(ValueError, match="one number or 2"):
        conv_per_sample(x, g, (3, 3, 3))
    with pytest.raises(ValueError, match="1 to 3 dimensions|one to three"):
        conv_clipped_sum(x, g[:1], torch.ones(2), 3)
    x, g = torch.ones(2, 4, 8, 8), torch.ones(2, 4, 4, 4)
    for sizes in ((3, 1, -1, 1, 1), (3, 0, 1, 1, 1), (3, 2, 1, 0, 1), (0, 2, 0, 1, 1), (3, 2, 1, 1, 0)):
        with pytest.raises(ValueError):  # PyTorch has no such convolution
            conv_norm_sq(x, g, *sizes)


# ---------------------------------------------------------------------- Triton's ways of loading


@pytest.mark.parametrize("backend", TRITON[:1], indirect=True)
@pytest.mark.parametrize("name", ["wide", "wide groups", "groups", "depthwise"])
def test_offsets_of_64_bits_and_divisions_give_the_same_bits(backend: str, name: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    x, g, args = data(CASES[name], torch.bfloat16)

    def every() -> list[Tensor]:
        norms = [conv_norm_sq(x, g, *args, method) for method in ("gram", "direct")]
        return [*norms, conv_per_sample(x, g, *args), conv_clipped_sum(x, g, torch.tensor([0.7, 1.3]), *args)]

    found, own = every(), Problem.constants
    monkeypatch.setattr(Problem, "constants", lambda p: own(p) | {"FAST": False, "FAR": True, "DEEP": True})
    assert all(torch.equal(a, b) for a, b in zip(found, every(), strict=True))
    monkeypatch.setattr(depthwise, "SPAN", 16)  # positions beyond a program's are another's
    monkeypatch.setattr("fastdp.kernels.conv.chunk_of", lambda x: 64)
    for a, b in zip(found, every(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


if TRITON:
    import triton
    import triton.language as tl

    from fastdp.kernels import depthwise, patches
    from fastdp.kernels.conv_problem import Geometry as ThreeSizes
    from fastdp.kernels.conv_problem import Problem

    @triton.jit
    def _over_kernel(p_x, p_out, y, inverse, n, BLOCK: tl.constexpr):
        o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(p_x + o, mask=o < n, other=0)
        tl.store(p_out + o, patches._over(x, y, inverse, True), mask=o < n)


@pytest.mark.parametrize("backend", TRITON[:1], indirect=True)
def test_positions_are_divided_exactly(backend: str) -> None:
    """Next to every multiple, up to the largest position for which the launcher takes this way."""
    for y in (2, 3, 7, 14, 55, 224, 4096, 32767, 46340):
        last = (1 << 31) // y - 1
        multiples = torch.linspace(0, last // y, 300, dtype=torch.float64).long() * y
        x = torch.cat([multiples - 1, multiples, multiples + 1, torch.tensor([last])]).clamp(0, last).int()
        found = torch.empty_like(x)
        _over_kernel[(triton.cdiv(x.numel(), 256),)](x, found, y, -(-(1 << 31) // y), x.numel(), BLOCK=256)
        assert torch.equal(found, x // y), y

    def constants(width: int, stride: int = 1) -> dict[str, Any]:
        x = (
            torch.empty(1, device="meta")
            .expand(1, 2, 1, 4, width)
            .as_strided((1, 2, 1, 4, width), (1, stride, 1, 1, 1))
        )
        ones = (1, 1, 1)
        g = torch.empty(1, 2, 4 * width, device="meta")
        return Problem(x, g, (4, width), ThreeSizes(ones, ones, (0, 0, 0), ones), 1, (2, 2, 1, 1)).constants()

    assert constants(56)["FAST"] and not constants(1)["FAST"] and not constants(46340)["FAST"]
    assert not constants(56)["FAR"] and constants(56, 1 << 30)["FAR"] and not constants(56)["DEEP"]
