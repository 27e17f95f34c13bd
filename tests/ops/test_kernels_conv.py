"""Triton kernels of convolutions against float64: in the interpreter, or compiled where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels_truth import DEVICE, check_close, check_norms, conv_gradients, numbers, poisoned, weighted

pytest.importorskip("triton")

from fastdp.kernels import conv
from fastdp.kernels.common import Tile
from fastdp.kernels.conv import conv_clipped_sum, conv_norm_sq, conv_per_sample

SMALL = Tile(16, 16, 16, 4, 2)

# x [B,C,*], weight [O, C / groups, *kernel], stride, padding, dilation, groups
SHAPES = (
    pytest.param((3, 6, 23), (10, 6, 3), (2,), (1,), (1,), 1, id="1-D"),
    pytest.param((2, 3, 6, 7), (17, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1, id="2-D"),
    pytest.param((2, 6, 9, 11), (10, 3, 3, 2), (2, 1), (1, 0), (1, 2), 2, id="2-D groups"),
    pytest.param((2, 5, 7, 6), (5, 1, 3, 3), (2, 2), (2, 2), (2, 2), 5, id="depthwise"),
    pytest.param((2, 4, 3, 4, 5), (6, 4, 3, 3, 3), (1, 2, 2), (1, 1, 0), (1, 1, 1), 1, id="3-D"),
    pytest.param((3, 20, 5, 4), (18, 20, 1, 1), (1, 1), (0, 0), (1, 1), 1, id="pointwise"),
    pytest.param((3, 3, 4, 4), (18, 3, 4, 4), (4, 4), (0, 0), (1, 1), 1, id="one position"),
    # channels of whole vectors: with 16 bits the inner elements of patches
    pytest.param((2, 16, 5, 6), (17, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1, id="wide"),
    pytest.param((2, 32, 7, 6), (32, 16, 3, 2), (2, 1), (1, 0), (1, 2), 2, id="wide groups"),
    pytest.param((2, 16, 13), (10, 16, 3), (2,), (1,), (1,), 1, id="wide 1-D"),
    pytest.param((2, 16, 2, 3, 3), (16, 16, 2, 2, 2), (1, 1, 1), (1, 0, 1), (1, 1, 1), 1, id="wide 3-D"),
    pytest.param((2, 16, 5, 4), (18, 16, 1, 1), (2, 2), (0, 0), (1, 1), 1, id="wide and strided"),
)  # fmt: skip


# float16 is loaded as bfloat16 is, by the same lines
def _dtypes(name: str) -> list[torch.dtype]:
    few = [torch.bfloat16] if "wide" in name else [torch.float32, torch.bfloat16]
    return [*few, torch.float16] if "groups" in name else few


CASES = [pytest.param(*shape.values, dtype, id=f"{shape.id}-{dtype}".replace("torch.", ""))
         for shape in SHAPES for dtype in _dtypes(str(shape.id))]  # fmt: skip


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


class Setting:
    """A convolution's input, output gradient and truth."""

    def __init__(self, x_shape: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...],
                 padding: tuple[int, ...], dilation: tuple[int, ...], groups: int,
                 dtype: torch.dtype) -> None:  # fmt: skip
        self.x = numbers(*x_shape, dtype=dtype)
        forward = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(x_shape)]
        meta = forward(self.x.to("meta"), torch.empty(weight, device="meta", dtype=dtype), None, stride, padding,
                       dilation, groups)  # fmt: skip
        self.g = numbers(*meta.shape, dtype=dtype, seed=1)
        self.geometry = (weight[2:], stride, padding, dilation, groups)
        self.truth = conv_gradients(self.x, self.g, weight, stride, padding, dilation, groups)

    def plain(self) -> Tensor:
        """In float32 by PyTorch."""
        k, stride, padding, dilation, groups = self.geometry
        w = torch.zeros(self.truth.shape[1:], device=DEVICE)
        rows = [torch.ops.aten.convolution_backward(
            self.g[b : b + 1].float(), self.x[b : b + 1].float(), w, None, stride, padding, dilation, False,
            [0] * len(k), groups, [False, True, False])[1] for b in range(self.x.size(0))]  # fmt: skip
        return torch.stack(rows)


@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize(("x", "weight", "stride", "padding", "dilation", "groups", "dtype"), CASES)
def test_norms(x: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
               dilation: tuple[int, ...], groups: int, method: str, dtype: torch.dtype) -> None:  # fmt: skip
    s = Setting(x, weight, stride, padding, dilation, groups, dtype)
    found = conv_norm_sq(s.x, s.g, *s.geometry, method, tile=SMALL)
    assert found.dtype == torch.float32
    check_norms(found, s.truth, s.plain().flatten(1).square().sum(1))


@pytest.mark.parametrize(("x", "weight", "stride", "padding", "dilation", "groups", "dtype"), CASES)
def test_per_sample_gradients_and_clipped_sums(
    x: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], groups: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    s = Setting(x, weight, stride, padding, dilation, groups, dtype)
    plain = s.plain()
    for tile in (SMALL, None):
        check_close(conv_per_sample(s.x, s.g, *s.geometry, tile=tile), s.truth, plain)
    c = torch.tensor([0.7, 0.0, 1.3], device=DEVICE)[: x[0]]
    truth, plain = weighted(s.truth, c), weighted(plain, c)
    s.g[1].fill_(float("inf"))
    for tile, parts in ((SMALL, 1), (SMALL, 2), (None, None)):
        found = conv_clipped_sum(s.x, s.g, c, *s.geometry, tile=tile, parts=parts)
        assert found.dtype == torch.float32
        check_close(found, truth, plain)
    out = torch.ones(weight, device=DEVICE)
    assert conv_clipped_sum(s.x, s.g, c, *s.geometry, out) is out
    check_close(out, truth + 1, plain + 1)


@pytest.mark.parametrize("last", [False, True])
def test_channels_last_are_not_copied(last: bool) -> None:
    """Copies of both sides, or none where they lie so; the same norms."""
    s = Setting((2, 16, 6, 6), (32, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1, torch.bfloat16)
    x, g = (t.contiguous(memory_format=torch.channels_last) if last else t for t in (s.x, s.g))
    p = conv.problem(x, g, *s.geometry).wide()
    assert p.last and p.x.stride(1) == 1 and p.g.stride(1) == 1
    assert (p.x.data_ptr() == x.data_ptr()) is last and (p.g.data_ptr() == g.data_ptr()) is last
    check_norms(conv_norm_sq(x, g, *s.geometry, "direct"), s.truth, s.plain().flatten(1).square().sum(1))


def test_the_rules_tiles_and_numbers_for_all_dimensions() -> None:
    s = Setting((2, 3, 9, 8), (17, 3, 3, 3), (2, 2), (1, 1), (1, 1), 1, torch.bfloat16)
    for method in ("auto", "gram", "direct"):
        found = conv_norm_sq(s.x, s.g, 3, 2, (1,), 1, 1, method, dtype=torch.float64)
        assert found.dtype == torch.float64
        check_norms(found, s.truth, s.truth.flatten(1).square().sum(1))


@pytest.mark.parametrize("method", ["gram", "direct"])
def test_sums_in_chunks(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "chunk_of", lambda x: 32)
    s = Setting((2, 4, 7, 7), (5, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1, torch.bfloat16)
    check_norms(conv_norm_sq(s.x, s.g, *s.geometry, method, tile=SMALL), s.truth, s.plain().flatten(1).square().sum(1))


@pytest.mark.parametrize("method", ["gram", "direct"])
def test_layouts(method: str) -> None:
    s = Setting((2, 6, 9, 11), (10, 3, 3, 2), (2, 1), (1, 0), (1, 2), 2, torch.float16)
    expected = conv_norm_sq(s.x, s.g, *s.geometry, method, tile=SMALL)
    x, g = s.x.to(memory_format=torch.channels_last), s.g.to(memory_format=torch.channels_last)
    torch.testing.assert_close(conv_norm_sq(x, g, *s.geometry, method, tile=SMALL), expected, rtol=1e-6, atol=0)
    wide = torch.stack([s.x, s.x], -1).flatten(-2)[..., ::2]
    torch.testing.assert_close(conv_norm_sq(wide, s.g, *s.geometry, method, tile=SMALL), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["gram", "direct"])
def test_a_bad_number_stays_in_its_sample(method: str) -> None:
    s = Setting((3, 3, 5, 5), (4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1, torch.bfloat16)
    before = conv_norm_sq(s.x, s.g, *s.geometry, method, tile=SMALL)
    s.x[1, 2, 4, 4] = float("nan")
    after = conv_norm_sq(s.x, s.g, *s.geometry, method, tile=SMALL)
    assert not after[1].isfinite() and torch.equal(before[[0, 2]], after[[0, 2]])
    alone = conv_norm_sq(s.x[2:], s.g[2:], *s.geometry, method, tile=SMALL)
    torch.testing.assert_close(alone, before[2:], rtol=1e-6, atol=0)


def test_nothing_and_errors() -> None:
    x, g = numbers(0, 3, 8, 8, dtype=torch.bfloat16), numbers(0, 4, 8, 8, dtype=torch.bfloat16)
    assert conv_norm_sq(x, g, 3, 1, 1).shape == (0,)
    assert conv_per_sample(x, g, 3, 1, 1).shape == (0, 4, 3, 3, 3)
    total = conv_clipped_sum(x, g, torch.ones(0, device=DEVICE), 3, 1, 1)
    assert torch.equal(total, torch.zeros(4, 3, 3, 3, device=DEVICE))
    x, g = numbers(2, 3, 8, 8), numbers(2, 4, 8, 8)
    for call in (lambda: conv_norm_sq(x, g, 3), lambda: conv_norm_sq(x, g[:, :, 0], 3, 1, 1),
                 lambda: conv_norm_sq(x, g, 3, 1, 1, 1, 2), lambda: conv_norm_sq(x, g, (3, 3, 3), 1, 1),
                 lambda: conv_clipped_sum(x, g, torch.ones(3, device=DEVICE), 3, 1, 1)):  # fmt: skip
        with pytest.raises(ValueError, match="expected|these sizes"):
            call()


def test_sizes_that_no_convolution_has_are_refused() -> None:
    """As the reference refuses them: PyTorch has no such convolution, so nobody can want its norms."""
    x, g = numbers(2, 4, 8, 8), numbers(2, 4, 4, 4)
    for sizes in ((3, 1, -1, 1, 1), (3, 0, 1, 1, 1), (3, 2, 1, 0, 1), (0, 2, 0, 1, 1), (3, 2, 1, 1, 0)):
        with pytest.raises(ValueError, match="or more"):
            conv_norm_sq(x, g, *sizes)


def test_float64_stays_float64() -> None:
    s = Setting((2, 6, 9, 11), (10, 3, 3, 2), (2, 1), (1, 0), (1, 2), 2, torch.float64)
    torch.testing.assert_close(conv_norm_sq(s.x, s.g, *s.geometry), s.truth.flatten(1).square().sum(1))
    torch.testing.assert_close(conv_per_sample(s.x, s.g, *s.geometry), s.truth)
    c = torch.tensor([0.5, 2.0], device=DEVICE)
    torch.testing.assert_close(conv_clipped_sum(s.x, s.g, c, *s.geometry), weighted(s.truth, c))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_patches_that_underflow(dtype: torch.dtype) -> None:
    """The gram matrix of small patches loses all its numbers: the norm may come out too large, never as 0."""
    s = Setting((2, 4, 5, 5), (6, 2, 3, 3), (1, 1), (1, 1), (1, 1), 2, dtype)
    x, g = s.x * 1e-24, s.g * 1e17
    truth = conv_gradients(x, g, (6, 2, 3, 3), (1, 1), (1, 1), (1, 1), 2).flatten(1).norm(dim=1)
    assert (truth > 1e-7).all()
    limits = 1e-6, (1e-6, 5e-5)
    geometry = (3, 3), (1, 1), (1, 1), (1, 1), 2
    for found in (conv_norm_sq(x, g, *geometry, "gram"), conv.conv_norm_sq_and_bound(x, g, *geometry, "gram", *limits)):
        assert (found.double().sqrt() >= truth).all()
