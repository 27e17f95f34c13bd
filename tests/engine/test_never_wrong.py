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
from fastdp.errors import FastDPError, ParameterError, SampleMixingError, StepError

from ..cases import Net, P, square
from ..truth import assert_refused, assert_step, compare

B, D = 3, 6


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
    forward = lambda m, x: m.b(function(m.a(x))) if after == "layer" else function(m.b(m.a(x)))
    model = Net(forward, a=nn.Linear(B, B), b=nn.Linear(B, B))
    assert_refused(model, torch.randn(B, B), square, kind=SampleMixingError)


# by an argument beside the first, which a rule must look at too; [B, T, D]
BESIDE = {
    "layer_norm": lambda h: F.layer_norm(h, (D,), h.mean((0, 1))),
    "rms_norm": lambda h: F.rms_norm(h, (D,), h.mean((0, 1))),
    "group_norm": lambda h: F.group_norm(h.mT, 2, h.mean((0, 1))).mT,
    "batch_norm": lambda h: F.batch_norm(h.mT, h.detach().mean((0, 1)), h.detach().var((0, 1)), training=False).mT,
    "mask of the mean": lambda h: F.scaled_dot_product_attention(h, h, h, attn_mask=(h @ h.mT).mean(0)),
    "mask of another": lambda h: F.scaled_dot_product_attention(h, h, h, attn_mask=(h @ h.mT).flip(0)),
    "gather": lambda h: h.gather(2, h.argsort(2).flip(0)),
    "take_along_dim": lambda h: torch.take_along_dim(h, h.argsort(2).flip(0), 2),
    "after no_grad saw it": lambda h: seen_without_grad(h) + covariance(h),
    "in a checkpoint": lambda h: checkpoint(covariance, h, use_reentrant=True),
}
OWN = {
    "mask": lambda h: F.scaled_dot_product_attention(h, h, h, attn_mask=h @ h.mT),
    "indices": lambda h: h.gather(2, h.argsort(2)),
}


def covariance(h):
    return h + torch.cov(h.flatten(1).T)[:1, :1]


@torch.no_grad()
def seen_without_grad(h):
    covariance(h)
    return 0


def between(mix):
    torch.manual_seed(0)
    return Net(lambda m, x: m.b(mix(torch.tanh(m.a(x)))), a=nn.Linear(D, D), b=nn.Linear(D, D))


@pytest.mark.parametrize("name", BESIDE)
def test_mixing_by_another_argument_is_refused(name):
    assert_refused(between(BESIDE[name]), torch.randn(4, 5, D), square)


@pytest.mark.parametrize("name", OWN)
def test_the_samples_own_mask_and_indices_are_exact(name):
    assert compare(between(OWN[name]), torch.randn(4, 5, D), square).worst < 1e-5


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

    model = Net(forward, a=nn.Linear(B, B), f=FROZEN[name]().requires_grad_(trained), b=nn.Linear(B, B))
    assert_refused(model, torch.randn(B, B, B), square, kind=SampleMixingError)


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


REFUSED = "diagonal row_in_place bias_into_view list_index_product list_index_row checkpoint_raw".split()


@pytest.mark.parametrize("name", EITHER)
def test_refused_or_exact(name):
    """Ordinary things must not be refused."""
    torch.manual_seed(1)
    # only what the forward uses is trained
    parts = {"w": P(B, B), "b": P(B), "e": nn.Embedding(B, B), "c": P(B // 2 + 1, 2)}
    try:
        found = compare(Net(EITHER[name], **parts), (torch.randn(B, B),), square)
    except FastDPError:
        assert name in REFUSED
        return
    assert found.worst < 1e-5, found


def test_arguments_that_hide_the_batch_are_refused():
    """Positions of the batch's size, and a first argument of one row."""
    model = Net(lambda m, i, p: m.o(m.a(i) + m.p(p)), a=nn.Embedding(5, 4), p=nn.Embedding(B, 4), o=nn.Linear(4, 2))
    assert_refused(model, (torch.randint(0, 5, (B, B)), torch.arange(B)), square)
    model = Net(lambda m, p, x: m.a(x) + p, a=nn.Linear(4, 4))
    assert_refused(model, (torch.zeros(1, 4), torch.randn(B, 4)), square, "batch_size=")
    engine = fastdp.PerSampleGradients(model, batch_size=B)
    with pytest.raises(StepError, match=f"batch_size={B}"):  # of another batch
        model(torch.zeros(1, 4), torch.randn(B - 1, 4))
    engine.detach()


def test_operations_between_modules_called_on_their_own():
    """They are followed as those within a forward are, also where shapes do not tell."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(B, B), "b": nn.Linear(B, B)})
    for between in (lambda h: h, lambda h: h.exp()):

        def losses(m, x, between=between):
            return m["b"](between(m["a"](x).transpose(0, 1))).square().sum((0, 2))

        assert compare(model, torch.randn(B, B, B), losses).worst < 1e-5
    centred = lambda m, x: losses(m, x, lambda h: h - h.mean(1, keepdim=True))
    assert_refused(model, torch.randn(B, B, B), centred)


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


@pytest.mark.parametrize("other", [False, True])
def test_ctrl_c_in_the_forward(other):
    """As in a notebook, where one goes on with the same model, or makes another."""

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
    if other:
        x = torch.randn(B, 4)
        x.numpy()[0] = 1.0
        x = x + torch.ones(B, 4)  # (the mode, over by now, goes with the next forward)
        engine = fastdp.PerSampleGradients(model := nn.Linear(4, 2))
    model(torch.randn(B + 2, 4)).square().sum(1).mean().backward()
    assert engine.norms().shape == (B + 2,)
    engine.detach()
    assert not torch.overrides._get_current_function_mode_stack()


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
    def forward(m, x):
        y = m.a(x).masked_fill((torch.arange(4) == 3) & masked, float("-inf"))
        return leaking(y).softmax(-1)

    assert_refused(Net(forward, a=nn.Linear(4, 4)), torch.randn(5, 4), square, "leaking", SampleMixingError)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_windows_over_samples_of_several_rows(parts):
    """as_strided on [B * parts, T, d], as sliding windows of attention heads take them, before a trained layer."""

    def forward(m, x):
        n, t, d = x.shape
        y = m.a(x).view(n, t, parts, d // parts).transpose(1, 2).reshape(n * parts, t, d // parts)
        size, stride = y.shape, y.stride()
        windows = y.as_strided((size[0], t - 2, 3, size[2]), (stride[0], stride[1], stride[1], stride[2]))
        return m.b(windows).tanh().view(n, -1)

    torch.manual_seed(0)
    model = Net(forward, a=nn.Linear(6, 6), b=nn.Linear(6 // parts, 3))
    assert compare(model, torch.randn(4, 5, 6), square).worst < 1e-5


def test_a_tied_head_kept_as_a_matrix_product():
    """Embedding and head of one table, by the cross term of the two uses: no per-sample gradient is formed."""

    forward = lambda m, ids: F.linear(m.mix(m.table(ids)).tanh(), m.table.weight)
    torch.manual_seed(0)
    model, ids = Net(forward, table=nn.Embedding(300, 48), mix=nn.Linear(48, 48)), torch.randint(0, 6, (4, 3))
    assert compare(model, ids, square).worst < 1e-5
    engine = fastdp.PerSampleGradients(model)
    model(ids).square().sum((1, 2)).mean().backward()
    engine.norms()
    assert "cross terms" in engine.explain().split("table.weight")[1].splitlines()[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_named_and_refused(layout: torch.layout) -> None:
    ragged_rows = lambda h: [row[: i + 1] for i, row in enumerate(h)]
    model = between(lambda h: torch.nested.as_nested_tensor(ragged_rows(h), layout=layout) * 2)
    assert_refused(model, torch.randn(4, 5, D), square, r"\w+\(\).*nested tensor.*mark_rows", StepError)
    ragged = torch.nested.nested_tensor(ragged_rows(torch.randn(4, 5, D)), layout=layout)
    assert_refused(model, ragged, square, r"argument is a nested tensor.*mark_rows", StepError)


class Shared(nn.Module):
    """An activation that is an argument's default, and so every model's, between reading lengths and their use."""

    def __init__(self, activation: nn.Module = nn.Tanh()) -> None:  # noqa: B008
        super().__init__()
        self.below, self.activation, self.above = nn.Linear(5, 4), activation, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = (x[:, 0].abs() * 2).long().clamp(1, 4).tolist()
        hidden, mask = self.activation(self.below(x)), torch.zeros(len(x), 4)
        for sample, length in enumerate(lengths):
            mask[sample, :length] = 1.0
        return self.above(hidden * mask)


@pytest.mark.filterwarnings("error")
def test_models_may_share_a_module_without_parameters():
    torch.manual_seed(0)
    first, second = Shared(), Shared()
    engines = [fastdp.PerSampleGradients(first), fastdp.PerSampleGradients(second)]
    for _ in range(2):  # in turns
        for engine in engines:
            assert_step(engine, torch.randn(4, 5), lambda m, x: m(x).sin().sum(1))
    engines[0].detach()
    assert_step(engines[1], torch.randn(4, 5), lambda m, x: m(x).sin().sum(1))
    with pytest.raises(ParameterError, match="already has"):
        fastdp.PerSampleGradients(second)


class WithScale(nn.Module):
    """Returns what is made of parameters alone beside its output, for the loss to use."""

    def __init__(self, made: bool) -> None:
        super().__init__()
        self.layer, self.scale, self.made = nn.Linear(5, 3), nn.Parameter(torch.tensor([0.3])), made

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.scale.exp() if self.made else self.scale


@pytest.mark.parametrize("made", [False, True])
def test_parameters_among_the_results(made):
    def losses(model, x):
        out, scale = model(x)
        return out.square().sum(1) * torch.exp(-scale) + scale

    torch.manual_seed(0)
    engine = fastdp.PerSampleGradients(WithScale(made))
    for _ in range(2):
        assert_step(engine, torch.randn(4, 5), losses)
        torch.testing.assert_close(engine.norms(), engine.norms())  # asked again
