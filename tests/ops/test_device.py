"""Every launcher of the Triton kernels on a GPU: real and odd sizes against float64, equal bits from run to run, replay
as a CUDA graph, outputs fully written. `python -m pytest tests/ops/test_device.py`; with `-k "not real"` without the
large ones.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from .kernels_truth import DEVICE, check_close, check_norms, numbers, poisoned, weighted

pytest.importorskip("triton")

from fastdp.kernels import clipped, common, conv, linear, norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


class Call(NamedTuple):
    """A launcher ready to run, and what its result is to be: in float64, and by PyTorch in float32."""

    run: Callable[[], Tensor]
    truth: Callable[[], Tensor]
    plain: Callable[[], Tensor]
    norms: bool  # truth and plain are per-sample gradients, the result their squared norms


def true_gradients(a: Tensor, g: Tensor) -> Tensor:
    return torch.bmm(g.double().mT, a.double())


def plain_gradients(a: Tensor, g: Tensor) -> Tensor:
    return torch.bmm(g.float().mT, a.float())


def linear_call(name: str, b: int, t: int, i: int, o: int, dtype: torch.dtype) -> Call:
    a, g = numbers(b, t, i, dtype=dtype), numbers(b, t, o, dtype=dtype, seed=1) * 0.01
    c = torch.rand(b, generator=torch.Generator().manual_seed(b)).to(DEVICE) + 0.1
    c[::3] = 0
    true, plain = lambda: true_gradients(a, g), lambda: plain_gradients(a, g)
    if name in ("gram", "direct", "auto"):
        return Call(lambda: linear.linear_norm_sq(a, g, name), true, plain, True)
    if name == "gram, not stored":
        return Call(lambda: linear._gram(a, g, torch.float32)[0], true, plain, True)
    if name == "per sample":
        return Call(lambda: linear.linear_per_sample(a, g), true, plain, False)
    if name == "per sample, kernel":
        tile = linear.direct_tile(a, g)
        return Call(lambda: linear.linear_per_sample(a, g, tile=tile), true, plain, False)
    run = {
        "sum": lambda: clipped.linear_clipped_sum(a, g, c),
        "sum, kernel": lambda: clipped.linear_clipped_sum(a, g, c, parts=1),
        "sum in parts": lambda: clipped.linear_clipped_sum(a, g, c, parts=3),
        "sum added": lambda: clipped.linear_clipped_sum(a, g, c, torch.zeros(o, i, device=DEVICE), parts=2),
    }[name]
    return Call(run, lambda: weighted(true(), c), lambda: weighted(plain(), c), False)


def conv_call(name: str, x_shape: tuple[int, ...], outputs: int, k: int, stride: int, padding: int, dilation: int,
              groups: int, dtype: torch.dtype, last: bool) -> Call:  # fmt: skip
    n = len(x_shape) - 2
    spatial = [(size + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for size in x_shape[2:]]
    x = numbers(*x_shape, dtype=dtype)
    g = numbers(x_shape[0], outputs, *spatial, dtype=dtype, seed=1) * 0.01
    if last and n == 2:
        x, g = x.to(memory_format=torch.channels_last), g.to(memory_format=torch.channels_last)
    c = torch.rand(x_shape[0], generator=torch.Generator().manual_seed(1)).to(DEVICE) + 0.1
    c[::3] = 0
    weight = torch.empty(outputs, x_shape[1] // groups, *[k] * n, device=DEVICE)

    def gradients(kind: torch.dtype) -> Tensor:
        with common.exact_convolutions():
            return torch.stack([torch.ops.aten.convolution_backward(
                g[b : b + 1].to(kind), x[b : b + 1].to(kind), weight.to(kind), None, [stride] * n, [padding] * n,
                [dilation] * n, False, [0] * n, groups, [False, True, False],
            )[1] for b in range(x.size(0))])  # fmt: skip

    geometry = (k, stride, padding, dilation, groups)
    true, plain = lambda: gradients(torch.float64), lambda: gradients(torch.float32)
    if name in ("gram", "direct", "auto"):
        return Call(lambda: conv.conv_norm_sq(x, g, *geometry, name), true, plain, True)
    if name == "per sample":
        return Call(lambda: conv.conv_per_sample(x, g, *geometry), true, plain, False)
    return Call(lambda: conv.conv_clipped_sum(x, g, c, *geometry), lambda: weighted(true(), c),
                lambda: weighted(plain(), c), False)  # fmt: skip


def norm_call(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Call:
    x, g = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    if name == "group":
        mean, rstd = numbers(shape[0], 4), numbers(shape[0], 4, seed=1).abs()
        expand = lambda y: y.repeat_interleave(shape[1] // 4, 1).view(shape[0], shape[1], *[1] * (x.dim() - 2))
        dims = tuple(range(2, x.dim()))
        run = lambda: torch.stack(norm.group_affine_per_sample(x, g, mean, rstd, 4))
    else:
        mean, rstd = numbers(*shape[:-1]), numbers(*shape[:-1], seed=1).abs()
        expand, dims = (lambda y: y.unsqueeze(-1)), (1,)
        run = lambda: torch.stack(norm.norm_affine_per_sample(x, g, mean, rstd))
        if name == "RMS":
            run = lambda: norm.rms_affine_per_sample(x, g, rstd)

    def sums(kind: torch.dtype) -> Tensor:
        x2, g2, mean2, rstd2 = x.to(kind), g.to(kind), expand(mean).to(kind), expand(rstd).to(kind)
        if name == "RMS":
            return (g2 * x2 * rstd2).sum(dims)
        return torch.stack([(g2 * (x2 - mean2) * rstd2).sum(dims), g2.sum(dims)])

    return Call(run, lambda: sums(torch.float64), lambda: sums(torch.float32), False)


def judge(call: Call, found: Tensor) -> None:
    truth, plain = call.truth(), call.plain()
    if call.norms:
        check_norms(found, truth, plain.flatten(1).double().square().sum(1))
    else:
        check_close(found, truth, plain)


LINEAR = ["gram", "gram, not stored", "direct", "auto", "per sample", "per sample, kernel", "sum", "sum, kernel",
          "sum in parts", "sum added"]  # fmt: skip
CONVS = [
    ((5, 16, 14, 14), 40, 3, 1, 1, 1, 1), ((4, 3, 33, 31), 70, 7, 2, 3, 1, 1), ((4, 12, 17, 15), 18, 3, 2, 2, 2, 3),
    ((3, 24, 28, 28), 24, 3, 1, 1, 1, 24), ((4, 80, 300), 96, 3, 1, 1, 1, 1), ((2, 4, 6, 7, 8), 10, 3, 1, 1, 1, 1),
    ((4, 64, 16, 16), 72, 1, 1, 0, 1, 1), ((4, 3, 64, 64), 96, 16, 16, 0, 1, 1),
]  # fmt: skip


def small_calls() -> Iterator[tuple[str, Callable[[], Call]]]:
    """Every launcher at odd sizes and at sizes with wide loads."""
    for dtype in DTYPES:
        few = dtype == torch.float16  # as bfloat16, so that a few do
        for size in ((4, 17, 40, 24), (3, 197, 192, 256), (5, 1, 70, 130), (3, 130, 67, 45), (2, 300, 16, 8))[
            : 2 if few else 5
        ]:
            for name in LINEAR:
                if size[1] > 1 or name != "gram, not stored":
                    yield f"{name} {size} {dtype}", lambda a=(name, *size, dtype): linear_call(*a)
        for shape in CONVS[: 1 if few else None]:
            for name in ("gram", "direct", "per sample", "sum"):
                yield f"conv {name} {shape} {dtype}", lambda a=(name, *shape, dtype, False): conv_call(*a)
        yield f"conv last {dtype}", lambda a=("direct", *CONVS[0], dtype, True): conv_call(*a)
        for name, shape in (("layer", (5, 197, 130)), ("layer", (4, 1, 768)), ("RMS", (5, 67, 100)),
                            ("group", (5, 12, 9, 11)), ("group", (4, 64, 32, 32))):  # fmt: skip
            yield f"{name} {shape} {dtype}", lambda a=(name, shape, dtype): norm_call(*a)


SMALL = dict(small_calls())


@pytest.mark.parametrize("name", SMALL)
def test_odd_sizes_equal_bits_and_graphs(name: str) -> None:
    call = SMALL[name]()
    first = call.run()
    judge(call, first)
    for _ in range(3):
        assert torch.equal(call.run(), first)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = call.run()
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, first)


def test_sanitizer_a_few_launches_of_every_kernel() -> None:
    """For compute-sanitizer, under which all others would take an hour: one odd size, one with wide loads."""
    sizes = ("(3, 197,", "(4, 17,", str(CONVS[0]), str(CONVS[3]), "layer", "RMS", "group")
    chosen = [name for name in SMALL if "bfloat16" in name and any(size in name for size in sizes)]
    assert len(chosen) > 25
    for name in chosen:
        SMALL[name]().run()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(
    "size", [(2, 1024, 4096, 4096), (8, 512, 768, 3072), (4, 2048, 1024, 1000), (64, 1, 768, 1000)]
)
@pytest.mark.parametrize("dtype", HALVES)
def test_real_sizes(name: str, size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    if size[1] == 1 and name == "gram, not stored":
        pytest.skip("one position needs no triangle")
    call = linear_call(name, *size, dtype)
    judge(call, call.run())


@pytest.mark.parametrize("shape", [((16, 64, 56, 56), 64, 3, 1, 1, 1, 1), ((16, 256, 14, 14), 512, 3, 2, 1, 1, 1),
                                   ((16, 512, 7, 7), 512, 3, 1, 1, 1, 1)])  # fmt: skip
@pytest.mark.parametrize("name", ["auto", "direct", "per sample", "sum"])
@pytest.mark.parametrize("last", [False, True])
def test_real_convolutions(name: str, shape: tuple, last: bool) -> None:
    call = conv_call(name, *shape, torch.bfloat16, last)
    judge(call, call.run())


@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("t", "i", "o"), [(64, 8192, 8192), (4096, 256, 256)])
def test_real_long_sums_of_one_sign_are_not_cut_off(method: str, dtype: torch.dtype, t: int, i: int, o: int) -> None:
    # matrix units round sums towards zero: if nothing is done, norms come out too small where products have one sign
    a, g = numbers(2, t, i).abs().to(dtype), numbers(2, t, o, seed=1).abs().to(dtype) * 0.01
    norms = linear.linear_norm_sq(a, g, method, dtype=torch.float64).sqrt()
    ratio = norms / true_gradients(a, g).flatten(1).norm(dim=1)
    print(f"{method} {dtype} T={t}: norm / truth - 1 = {[f'{r - 1:.2e}' for r in ratio.tolist()]}")
    assert bool((ratio >= 1 - 1e-6).all()) and bool((ratio <= 1 + 1e-5).all()), (ratio - 1).tolist()


def test_offsets_beyond_2_to_the_31() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB")
    a, g = numbers(2, 80, 16, dtype=torch.bfloat16), numbers(2, 80, 24, dtype=torch.bfloat16, seed=1)
    wide = torch.empty(2, 80, 2**25, dtype=torch.bfloat16, device=DEVICE)  # rows 2^25 apart
    wide[:, :, :24] = g
    far = wide[:, :, :24]
    for method in ("gram", "direct"):
        found = linear._gram(a, far, torch.float32)[0] if method == "gram" else linear.linear_norm_sq(a, far, method)
        check_norms(found, true_gradients(a, g), plain_gradients(a, g).flatten(1).double().square().sum(1))
    c = torch.ones(2, device=DEVICE)
    check_close(clipped.linear_clipped_sum(a, far, c), weighted(true_gradients(a, g), c),
                weighted(plain_gradients(a, g), c))  # fmt: skip


def test_a_bad_sample_is_dropped_and_stays_alone() -> None:
    for dtype in DTYPES:
        a, g = numbers(4, 70, 96, dtype=dtype), numbers(4, 70, 64, dtype=dtype, seed=1)
        truth = true_gradients(a, g)
        before = [linear.linear_norm_sq(a, g, method) for method in ("gram", "direct")]
        a[2, 5, 7], g[2, 6, 8] = float("nan"), float("inf")
        for method, known in zip(("gram", "direct"), before, strict=True):
            found = linear.linear_norm_sq(a, g, method)
            assert not found[2].isfinite() and torch.equal(found[[0, 1, 3]], known[[0, 1, 3]])
        c = torch.tensor([1.0, 0.5, 0.0, 2.0], device=DEVICE)
        for parts in (None, 1, 2):
            found = clipped.linear_clipped_sum(a, g, c, parts=parts)
            check_close(found, weighted(truth, c), weighted(truth, c).float())
