"""The Triton kernel of a head's loss against float64, in the interpreter, and the function that it serves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastdp.ops import head, head_loss
from fastdp.ops.head import Head, Terms
from fastdp.ops.head_loss import Wanted, evaluate

from .kernels_truth import numbers, poisoned

pytest.importorskip("triton")

from fastdp.kernels import head_loss as kernels

ALL = Terms(-100, 0.1, 3.0, 0.7, 0.05)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def truth(z: Tensor, y: Tensor, terms: Terms) -> tuple[Tensor, ...]:
    """Log-sum-exps, scores of labels, means of scores, gradients, in float64 by autograd."""
    z = z.double().requires_grad_()
    s = z * terms.logit_scale
    s = s if terms.softcap is None else terms.softcap * torch.tanh(s / terms.softcap)
    lse, at, mean = s.logsumexp(1), s.gather(1, y[:, None])[:, 0], s.mean(1)
    loss = (1 - terms.label_smoothing) * (lse - at) + terms.label_smoothing * (lse - mean) + terms.z_loss * lse**2
    return lse.detach(), at.detach(), mean.detach(), torch.autograd.grad(loss.sum(), z)[0]


@pytest.mark.parametrize("terms", [Terms(), ALL, Terms(softcap=30.0), Terms(logit_scale=-2.0)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (5, 130), (2, 5000)])
def test_gradients(shape: tuple[int, int], terms: Terms) -> None:
    z, y = 3 * numbers(*shape), torch.arange(shape[0]) % shape[1]
    one = Head(z.new_empty(shape[1], 1), None, terms)
    exact = truth(z, y, terms)
    for write in (False, True):
        found = z.clone()
        parts = kernels.gradient_(found, y, 0, shape[1], *one.numbers(), write=write)
        for own, true in zip(parts, exact, strict=False):
            torch.testing.assert_close(own.double(), true, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(found.double(), exact[3] if write else z.double(), rtol=2e-6, atol=5e-7)
    low = shape[1] // 3  # slices, with the log-sum-exps at hand
    for start, stop in ((0, low), (low, shape[1])):
        part = z[:, start:stop].contiguous()
        kernels.gradient_(part, y, start, shape[1], *one.numbers(), lse=parts[0])
        torch.testing.assert_close(part.double(), exact[3][:, start:stop], rtol=2e-6, atol=2e-6)


def test_a_bad_row_stays_alone() -> None:
    z, y = numbers(4, 40), torch.tensor([0, 1, 2, 3])
    clean = z.clone()
    kernels.gradient_(clean, y, 0, 40)
    z[1, 7], z[2, 3] = float("nan"), float("inf")
    lse, _, _ = kernels.gradient_(z, y, 0, 40)
    assert torch.equal(z[[0, 3]], clean[[0, 3]]) and not lse[[1, 2]].isfinite().any()
    assert not z[1].isfinite().all() and not z[2].isfinite().all()


def test_small_scores_keep_their_digits() -> None:
    z = numbers(2, 50) * 1e-3
    exact = truth(z, torch.tensor([1, 2]), Terms(softcap=30.0))
    _, at, _ = kernels.gradient_(z, torch.tensor([1, 2]), 0, 50, softcap=30.0)
    torch.testing.assert_close(at.double(), exact[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("terms", [Terms(), ALL])
@pytest.mark.parametrize("limit", [2**27, 1])
def test_the_function_by_the_kernel(terms: Terms, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`evaluate` with the kernel equals itself without."""
    monkeypatch.setattr(head_loss, "LIMIT", limit)
    monkeypatch.setattr(head, "SLICE", 4 * 60)
    h, w, c, y = numbers(3, 5, 4), numbers(23, 4, seed=1), numbers(23, seed=2), torch.arange(15).view(3, 5)
    y[1, 2:] = -100
    exact = evaluate(h, y, Head(w, c, terms), Wanted(True, "norms", True))
    used = SimpleNamespace(gradient_=kernels.gradient_)
    for module in (head, head_loss):
        monkeypatch.setattr(module, "kernels_for", lambda z: used)
    found = evaluate(h, y, Head(w, c, terms), Wanted(True, "norms", True))
    for own, true in zip(found, exact, strict=True):
        if true is not None:
            torch.testing.assert_close(own, true, rtol=2e-5, atol=2e-6)
