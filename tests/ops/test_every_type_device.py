"""Kernels of many layers, segments, cross terms, stored rows and losses in every type: on a card at the sizes of real
models, where products go to matrix units; without one at small sizes, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .kernels_truth import DEVICE, DTYPES, conv_gradients, numbers

pytest.importorskip("triton")
from fastdp.kernels import conv, embedding, head_loss, linear, many, norm, rows, segments

pytestmark = pytest.mark.slow  # `make test-all` runs it

CARD = DEVICE == "cuda"
LAYERS = [(512, 1280, 5120), (197, 768, 768), (1, 768, 3072)] if CARD else [(33, 32, 48), (1, 16, 32)]


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm().clamp(min=1e-30))


def squares(gradients: Tensor) -> Tensor:
    return gradients.flatten(1).square().sum(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "i", "o"), LAYERS)
def test_many_layers_are_each_what_it_is_alone(dtype: torch.dtype, t: int, i: int, o: int) -> None:
    pairs = [(numbers(4, t, i, dtype=dtype, seed=k), numbers(4, t, o, dtype=dtype, seed=k + 9)) for k in range(5)]
    pairs.insert(2, (numbers(4, t, i + 1, dtype=dtype), numbers(4, t, o, dtype=dtype, seed=1)))  # of another shape
    factors = torch.tensor([0.3, 0.0, 1.0, 0.7], device=DEVICE)
    truth = [torch.bmm(g.double().mT, a.double()) for a, g in pairs]
    for method in ("gram", "direct"):
        found = many.linear_norm_sq(pairs, method, 0.0, 1.0)
        assert all(error(norms, squares(each)) < 1e-4 for norms, each in zip(found, truth, strict=True))
        alone = [linear.linear_norm_sq_and_bound(a, g, method, 0.0, 1.0)[0] for a, g in pairs]
        assert torch.equal(found, torch.stack(alone))
    sums = many.linear_clipped_sum(list(pairs), factors)
    weights = factors.double()[:, None, None]
    assert all(error(total, (weights * each).sum(0)) < 1e-4 for total, each in zip(sums, truth, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_rows_of_many_layers(dtype: torch.dtype) -> None:
    stacks = [numbers(3, 7, 771, dtype=dtype, seed=k) for k in range(4)]
    factors = torch.tensor([0.0, 0.5, 1.0], device=DEVICE)
    for found, stack in zip(many.square_sum(stacks), stacks, strict=True):
        assert error(found, squares(stack.double())) < 1e-6
    for found, stack in zip(many.weighted_sum(stacks, factors), stacks, strict=True):
        assert error(found, (factors.double()[:, None, None] * stack.double()).sum(0)) < 1e-2
        assert error(rows.square_sum(stack), squares(stack.double())) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_segments(dtype: torch.dtype) -> None:
    n, i, o = (2048, 256, 512) if CARD else (37, 33, 18)
    a, g = numbers(n, i, dtype=dtype), numbers(n, o, dtype=dtype, seed=1)
    factors = numbers(n, seed=2).abs()
    factors[::3] = 0
    ends = [0, 0, 5, 5, n - 1, n]
    starts, spans = torch.tensor(ends, device=DEVICE), list(zip(ends, ends[1:], strict=False))
    truth = torch.stack([g[x:y].double().T @ a[x:y].double() for x, y in spans])
    clipped = torch.stack([(factors[x:y, None].double() * g[x:y].double()).T @ a[x:y].double() for x, y in spans])
    assert error(segments.norm_sq(a, g, starts), squares(truth)) < 1e-4
    into = torch.full((5, o, i), float("nan"), device=DEVICE)
    assert error(segments.overwrite_sums(a, g, starts, into), truth) < 1e-4
    assert error(segments.overwrite_sums(a, g, starts, into, factors), clipped) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_terms_and_statistics(dtype: torch.dtype) -> None:
    b, k, t, d, v = (4, 512, 512, 768, 50257) if CARD else (2, 13, 9, 20, 11)
    ids = torch.randint(0, v, (b, k), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    e, h, g = (numbers(b, *size, dtype=dtype, seed=k) for k, size in enumerate(((k, d), (t, d), (t, v))))
    picked = g.double().gather(2, ids[:, None, :].expand(-1, t, -1))
    truth = (torch.bmm(h.double(), e.double().mT) * picked).sum((1, 2))
    found, spread = embedding.cross_term_and_spread(ids, e, h, g)
    assert bool(((found - truth).abs() <= 1e-5 * spread).all())
    assert error(norm.rms_rstd(h, 1e-6), (h.double().square().mean(-1) + 1e-6).rsqrt()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 32])
def test_norms_with_bounds(dtype: torch.dtype, groups: int) -> None:
    a, g = numbers(2, 65, 48, dtype=dtype), numbers(2, 65, 32, dtype=dtype, seed=1)
    truth = squares(torch.bmm(g.double().mT, a.double()))
    for method in ("gram", "direct"):
        assert error(linear.linear_norm_sq_and_bound(a, g, method, 1e-6, 5e-5)[0], truth) < 1e-4
    x, g = numbers(2, 32, 9, 9, dtype=dtype), numbers(2, 32, 9, 9, dtype=dtype, seed=1)
    truth = squares(conv_gradients(x, g, (32, 32 // groups, 3, 3), 1, 1, 1, groups))
    found = conv.conv_norm_sq_and_bound(x, g, 3, 1, 1, 1, groups, "direct", 1e-6, (1e-6, 5e-5))
    assert error(found, truth) < 1e-4


@pytest.mark.parametrize("words", [7, 2049, 50257] if CARD else [7, 2049])
def test_losses_of_heads(words: int) -> None:
    scores = numbers(9, words) * 5
    labels = (numbers(9, seed=1).abs() * 1000).long() % words
    exact = scores.double().requires_grad_()
    torch.nn.functional.cross_entropy(exact, labels, reduction="sum").backward()
    assert exact.grad is not None
    lse, _, mean = head_loss.gradient_(scores, labels, 0, words)
    assert error(scores, exact.grad) < 1e-5 and error(mean, exact.detach().mean(1)) < 1e-4
    assert error(lse, exact.detach().logsumexp(1)) < 1e-6
