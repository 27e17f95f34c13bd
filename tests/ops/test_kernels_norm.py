"""Triton kernels of affine maps against float64: in the interpreter, or compiled where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels_truth import DTYPES, check_close, numbers, poisoned

pytest.importorskip("triton")

from fastdp.kernels.norm import group_affine_per_sample, norm_affine_per_sample, rms_affine_per_sample, rms_rstd


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation of rows, [..., 1] float32."""
    x = x.float()
    return x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(3, 1, 37), (3, 37, 50), (2, 70, 130), (2, 3, 5, 7), (3, 20)])
def test_layer_and_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, g = numbers(*shape, dtype=dtype) + 1, numbers(*shape, dtype=dtype, seed=1)
    mean, rstd = statistics(x)
    x2, g2, mean2, rstd2 = (y.double().reshape(shape[0], -1, y.size(-1)) for y in (x, g, mean, rstd))
    weight, bias = norm_affine_per_sample(x, g, mean, rstd)
    assert weight.dtype == bias.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    plain = (g2.float() * ((x2.float() - mean2.float()) * rstd2.float())).sum(1)
    check_close(weight, (g2 * (x2 - mean2) * rstd2).sum(1), plain)
    check_close(bias, g2.sum(1), g2.float().sum(1))
    check_close(rms_affine_per_sample(x, g, rstd.squeeze(-1)), (g2 * x2 * rstd2).sum(1),
                (g2.float() * x2.float() * rstd2.float()).sum(1))  # fmt: skip


def test_layer_norm_is_autograds() -> None:
    x, g = numbers(3, 37, 50).double(), numbers(3, 37, 50, seed=1).double()
    mean, rstd = statistics(x)
    weight, bias = norm_affine_per_sample(x, g, mean.double(), rstd.double())
    for b in range(3):
        w = torch.ones(50, dtype=torch.float64, device=x.device, requires_grad=True)
        v = torch.zeros_like(w, requires_grad=True)
        expected = torch.autograd.grad(F.layer_norm(x[b], (50,), w, v), (w, v), g[b])
        torch.testing.assert_close((weight[b], bias[b]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("shape", "groups"), [((3, 12, 5, 31), 4), ((2, 70, 9, 9), 7), ((3, 6), 3), ((2, 8, 3), 1)])
@pytest.mark.parametrize("last", [False, True])
def test_group_norm(dtype: torch.dtype, shape: tuple[int, ...], groups: int, last: bool) -> None:
    x, g = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    if last and x.dim() == 4:
        x, g = (y.to(memory_format=torch.channels_last) for y in (x, g))
    mean, rstd = (y.squeeze(-1) for y in statistics(x.reshape(shape[0], groups, -1)))
    weight, bias = group_affine_per_sample(x, g, mean, rstd, groups)
    x2, g2 = (y.double().reshape(*shape[:2], -1) for y in (x, g))
    mean2, rstd2 = (y.double().repeat_interleave(shape[1] // groups, 1).unsqueeze(-1) for y in (mean, rstd))
    plain = (g2.float() * ((x2.float() - mean2.float()) * rstd2.float())).sum(2)
    check_close(weight, (g2 * (x2 - mean2) * rstd2).sum(2), plain)
    check_close(bias, g2.sum(2), g2.float().sum(2))


def test_a_bad_number_stays_in_its_sample() -> None:
    x, g = numbers(3, 12, 5), numbers(3, 12, 5, seed=1)
    rows, groups = statistics(x), [y.squeeze(-1) for y in statistics(x.reshape(3, 4, -1))]
    calls = (lambda: norm_affine_per_sample(x, g, *rows), lambda: group_affine_per_sample(x, g, *groups, 4),
             lambda: (rms_affine_per_sample(x, g, rows[1]),))  # fmt: skip
    before = [call() for call in calls]
    x[1, -1, -1] = float("nan")
    rows[0][1, 0] = float("inf")
    groups[0][1, 0] = float("inf")
    for call, expected in zip(calls, before, strict=True):
        for found, known in zip(call(), expected, strict=True):
            assert torch.equal(found[[0, 2]], known[[0, 2]])
        assert not call()[0][1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 37), (2, 4, 513)])
def test_statistic_of_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = numbers(*shape, dtype=dtype)
    for y in (x, x.mT.contiguous().mT, x[:1].expand(3, -1, -1), x[:, ::2]):
        want = (y.double().square().mean(2) + 1e-6).rsqrt()
        torch.testing.assert_close(rms_rstd(y, 1e-6).double(), want, rtol=1e-6, atol=0)
    assert rms_rstd(x[:0], 1e-6).shape == (0, shape[1])
    large = numbers(2, 3, 8) * 1e30  # whose squares float32 does not hold
    torch.testing.assert_close(rms_rstd(large, 1e-6), large.double().square().mean(2).rsqrt().float())


def test_strides_nothing_and_errors() -> None:
    x, g = numbers(50, 3, 37).permute(1, 2, 0), numbers(3, 37, 100, seed=1)[..., ::2]
    mean, rstd = statistics(x)
    found = norm_affine_per_sample(x, g, mean, rstd)
    again = norm_affine_per_sample(x.contiguous(), g.contiguous(), mean, rstd)
    torch.testing.assert_close(found, again, rtol=1e-5, atol=1e-5)
    for shape in ((0, 5, 4), (3, 0, 4)):
        empty = numbers(*shape)
        for result in norm_affine_per_sample(empty, empty, empty[..., 0], empty[..., 0]):
            assert torch.equal(result, torch.zeros_like(result)) and result.shape == (shape[0], 4)
    empty = numbers(2, 4, 0)
    statistic = numbers(2, 2)
    assert torch.equal(
        group_affine_per_sample(empty, empty, statistic, statistic, 2)[0], torch.zeros_like(numbers(2, 4))
    )
    with pytest.raises(ValueError, match="expected x and g"):
        norm_affine_per_sample(x, g[:, 1:], mean, rstd)
    with pytest.raises(ValueError, match="a statistic a row"):
        norm_affine_per_sample(x, g, mean[1:], rstd)
    with pytest.raises(ValueError, match="a multiple of 5"):
        group_affine_per_sample(x, g, mean, rstd, 5)
    with pytest.raises(ValueError, match="a sample and group"):
        group_affine_per_sample(x, g, mean, rstd, 1)
