"""Home-made models: the ways people write them, each in a few lines."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from . import (
    coverage_images,  # noqa: F401  (adds to MODELS)
    coverage_variants,
)
from .coverage_parts import BATCH_FIRST, MODELS, D, P, V, add, ids, lin, rows, sequence, two
from .coverage_truth import Case

# ---------------------------------------------------------------------- attention and tokens

add("class_token", lambda m, x: m.h(m.a(torch.cat([m.c.expand(len(x), -1, -1), x], 1)).tanh()[:, 0]), sequence,
    c=P(1, 1, D), a=lin(D, D), h=lin(D, 4))  # fmt: skip
add("position_slice", lambda m, x: m.a(x + m.p[:, : x.size(1)]).tanh(), sequence, p=P(1, 12, D), a=lin(D, 5))
add("position_ids", lambda m, i: m.a(m.e(i) + m.p(torch.arange(i.size(1)))).tanh(), ids, a=lin(D, 5),
    e=lambda: nn.Embedding(V, D), p=lambda: nn.Embedding(12, D))  # fmt: skip
add("tied_head", lambda m, i: m.a(m.e(i)).tanh() @ m.e.weight.T, ids, e=lambda: nn.Embedding(V, D), a=lin(D, D))
add("embedding_bag", lambda m, i: m.a(m.e(i)).tanh(), ids, e=lambda: nn.EmbeddingBag(V, D), a=lin(D, 4))
add(
    "padded_embedding",
    lambda m, i: m.a(m.e(i % 5)).tanh(),
    ids,
    e=lambda: nn.Embedding(V, D, padding_idx=0),
    a=lin(D, 4),
)


def relative_bias(m: nn.Module, x: Tensor) -> Tensor:
    t = x.size(1)
    place = torch.arange(t)[:, None] - torch.arange(t)[None] + t - 1
    q, k, v = m.a(x).view(len(x), t, 3, 2, 4).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) / 2 + m.table[place].permute(2, 0, 1)).softmax(-1)
    return m.b((weights @ v).transpose(1, 2).flatten(2))


add("relative_position_bias", relative_bias, sequence, a=lin(D, 24), b=lin(D, 4), table=P(23, 2))


def einsum_attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("btd,dhk->bhtk", x, w) for w in (m.q, m.k, m.v))
    weights = torch.einsum("bhtk,bhsk->bhts", q, k).softmax(-1)
    return torch.einsum("bhts,bhsk,hkd->btd", weights, v, m.o)


add("einsum_attention", einsum_attention, sequence, q=P(D, 2, 4), k=P(D, 2, 4), v=P(D, 2, 4), o=P(2, 4, 5))
add("batch_second", lambda m, x: m.a(x.transpose(0, 1))[0].transpose(0, 1), sequence, a=lambda: nn.GRU(D, 5))
add("axis_keyword", lambda m, x: m.a(x) / (x * x).mean(axis=-1, keepdim=True).sqrt(), sequence, a=lin(D, 5))
add("type_as", lambda m, x: m.a(x + torch.arange(x.size(1)).type_as(x)[:, None]), sequence, a=lin(D, 5))
add("one_sample_at_a_time", lambda m, x: torch.stack([m.a(row.tanh()).sum(0) for row in x]), sequence, BATCH_FIRST,
    a=lin(D, 5))  # fmt: skip
add("unpadded_rows", lambda m, x: m.a(x.flatten(0, 1)[torch.arange(x[..., 0].numel())]).view(len(x), -1, 5), sequence,
    BATCH_FIRST, a=lin(D, 5))  # fmt: skip
add(
    "heads_in_batch",
    lambda m, x: m.b(
        m.a(x)
        .view(len(x), -1, 2, 4)
        .transpose(1, 2)
        .flatten(0, 1)
        .softmax(1)
        .view(len(x), 2, -1, 4)
        .transpose(1, 2)
        .flatten(2)
    ),
    sequence,
    a=lin(D, D),
    b=lin(D, 4),
)


def image_tokens(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    places = (torch.arange(x.size(1)) % 2 == 0)[:, None].expand_as(x)
    return m.a(x.masked_scatter(places, m.b(y)[:, ::2]))


add("masked_scatter", image_tokens, two, a=lin(D, 5), b=lin(D, D))

# ---------------------------------------------------------------------- experts


def routed(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    flat = x.flatten(0, 1)
    weight, choice = m.router(flat).softmax(-1).topk(2, -1)
    return flat, weight, choice


def experts_by_index_add(m: nn.Module, x: Tensor) -> Tensor:
    flat, weight, choice = routed(m, x)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(m.experts):
        token, place = torch.where(choice == e)
        out.index_add_(0, token, expert(flat[token]) * weight[token, place, None])
    return out.view_as(x)


def experts_by_bmm(m: nn.Module, x: Tensor) -> Tensor:
    flat, weight, choice = routed(m, x)
    every = torch.bmm(flat.expand(4, -1, -1), m.w).transpose(0, 1).tanh()
    return (every.gather(1, choice[..., None].expand(-1, -1, D)) * weight[..., None]).sum(1).view_as(x)


def experts_grouped(m: nn.Module, x: Tensor) -> Tensor:
    flat, weight, choice = routed(m, x)
    order = choice.flatten().argsort()
    ends = torch.bincount(choice.flatten(), minlength=4).cumsum(0).to(torch.int32)
    hidden = F.grouped_mm(flat.repeat_interleave(2, 0)[order], m.w, offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return (hidden[back].view(-1, 2, D) * weight[..., None]).sum(1).view_as(x)


ROUTED = dict(router=lin(D, 4, False))
add(
    "experts_index_add",
    experts_by_index_add,
    sequence,
    BATCH_FIRST,
    experts=lambda: nn.ModuleList(lin(D, D)() for _ in range(4)),
    **ROUTED,
)
add("experts_bmm", experts_by_bmm, sequence, w=P(4, D, D), **ROUTED)
add("experts_grouped_mm", experts_grouped, sequence, w=P(4, D, D), **ROUTED)
add("experts_soft_einsum", lambda m, x: torch.einsum("bte,btd,edo->bto", m.router(x).softmax(-1), x, m.w), sequence,
    w=P(4, D, 5), **ROUTED)  # fmt: skip

# ---------------------------------------------------------------------- state spaces, recurrences


def selective_scan(m: nn.Module, x: Tensor) -> Tensor:
    u = F.silu(m.conv(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2))
    step, b, c = F.softplus(m.dt(u) + m.dt_bias), m.b(u), m.c(u)
    decay, state, out = -torch.exp(m.A_log), torch.zeros(len(x), D, 3, dtype=x.dtype), []
    for t in range(x.size(1)):
        state = state * torch.exp(step[:, t, :, None] * decay) + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
        out.append((state * c[:, t, None]).sum(-1))
    return m.o(torch.stack(out, 1) + m.D * u)


add("mamba_like", selective_scan, sequence, conv=lambda: nn.Conv1d(D, D, 3, padding=2, groups=D), dt=lin(D, D, False),
    b=lin(D, 3, False), c=lin(D, 3, False), A_log=P(D, 3), D=P(D), dt_bias=P(D), o=lin(D, 5))  # fmt: skip


def long_convolution(m: nn.Module, x: Tensor) -> Tensor:
    t = x.size(1)
    kernel = (m.c * torch.exp(-torch.exp(m.a) * torch.arange(t).to(x.dtype)[:, None, None])).sum(-1)
    out = torch.fft.irfft(torch.fft.rfft(x, 2 * t, dim=1) * torch.fft.rfft(kernel, 2 * t, dim=0), 2 * t, dim=1)[:, :t]
    return m.o(F.gelu(out + m.d * x))


add("s4_like", long_convolution, sequence, a=P(D, 4), c=P(D, 4), d=P(D), o=lin(D, 5))
for kind in ("RNN", "GRU", "LSTM"):
    add(kind.lower(), lambda m, x: m.o(m.a(x)[0]), sequence, o=lin(12, 4),
        a=lambda kind=kind: getattr(nn, kind)(D, 6, 2, bidirectional=True, batch_first=True))  # fmt: skip


def equilibrium(m: nn.Module, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    for _ in range(6):
        z = torch.tanh(0.3 * m.a(z) + m.b(x))
    return m.o(z)


add("equilibrium", equilibrium, sequence, a=lin(D, D), b=lin(D, D), o=lin(D, 4))
# ---------------------------------------------------------------------- weights of weights, several forwards

add(
    "tied_autoencoder",
    lambda m, x: F.linear(F.linear(x, m.w, m.b).tanh(), m.w.t(), m.c),
    rows(D),
    w=P(5, D),
    b=P(5),
    c=P(D),
)
add("siamese", lambda m, x, y: m.o((m.a(x).tanh() - m.a(y).tanh()).abs()), two, a=lin(D, 6), o=lin(6, 4))
add("hypernetwork", lambda m, x: torch.einsum("bd,bdo->bo", x, m.h(x).view(len(x), D, 4)), rows(D), h=lin(D, 4 * D))
add("hypernetwork_of_parameters", lambda m, x: F.linear(x, m.h(m.z).view(4, D)), rows(D), h=lin(6, 4 * D), z=P(6))
add("low_rank_merge", lambda m, x: F.linear(x, m.w + 0.5 * m.u @ m.v), sequence, w=P(5, D), u=P(5, 2), v=P(2, D))
add("weight_norm", lambda m, x: m.a(x).tanh(), sequence, a=lambda: parametrizations.weight_norm(nn.Linear(D, 5)))
add("orthogonal", lambda m, x: m.a(x).tanh(), sequence, a=lambda: parametrizations.orthogonal(nn.Linear(D, 5)))
add(
    "standardised_convolution",
    lambda m, x: F.conv1d(
        x.transpose(1, 2), (m.w - m.w.mean((1, 2), True)) / (m.w.var((1, 2), keepdim=True) + 0.1).sqrt()
    ),
    sequence,
    w=P(5, D, 2),
)


def spectral() -> nn.Module:
    module = parametrizations.spectral_norm(nn.Linear(D, 5))
    module.parametrizations["weight"][0].train = lambda mode=True: module  # its power iteration moves in training
    module.parametrizations["weight"][0].training = False
    return module


add("spectral_norm", lambda m, x: m.a(x).tanh(), sequence, a=spectral)
for again in (True, False):
    add(f"checkpointed_{'reentrant' if again else 'not_reentrant'}",
        lambda m, x, again=again: m.o(checkpoint(lambda y: m.b(m.a(y).tanh()), m.i(x), use_reentrant=again)), sequence,
        i=lin(D, D), a=lin(D, 9), b=lin(9, D), o=lin(D, 4))  # fmt: skip
add("several_heads", lambda m, x: torch.cat([m.a(x.mean(1)), m.b(x.mean(1)).exp(), m.c(x).flatten(1)], 1), sequence,
    a=lin(D, 3), b=lin(D, 2), c=lin(D, 1))  # fmt: skip


def coupling_flow(m: nn.Module, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    for net in (m.one, m.two):
        scale, shift = net(a).chunk(2, -1)
        a, b = b * torch.exp(torch.tanh(scale)) + shift, a
    return torch.cat([a, b], -1)


add("normalising_flow", coupling_flow, rows(D), one=lin(4, 8), two=lin(4, 8))


def cases() -> dict[str, Case]:
    return {**MODELS, **coverage_variants.cases()}
