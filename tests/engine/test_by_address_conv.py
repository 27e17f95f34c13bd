"""Convolutions of a whole step as on a GPU, in Triton's interpreter: channels are laid out once, and those of 1 x 1 go
in one launch each for norms and sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.grad_sample.conv import Conv, Products
from fastdp.ops import conv as conv_ops
from fastdp.ops.geometry import Geometry

from ..ops.by_triton import launches, serve_by_triton
from ..routes import forced
from ..truth import norms_of, truth

pytest.importorskip("triton")

B, LAYERS, C = 3, 3, 16
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_triton(monkeypatch)


class Net(nn.Module):
    """Blocks of 1 x 1 convolutions between one of 3 x 3 and a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, C, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(C, C, 1, bias=False) for _ in range(LAYERS))
        self.deep = nn.Conv2d(C, C, 3, padding=1, groups=C)
        self.wide = nn.Conv2d(C, 2 * C, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * C, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.wide(torch.tanh(self.deep(x))).mean((2, 3)))


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return F.softplus(model(x).float()).sum(1)


def images(side: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, 3, side, side, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("side", [4, 5])
@pytest.mark.parametrize("route", ["gram", "direct"])
def test_norms_and_sums(route: str, side: int, last: bool) -> None:
    model, x = Net(), images(side)
    exact, factors = truth(model, x, losses), torch.tensor([0.3, 0.0, 1.7])
    if last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    engine = fastdp.PerSampleGradients(model)
    with forced(route):
        losses(model, x).mean().backward()
        norms, sums = engine.norms(), engine.clipped_sum(factors)
    torch.testing.assert_close(norms.double(), norms_of(exact), rtol=1e-5, atol=0)
    assert bool((norms.double() >= norms_of(exact) * (1 - 1e-6)).all())
    for name, total in sums.items():
        want = torch.einsum("b,b...->...", factors.double(), exact[name])
        assert total.shape == want.shape
        torch.testing.assert_close(total.double(), want, rtol=1e-4, atol=1e-6)


def test_1x1_convolutions_go_in_one_launch() -> None:
    model, x = Net().bfloat16(), images(6, torch.bfloat16)
    engine = fastdp.PerSampleGradients(model)
    with forced("gram"):
        losses(model, x).mean().backward()
        with launches() as found:
            engine.norms()
        assert found["gram_kernel"] == 1, found
        with launches() as found:
            engine.clipped_sum(torch.ones(B))
        assert found["clipped_kernel"] == 1, found


GEOMETRY = Geometry((C, C, 1, 1), (1, 1), (0, 0), (1, 1), 1, False, (0, 0))


def sides(dtype: torch.dtype = torch.bfloat16, side: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(B, 1, C, side, side).to(dtype), torch.randn(B, 1, C, side, side).to(dtype)


@pytest.mark.parametrize("kernel", [1, 3])
def test_channels_are_laid_out_once_where_each_call_would_copy_them(kernel: int) -> None:
    geometry = GEOMETRY._replace(weight=(C, C, kernel, kernel), padding=(kernel // 2, kernel // 2))
    x, g = sides()
    laid = conv_ops.laid_out(x, g, geometry)
    assert all(torch.equal(a, b) and a.stride(2) == 1 for a, b in zip(laid, (x, g), strict=True))
    again = conv_ops.laid_out(*laid, geometry)
    assert all(a is b for a, b in zip(again, laid, strict=True)), "they lie so already"
    same = conv_ops.laid_out(*sides(torch.float32), geometry)
    assert all(a.is_contiguous() for a in same), "float32 is read as it lies"
    whole = conv_ops.laid_out(*sides(side=4), geometry)  # 16 positions are whole vectors
    assert whole[1].is_contiguous() and whole[0].is_contiguous() is (kernel == 1)


def test_what_is_a_product() -> None:
    x, g = sides()
    found = conv_ops.product_of(x, g, GEOMETRY)
    assert found is not None and found[0].data_ptr() == x.data_ptr() and found[1].shape == (B, 25, C)
    assert conv_ops.product_of(x[..., :4], g[..., :4], GEOMETRY) is None, "rows with gaps are no one stride apart"
    for change in ({"groups": 2}, {"stride": (2, 1)}, {"padding": (0, 1)}, {"weight": (C, C, 3, 1)},
                   {"transposed": True}):  # fmt: skip
        assert conv_ops.product_of(x, g, GEOMETRY._replace(**change)) is None
    assert conv_ops.product_of(x, g.float(), GEOMETRY) is None and conv_ops.product_of(x[:0], g[:0], GEOMETRY) is None
    assert conv_ops.product_of(torch.cat([x, x], 1), torch.cat([g, g], 1), GEOMETRY) is None


def test_sums_have_the_shape_of_the_weight_and_data_goes() -> None:
    uses = [Conv(torch.zeros(C, C, 1, 1), *sides(), GEOMETRY, "conv2d") for _ in range(2)]
    assert uses[0].alike() == uses[1].alike()
    one = uses[0].abreast(uses[1:])
    assert isinstance(one, Products)
    sums = one.sums_abreast(2, torch.tensor([0.5, 0.0, 2.0]), last=True)
    for use, total in zip(uses, sums, strict=True):
        g, x = (side.double().reshape(B, C, -1) for side in (use.g, use.x))
        want = torch.einsum("b,bop,bip->oi", torch.tensor([0.5, 0.0, 2.0]).double(), g, x)
        assert total.shape == (C, C, 1, 1)
        torch.testing.assert_close(total.double()[..., 0, 0], want, rtol=1e-4, atol=1e-4)
    assert not one._pairs


def test_the_engine_runs_the_kernels_themselves() -> None:
    """Sums of the convolutions that are no products are by the device's kernels here, too, not by the C++ ones."""
    model, x = Net().bfloat16(), images(6, torch.bfloat16)
    engine = fastdp.PerSampleGradients(model)
    with forced("direct"):
        losses(model, x).mean().backward()
        engine.norms()
        with launches() as found:
            engine.clipped_sum(torch.ones(B))
    assert found["conv_kernel"] == 2, found
