"""What must hold of the per-sample kernels of fastdp.ops.cuda (clip factors, embedding) on any device; the others' are
in tests/ops/cuda_checks.py."""

import math
from fractions import Fraction

import torch
from torch import Tensor

from fastdp.ops import clip, cuda

from .cuda_checks import accurate

# ---------------------------------------------------------------------- clip factors


def check_clip_factors(device: str) -> None:
    tiny, huge = 1e-300, 1e300
    torch.manual_seed(0)
    values = torch.logspace(-12, 12, 200, dtype=torch.float64).mul(torch.rand(200) + 0.5).tolist()
    values += [0.0, tiny, huge, 1e-45, 1e-38, 2e-38, 1e-8, 0.25, 0.999999, 1.0, 1.000001, 4.0, 1e38, math.inf, math.nan]
    for dtype in (torch.float64, torch.float32):
        norm_sq = torch.tensor(values, dtype=torch.float64).to(dtype)
        for kind in clip.KINDS:
            for limit in (1.0, 1e-3, 1e6, 1e-20):
                for gamma in (0.01, 0.0):
                    found = cuda.clip_factors(norm_sq.to(device), limit, kind, gamma).cpu()
                    assert found.dtype == torch.float32 and bool(found.isfinite().all())
                    usual = (norm_sq > 1e-12) & (norm_sq < 1e12)
                    expected = clip.clip_factors(norm_sq.double(), limit, kind, gamma).float()
                    assert torch.allclose(found[usual], expected[usual], rtol=1e-6, atol=0)
                    assert bool((found[~norm_sq.isfinite()] == 0).all())
                    for square, c in zip(norm_sq.tolist(), found.tolist(), strict=True):
                        if math.isfinite(square):  # c^2 n^2 <= R^2 without rounding
                            lost = Fraction(2) ** -126 if dtype == torch.float32 else 0  # a square that vanished
                            norm_above = (Fraction(square) + lost) * (1 + Fraction(clip.MARGIN)) ** 2
                            assert Fraction(c) ** 2 * norm_above <= Fraction(limit) ** 2
    check_clip_layouts(device)


def check_clip_layouts(device: str) -> None:
    torch.manual_seed(0)
    uses = torch.rand(5, 300, dtype=torch.float64) * 4
    uses[2, 7], uses[0, 299] = math.nan, math.inf
    for given in (uses, uses.float(), uses.T.contiguous().T, uses[:, ::3]):
        found = cuda.clip_factors(given.to(device), 2.0).cpu()
        expected = clip.clip_factors(given.double().sum(0), 2.0).float()
        assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    for shape in ((0,), (3, 0)):
        assert cuda.clip_factors(torch.zeros(shape, device=device), 1.0).shape == (0,)


# ---------------------------------------------------------------------- embedding


def look_up(
    batch: int, k: int, d: int, rows: int, dtype: torch.dtype, seed: int = 0, same: bool = False
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    ids = torch.full((batch, k), rows - 1) if same else torch.randint(0, rows, (batch, k))
    return ids, torch.randn(batch, k, d).to(dtype)


def table_gradients(ids: Tensor, g: Tensor, rows: int, padding: int | None) -> Tensor:
    """[B, rows, d] float64, a position at a time."""
    out = torch.zeros(ids.size(0), rows, g.size(-1), dtype=torch.float64)
    for b in range(ids.size(0)):
        for j in range(ids.size(1)):
            if ids[b, j] != padding:
                out[b, ids[b, j]] += g[b, j].double()
    return out


SHAPES = [(1, 1, 1, 3), (3, 37, 5, 11), (2, 64, 128, 4), (2, 130, 129, 7), (4, 65, 3, 1), (0, 5, 4, 3), (3, 0, 4, 3)]


def check_embedding(device: str, dtype: torch.dtype) -> None:
    for batch, k, d, rows in SHAPES:
        for padding in (None, 2):
            ids, g = look_up(batch, k, d, rows, dtype)
            each = table_gradients(ids, g, rows, padding)
            norm_sq = cuda.embedding_norm_sq(ids.to(device), g.to(device), padding, dtype=torch.float64).cpu()
            truth = each.square().sum((1, 2))
            assert norm_sq.shape == (batch,) and torch.allclose(norm_sq, truth, rtol=1e-12, atol=0)
            c = torch.rand(batch)
            c[1:2] = 0
            g[1:2] = math.nan
            total = torch.einsum("b,bvd->vd", c.double(), each)
            plain = torch.einsum("b,bvd->vd", c, each.float())
            found = cuda.embedding_clipped_sum(ids.to(device), g.to(device), c.to(device), rows, padding)
            assert found.shape == (rows, d) and accurate(found, plain, total, 1e-12 if dtype == torch.float64 else 5e-5)
            base = torch.randn(rows, d, dtype=found.dtype)
            out = base.clone().to(device)
            assert cuda.embedding_clipped_sum(ids.to(device), g.to(device), c.to(device), rows, padding, out) is out
            assert accurate(out, base + plain, base + total, 5e-5)


def check_embedding_long_segments(device: str) -> None:
    """One id over many chunks, and some that begin or end at their edges."""
    for same in (True, False):
        ids, g = look_up(3, 300, 6, 3, torch.float32, seed=5, same=same)
        each = table_gradients(ids, g, 3, None)
        norm_sq = cuda.embedding_norm_sq(ids.to(device), g.to(device))
        assert norm_sq.dtype == torch.float32
        assert torch.allclose(norm_sq.cpu().double(), each.square().sum((1, 2)), rtol=1e-6)
        found = cuda.embedding_clipped_sum(ids.to(device), g.to(device), torch.ones(3, device=device), 3).cpu()
        assert torch.allclose(found.double(), each.sum(0), rtol=1e-5, atol=1e-4)
    ids = torch.arange(256).div(64, rounding_mode="floor").view(2, 128)  # segments end where chunks do
    g = torch.randn(2, 128, 2)
    found = cuda.embedding_clipped_sum(ids.to(device), g.to(device), torch.ones(2, device=device), 4).cpu()
    assert torch.allclose(found.double(), table_gradients(ids, g, 4, None).sum(0), rtol=1e-5, atol=1e-5)


def check_embedding_layouts(device: str) -> None:
    """Strides, more dimensions, 32-bit ids, a sample that is no number, an `out` that is not contiguous."""
    ids, g = look_up(4, 6, 8, 5, torch.float32)
    truth = table_gradients(ids, g, 5, None)
    squares, total = truth.square().sum((1, 2)), truth.sum(0)
    ones = torch.ones(4, device=device)
    cases = [
        (ids, g.mT.contiguous().mT),
        (ids, torch.cat([g, g], 2)[:, :, :8]),
        (ids.view(4, 2, 3), g.view(4, 2, 3, 8)),
        (ids.int(), g.transpose(0, 1).contiguous().transpose(0, 1)),
    ]
    for given_ids, given in cases:
        put_ids, put = given_ids.to(device), given.to(device)
        assert torch.allclose(cuda.embedding_norm_sq(put_ids, put).cpu().double(), squares, rtol=1e-6)
        found = cuda.embedding_clipped_sum(put_ids, put, ones, 5).cpu().double()
        assert torch.allclose(found, total, rtol=1e-5, atol=1e-6)
    out = torch.zeros(8, 5, device=device).mT
    cuda.embedding_clipped_sum(ids.to(device), g.to(device), ones, 5, out=out)
    assert torch.allclose(out.cpu().double(), total, rtol=1e-5, atol=1e-6)
    g[2, 3, 1] = math.inf
    norms = cuda.embedding_norm_sq(ids.to(device), g.to(device)).cpu().double()
    assert not norms[2].isfinite()
    assert torch.allclose(norms[[0, 1, 3]], squares[[0, 1, 3]], rtol=1e-6)


CHECKS = [check_clip_factors, check_embedding_long_segments, check_embedding_layouts]
