"""Refused or exact, never silently wrong: ways of mixing and hiding that an adversarial review tried.

All dimensions have the size of the batch where they can, so that shapes tell nothing. A model passes if the
engine raises one of its own errors, or agrees with one-sample truth (which no model that mixes samples can).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import FastDPError, SampleMixingError

from ..cases import Net, P, square
from ..truth import compare

B = 3


def written(write):
    """y = write(clone of x); what write does to it in place counts."""

    def function(x):
        y = x.clone()
        write(y)
        return y

    return function


MIXING = {
    "fft": lambda x: torch.fft.fft(x, dim=0).real,
    "fftn": lambda x: torch.fft.fftn(x).abs(),
    "msort": torch.msort,
    "flipud": lambda x: x + torch.flipud(x),
    "rot90": lambda x: x + torch.rot90(x, 2, [0, 1]),
    "special_softmax": lambda x: torch.special.softmax(x, 0),
    "softmax_by_keyword": lambda x: torch.softmax(input=x, dim=0),
    "sdpa_by_keyword": lambda x: F.scaled_dot_product_attention(query=x, key=x, value=x),
    "scatter": lambda x: torch.zeros_like(x).scatter(0, torch.tensor([[1] * B, [2] * B, [0] * B]), x) + x,
    "take": lambda x: x + torch.take(x, torch.arange(B * B).flip(0)).view(B, B),
    "renorm": lambda x: torch.renorm(x, 2, 1, 0.5),
    "einsum": lambda x: torch.einsum("bd,ce->bd", x, x),
    "constant_matrix": lambda x: torch.ones(B, B, dtype=x.dtype) @ x,
    "pad": lambda x: x + F.pad(x, (0, 0, 1, -1)),
    "gradient": lambda x: torch.gradient(x, dim=0)[0],
    "local_response_norm": lambda x: F.local_response_norm(x.unsqueeze(0), 3).squeeze(0),
    "count": lambda x: x * (x > 0).sum() / 10,
    "any": lambda x: x * (x > 0).any(0),
    "argmax": lambda x: x + x.argmax(0).to(x.dtype),
    "diff": lambda x: torch.cat([x[:1], x.diff(dim=0)]),
    "view_sub": written(lambda y: y.view(-1, B).sub_(y.view(-1, B).mean(0))),
    "column_sub": written(lambda y: y[:, 0].sub_(y[:, 0].mean(0))),
    "row_add": written(lambda y: y[0].add_(y[1])),
    "swap_in_place": written(lambda y: y.swapaxes_(0, 1)),
    "transpose_in_place": written(lambda y: y.t_()),
    "setitem": written(lambda y: y.__setitem__(0, y[1])),
    "setitem_slices": written(lambda y: y.__setitem__(slice(0, 2), y[1:].clone())),
    "index_copy": written(lambda y: y.index_copy_(0, torch.tensor([0, 1]), y[1:].clone())),
    "column_copy": lambda x: (
        torch.zeros_like(x).index_put((torch.arange(B), torch.zeros(B).long()), x[:, 0].flip(0)) + x
    ),
    "unbind": lambda x: torch.stack([a + b for a, b in zip(x, list(x)[::-1], strict=True)]),
    "cat_halves": lambda x: torch.cat([x[1:], x[:1]]) * x,
    "mean_at_the_end": lambda x: x - x.mean(0),
    "tolist": lambda x: x * x.detach().abs().max(),
}


@pytest.mark.parametrize("after", ["layer", "output"])
@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused(name, after):
    if after == "output" and name in ("swap_in_place", "transpose_in_place"):
        return  # an output may lie in any way
    torch.manual_seed(0)
    function = MIXING[name]
    a, b = nn.Linear(B, B), nn.Linear(B, B)
    model = Net((lambda m, x: m.b(function(m.a(x))) if after == "layer" else function(m.b(m.a(x)))), a=a, b=b)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        square(model, torch.randn(B, B)).mean().backward()
    engine.detach()


FROZEN = {
    "attention": lambda: nn.MultiheadAttention(B, 1),
    "lstm": lambda: nn.LSTM(B, B),
    "gru": lambda: nn.GRU(B, B),
    "encoder_layer": lambda: nn.TransformerEncoderLayer(B, 1, 4, 0.0),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", FROZEN)
def test_samples_in_the_place_of_the_sequence(name, trained):
    """batch_first=False given [B,T,E]: attends, or recurs, from one sample to another; also where frozen."""

    def forward(m, x):
        h = m.a(x)
        y = m.f(h, h, h) if name == "attention" else m.f(h)
        return m.b(y if isinstance(y, torch.Tensor) else y[0])

    frozen = FROZEN[name]().requires_grad_(trained)
    model = Net(forward, a=nn.Linear(B, B), f=frozen, b=nn.Linear(B, B))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        square(model, torch.randn(B, B, B)).mean().backward()
    engine.detach()


def _diagonal(m, x):
    c = m.w.clone()
    c.diagonal().mul_(2)
    return F.linear(x, c)


def _row(m, x):
    c = m.w.clone()
    c[0].mul_(3)
    return F.linear(x, c)


def _bias_into_view(m, x):
    c = m.w.clone()
    c[:, 0].add_(m.b)
    return F.linear(x, c)


EITHER = {
    "list_index": lambda m, x: F.linear(x, m.w[[0, 0, 1]]),
    "list_index_product": lambda m, x: x.unsqueeze(1) * m.w[[0, 0, 1]],
    "list_index_row": lambda m, x: x * m.w[0, [0, 0, 1]],
    "diagonal": _diagonal,
    "row_in_place": _row,
    "bias_into_view": _bias_into_view,
    "expand_as": lambda m, x: x + m.b.expand_as(x),
    "type_as": lambda m, x: F.linear(x, m.w.type_as(x)),
    "comparison": lambda m, x: torch.where(x > m.b, x * m.b, x),
    "complex": lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.c), n=B),
    "mask_and_slice": lambda m, x: F.linear(x, m.w)[torch.ones(len(x), dtype=torch.bool), :],
    "list_of_rows": lambda m, x: F.linear(x, m.w)[list(range(len(x)))],
    "take_along_dim": lambda m, x: F.linear(x, m.w).take_along_dim(x.argsort(1), 1),
    "int32_ids": lambda m, x: m.e(x[:, :2].abs().int().clamp(max=2)),
    "index_add_columns": lambda m, x: F.linear(x, m.w).index_add(1, torch.tensor([0, 1]), F.linear(x, m.w)[:, :2]),
    "unsqueeze_in_place": lambda m, x: F.linear(F.linear(x, m.w).unsqueeze_(1), m.w),
    "checkpoint_raw": lambda m, x: checkpoint(lambda y: F.linear(y, m.w).relu(), F.linear(x, m.w), use_reentrant=True),
    "prelu": lambda m, x: F.prelu(x, m.b),
}


@pytest.mark.parametrize("name", EITHER)
def test_refused_or_exact(name):
    torch.manual_seed(1)
    # only what the forward uses is trained
    parts = {"w": P(B, B), "b": P(B), "e": nn.Embedding(B, B), "c": P(B // 2 + 1, 2)}
    model = Net(EITHER[name], **parts)
    try:
        found = compare(model, (torch.randn(B, B),), square)
    except FastDPError:
        return
    assert found.worst < 1e-5, found


MUST_WORK = (
    "list_index expand_as type_as comparison mask_and_slice list_of_rows take_along_dim int32_ids index_add_columns "
    "unsqueeze_in_place prelu complex"
).split()


@pytest.mark.parametrize("name", MUST_WORK)
def test_ordinary_things_are_not_refused(name):
    torch.manual_seed(1)
    model = Net(EITHER[name], w=P(B, B), b=P(B), e=nn.Embedding(B, B), c=P(B // 2 + 1, 2))
    assert compare(model, (torch.randn(B, B),), square).worst < 1e-5


def test_positions_passed_as_an_argument_of_the_batchs_size():
    model = Net(lambda m, i, p: m.o(m.a(i) + m.p(p)), a=nn.Embedding(5, 4), p=nn.Embedding(B, 4), o=nn.Linear(4, 2))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randint(0, 5, (B, B)), torch.arange(B)).square().sum((1, 2)).mean().backward()
    engine.detach()


def test_a_first_argument_without_the_batch():
    model = Net(lambda m, p, x: m.a(x) + p, a=nn.Linear(4, 4))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError, match="batch_size="):
        model(torch.zeros(1, 4), torch.randn(B, 4))
    engine.detach()


def test_operations_between_modules_called_on_their_own():
    """They are followed as those within a forward are, also where shapes do not tell."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(B, B), "b": nn.Linear(B, B)})
    for between in (lambda h: h, lambda h: h.exp()):

        def losses(m, x, between=between):
            return m["b"](between(m["a"](x).transpose(0, 1))).square().sum((0, 2))

        assert compare(model, torch.randn(B, B, B), losses).worst < 1e-5
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        h = model["a"](torch.randn(B, B, B)).transpose(0, 1)
        model["b"](h - h.mean(1, keepdim=True)).square().sum((0, 2)).mean().backward()
    engine.detach()


def test_reentrant_checkpoint_of_the_root():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    engine = fastdp.PerSampleGradients(model)
    x = torch.randn(B, 4)
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).square().sum(1).mean().backward()
    found = engine.norms()
    model(x).square().sum(1).mean().backward()
    assert torch.allclose(found, engine.norms(), rtol=1e-6) and found.shape == (B,)


def test_a_refused_backward_leaves_no_old_norms():
    model = nn.Linear(4, 2)
    engine = fastdp.PerSampleGradients(model)
    model(torch.randn(B, 4)).square().sum(1).mean().backward()
    engine.norms()
    with pytest.raises(FastDPError):
        (model(torch.randn(B, 4)).square().sum(1).mean() + model.bias.sum()).backward()
    with pytest.raises(FastDPError):
        engine.norms()


def test_ctrl_c_in_the_forward():
    class Interrupted(nn.Module):
        fail = True

        def forward(self, x):
            if self.fail:
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.Linear(4, 4), Interrupted(), nn.Linear(4, 2))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(B, 4))
    model[1].fail = False
    model(torch.randn(B, 4)).square().sum(1).mean().backward()
    assert engine.norms().shape == (B,)
    assert not torch.overrides._get_current_function_mode_stack()


def test_only_one_group_is_not_finite():
    """Layerwise: infinity in one layer's gradient drops the sample from all of them."""
    from fastdp.optim.clipping import Clipping

    clipping = Clipping({"0.weight": torch.zeros(1), "1.weight": torch.zeros(1)}, "local", 1.0, "layerwise")
    squares = [torch.tensor([1.0, float("inf"), 4.0]), torch.tensor([1.0, 1.0, float("nan")])]
    for factors in clipping.factors(squares):
        assert factors[0] > 0 and factors[1] == 0 and factors[2] == 0


def test_cancelling_summands_do_not_spoil_the_gram_route():
    """Large parts that cancel: the gram sum loses digits, and the sample is computed again directly."""
    from fastdp.ops import linear_norm_sq

    torch.manual_seed(0)
    a = torch.randn(32, 64, 40) * 0.01 + 1000
    g = torch.randn(32, 64, 40)
    g -= g.mean(1, keepdim=True)
    exact = torch.einsum("bto,bti->boi", g.double(), a.double()).square().sum((1, 2))
    for method in ("gram", "direct"):
        found = linear_norm_sq(a, g, method).double()
        assert torch.allclose(found, exact, rtol=1e-2), method


def test_mixed_results_that_no_loss_uses():
    """CLIP computes logits over the batch beside its embeddings: only a gradient through them is refused."""
    model = Net(lambda m, x: (m.a(x), (m.a(x) @ m.a(x).T) * m.s.exp()), a=nn.Linear(B, B), s=P())
    engine = fastdp.PerSampleGradients(model)
    embedding, _ = model(torch.randn(B, B))
    embedding.square().sum(1).mean().backward()
    assert engine.norms().shape == (B,)
    _, logits = model(torch.randn(B, B))
    with pytest.raises(SampleMixingError, match="matmul"):
        logits.square().sum(1).mean().backward()


@torch.overrides.wrap_torch_function(lambda x: (x,))
def leaking(x: torch.Tensor) -> torch.Tensor:
    """An unknown function of the right shapes in which a sample's rows depend on its neighbour's."""
    return x + x.roll(1, 0).nan_to_num(0, 0, 0)


@pytest.mark.parametrize("masked", [False, True])
def test_mixing_is_found_beside_infinite_scores(masked):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            if masked:
                y = y.masked_fill(torch.arange(4) == 3, float("-inf"))
            return leaking(y).softmax(-1)

    torch.manual_seed(0)
    engine = fastdp.PerSampleGradients(Masked())
    with pytest.raises(SampleMixingError, match="leaking"):
        engine.model(torch.randn(5, 4)).square().sum(1).mean().backward()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_windows_over_samples_of_several_rows(parts):
    """as_strided on [B * parts, T, d], as sliding windows of attention heads take them, before a trained layer."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6 // parts, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n, t, d = x.shape
            y = self.a(x).view(n, t, parts, d // parts).transpose(1, 2).reshape(n * parts, t, d // parts)
            size, stride = y.shape, y.stride()
            windows = y.as_strided((size[0], t - 2, 3, size[2]), (stride[0], stride[1], stride[1], stride[2]))
            return self.b(windows).tanh().view(n, -1)

    torch.manual_seed(0)
    assert compare(Windows(), torch.randn(4, 5, 6), lambda m, x: m(x).square().sum(1)).worst < 1e-5


def test_a_tied_head_kept_as_a_matrix_product():
    """Embedding and head of one table, by the cross term of the two uses: no per-sample gradient is formed."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(300, 48)
            self.mix = nn.Linear(48, 48)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.linear(self.mix(self.table(ids)).tanh(), self.table.weight)

    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(0, 6, (4, 3))
    assert compare(model, ids, lambda m, x: m(x).square().sum((1, 2))).worst < 1e-5
    engine = fastdp.PerSampleGradients(model)
    model(ids).square().sum((1, 2)).mean().backward()
    engine.norms()
    assert "cross terms" in engine.explain().split("table.weight")[1].splitlines()[0]
