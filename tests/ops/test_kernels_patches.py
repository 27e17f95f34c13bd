"""Where elements of patches lie: divisions by a multiplication, offsets of 64 bits, whole tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .kernels_truth import DEVICE, check_close, check_norms, conv_gradients, numbers, weighted

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from fastdp.kernels import patches  # noqa: E402
from fastdp.kernels.conv import conv_clipped_sum, conv_norm_sq, conv_per_sample  # noqa: E402
from fastdp.kernels.conv_problem import Problem  # noqa: E402


@triton.jit
def _over_kernel(p_x, p_out, y, inverse, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o, mask=o < n, other=0)
    tl.store(p_out + o, patches._over(x, y, inverse, True), mask=o < n)


@pytest.mark.parametrize("y", [2, 3, 7, 14, 55, 56, 57, 224, 1000, 4096, 32767, 46340])
def test_positions_are_divided_exactly(y: int) -> None:
    """Next to every multiple, up to the largest position for which the launcher takes this way."""
    last = (1 << 31) // y - 1
    multiples = torch.linspace(0, last // y, 300, dtype=torch.float64).long() * y
    x = torch.cat([multiples - 1, multiples, multiples + 1, torch.tensor([last])]).clamp(0, last).int().to(DEVICE)
    found = torch.empty_like(x)
    _over_kernel[(triton.cdiv(x.numel(), 256),)](x, found, y, -(-(1 << 31) // y), x.numel(), BLOCK=256)
    assert torch.equal(found, x // y)


# x, weight, stride, padding, dilation, groups
CASES = [
    pytest.param((2, 16, 12, 12), (24, 16, 3, 3), 1, 1, 1, 1, id="more positions than a tile has"),
    pytest.param((2, 80, 5, 9), (130, 80, 2, 3), (2, 1), (0, 2), 1, 1, id="several tiles"),
    pytest.param((2, 32, 6, 5), (32, 16, 3, 3), 1, 2, 2, 2, id="groups"),
    pytest.param((2, 6, 6, 5), (6, 1, 3, 3), 1, 1, 1, 6, id="depthwise"),
]


@pytest.mark.parametrize(("x", "weight", "stride", "padding", "dilation", "groups"), CASES)
def test_tiles_of_the_rules(x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int,
                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Against float64; and the same bits by divisions, and by offsets of 64 bits."""
    images = numbers(*x, dtype=torch.bfloat16)
    shape = torch.nn.functional.conv2d(torch.empty(x), torch.empty(weight), None, stride, padding, dilation, groups)
    g = numbers(*shape.shape, dtype=torch.bfloat16, seed=1)
    truth = conv_gradients(images, g, weight, stride, padding, dilation, groups)
    c, rest = torch.tensor([0.7, 1.3], device=DEVICE), (weight[2:], stride, padding, dilation, groups)

    def every() -> list[torch.Tensor]:
        norms = [conv_norm_sq(images, g, *rest, method) for method in ("gram", "direct")]
        return [*norms, conv_per_sample(images, g, *rest), conv_clipped_sum(images, g, c, *rest)]

    found = every()
    for norms in found[:2]:
        check_norms(norms, truth, truth.float().flatten(1).square().sum(1))
    check_close(found[2], truth, truth.float())
    check_close(found[3], weighted(truth, c), weighted(truth, c).float())
    own = Problem.constants
    monkeypatch.setattr(Problem, "constants", lambda p: own(p) | {"FAST": False, "FAR": True, "DEEP": True})
    for before, after in zip(found, every(), strict=True):
        assert torch.equal(before, after)


def test_what_launchers_take_for_granted() -> None:
    def constants(width: int, height: int = 4, stride: int | None = None) -> dict[str, Any]:
        x = torch.empty(1, 2, 1, height, width, device="meta")
        if stride is not None:
            x = x.as_strided(x.shape, (8 * stride, stride, 1, 1, 1))
        g = torch.empty(1, 2, height * width, device="meta")
        ones = (1, 1, 1)
        from fastdp.kernels.conv_problem import Geometry

        return Problem(x, g, (height, width), Geometry(ones, ones, (0, 0, 0), ones), 1, (2, 2, 1, 1)).constants()

    assert constants(56)["FAST"] and not constants(1)["FAST"] and not constants(46340)["FAST"]
    assert not constants(56)["FAR"] and constants(56, stride=1 << 30)["FAR"] and not constants(56)["DEEP"]
