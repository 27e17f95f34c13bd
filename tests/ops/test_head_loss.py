"""A head with its cross-entropy: losses, gradients, norms and sums against float64, with every option and odd sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastdp.grad_sample.head_loss import _weights
from fastdp.losses import causal_lm_loss, linear_cross_entropy, token_loss
from fastdp.ops import head, head_loss, head_sums
from fastdp.ops.head import Head, Terms
from fastdp.ops.head_loss import Wanted, evaluate
from fastdp.ops.registry import triton_module

from .backends import TRITON

pytestmark = pytest.mark.slow  # `make test-all` runs it

B, T, D, V = 3, 5, 4, 11
# bytes of whole logits, bytes of a slice: all at once; by samples; by slices, of several words and of one
CUTS = [(2**27, 2**26), (8 * T * V, 2**26), (1, 256), (1, 1)]
KERNEL = [("kernel", *CUTS[0]), ("kernel", 1, 4096)] if TRITON else []


@pytest.fixture(params=[*CUTS, *KERNEL], ids=str)
def cut(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """The type of numbers that is to be asked: Triton's kernel, in its interpreter, takes float32 alone."""
    *by_kernel, most, slice_ = request.param
    monkeypatch.setattr(head_loss, "LIMIT", most)
    monkeypatch.setattr(head_loss, "PART", most)
    monkeypatch.setattr(head, "SLICE", slice_)
    if most < 2**27:  # a few rows at a time
        monkeypatch.setattr(head_loss, "CACHED", 8 * V)
    for module in (head, head_loss) if by_kernel else ():
        monkeypatch.setattr(module, "kernels_for", lambda z: triton_module("head_loss") if z.dtype == F32 else None)
    yield torch.float32 if by_kernel else torch.float64


F32 = torch.float32


def plain(h: Tensor, w: Tensor, y: Tensor, b: Tensor | None = None, **options: Any) -> Tensor:
    """The same with logits, by torch's cross_entropy."""
    cap, ignored = options.get("softcap"), options.get("ignore_index", -100)
    z = F.linear(h, w, b) * options.get("logit_scale", 1.0)
    z = z if cap is None else cap * torch.tanh(z / cap)
    if options.get("mask") is not None:
        y = y.masked_fill(options["mask"] == 0, ignored)
    if options.get("shift"):
        z, y = z[:, :-1], y[:, 1:]
    each = F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=ignored, reduction="none",
                           label_smoothing=options.get("label_smoothing", 0.0)).view(y.shape)  # fmt: skip
    each = each + torch.logsumexp(z, -1).square() * options.get("z_loss", 0.0) * (y != ignored)
    return each.sum(1) / (y != ignored).sum(1).clamp(min=1)


def data(b: int = B, t: int = T, d: int = D, v: int = V, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """hidden, weight, labels with ignored ones and a sample without any, bias."""
    torch.manual_seed(b * t + v)
    h, w, c = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in ((b, t, d), (v, d), (v,)))
    y = torch.randint(0, v, (b, t))
    y[0, t // 2], y[b - 1] = -100, -100
    return h, w, y, c


OPTIONS: list[dict[str, Any]] = [
    {}, {"label_smoothing": 0.1}, {"softcap": 2.0}, {"logit_scale": -0.5}, {"z_loss": 0.3},
    {"label_smoothing": 0.1, "softcap": 2.0, "logit_scale": -0.5, "z_loss": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients(cut: torch.dtype, options: dict[str, Any], with_bias: bool) -> None:
    for shift, masked in itertools.product((False, True), repeat=2):
        h, w, y, c = data(dtype=cut)
        more = {**options, "shift": shift, "mask": torch.randint(0, 2, (B, T)) if masked else None}
        given = [t.requires_grad_() for t in ((h, w, c) if with_bias else (h, w))]
        found = linear_cross_entropy(h, w, y, c if with_bias else None, **more)
        exact = plain(h.double(), w.double(), y, c.double() if with_bias else None, **more)
        limits = {} if cut == torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
        torch.testing.assert_close(found.double(), exact, **limits)
        weights = torch.tensor([0.3, -2.0, 1.0], dtype=torch.float64)
        for own, true in zip(torch.autograd.grad((found * weights).sum(), given),
                             torch.autograd.grad((exact * weights).sum(), given), strict=True):  # fmt: skip
            torch.testing.assert_close(own, true, **limits)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 1, 3, 2), (5, 33, 9, 70), (1, 2, 3, 5000), (0, 3, 4, 5), (2, 0, 4, 5)]
)
def test_sizes_and_the_other_losses(cut: torch.dtype, shape: tuple[int, ...]) -> None:
    b, t, d, v = shape
    h, w, y = torch.randn(b, t, d), torch.randn(v, d), torch.randint(0, v, (b, t))
    if y.numel() > 2:
        y[0, 0] = -100
    logits = h @ w.t()
    torch.testing.assert_close(
        linear_cross_entropy(h, w, y), token_loss(logits, y, reduction="none"), rtol=2e-5, atol=1e-5
    )
    if t:
        shifted = causal_lm_loss(logits, y, reduction="none", label_smoothing=0.1)
        torch.testing.assert_close(linear_cross_entropy(h, w, y, shift=True, label_smoothing=0.1), shifted)


def rows_of(h: Tensor, w: Tensor, y: Tensor, c: Tensor, terms: Terms, of: Tensor) -> Tensor:
    """The weight's gradient of each sample in float64, [B,V,d]."""
    options = {k: v for k, v in terms._asdict().items()}
    found = []
    for b in range(len(h)):
        weight = w.detach().double().requires_grad_()
        loss = plain(h[b : b + 1].double(), weight, y[b : b + 1], c.double(), **options)
        found.append(torch.autograd.grad(loss.sum() * of[b].double(), weight)[0])
    return torch.stack(found)


def bounded(found: Tensor, exact: Tensor, limit: float) -> None:
    """Norms never come out too small; the rounding of logits computed again may enlarge them a little."""
    assert bool((found >= exact * (1 - limit)).all()) and bool((found <= exact * (1 + 50 * limit)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 4, 11), (2, 20, 9, 33), (2, 3, 40, 130)])
@pytest.mark.parametrize("terms", [Terms(), Terms(-100, 0.1, 3.0, 0.7, 0.05)], ids=["plain", "all"])
def test_norms_and_sums(cut: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...], terms: Terms) -> None:
    h, w, y, c = data(*shape, dtype)
    of, factors = torch.rand(shape[0]) + 0.5, torch.rand(shape[0])
    factors[0] = 0
    exact = rows_of(h, w, y, c, terms, of)
    limit = 1e-10 if dtype == torch.float64 else 2e-5
    one = Head(w, c, terms)
    norms = exact.square().sum((1, 2))
    for count in range(shape[0] + 1):  # of so many samples gradients are stored
        found = evaluate(h, y, one, Wanted(True, True, True, count))
        assert (found.norm_sq is None) == (count == shape[0]) and (found.weight is None) == (count == 0)
        if found.norm_sq is not None:
            bounded(found.norm_sq * of[count:].double().square(), norms[count:], limit)
        if found.weight is not None:
            own = found.weight.double() * of[:count, None, None].double()
            torch.testing.assert_close(own, exact[:count], rtol=0, atol=limit)
    weights = _weights(y, terms, of.to(found.lse.dtype))
    kept = (one, h, torch.where(weights != 0, y, 0), found.lse, weights)
    bounded(head_sums.norm_sq(*kept)[0], norms, limit)
    torch.testing.assert_close(head_sums.per_sample(*kept).double(), exact, rtol=0, atol=limit)
    total = torch.einsum("b,bvd->vd", factors.double(), exact)
    torch.testing.assert_close(head_sums.clipped_sum(*kept, factors).double(), total, rtol=0, atol=limit)
    ids = torch.randint(0, shape[3], (shape[0], 6))
    e = torch.randn(shape[0], 6, shape[2], dtype=torch.float64).to(dtype)
    cross, _ = head_sums.cross_term_and_spread(*kept, ids, e)
    rows = torch.stack([exact[b, ids[b]] for b in range(len(ids))])
    torch.testing.assert_close(cross, (rows * e.double()).sum((1, 2)), rtol=0, atol=max(limit, 1e-10) * 10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_sample_stays_alone(cut: torch.dtype, bad: float) -> None:
    h, w, y, c = data(4, 9, 4, 11, torch.float32)
    y[3] = 1
    clean = evaluate(h, y, Head(w, c, Terms()), Wanted(True, True, True))
    h[2, 3, 1] = bad
    found = evaluate(h, y, Head(w, c, Terms()), Wanted(True, True, True))
    assert found.norm_sq is not None and clean.norm_sq is not None and not found.norm_sq[2].isfinite()
    others = [0, 1, 3]
    torch.testing.assert_close(found.norm_sq[others], clean.norm_sq[others], rtol=1e-6, atol=0)
    weights = _weights(y, Terms(), torch.ones(4))
    kept = (y.clamp(min=0), found.lse, weights)
    factors = torch.tensor([1.0, 0.5, 0.0, 1.0])
    total = head_sums.clipped_sum(Head(w, c, Terms()), h, *kept, factors)
    h[2] = 0
    assert total.isfinite().all()
    alone = evaluate(h, y, Head(w, c, Terms()), Wanted())
    torch.testing.assert_close(
        total, head_sums.clipped_sum(Head(w, c, Terms()), h, kept[0], alone.lse, weights, factors)
    )


def test_a_token_without_a_loss_is_not_read() -> None:
    h, w, y, c = data(dtype=torch.float32)
    exact = linear_cross_entropy(h, w, y, c)
    h[y == -100] = math.nan
    given = h.clone().requires_grad_()
    found = linear_cross_entropy(given, w, y, c)
    torch.testing.assert_close(found, exact)
    (gradient,) = torch.autograd.grad(found.sum(), given)
    assert gradient.isfinite().all() and not gradient[y == -100].any()


class Largest(TorchDispatchMode):
    """The largest tensor that any operator made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor) and not t._is_view()]
        self.numel = max([self.numel, *made])
        return out


def test_logits_are_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "LIMIT", 4 * 20 * 500)
    monkeypatch.setattr(head_loss, "PART", 4 * 20 * 500)
    monkeypatch.setattr(head, "SLICE", 4 * 20 * 500)
    h, w, y = (
        torch.randn(8, 20, 6, requires_grad=True),
        torch.randn(500, 6, requires_grad=True),
        torch.zeros(8, 20).long(),
    )
    with Largest() as seen:
        linear_cross_entropy(h, w, y, label_smoothing=0.1).sum().backward()
    assert seen.numel <= 20 * 500


def test_refusals() -> None:
    h, w, y, c = data()
    for arguments, words in [
        ((h[0], w, y), "hidden"), ((h, w[:, :2], y), "weight"), ((h, w, y, c[:3]), "bias"),
        ((h, w.t(), y), "weight.t()"), ((h, w, y, c.float()), "one type"), ((h, w.to("meta"), y), "device of hidden"),
        ((h, w, y.tolist()), "labels is a tensor"), ((h, w, y > 0), "whole numbers"),
        ((h, w.float(), y), "one type"), ((h, w, y.double()), "whole numbers"), ((h, w, y[:, :2]), "labels"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            linear_cross_entropy(*arguments)
    with pytest.raises(ValueError, match="label_smoothing"):
        linear_cross_entropy(h, w, y, label_smoothing=2.0)
    with pytest.raises(ValueError, match="softcap"):
        linear_cross_entropy(h, w, y, softcap=0.0)
    with pytest.raises(ValueError, match="mask"):
        linear_cross_entropy(h, w, y, mask=y[:1])
    with pytest.raises(ValueError, match="a mask holds 0 and 1"):
        linear_cross_entropy(h, w, y, mask=torch.full(y.shape, -1e9))
    for name, value in [("logit_scale", torch.tensor(2.0, requires_grad=True)), ("z_loss", math.nan),
                        ("softcap", math.inf)]:  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} is a finite number"):
            linear_cross_entropy(h, w, y, **{name: value})
    with pytest.raises(IndexError, match="label 11"):
        linear_cross_entropy(h, w, torch.full_like(y, V))
    (first,) = torch.autograd.grad(linear_cross_entropy(h.requires_grad_(), w, y).sum(), h, create_graph=True)
    assert not first.requires_grad
