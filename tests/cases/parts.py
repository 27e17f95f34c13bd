"""Parameters that no layer owns, attention and recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import rnn

from .base import B, Built, D, P, T, named, net

# --------------------------------------------------------------------------- raw parameters

named("class_token", lambda: net(
    lambda m, x: m.a(torch.cat([m.c.expand(len(x), -1, -1), x], 1) + m.p).tanh(), torch.randn(B, T, D),
    c=P(1, 1, D), p=P(1, T + 1, D), a=nn.Linear(D, 4)))  # fmt: skip
named("positions_sliced", lambda: net(
    lambda m, x: (m.a(x) + m.p[:, : x.size(1)]).tanh(), torch.randn(B, T, D), p=P(1, 9, D), a=nn.Linear(D, D)))  # fmt: skip
named("layer_scale", lambda: net(lambda m, x: x + m.s * m.a(x), torch.randn(B, T, D), s=P(D), a=nn.Linear(D, D)))
named("temperature", lambda: net(
    lambda m, x: m.a(x) * m.t.exp() / m.u, torch.randn(B, D), t=P(), u=P(1), a=nn.Linear(D, 4)))  # fmt: skip
named("gate", lambda: net(lambda m, x: m.a(x) * torch.sigmoid(m.g), torch.randn(B, D), g=P(), a=nn.Linear(D, 4)))
named("mask_token_where", lambda: net(
    lambda m, x: torch.where(x[..., :1] > 0, x, m.t).tanh(), torch.randn(B, T, D), t=P(D)))  # fmt: skip


def _mask_in_place(m: nn.Module, x: Tensor) -> Tensor:
    y = x * 1.5
    y[x[..., 0] > 0] = m.t
    return m.a(y).tanh()


named("mask_token_setitem", lambda: net(_mask_in_place, torch.randn(B, T, D), t=P(D), a=nn.Linear(D, 4)))


def _written(m: nn.Module, x: Tensor) -> Tensor:
    out = x.new_zeros(len(x), T + 1, D)
    out[:, 0] = m.t
    out[:, 1:] = x
    return m.a(out).tanh()


named("written_into_zeros", lambda: net(_written, torch.randn(B, T, D), t=P(D), a=nn.Linear(D, 4)))


def _added_in_place(m: nn.Module, x: Tensor) -> Tensor:
    y = m.a(x)
    y += m.p
    y.mul_(m.s)
    return y.tanh()


named("added_in_place", lambda: net(_added_in_place, torch.randn(B, T, D), p=P(T, 4), s=P(4), a=nn.Linear(D, 4)))
named("subtract_divide", lambda: net(
    lambda m, x: (m.p - x) / (2 + m.s.abs()) - m.q / (3 + x * x), torch.randn(B, T, D), p=P(D), s=P(T, 1), q=P(1)))  # fmt: skip
named(
    "product_of_parameters",
    lambda: net(lambda m, x: F.linear(x, m.u @ m.v).tanh(), torch.randn(B, D), u=P(6, 2), v=P(2, D)),
)
named("state_space", lambda: net(
    lambda m, x: (x * torch.exp(-F.softplus(m.dt) * torch.exp(m.a))).cumsum(1) + m.d * x, torch.randn(B, T, D),
    dt=P(D), a=P(D), d=P(D)))  # fmt: skip
named("lora", lambda: net(
    lambda m, x: (m.a(x) + 0.5 * m.v(m.u(x))).tanh(), torch.randn(B, T, D), a=nn.Linear(D, 6).requires_grad_(False),
    u=nn.Linear(D, 2, bias=False), v=nn.Linear(2, 6, bias=False)))  # fmt: skip

# --------------------------------------------------------------------------- attention


def attention(cross: bool = False, **options: Any) -> Callable[[], Built]:
    first = options.get("batch_first", False)

    def forward(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        q, k = (x, y) if cross else (x, x)
        q, k = (t if first else t.transpose(0, 1) for t in (q, k))
        out = m.a(q, k, k, need_weights=False)[0]
        return m.b(out if first else out.transpose(0, 1)).tanh()

    width = options.get("kdim", D)
    return lambda: net(
        forward,
        torch.randn(B, B, D),
        torch.randn(B, 4, width),
        a=nn.MultiheadAttention(D, 2, **options),
        b=nn.Linear(D, 3),
    )


named("mha_self", attention())
named("mha_self_batch_first", attention(batch_first=True))
named("mha_cross", attention(cross=True, batch_first=True))
named("mha_kdim_vdim", attention(cross=True, kdim=6, vdim=6))
named("mha_bias_kv", attention(add_bias_kv=True, add_zero_attn=True))
named("mha_no_bias", attention(bias=False, batch_first=True))
for first in (True, False):
    for early in (True, False):
        named(f"encoder_layer_{first}_{early}", lambda first=first, early=early: net(
            lambda m, x: m.a(x) if first else m.a(x.transpose(0, 1)).transpose(0, 1), torch.randn(B, B, D),
            a=nn.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=first, norm_first=early)))  # fmt: skip
    named(f"decoder_layer_{first}", lambda first=first: net(
        lambda m, x, y: m.a(x, y) if first else m.a(x.transpose(0, 1), y.transpose(0, 1)).transpose(0, 1),
        torch.randn(B, T, D), torch.randn(B, B, D), a=nn.TransformerDecoderLayer(D, 2, 12, 0.0, batch_first=first)))  # fmt: skip
named("transformer", lambda: net(
    lambda m, x, y: m.a(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)),
    torch.randn(B, 4, D), torch.randn(B, T, D), a=nn.Transformer(D, 2, 1, 1, 12, 0.0, batch_first=True)))  # fmt: skip

# --------------------------------------------------------------------------- recurrent

for kind in ("RNN", "GRU", "LSTM"):
    for option, arguments in {
        "plain": {}, "stacked_bidirectional": {"num_layers": 2, "bidirectional": True, "batch_first": True},
        "nobias": {"bias": False},
    }.items():  # fmt: skip
        named(f"{kind.lower()}_{option}", lambda kind=kind, arguments=arguments: net(
            lambda m, x: m.a(x if m.a.batch_first else x.transpose(0, 1))[0].transpose(0, 0 if m.a.batch_first else 1),
            torch.randn(B, B, D), a=getattr(nn, kind)(D, 6, **arguments)))  # fmt: skip
named("lstm_projection", lambda: net(
    lambda m, x: m.a(x)[0], torch.randn(B, T, D), a=nn.LSTM(D, 6, proj_size=4, batch_first=True)))  # fmt: skip
named("rnn_relu", lambda: net(
    lambda m, x: m.a(x)[0], torch.randn(B, T, D), a=nn.RNN(D, 6, nonlinearity="relu", batch_first=True)))  # fmt: skip
named("learned_initial_state", lambda: net(
    lambda m, x: m.a(x, m.h.expand(-1, len(x), -1).contiguous())[0], torch.randn(B, T, D), h=P(1, 1, 6),
    a=nn.GRU(D, 6, batch_first=True)))  # fmt: skip


def _cells(m: nn.Module, x: Tensor) -> Tensor:
    state = (x.new_zeros(len(x), 6), x.new_zeros(len(x), 6))
    for t in range(x.size(1)):
        state = m.a(x[:, t], state)
    return m.b(state[0])


named("lstm_cell", lambda: net(_cells, torch.randn(B, T, D), a=nn.LSTMCell(D, 6), b=nn.Linear(6, 3)))


def packed(kind: str, ordered: bool, bidirectional: bool) -> Callable[[], Built]:
    def forward(m: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        p = rnn.pack_padded_sequence(m.e(x).tanh(), lengths.cpu(), batch_first=True, enforce_sorted=ordered)
        out, state = m.a(p)
        state = state[0] if isinstance(state, tuple) else state
        padded = rnn.pad_packed_sequence(out, batch_first=True, total_length=T)[0]
        return torch.cat([padded.flatten(1), state.transpose(0, 1).flatten(1)], 1)

    lengths = torch.tensor([5, 4, 2] if ordered else [2, 5, 3])
    return lambda: net(
        forward, torch.randn(B, T, D), lengths, e=nn.Linear(D, D),
        a=getattr(nn, kind)(D, 6, 2, bidirectional=bidirectional, batch_first=True),
    )  # fmt: skip


named("lstm_packed", packed("LSTM", False, False))
named("lstm_packed_sorted", packed("LSTM", True, True))
named("gru_packed_bidirectional", packed("GRU", False, True))
