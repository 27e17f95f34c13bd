"""Parameters repeated for every sample, which meet layers before they meet data: each sample's gradient is that of its
own copy, and none is pulled back through the copies of the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.batch_axis.aliasing import shares
from fastdp.errors import SampleMixingError
from fastdp.grad_sample.parameter_links import leaves_of

from ..cases import Net, P, square
from ..truth import assert_refused, compare

B, T, N, D = 4, 5, 3, 6


def look(q, x):
    return torch.softmax(q @ x.mT, -1) @ x


def decoder(m, x):
    """As in DETR: places are learned, what is looked for begins with zeros."""
    places = m.table.weight.unsqueeze(1).repeat(1, len(x), 1)
    found, x = torch.zeros_like(places), x.transpose(0, 1)
    found = m.norm(found + m.rows_first(found + places, found + places, found)[0])
    return (found + m.rows_first(found + places, x, x)[0]).transpose(0, 1)


def by_hand(m, x, h):
    for t in range(2):
        h = torch.tanh(x[:, t] + m.a(h))
    return h


def blocks(m, x, q):
    """Encoder and decoder of tokens."""
    return look(m.norm(q + m.attention(q, q, q)[0]), x)


def in_pieces(m, x, q=None, again=False):
    """Checkpointed; the parameter is repeated outside, or in there again."""

    def piece(x, *q):
        q = q[0] if q else m.q.expand(len(x), -1, -1)
        return look(m.a(q.tanh()), x)

    return checkpoint(piece, m.b(x), *(() if q is None else (q,)), use_reentrant=again)


def dropped(m, x):
    """As in guidance without a classifier: the condition of some samples is a learned one."""
    c, none = m.a(x).clone(), x[:, 0, 0] > 0
    c[none] = m.q[:1].expand(len(x), T, -1)[none]
    return m.b(c)


FORWARDS = {
    "picked by a mask": dropped,
    "expand": lambda m, x: look(m.a(m.q.expand(len(x), -1, -1)), x),
    "expand_as": lambda m, x: look(m.a(m.q[:1].expand_as(x)), x),
    "repeat": lambda m, x: look(m.a(m.q.unsqueeze(0).repeat(len(x), 1, 1)), x),
    "repeat_interleave": lambda m, x: look(m.a(m.q.unsqueeze(0).repeat_interleave(x.size(0), 0)), x),
    "a table": lambda m, x: look(m.a(m.table.weight.expand(len(x), -1, -1)), x),
    "looked up": lambda m, x: look(m.a(m.table(torch.arange(N).expand(len(x), -1))), x),
    "start tokens": lambda m, x: look(m.a(m.table(torch.full((len(x), 1), 2))), x),
    "no layer": lambda m, x: look(m.q.expand(len(x), -1, -1), x),
    "transposed": lambda m, x: x @ m.q.expand(len(x), -1, -1).mT,
    "einsum": lambda m, x: torch.einsum("bnd,btd->bnt", m.q.expand(len(x), -1, -1), x),
    "computed": lambda m, x: look(m.a(F.normalize(m.q.expand(len(x), -1, -1).exp(), dim=-1)), x),
    "beside data": lambda m, x: x + m.q[:1].expand(len(x), T, -1).tanh(),
    "places added": lambda m, x: look(m.a(m.q.expand(len(x), -1, -1) + m.places), x),
    "scaled": lambda m, x: look(m.a(m.q.expand(len(x), -1, -1) * m.scale + m.places), x),
    "used twice": lambda m, x: look(m.a(q := m.q.expand(len(x), -1, -1)), x) + look(m.b(q), x) + q,
    "flattened": lambda m, x: look(m.a(m.q.expand(len(x), -1, -1).flatten(0, 1)).view(len(x), N, D), x),
    "norm": lambda m, x: look(m.norm(m.q.expand(len(x), -1, -1)), x),
    "convolution": lambda m, x: look(m.conv(m.q.t().expand(len(x), -1, -1)).mT, x),
    "attention": lambda m, x: m.attention(m.q.expand(len(x), -1, -1), x, x)[0],
    "block": lambda m, x: blocks(m, x, m.q.expand(len(x), -1, -1)),
    "checkpointed": lambda m, x: in_pieces(m, x, m.q.expand(len(x), -1, -1)),
    "checkpointed, within": lambda m, x: in_pieces(m, x),
    "checkpointed, reentrant": lambda m, x: in_pieces(m, x, again=True),
    "decoder": decoder,
    "first state": lambda m, x: by_hand(m, x, m.begin.expand(len(x), -1)),
    "zeros": lambda m, x: by_hand(m, x, torch.zeros(len(x), D, dtype=x.dtype)),
    "zeros of the data's kind": lambda m, x: by_hand(m, x, x.new_zeros(len(x), D)),
    "zeros, moved": lambda m, x: by_hand(m, x, torch.zeros(x.size(0), D).to(x.device).type_as(x)),
    "a constant time": lambda m, x: (
        x + m.a(F.silu(m.b(torch.linspace(0, 1, D, dtype=x.dtype).expand(len(x), D))))[:, None]
    ),
    "recurrent layer": lambda m, x: m.gru(x, m.begin.expand(1, len(x), D).contiguous())[0],
    "recurrent start": lambda m, x: m.gru(x, m.gru(m.begin.expand(len(x), 1, D))[1])[0],
}


def net(forward):
    parts = {
        "a": nn.Linear(D, D), "b": nn.Linear(D, D), "table": nn.Embedding(N, D), "norm": nn.LayerNorm(D),
        "conv": nn.Conv1d(D, D, 3, padding=1), "attention": nn.MultiheadAttention(D, 2, batch_first=True),
        "rows_first": nn.MultiheadAttention(D, 2), "gru": nn.GRU(D, D, batch_first=True),
    }  # fmt: skip
    more = {"q": P(N, D), "places": P(N, D), "scale": P(1), "begin": P(1, D)}
    return net_of(forward, torch.randn(B, T, D), **parts, **more)


@pytest.mark.parametrize("name", FORWARDS)
def test_each_sample_has_the_gradient_of_its_copy(name):
    torch.manual_seed(0)
    model = net(FORWARDS[name])
    found = compare(model, torch.randn(B, T, D), square)
    assert found.worst < 1e-5
    assert not any(map(shares, model.parameters()))  # memory with data
    for use in found.uses:  # of the parameter itself, not of copies for all samples
        assert use.operand.numel() <= leaves_of(use.operand)[0].numel()


SIZES = {
    "a shape's": lambda m, x: m.a(m.q.expand(x.shape[0], -1, -1)) + x[:, :N],
    "a dimension's": lambda m, x: m.a(m.q.repeat(x.size(0), 1, 1)) + x[:, :N],
    "the length": lambda m, x: m.a(m.q.expand(len(x), -1, -1)) + x[:, :N],
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("rows", [T, D])
def test_as_many_samples_as_another_dimension_has(name, rows):
    """The line that repeats the parameter asks for one size alone, whatever others are as large."""
    torch.manual_seed(0)
    found = compare(net(SIZES[name]), torch.randn(rows, T, D), square)
    assert found.worst < 1e-5
    assert all(use.operand.numel() <= leaves_of(use.operand)[0].numel() for use in found.uses)


def net_of(forward, x, **parts):
    """A net with those of its parameters trained that the forward uses."""
    model = Net(forward, **parts)
    forward(model, x).sum().backward()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    return model


def depthwise(m, x, scale=1.0):
    channels = x.size(1)
    return F.conv1d(x, m.kernel.expand(channels, 1, 3) * scale, groups=channels)


def per_head(m, x):
    heads = x.size(1)
    return x + m.begin[None].expand(heads, B, D) * m.scale


def outputs(m, x):
    many = x.size(1)
    return x @ (m.begin.expand(many, D) + m.kernel.sum())


def slots(m, x):
    """As many as there are samples, by an attribute."""
    batch, tokens, width = x.shape
    many = m.many
    return look(m.a(m.begin.expand(many, D)), x)


def prototypes(m, x, count=B):
    """As many as a parameter has rows, or by an argument."""
    rows = x.view(x.shape[0], D)
    return rows @ (m.a(m.begin.expand(len(m.rows), D)) + m.a(m.begin.repeat(count, 1)).tanh() + m.rows).t()


def by_token(m, x):
    batch, tokens, width = x.shape
    return x + m.a(m.begin.expand(tokens, width))


def latents(m, x):
    batch, tokens, width = x.shape
    return look(m.a(m.q.expand(batch, -1, -1) + m.places), x)


def latents_told_apart(m, x):
    """Of a size that a function was given: the batch's or the tokens'."""
    return (lambda batch: look(m.a(m.q.expand(batch, -1, -1) * m.scale + m.places), x))(x.shape[0])


OTHER_SIZES = {
    "channels": (depthwise, (B, B, T)),
    "channels, scaled": (lambda m, x: depthwise(m, x, m.scale), (B, B, T)),
    "channels, by channel": (lambda m, x: depthwise(m, x, m.each), (B, B, T)),
    "heads": (per_head, (B, B, B, D)),
    "outputs": (outputs, (B, B)),
    "as many rows as numbers": (lambda m, x: x + m.begin.expand(x.size(1), -1)[:, :1].t(), (B, B)),
    "slots": (slots, (B, T, D)),
    "prototypes": (prototypes, (B, D)),
    "tokens": (by_token, (B, B, D)),
    "tokens, asked there": (lambda m, x: x + m.a(m.begin.expand(x.size(1), D)), (B, B, D)),
    "tokens, given": (lambda m, x: (lambda n: x + m.a(m.begin.expand(n, D)))(x.size(1)), (B, B, D)),
    "outputs, given": (lambda m, x: (lambda n: x @ m.begin.expand(n, D))(x.size(1)), (B, B)),
    "places added": (latents, (B, B, D)),
    "places added, of a number given": (latents_told_apart, (B, B, D)),
}


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_other_sizes_may_equal_the_batch(name):
    torch.manual_seed(0)
    forward, shape = OTHER_SIZES[name]
    x = torch.randn(shape)
    parts = {"kernel": P(1, 1, 3), "scale": P(1), "each": P(B, 1, 1), "begin": P(1, D), "q": P(N, D), "rows": P(B, D)}
    model = net_of(forward, x, **parts, places=P(N, D), a=nn.Linear(D, D), many=B)
    assert compare(model, x, square).worst < 1e-5


WITH_OTHERS = {
    "addmm": lambda m, x: look(torch.addmm(m.begin[0], m.q.repeat(len(x), 1), m.w).view(len(x), N, D), x),
    "tensordot": lambda m, x: look(torch.tensordot(m.q.expand(len(x), -1, -1), m.w, 1), x),
    "joined": lambda m, x: look(torch.cat([m.q.expand(len(x), -1, -1), torch.stack([m.begin] * len(x))], 1), x),
    "joined, and a layer": lambda m, x: look(
        m.a(torch.cat([m.q.expand(len(x), -1, -1), torch.stack([m.begin] * len(x))], 1)), x
    ),
}


@pytest.mark.parametrize("name", WITH_OTHERS)
def test_no_parameter_beside_the_copies_is_left_out(name):
    torch.manual_seed(0)
    x = torch.randn(B, T, D)
    model = net_of(WITH_OTHERS[name], x, q=P(N, D), w=P(D, D), begin=P(1, D), a=nn.Linear(D, D))
    assert compare(model, x, square).worst < 1e-5


BY_PLACE = {
    "added to copies": lambda m, x: look(m.a(m.q.expand(len(x), -1, -1) + m.each[: len(x)]), x),
    "copies numbered": lambda m, x: look(m.q.expand(len(x), -1, -1) * torch.arange(len(x))[:, None, None], x),
    "and a layer": lambda m, x: look(m.a(m.q.expand(len(x), -1, -1) * torch.arange(len(x))[:, None, None]), x),
    "cut": lambda m, x: look(m.each[: len(x)], x),
    "cut, and a layer": lambda m, x: look(m.a(m.each[: len(x)]), x),
    "looked up by place": lambda m, x: x @ m.table(torch.arange(len(x)))[:, :, None],
    "joined": lambda m, x: torch.cat([m.each[: len(x)], x], 1),
    "stacked": lambda m, x: torch.stack([m.each[: len(x), 0], x[:, 0]], 1),
    "chosen": lambda m, x: torch.where(x > 0, x, m.each[: len(x), :1]),
    "attention": lambda m, x: m.attention(m.each[: len(x)], x, x)[0],
    "a state": lambda m, x: m.gru(x, m.each[: len(x), 0][None].contiguous())[0],
}


@pytest.mark.parametrize("name", BY_PLACE)
def test_a_parameter_for_each_place_in_the_batch_is_refused(name):
    """Copies are alike; rows of a parameter that the batch's size cuts are not."""
    parts = {"a": nn.Linear(D, D), "table": nn.Embedding(9, D), "gru": nn.GRU(D, D, batch_first=True)}
    attention = nn.MultiheadAttention(D, 2, batch_first=True)
    model = Net(BY_PLACE[name], **parts, attention=attention, q=P(N, D), each=P(9, N, D))
    engine, x = fastdp.PerSampleGradients(model), torch.randn(B, T, D)
    with pytest.raises(SampleMixingError, match="by their place in the batch"):
        square(model, x).mean().backward()
    engine.detach()


BY_NUMBER = {
    "sum": lambda q, x: q.sum(0),
    "sum of repeated": lambda q, x: q[:1].repeat(len(x), 1, 1).sum(),
    "softmax": lambda q, x: q.softmax(0),
    "normalize": lambda q, x: F.normalize(q, dim=0),
    "norm": lambda q, x: q / q.norm(),
    "deviation": lambda q, x: q / q.std(),
    "product": lambda q, x: (q.flatten(0, 1).T @ q.flatten(0, 1)).diagonal(),
}
WHATEVER_NUMBER = {
    "mean": lambda q, x: q.mean(0),
    "largest": lambda q, x: q.amax(0),
    "one": lambda q, x: q[0],
    "in the sample": lambda q, x: F.normalize(q, dim=-1) / q.std(1, keepdim=True),
}


@pytest.mark.parametrize("name", [*BY_NUMBER, *WHATEVER_NUMBER])
def test_what_depends_on_how_many_copies_there_are_is_refused(name):
    """A sum over the copies is the batch's size times the parameter, which every sample changes for all."""
    torch.manual_seed(0)
    made, x = {**BY_NUMBER, **WHATEVER_NUMBER}[name], torch.randn(B, N, D)
    model = Net(lambda m, x: m.a(made(m.q.expand(len(x), -1, -1), x) * x), q=P(1, N, D), a=nn.Linear(D, D))
    if name in WHATEVER_NUMBER:
        assert compare(model, x, square).worst < 1e-5
    else:
        assert_refused(model, x, square, "copies of a parameter, of which there are as many as samples")
