"""Weight gradients of convolutions: kernels and reference against float64, a sample at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdp.ops import conv, conv_clipped_sum, conv_norm_sq, conv_per_sample, registry
from fastdp.ops.geometry import Geometry, spatial

pytestmark = pytest.mark.usefixtures("poison")
NATIVE = not isinstance(registry.native(), str)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORWARD = [F.conv1d, F.conv2d, F.conv3d]
TRANSPOSED = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]
# sizes of x, outputs, kernel, stride, padding, dilation, groups
CASES: dict[str, tuple[Any, ...]] = {
    "stem": ((3, 3, 12, 12), 8, 3, 1, 1, 1, 1),
    "whole_tiles": ((2, 32, 8, 8), 32, 3, 1, 1, 1, 1),
    "strided": ((2, 17, 9, 11), 21, 3, 2, 1, 1, 1),
    "point": ((2, 20, 7, 7), 9, 1, 2, 0, 1, 1),
    "uneven": ((2, 5, 10, 7), 6, (3, 2), (2, 1), (0, 2), (1, 3), 1),
    "groups": ((2, 12, 8, 8), 18, 3, 1, 1, 1, 3),
    "depthwise": ((2, 20, 9, 9), 20, 3, 1, 1, 1, 20),
    "depthwise_of_many_taps": ((2, 33, 9, 12), 33, 7, 1, 3, 1, 33),
    "depthwise_strided": ((2, 18, 11, 9), 18, (5, 2), (2, 3), (2, 0), (1, 2), 18),
    "depthwise_line": ((3, 17, 300), 17, 4, 1, 2, 3, 17),
    "depthwise_volume": ((2, 3, 4, 6, 5), 3, (2, 3, 1), (1, 2, 1), (1, 1, 0), 1, 3),
    "multiplied_depthwise": ((2, 4, 9, 9), 12, 3, 2, 1, 1, 4),
    "line": ((3, 18, 300), 7, 5, 1, 2, 1, 1),
    "point_line": ((2, 3, 1), 4, 1, 1, 0, 1, 1),
    "volume": ((2, 3, 4, 6, 5), 5, (2, 3, 1), (1, 2, 1), (1, 1, 0), 1, 1),
    "wide_padding": ((2, 2, 3, 3), 3, 3, 3, 4, 1, 1),
    "wide_padding_of_a_point": ((2, 2, 2, 3), 3, 1, 3, 2, 1, 1),
    "many_outputs": ((1, 16, 4, 4), 150, 3, 1, 1, 1, 1),
    "long_enough_for_bands": ((1, 64, 80, 80), 16, 3, 1, 1, 1, 1),
}


def data(case: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    sizes, outputs, kernel, *rest = case
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, generator=generator, dtype=torch.float64)
    weight = torch.zeros(outputs, sizes[1] // rest[3], *spatial(kernel, len(sizes) - 2), dtype=torch.float64)
    shape = FORWARD[x.dim() - 3](x, weight, None, *rest).shape
    g = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype), g.to(dtype), (kernel, *rest)


def truth(x: Tensor, g: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int,
          dtype: torch.dtype = torch.float64) -> Tensor:  # fmt: skip
    """The weight gradient of each sample, by autograd through the sample alone."""
    n = x.dim() - 2
    weight = torch.zeros(g.size(1), x.size(1) // groups, *spatial(kernel, n), dtype=dtype, requires_grad=True)
    rows = []
    for some, grad in zip(x.to(dtype).split(1), g.to(dtype).split(1), strict=True):
        y = FORWARD[n - 1](some, weight, None, stride, padding, dilation, groups)
        rows.append(torch.autograd.grad(y, weight, grad)[0])
    return torch.stack(rows)


def norms(rows: Tensor) -> Tensor:
    return rows.flatten(1).square().sum(1)


def accuracy(dtype: torch.dtype) -> float:
    """Relative, of squared norms of random data. MEASURED worst of all cases and routes: 3.5e-7, float64 6e-16."""
    return 1e-14 if dtype == torch.float64 else 1e-6


def close(found: Tensor, exact: Tensor, rough: Tensor) -> bool:
    error, allowed = (found.double() - exact).abs(), 4 * (rough.double() - exact).abs()
    return bool((error <= allowed + 1e-5 * exact.abs().max()).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_against_one_sample_at_a_time(backend: str, name: str, dtype: torch.dtype) -> None:
    x, g, args = data(CASES[name], dtype)
    exact, rough = truth(x, g, *args), truth(x, g, *args, dtype=dtype)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    for method in ("auto", "gram", "direct"):
        if method == "gram" and name.startswith("long"):
            continue  # 6400 positions
        found = conv_norm_sq(x, g, *args, method)
        assert found.dtype == kind
        torch.testing.assert_close(found.double(), norms(exact), rtol=accuracy(dtype), atol=0)
    rows = conv_per_sample(x, g, *args)
    assert rows.dtype == kind and close(rows, exact, rough)
    c = torch.linspace(0, 1, x.size(0))
    total = conv_clipped_sum(x, g, c, *args)
    assert total.dtype == kind
    weights = c.view(-1, *[1] * (exact.dim() - 1))
    assert close(total, (exact * weights).sum(0), (rough.double() * weights).sum(0))
    out = torch.ones_like(total)
    assert conv_clipped_sum(x, g, c, *args, out) is out
    torch.testing.assert_close(out, total + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_strides_are_only_strides(backend: str, dtype: torch.dtype) -> None:
    for name in ("whole_tiles", "strided", "groups", "stem"):
        x, g, args = data(CASES[name], dtype)
        wanted = truth(x, g, *args)
        last = [t.to(memory_format=torch.channels_last) for t in (x, g)]
        turned = [t.mT.contiguous().mT for t in (x, g)]
        sparse = [torch.zeros(*t.shape, 2, dtype=dtype).select(-1, 1).copy_(t) for t in (x, g)]
        for some, grad in (last, turned, sparse, (last[0], g), (x, turned[1])):
            assert not (some.is_contiguous() and grad.is_contiguous())
            for method in ("gram", "direct"):
                found = conv_norm_sq(some, grad, *args, method)
                torch.testing.assert_close(found.double(), norms(wanted), rtol=accuracy(dtype), atol=0)
            rows = conv_per_sample(some, grad, *args)
            torch.testing.assert_close(rows.double(), wanted, rtol=1e-4, atol=1e-4)
        expanded = g[:, :, :1].expand_as(g)
        wanted = norms(truth(x, expanded, *args))
        torch.testing.assert_close(conv_norm_sq(x, expanded, *args).double(), wanted, rtol=accuracy(dtype), atol=0)


SIZE = st.integers(1, 3)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_geometry(draw: st.DataObject) -> None:
    """F images a sample, groups, transposed, 1 to 3 dimensions: the internal functions the engine calls."""
    n, groups, batch, images = (draw.draw(s) for s in (SIZE, SIZE, SIZE, st.integers(1, 2)))
    inputs, outputs = (groups * draw.draw(st.sampled_from([1, 2, 3, 16, 17])) for _ in range(2))
    kernel, stride, dilation = ([draw.draw(SIZE) for _ in range(n)] for _ in range(3))
    transposed = draw.draw(st.booleans())
    most = [d * (k - 1) // (2 if transposed else 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = [draw.draw(st.integers(0, m)) for m in most]
    size = [(k - 1) * d + draw.draw(st.integers(1, 6)) for k, d in zip(kernel, dilation, strict=True)]
    extra = [draw.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    torch.manual_seed(0)
    x = torch.randn(batch, images, inputs, *size)
    flat = x.double().flatten(0, 1)
    if transposed:
        shape: tuple[int, ...] = (inputs, outputs // groups, *kernel)
        y = TRANSPOSED[n - 1](flat, torch.zeros(shape).double(), None, stride, padding, extra, groups, dilation)
    else:
        shape, extra = (outputs, inputs // groups, *kernel), [0] * n
        y = FORWARD[n - 1](flat, torch.zeros(shape).double(), None, stride, padding, dilation, groups)
    g = torch.randn(batch, images, *y.shape[1:])
    geometry = Geometry(shape, tuple(stride), tuple(padding), tuple(dilation), groups, transposed, tuple(extra))
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    rows = []
    for some, grad in zip(x.double(), g.double(), strict=True):
        if transposed:
            y = TRANSPOSED[n - 1](some, weight, None, stride, padding, extra, groups, dilation)
        else:
            y = FORWARD[n - 1](some, weight, None, stride, padding, dilation, groups)
        rows.append(torch.autograd.grad(y, weight, grad)[0])
    exact = torch.stack(rows)
    for force in ("auto", "reference"):
        with registry.forced(force):
            torch.testing.assert_close(conv.per_sample(x, g, geometry).double(), exact, rtol=1e-4, atol=1e-4)
            for method in ("auto", "gram", "direct"):
                found = conv.norm_sq(x, g, geometry, method)
                assert found.dtype == torch.float64
                torch.testing.assert_close(found, norms(exact), rtol=1e-5, atol=1e-8)
            c = torch.rand(batch)
            total = torch.einsum("b,b...->...", c.double(), exact)
            torch.testing.assert_close(conv.clipped_sum(x, g, c, geometry).double(), total, rtol=1e-4, atol=1e-4)


def test_nothing(backend: str) -> None:
    for b, c, o in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x, g = torch.ones(b, c, 5, 5), torch.ones(b, o, 3, 3)
        for method in ("auto", "gram", "direct"):
            assert conv_norm_sq(x, g, 3, method=method).tolist() == [0.0] * b
        assert torch.equal(conv_per_sample(x, g, 3), torch.zeros(b, o, c, 3, 3))
        assert torch.equal(conv_clipped_sum(x, g, torch.ones(b), 3), torch.zeros(o, c, 3, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["stem", "whole_tiles", "groups"])
def test_a_bad_sample_stays_alone(backend: str, name: str, bad: float) -> None:
    x, g, args = data(CASES[name])
    x, g = (torch.cat([t, t.flip(0)])[:4] for t in (x, g))
    for method in ("gram", "direct"):
        clean = conv_norm_sq(x, g, *args, method)
        broken, grads = x.clone(), g.clone()
        broken[0, 1, 2, 2], grads[2, 0, 0, 0] = bad, bad
        found = conv_norm_sq(broken, grads, *args, method)
        assert not found[[0, 2]].isfinite().any()
        assert torch.equal(found[[1, 3]], clean[[1, 3]])
    rows, intact = conv_per_sample(broken, grads, *args), conv_per_sample(x, g, *args)
    torch.testing.assert_close(rows[[1, 3]], intact[[1, 3]])
    c = torch.tensor([0.0, 1.0, 0.0, 0.5])
    assert conv_clipped_sum(broken, grads, c, *args).isfinite().all()


@pytest.mark.skipif(not NATIVE, reason="needs the compiled extension")
@pytest.mark.parametrize("name", ["whole_tiles", "stem", "many_outputs", "depthwise", "line"])
def test_threads_and_repetition_change_no_bit(name: str) -> None:
    x, g, args = data(CASES[name])
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            some = [conv_norm_sq(x, g, *args, method, dtype=torch.float64) for method in ("gram", "direct")]
            found.append([*some, conv_per_sample(x, g, *args)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("side", [20, 60, 120])
def test_constant_data_does_not_shrink(backend: str, side: int) -> None:
    for value in (0.1, 1 / 3, 0.7071):
        x, g = torch.full((1, 16, side, side), value), torch.full((1, 8, side, side), value)
        exact = float(norms(truth(x, g, 3, 1, 1, 1, 1)))
        ratio = float(conv_norm_sq(x, g, 3, 1, 1, method="direct", dtype=torch.float64)) / exact
        assert abs(ratio - 1) < 4e-6, (value, ratio)  # 3.2e-6 MEASURED: summands of one sign


def test_cancelling_summands_are_found_out(backend: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, 8, 8) * 0.01 + 1000
    g = torch.randn(3, 5, 6, 6)
    g -= g.mean((2, 3), keepdim=True)
    exact = norms(truth(x, g, 3, 1, 0, 1, 1))
    for method in ("gram", "direct"):
        assert torch.allclose(conv_norm_sq(x, g, 3, method=method).double(), exact, rtol=1e-2), method


def test_refusals(backend: str) -> None:
    x, g = torch.ones(2, 4, 5, 5), torch.ones(2, 6, 3, 3)
    with pytest.raises(ValueError, match="method"):
        conv_norm_sq(x, g, 3, method="fast")
    with pytest.raises(ValueError, match="groups"):
        conv_norm_sq(x, g, 3, groups=3)
    with pytest.raises(ValueError, match="expected g"):
        conv_per_sample(x, g, 2)
    with pytest.raises(ValueError, match="one number or 2"):
        conv_per_sample(x, g, (3, 3, 3))
    with pytest.raises(ValueError, match="1 to 3 dimensions"):
        conv_clipped_sum(x, g[:1], torch.ones(2), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # opcheck has its own ways of calling torch.empty
    x, g = torch.randn(2, 4, 6, 6).to(dtype), torch.randn(2, 6, 3, 3).to(dtype)
    args, c, ops = ([3, 3], [2, 2], [1, 1], [1, 1], 2), torch.ones(2), torch.ops.fastdp
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    for method in ("auto", "gram", "direct"):
        torch.library.opcheck(ops.conv_norm_sq.default, (x, g, *args, method))
    torch.library.opcheck(ops.conv_per_sample.default, (x, g, *args))
    torch.library.opcheck(ops.conv_clipped_sum.default, (x, g, c, *args))
    torch.library.opcheck(ops.conv_clipped_sum.out, (x, g, c, *args, torch.zeros(6, 2, 3, 3, dtype=kind)))


def test_a_large_depthwise_image_is_read_in_bands() -> None:
    x, g = torch.randn(2, 2, 1100, 16), torch.randn(2, 2, 1100, 16)  # 16 channels of it are more than a band
    found = conv_per_sample(x, g, 3, padding=1, groups=2)
    for b in range(2):
        weight = torch.zeros(2, 1, 3, 3, dtype=torch.float64, requires_grad=True)
        F.conv2d(x[b : b + 1].double(), weight, padding=1, groups=2).backward(g[b : b + 1].double())
        assert weight.grad is not None
        torch.testing.assert_close(found[b].double(), weight.grad, rtol=1e-5, atol=1e-4)
    norms = conv_norm_sq(x, g, 3, padding=1, groups=2)
    torch.testing.assert_close(norms, found.square().flatten(1).sum(1), rtol=1e-5, atol=0)
