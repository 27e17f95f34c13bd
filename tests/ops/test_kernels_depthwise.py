"""Depthwise convolutions in the interpreter, or compiled where there is a GPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .by_triton import launches
from .kernels_truth import DEVICE, check_close, check_norms, conv_gradients, numbers, poisoned, weighted

pytest.importorskip("triton")
from fastdp.kernels import conv, depthwise
from fastdp.kernels.conv import conv_clipped_sum, conv_norm_sq, conv_norm_sq_and_bound, conv_per_sample

# x [B,C,*], kernel, stride, padding, dilation
SHAPES = (
    pytest.param((3, 6, 23), (4,), (1,), (3,), (1,), id="1-D"),
    pytest.param((2, 70, 9), (3,), (2,), (1,), (2,), id="1-D of several blocks of channels"),
    pytest.param((2, 5, 7, 6), (3, 3), (2, 2), (2, 2), (2, 2), id="2-D"),
    pytest.param((2, 16, 9, 8), (7, 7), (1, 1), (3, 3), (1, 1), id="7 x 7"),
    pytest.param((2, 33, 8, 5), (3, 2), (2, 1), (0, 1), (1, 2), id="2-D without padding on one side"),
    pytest.param((2, 4, 3, 4, 5), (3, 3, 3), (1, 2, 2), (1, 1, 0), (1, 1, 1), id="3-D"),
    pytest.param((2, 3, 4, 4), (4, 4), (1, 1), (0, 0), (1, 1), id="one position"),
    pytest.param((1, 2, 12, 1), (3, 1), (1, 1), (1, 0), (1, 1), id="one column"),
)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


class Setting:
    """A convolution's input, output gradient and truth."""

    def __init__(self, shape: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...],
                 padding: tuple[int, ...], dilation: tuple[int, ...], dtype: torch.dtype) -> None:  # fmt: skip
        groups, self.weight = shape[1], (shape[1], 1, *kernel)
        self.x = numbers(*shape, dtype=dtype)
        forward = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
        out = forward(torch.empty(shape), torch.empty(self.weight), None, stride, padding, dilation, groups)
        self.g = numbers(*out.shape, dtype=dtype, seed=1)
        self.geometry = (kernel, stride, padding, dilation, groups)
        self.truth = conv_gradients(self.x, self.g, self.weight, stride, padding, dilation, groups)

    def norms(self) -> Tensor:
        return self.truth.float().flatten(1).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "kernel", "stride", "padding", "dilation"), SHAPES)
def test_against_float64(shape: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...],
                         padding: tuple[int, ...], dilation: tuple[int, ...], dtype: torch.dtype) -> None:  # fmt: skip
    s = Setting(shape, kernel, stride, padding, dilation, dtype)
    found = conv_per_sample(s.x, s.g, *s.geometry)
    assert found.dtype == torch.float32
    check_close(found, s.truth, s.truth.float())
    for method in ("auto", "gram", "direct"):
        check_norms(conv_norm_sq(s.x, s.g, *s.geometry, method), s.truth, s.norms())
    limits = 1e-6, (1e-6, 5e-5)
    check_norms(conv_norm_sq_and_bound(s.x, s.g, *s.geometry, "direct", *limits), s.truth, s.norms())
    c = torch.tensor([0.7, 0.0, 1.3], device=DEVICE)[: shape[0]]
    truth = weighted(s.truth, c)
    if shape[0] > 1:
        s.g[1].fill_(float("inf"))
    total = conv_clipped_sum(s.x, s.g, c, *s.geometry)
    assert total.dtype == torch.float32
    check_close(total, truth, truth.float())
    out = torch.ones(s.weight, device=DEVICE)
    assert conv_clipped_sum(s.x, s.g, c, *s.geometry, out) is out
    check_close(out, truth + 1, (truth + 1).float())


def test_parts_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions beyond a program's are another's, and sums the same."""
    s = Setting((2, 6, 11, 9), (3, 3), (1, 1), (1, 1), (1, 1), torch.bfloat16)
    whole = conv_per_sample(s.x, s.g, *s.geometry)
    monkeypatch.setattr(depthwise, "SPAN", 64)
    parts = conv_per_sample(s.x, s.g, *s.geometry)
    check_close(parts, s.truth, s.truth.float())
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_layouts_are_copied_only_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setting((2, 16, 6, 7), (3, 3), (1, 1), (1, 1), (1, 1), torch.bfloat16)
    x, g = (t.contiguous(memory_format=torch.channels_last) for t in (s.x, s.g))
    p = conv.problem(x, g, *s.geometry)
    laid = depthwise._last(p)
    assert laid.x.data_ptr() == x.data_ptr() and laid.g.data_ptr() == g.data_ptr()
    assert torch.equal(depthwise.per_sample(p), conv_per_sample(s.x, s.g, *s.geometry))
    wide = torch.stack([s.x, s.x], -1).flatten(-2)[..., ::2]
    assert torch.equal(conv_per_sample(wide, s.g, *s.geometry), conv_per_sample(s.x, s.g, *s.geometry))


def test_a_bad_number_stays_in_its_sample() -> None:
    s = Setting((3, 5, 6, 6), (3, 3), (1, 1), (1, 1), (1, 1), torch.bfloat16)
    before = conv_norm_sq(s.x, s.g, *s.geometry)
    s.x[1, 2, 4, 4] = float("nan")
    after = conv_norm_sq(s.x, s.g, *s.geometry)
    assert not after[1].isfinite() and torch.equal(before[[0, 2]], after[[0, 2]])
    assert torch.equal(conv_norm_sq(s.x[2:], s.g[2:], *s.geometry), before[2:])


def test_what_is_taken() -> None:
    def problem(channels: int, outputs: int, groups: int, dtype: torch.dtype = torch.bfloat16) -> conv.Problem:
        x, g = numbers(1, channels, 4, 4, dtype=dtype), numbers(1, outputs, 4, 4, dtype=dtype)
        return conv.problem(x, g, 3, 1, 1, 1, groups)

    assert depthwise.takes(problem(6, 6, 6)) and depthwise.takes(problem(6, 6, 6, torch.float32))
    assert not depthwise.takes(problem(6, 12, 6)) and not depthwise.takes(problem(6, 6, 3))
    assert not depthwise.takes(problem(1, 1, 1)) and not depthwise.takes(problem(6, 6, 6, torch.float64))


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are counted in the interpreter")
def test_the_kernel_serves() -> None:
    s = Setting((2, 5, 6, 6), (3, 3), (1, 1), (1, 1), (1, 1), torch.bfloat16)
    with launches() as found:
        conv_norm_sq(s.x, s.g, *s.geometry)
        conv_clipped_sum(s.x, s.g, torch.ones(2, device=DEVICE), *s.geometry)
    assert found == {"depthwise_kernel": 2, "square_kernel": 1, "weighted_kernel": 1}
