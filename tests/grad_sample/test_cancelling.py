"""Samples whose gradient is a small sum of large terms: the norm bounds what is added to the clipped sum.

Each model is called three times on the same data, with weights that add up to 0, and once on other data: the terms of
the three calls cancel, and what is left of them in float32 is rounding.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp import ops

from ..cases import Net
from ..truth import norms_of, truth

B, T, D = 3, 6, 16
SCALES = [1.0, 2.0**10, 2.0**17, 2.0**22]
ALLOWED = 1e-4


class Cancelling(nn.Module):
    """Losses of samples: scale (m(x) + m(x) - 2 m(x)) . v + m(y) . u, whose gradient is that of the last term."""

    def __init__(self, inner, scale, at_once=False):
        super().__init__()
        self.inner, self.scale, self.at_once = inner, scale, at_once

    def forward(self, x, y):
        if self.at_once:  # rows of one call, along T
            outs = self.inner(torch.cat([x, x, x, y], 1)).chunk(4, 1)
        else:
            outs = [self.inner(each) for each in (x, x, x, y)]
        shape = outs[0].shape[1:]
        generator = torch.Generator().manual_seed(5)
        v, u = (torch.randn(shape, generator=generator).to(outs[0].dtype) for _ in range(2))
        total = 0
        for weight, out in zip((1, 1, -2), outs, strict=False):
            total = total + (out * (v * (weight * self.scale))).flatten(1).sum(1)
        return total + (outs[3] * u).flatten(1).sum(1)


def losses(model, batch):
    return model(*batch)


def check(model, batch, exact=True, terms=0.0):
    """What a sample adds to the clipped sum is at most R, and norms are right but for the rounding of `terms`."""
    true = norms_of(truth(model, batch, losses))
    engine = fastdp.PerSampleGradients(copy.deepcopy(model))
    losses(engine.model, batch).mean().backward()
    norms = engine.norms().double()
    bound = float(true.min()) / 100
    factors = (bound / norms).clamp(max=1).float()
    together = engine.clipped_sum(factors)
    for b in range(len(norms)):
        without = factors.clone()
        without[b] = 0
        rest = engine.clipped_sum(without)
        moved = sum(float((together[n].double() - rest[n].double()).square().sum()) for n in rest) ** 0.5
        assert moved <= bound * (1 + ALLOWED), (b, moved / bound)
        only = torch.zeros_like(factors)
        only[b] = factors[b]
        alone = sum(float(s.double().square().sum()) for s in engine.clipped_sum(only).values()) ** 0.5
        assert alone <= bound * (1 + ALLOWED), (b, alone / bound)
    engine.detach()
    if exact:
        slack = ALLOWED * true + 2.0**-24 * terms
        assert bool((norms >= true - slack).all()), norms / true
        assert bool((norms <= true + 8 * slack).all()), norms / true
    return norms, true


def tokens():
    torch.manual_seed(1)
    return torch.randn(B, T, D), torch.randn(B, T, D)


def ids():
    torch.manual_seed(1)
    return torch.randint(0, 11, (B, T)), torch.randint(0, 11, (B, T))


def images():
    torch.manual_seed(1)
    return torch.randn(B, 4, 6, 6), torch.randn(B, 4, 6, 6)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def routed(m, x):
    """Every token to one of two matrices."""
    rows = x.flatten(0, 1)
    return torch.bmm(rows.unsqueeze(1), m.w[(rows[:, 0] > 0).long()]).view(x.size(0), T, -1)


def tied(m, x):
    """A table that looks up and is the head."""
    h = m.e(x)
    return torch.cat([h, F.linear(h, m.e.weight)], -1)


def tied_by_views(m, x):
    h = m.e(x)
    return torch.cat([h, h @ m.e.weight.t(), h @ m.e.weight.view(-1, D).T], -1)


def tied_parts(m, x):
    h = m.e(x)
    return torch.cat([h, F.linear(h, m.e.weight[:5]), F.linear(h, m.e.weight * 2 - m.e.weight.mean(0))], -1)


MODELS = {
    "linear": (lambda: nn.Linear(D, D), tokens),
    "linear_of_images": (lambda: Net(lambda m, x: m.a(x.flatten(1)), a=nn.Linear(144, 5)), images),
    "stored": (lambda: nn.Linear(D, 3), tokens),
    "matmul": (lambda: Net(lambda m, x: x @ m.w, w=parameter(D, D)), tokens),
    "matmul_left": (lambda: Net(lambda m, x: m.w @ x, w=parameter(T, T)), tokens),
    "addmm": (lambda: Net(lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w).view(x.shape), w=parameter(D, D),
                           b=parameter(D)), tokens),
    "view": (lambda: Net(lambda m, x: F.linear(x, m.w.T) + x @ m.w, w=parameter(D, D)), tokens),
    "slices": (lambda: Net(lambda m, x: F.linear(x, m.w[:D]) * F.linear(x, m.w[D:]), w=parameter(2 * D, D)), tokens),
    "overlapping": (lambda: Net(lambda m, x: F.linear(x, m.w[:D]) - F.linear(x, m.w[1:]), w=parameter(D + 1, D)),
                    tokens),
    "einsum": (lambda: Net(lambda m, x: torch.einsum("btd,de->bte", x, m.w), w=parameter(D, D)), tokens),
    "bilinear": (lambda: Net(lambda m, x: m.b(x, x), b=nn.Bilinear(D, D, 3)), tokens),
    "scale": (lambda: Net(lambda m, x: x * m.w + m.b, w=parameter(D), b=parameter(T, 1)), tokens),
    "concatenated": (lambda: Net(lambda m, x: torch.cat([x, m.w.expand(len(x), -1, -1)], 1), w=parameter(1, D)),
                     tokens),
    "layer_norm": (lambda: nn.LayerNorm(D), tokens),
    "rms_norm": (lambda: nn.RMSNorm(D), tokens),
    "group_norm": (lambda: nn.GroupNorm(2, 4), images),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), images),
    "conv2d_wide": (lambda: nn.Conv2d(4, 64, 3, stride=3), images),
    "conv2d_groups": (lambda: nn.Conv2d(4, 64, 3, groups=2, stride=3), images),
    "conv1d": (lambda: Net(lambda m, x: m.c(x.mT), c=nn.Conv1d(D, 32, 3)), tokens),
    "conv_transpose": (lambda: nn.ConvTranspose2d(4, 32, 3, stride=2), images),
    "lstm": (lambda: Net(lambda m, x: m.r(x)[0], r=nn.LSTM(D, D, batch_first=True)), tokens),
    "gru": (lambda: Net(lambda m, x: m.r(x)[0], r=nn.GRU(D, D, batch_first=True)), tokens),
    "attention": (lambda: Net(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(D, 2, batch_first=True)), tokens),
    "routed": (lambda: Net(routed, w=parameter(2, D, D)), tokens),
    "looped": (lambda: Net(lambda m, x: torch.stack([m.a(row) for row in x]), a=nn.Linear(D, D)), tokens),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), tokens),
    "centred": (lambda: Net(lambda m, x: F.linear(x, m.w - m.w.mean(1, keepdim=True)), w=parameter(D, D)), tokens),
    "merged": (lambda: Net(lambda m, x: F.linear(x, m.w + m.b @ m.a), w=parameter(D, D), a=parameter(2, D),
                            b=parameter(D, 2)), tokens),
    "embedding": (lambda: nn.Embedding(11, D), ids),
    "padded": (lambda: nn.Embedding(11, D, padding_idx=3), ids),
    "bag": (lambda: Net(lambda m, x: m.e(x), e=nn.EmbeddingBag(11, D, mode="mean")), ids),
    "indexed": (lambda: Net(lambda m, x: m.w[x], w=parameter(11, D)), ids),
    "tied": (lambda: Net(tied, e=nn.Embedding(11, D)), ids),
    "tied_padded": (lambda: Net(tied, e=nn.Embedding(11, D, padding_idx=3)), ids),
    "tied_by_views": (lambda: Net(tied_by_views, e=nn.Embedding(11, D)), ids),
    "tied_parts": (lambda: Net(tied_parts, e=nn.Embedding(11, D)), ids),
}  # fmt: skip


DERIVED = ("weight_norm", "centred", "merged", "tied_parts", "overlapping")  # bounded without a look into the map


@pytest.mark.parametrize("name", MODELS)
def test_uses_that_cancel(name: str) -> None:
    build, data = MODELS[name]
    for scale in SCALES:
        torch.manual_seed(0)
        model = Cancelling(build(), scale)
        check(model, data(), exact=scale <= 2.0**10, terms=scale * (5e3 if name in DERIVED else 1e3))


class Issue(nn.Module):
    """A table that looks up and is the head; the two gradients are all but opposite. Returns the samples' losses."""

    def __init__(self, scale, dim=64):
        super().__init__()
        self.e = nn.Embedding(300, dim)
        nn.init.zeros_(self.e.weight)
        self.scale = scale
        self.register_buffer("c", torch.randn(dim))
        self.register_buffer("u", torch.randn(dim))

    def forward(self, ids):
        e = self.e(ids)
        pick = F.linear(self.c.expand_as(e), self.e.weight).gather(-1, ids[..., None]).squeeze(-1)
        return (self.scale * (e @ self.c) - self.scale * pick + e @ self.u).sum(1)


@pytest.mark.parametrize("scale", [1.0, 100.0, 3e3, 1e5])
def test_a_tied_table(scale: float) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        for batch in (1, 2):  # a batch of one sees the constant rows as the sample's
            ids = torch.randint(0, 300, (batch, 16))
            check(Issue(scale), (ids,), exact=scale < 1e4, terms=2e3 * scale)


class Weighted(nn.Module):
    """sum_t k_t scale v . m(x_t) + u . m(x_t), where the weights k_t of the positions add up to 0."""

    def __init__(self, inner, weights, scale, dim):
        super().__init__()
        self.inner = inner
        self.register_buffer("v", weights.unsqueeze(1) * scale * torch.randn(dim))
        self.register_buffer("u", torch.randn(dim))

    def forward(self, x):
        out = self.inner(x)
        return (out * self.v).sum((1, 2)) + (out * self.u).sum((1, 2))


def weights_of(kind, count):
    weights = torch.ones(count)
    if kind == "halves":
        weights[count // 2 :] = -1
    elif kind == "quarter":
        weights[-(count // 4) :] = -3
    elif kind == "last":
        weights[-1] = -(count - 1)
    return weights


@pytest.mark.parametrize("kind", ["halves", "quarter", "last"])
@pytest.mark.parametrize("count", [4, 64, 400])
def test_positions_that_are_alike(kind: str, count: int) -> None:
    """Equal terms are rounded alike: the errors of a sum add up."""
    for scale in (1.0, 1e3, 1e5):
        for i, o in ((24, 30), (1, 5), (5, 1), (300, 200)):
            torch.manual_seed(i)
            x = torch.randn(2, 1, i).expand(2, count, i).contiguous()
            model = Weighted(nn.Linear(i, o), weights_of(kind, count), scale, o)
            check(model, (x,), exact=False)
        ids = torch.stack([torch.full((count,), 3), torch.randint(0, 5, (count,))])
        check(Weighted(nn.Embedding(7, 8), weights_of(kind, count), scale, 8), (ids,), exact=False)


def test_records_of_a_person_that_cancel() -> None:
    for name in ("linear", "bilinear", "conv1d"):
        for keys in ([0, 0, 0, 0, 1, 1], [0, 0, 1, 0, 0, 2]):
            torch.manual_seed(0)
            model = MODELS[name][0]()
            x = torch.randn(1, T, D).expand(6, T, D).contiguous()
            weight = torch.tensor([1.0, 1.0, 1.0, -3.0, 2.0, 1.0]) * 2**20
            engine = fastdp.PerSampleGradients(model)
            engine.group_by(keys)
            out = model(x)
            v, u = torch.randn(2, 1, *out.shape[1:])
            if keys[3] == keys[4]:
                weight = torch.tensor([1.0, 1.0, 2.0, -3.0, 1.0, 1.0]) * 2**20
            ((out * v).flatten(1).sum(1) * weight + (out * u).flatten(1).sum(1)).mean().backward()
            norms = engine.norms()
            assert norms[0] < norms[1] / 100
            factors = (1.0 / norms).clamp(max=1)
            for b in range(len(norms)):
                alone = torch.zeros_like(factors)
                alone[b] = factors[b]
                sums = engine.clipped_sum(alone).values()
                assert sum(float(s.double().square().sum()) for s in sums) ** 0.5 <= 1 + ALLOWED
            engine.detach()


@pytest.mark.parametrize("name", ["linear", "embedding", "tied", "conv2d", "weight_norm", "merged", "lstm"])
def test_models_of_16_bits(name: str) -> None:
    """The clipped sums are of float32; what is added of a sample is bounded whatever its gradient is rounded to."""
    build, data = MODELS[name]
    for scale in SCALES[:3]:
        torch.manual_seed(0)
        model = Cancelling(build(), scale).bfloat16()
        batch = tuple(t.bfloat16() if t.is_floating_point() else t for t in data())
        check(model, batch, exact=False)


class Cast(nn.Module):
    """A float32 weight that is used in 16 bits: autograd rounds the clipped sum on its way back to the weight."""

    def __init__(self, derive):
        super().__init__()
        self.derive, self.w = derive, nn.Parameter(torch.randn(7, 5))

    def forward(self, x):
        x = x.bfloat16()
        return sum(F.linear(x, w).float().square().sum(1) for w in self.derive(self.w))


@pytest.mark.parametrize("derive", [
    lambda w: [w.bfloat16()],
    lambda w: [w.bfloat16().t().contiguous().t()],
    lambda w: [w.bfloat16()[:4]],
    lambda w: w.bfloat16().split([4, 3]),
    lambda w: [(w * 1.5).bfloat16()],
], ids=["cast", "transposed", "slice", "disjoint slices", "scaled"])  # fmt: skip
def test_weights_that_are_cast_to_16_bits(derive) -> None:
    """No sample adds more to the clipped sum, as rounded, than its norm says."""
    for seed in range(20):
        torch.manual_seed(seed)
        engine = fastdp.PerSampleGradients(Cast(derive))
        engine.model(torch.randn(6, 5)).mean().backward()
        norms = engine.norms()
        for factors, norm in zip(torch.eye(6), norms, strict=True):
            assert engine.clipped_sum(factors)["w"].double().norm() <= norm * (1 + 1e-6)
        engine.detach()


def test_sums_are_of_full_numbers(monkeypatch) -> None:
    """PyTorch may be told to multiply float32 as 16-bit numbers; norms are not of those."""
    seen = []
    for place, name in ((torch, "mm"), (ops.geometry.torch.ops.aten, "convolution_backward")):
        real = getattr(place, name)

        def watched(*args, real=real, **kwargs):
            seen.append((torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision))
            return real(*args, **kwargs)

        monkeypatch.setattr(place, name, watched)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        c = torch.ones(2)
        ops.linear_clipped_sum(torch.randn(2, 3, 4), torch.randn(2, 3, 5), c)
        ops.linear.overwrite_clipped_sum(torch.randn(2, 3, 4), torch.randn(2, 3, 5), c, torch.empty(5, 4))
        zeros = torch.zeros(6, dtype=torch.long)
        ops.routed_clipped_sum(torch.randn(6, 4), torch.randn(6, 5), zeros, zeros, c, 1)
        ops.conv_clipped_sum(torch.randn(2, 3, 8, 8), torch.randn(2, 4, 6, 6), c, 3)
        assert torch.get_float32_matmul_precision() == "medium", "left as it was"
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(seen) == 4 and all(matmul == "ieee" for matmul, _ in seen)
