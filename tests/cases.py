"""Models for the exactness tests: one for every kind of use, and the ways users write them.

A case builds (model, batch, losses); losses(model, batch) gives one loss a sample. Sizes are odd, and where
it can deceive, another dimension has the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint

B, T, D, V = 3, 5, 8, 11
Built = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
CASES: dict[str, Callable[[], Built]] = {}


def case(build: Callable[[], Built]) -> Callable[[], Built]:
    CASES[build.__name__] = build
    return build


def named(name: str, build: Callable[[], Built]) -> None:
    assert name not in CASES, name
    CASES[name] = build


def square(model: nn.Module, batch: Any) -> Tensor:
    """A loss that weighs every output differently, so that no gradient is symmetric."""
    out = model(*batch) if isinstance(batch, tuple) else model(batch)
    out = out.flatten(1)
    return (out * torch.linspace(0.5, 1.5, out.size(1), dtype=out.dtype)).square().mean(1)


def shake(model: nn.Module) -> nn.Module:
    """Away from zeros and ones, so that every parameter has a gradient of its own."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype))
    return model


def build(name: str) -> Built:
    torch.manual_seed(3)
    model, batch, losses = CASES[name]()
    return shake(model), batch, losses


class Net(nn.Module):
    """A forward given as a function of (module, *inputs)."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


def net(forward: Callable[..., Tensor], *inputs: Tensor, **parts: Any) -> Built:
    return Net(forward, **parts), inputs, square


def ids(*shape: int, low: int = 0, high: int = V) -> Tensor:
    return torch.randint(low, high, shape)


# --------------------------------------------------------------------------- linear

for dims in (2, 3, 4, 5):
    for bias in (True, False):
        named(
            f"linear_{dims}d_{'bias' if bias else 'nobias'}",
            lambda dims=dims, bias=bias: (
                nn.Sequential(nn.Linear(6, D, bias), nn.Tanh(), nn.Linear(D, 4, bias)),
                torch.randn(B, *(2, 3, 4)[: dims - 2], 6),
                square,
            ),
        )
named("linear_features_equal_batch", lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, B, B), a=nn.Linear(B, B)))
named("linear_long", lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, 70, 9), a=nn.Linear(9, 7)))
named("matmul_right", lambda: net(lambda m, x: (x @ m.w).tanh(), torch.randn(B, T, D), w=P(D, 6)))
named("matmul_left", lambda: net(lambda m, x: torch.matmul(m.w, x).tanh(), torch.randn(B, D, T), w=P(6, D)))
named("mm", lambda: net(lambda m, x: torch.mm(x, m.w).tanh(), torch.randn(B, D), w=P(D, 6)))
named("addmm_conv1d_hf", lambda: net(
    lambda m, x: torch.addmm(m.b, x.view(-1, D), m.w).view(B if len(x) == B else 1, T, 6).tanh(),
    torch.randn(B, T, D), w=P(D, 6), b=P(6)))  # fmt: skip
named("vector_product", lambda: net(lambda m, x: (x @ m.w).tanh(), torch.randn(B, T, D), w=P(D)))
named("stack_of_matrices", lambda: net(lambda m, x: (x @ m.w).tanh(), torch.randn(B, 4, T, D), w=P(4, D, 6)))
named("bmm_expanded", lambda: net(
    lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)).tanh(), torch.randn(B, T, D), w=P(D, 6)))  # fmt: skip
named("einsum", lambda: net(
    lambda m, x: torch.einsum("bthd,hde->bte", x, m.w).tanh(), torch.randn(B, T, 4, D), w=P(4, D, 6)))  # fmt: skip
named("bilinear", lambda: net(
    lambda m, x, y: m.a(x, y).tanh(), torch.randn(B, D), torch.randn(B, 6), a=nn.Bilinear(D, 6, 4)))  # fmt: skip
named("prelu", lambda: net(
    lambda m, x: m.b(m.a(x)), torch.randn(B, D, 6), a=nn.PReLU(), b=nn.PReLU(D)))  # fmt: skip
named("keyword_arguments", lambda: net(lambda m, x: m.a(input=x).tanh(), torch.randn(B, D), a=nn.Linear(D, 4)))
named("time_major", lambda: net(
    lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh()).transpose(0, 1), torch.randn(B, B, D),
    a=nn.Linear(D, D), b=nn.LayerNorm(D)))  # fmt: skip
named("flattened_tokens", lambda: net(
    lambda m, x: m.a(x.reshape(-1, D)).tanh().view(-1, T, 4), torch.randn(B, T, D), a=nn.Linear(D, 4)))  # fmt: skip
named("flattened_time_major", lambda: net(
    lambda m, x: m.a(x.transpose(0, 1).reshape(-1, D)).tanh().view(T, -1, 4).transpose(0, 1), torch.randn(B, T, D),
    a=nn.Linear(D, 4)))  # fmt: skip
named("routed_rows", lambda: net(
    lambda m, x: torch.zeros(len(x), 4, dtype=x.dtype).index_add(
        0, torch.arange(len(x)).flip(0), m.a(x.flip(0)[torch.arange(len(x))]).tanh()),
    torch.randn(B, D), a=nn.Linear(D, 4)))  # fmt: skip
named("masked_tokens", lambda: net(
    lambda m, x: torch.zeros(*x.shape[:2], 4, dtype=x.dtype).index_put((x[..., 0] > -1,), m.a(x[x[..., 0] > -1]).tanh()),
    torch.randn(B, T, D), a=nn.Linear(D, 4)))  # fmt: skip

# --------------------------------------------------------------------------- convolution

_CONV = {
    "plain": {}, "stride": {"stride": 2}, "padding": {"padding": 1}, "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2, "padding": 1}, "depthwise": {"groups": 4}, "nobias": {"bias": False},
    "same": {"padding": "same"}, "valid": {"padding": "valid"}, "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect": {"padding": 1, "padding_mode": "reflect"}, "replicate": {"padding": 1, "padding_mode": "replicate"},
    "zeros_strided": {"padding": 2, "stride": 3, "dilation": 2, "groups": 2},
}  # fmt: skip
for n in (1, 2, 3):
    for option, arguments in _CONV.items():
        if n < 3 or option not in ("reflect", "replicate"):
            named(f"conv{n}d_{option}", lambda n=n, arguments=arguments: net(
                lambda m, x: m.a(x).tanh(), torch.randn(B, 4, *(9, 8, 7)[:n]),
                a=getattr(nn, f"Conv{n}d")(4, 8, 3, **arguments)))  # fmt: skip
    for option, arguments in {"plain": {}, "stride": {"stride": 2, "padding": 1, "output_padding": 1},
                              "groups": {"groups": 2, "dilation": 2}}.items():  # fmt: skip
        named(f"conv_transpose{n}d_{option}", lambda n=n, arguments=arguments: net(
            lambda m, x: m.a(x).tanh(), torch.randn(B, 4, *(5, 4, 3)[:n]),
            a=getattr(nn, f"ConvTranspose{n}d")(4, 6, 3, **arguments)))  # fmt: skip
named("conv2d_even_same", lambda: net(
    lambda m, x: m.a(x).tanh(), torch.randn(B, 3, 6, 7), a=nn.Conv2d(3, 4, (2, 4), padding="same")))  # fmt: skip
named("conv2d_large_image", lambda: net(
    lambda m, x: m.b(m.a(x).relu()), torch.randn(B, 3, 24, 24), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 3, 5)))  # fmt: skip
named("conv2d_channels_last", lambda: net(
    lambda m, x: m.a(x).tanh(), torch.randn(B, 4, 7, 6).contiguous(memory_format=torch.channels_last),
    a=nn.Conv2d(4, 5, 3).to(memory_format=torch.channels_last)))  # fmt: skip
named("conv2d_frames", lambda: net(
    lambda m, x: m.a(x.flatten(0, 1)).tanh().unflatten(0, (-1, 4)), torch.randn(B, 4, 2, 6, 6), a=nn.Conv2d(2, 3, 3)))  # fmt: skip
named("conv2d_shared_resolutions", lambda: net(
    lambda m, x: torch.cat([m.a(x).tanh().flatten(1), m.a(x[..., ::2, ::2]).tanh().flatten(1)], 1),
    torch.randn(B, 3, 8, 8), a=nn.Conv2d(3, 4, 3)))  # fmt: skip
named("conv2d_twice", lambda: net(
    lambda m, x: m.a(m.a(x).tanh()).tanh(), torch.randn(B, 4, 6, 6), a=nn.Conv2d(4, 4, 3, padding=1)))  # fmt: skip

# --------------------------------------------------------------------------- embedding

named("embedding_repeated", lambda: net(lambda m, i: m.a(i).tanh(), ids(B, 9), a=nn.Embedding(V, D)))
named("embedding_padding", lambda: net(
    lambda m, i: m.a(i).tanh(), ids(B, 7, high=3), a=nn.Embedding(V, D, padding_idx=1)))  # fmt: skip
named("embedding_negative_padding", lambda: net(
    lambda m, i: m.a(i).tanh(), ids(B, 7, low=V - 3), a=nn.Embedding(V, D, padding_idx=-1)))  # fmt: skip
named("embedding_2d_ids", lambda: net(lambda m, i: m.a(i).tanh(), ids(B, 3, 4), a=nn.Embedding(V, D)))
named("embedding_one_id", lambda: net(lambda m, i: m.a(i).tanh(), ids(B), a=nn.Embedding(V, D)))
for shape in ("(T)", "(1, T)", "(B, T)"):
    named(f"positions_{shape}", lambda shape=shape: net(
        lambda m, i: m.b((m.a(i) + m.p(
            torch.arange(i.size(1)) if shape == "(T)" else torch.arange(i.size(1))[None].expand(
                1 if shape == "(1, T)" else len(i), -1))).tanh()),
        ids(B, B), a=nn.Embedding(V, D), p=nn.Embedding(B, D), b=nn.Linear(D, 4)))  # fmt: skip
for mode in ("sum", "mean", "max"):
    named(f"bag_{mode}", lambda mode=mode: net(
        lambda m, i: m.a(i).tanh(), ids(B, 6, high=4), a=nn.EmbeddingBag(V, D, mode=mode)))  # fmt: skip
named("bag_weights", lambda: net(
    lambda m, i, w: m.a(i, per_sample_weights=w).tanh(), ids(B, 6, high=4), torch.rand(B, 6),
    a=nn.EmbeddingBag(V, D, mode="sum")))  # fmt: skip
named("bag_padding", lambda: net(
    lambda m, i: m.a(i).tanh(), ids(B, 6, high=3), a=nn.EmbeddingBag(V, D, mode="mean", padding_idx=1)))  # fmt: skip
named("bag_offsets", lambda: net(
    lambda m, i: m.a(i.flatten(), torch.arange(len(i)) * 6).tanh(), ids(B, 6, high=4), a=nn.EmbeddingBag(V, D)))  # fmt: skip
named("table_indexed", lambda: net(lambda m, i: m.w[i].tanh(), ids(B, 6), w=P(V, D)))

# --------------------------------------------------------------------------- norms

for affine in ("both", "weight", "none"):
    named(f"layer_norm_{affine}", lambda affine=affine: net(
        lambda m, x: m.b(m.a(x).tanh()), torch.randn(B, T, D), b=nn.Linear(D, 3),
        a=nn.LayerNorm(D, elementwise_affine=affine != "none", bias=affine == "both")))  # fmt: skip
named("layer_norm_2d", lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, 4, T, D), a=nn.LayerNorm((T, D))))
named("rms_norm", lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, T, D), a=nn.RMSNorm(D)))
named("rms_norm_by_hand", lambda: net(
    lambda m, x: (1 + m.w) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), torch.randn(B, T, D), w=P(D)))  # fmt: skip
named("group_norm", lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, D, 4, 5), a=nn.GroupNorm(2, D)))
named("group_norm_channels_equal_batch", lambda: net(
    lambda m, x: m.a(x).tanh(), torch.randn(B, B, 4), a=nn.GroupNorm(1, B)))  # fmt: skip
named("group_norm_no_affine", lambda: net(
    lambda m, x: m.a(m.c(x)).tanh(), torch.randn(B, D, 4, 5), a=nn.GroupNorm(2, D, affine=False), c=nn.Conv2d(D, D, 1)))  # fmt: skip
named("instance_norm", lambda: net(
    lambda m, x: m.a(x).tanh(), torch.randn(B, D, 4, 5), a=nn.InstanceNorm2d(D, affine=True)))  # fmt: skip


@case
def batch_norm_eval() -> Built:
    model = nn.Sequential(nn.Conv2d(3, D, 3), nn.BatchNorm2d(D), nn.Tanh())
    model[1].running_mean.normal_()
    model[1].eval()
    return model, torch.randn(B, 3, 6, 6), square


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
    out = torch.zeros(len(x), T + 1, D, dtype=x.dtype)
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
    state = (torch.zeros(len(x), 6, dtype=x.dtype), torch.zeros(len(x), 6, dtype=x.dtype))
    for t in range(x.size(1)):
        state = m.a(x[:, t], state)
    return m.b(state[0])


named("lstm_cell", lambda: net(_cells, torch.randn(B, T, D), a=nn.LSTMCell(D, 6), b=nn.Linear(6, 3)))


def packed(kind: str, ordered: bool, bidirectional: bool) -> Callable[[], Built]:
    def forward(m: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        p = rnn.pack_padded_sequence(m.e(x).tanh(), lengths, batch_first=True, enforce_sorted=ordered)
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

# --------------------------------------------------------------------------- parametrized, tied, shared

named(
    "weight_norm",
    lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, T, D), a=parametrizations.weight_norm(nn.Linear(D, 6))),
)
named("weight_norm_conv", lambda: net(
    lambda m, x: m.a(x).tanh(), torch.randn(B, D, 9), a=parametrizations.weight_norm(nn.Conv1d(D, 6, 3), dim=2)))  # fmt: skip
named(
    "orthogonal",
    lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, D), a=parametrizations.orthogonal(nn.Linear(D, D))),
)
named("transposed_weight", lambda: net(
    lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w.t(), m.b), torch.randn(B, T, D), w=P(6, D), b=P(D)))  # fmt: skip
named("slices", lambda: net(
    lambda m, x: F.linear(F.linear(x, m.w[:D]).tanh(), m.w[D:]).tanh(), torch.randn(B, T, D), w=P(D + 4, D)))  # fmt: skip
named("chunks", lambda: net(
    lambda m, x, y: F.linear(x, m.w.chunk(3)[0]) * F.linear(y, m.w.chunk(3)[1]) + F.linear(x, m.w.chunk(3)[2]),
    torch.randn(B, T, D), torch.randn(B, T, D), w=P(3 * D, D)))  # fmt: skip
named("overlapping_slices", lambda: net(
    lambda m, x: F.linear(x, m.w[:6]) * F.linear(x, m.w[2:]), torch.randn(B, T, D), w=P(D, D)))  # fmt: skip
named("tied_embedding_head", lambda: net(
    lambda m, i: F.linear(m.b(m.a(i)).tanh(), m.a.weight), ids(B, 9), a=nn.Embedding(V, D), b=nn.Linear(D, D)))  # fmt: skip
named("tied_embedding_head_matmul", lambda: net(
    lambda m, i: (m.b(m.a(i)).tanh() @ m.a.weight.T), ids(B, 9), a=nn.Embedding(V, D), b=nn.Linear(D, D)))  # fmt: skip


@case
def tied_modules() -> Built:
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, V, bias=False))
    model[3].weight = model[0].weight
    return model, ids(B, 7), square


named("shared_layer", lambda: net(
    lambda m, x, y: torch.cat([m.a(m.a(x).tanh()).flatten(1), m.a(y).flatten(1)], 1), torch.randn(B, T, D),
    torch.randn(B, 2, D), a=nn.Linear(D, D)))  # fmt: skip
named("shared_norm", lambda: net(lambda m, x: m.a(m.a(x).tanh()), torch.randn(B, T, D), a=nn.LayerNorm(D)))
named("shared_embedding", lambda: net(
    lambda m, i, j: torch.cat([m.a(i), m.a(j)], 1).tanh(), ids(B, 4), ids(B, 5), a=nn.Embedding(V, D)))  # fmt: skip


@case
def two_forwards() -> Built:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 4))

    def losses(m: nn.Module, batch: Any) -> Tensor:
        return (m(batch[0]) - m(batch[1])).square().mean(1) + m(batch[0]).square().sum(1)

    return model, (torch.randn(B, D), torch.randn(B, D)), losses


@case
def submodules_called() -> Built:
    model = nn.ModuleDict({"encoder": nn.Linear(D, D), "head": nn.Linear(D, 4)})

    def losses(m: nn.Module, x: Tensor) -> Tensor:
        return m["head"](m["encoder"](x).tanh()).square().mean(1)

    return model, torch.randn(B, D), losses


# --------------------------------------------------------------------------- how a forward is run

named("inplace_activation", lambda: net(
    lambda m, x: m.b(F.relu_(m.a(x))), torch.randn(B, T, D), a=nn.Linear(D, 9), b=nn.Linear(9, 4)))  # fmt: skip
named("inplace_after_conv", lambda: (
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.SiLU(inplace=True), nn.Conv2d(4, 4, 3)),
    torch.randn(B, 3, 8, 8), square))  # fmt: skip
for reentrant in (True, False):
    named(f"checkpoint_reentrant_{reentrant}", lambda reentrant=reentrant: net(
        lambda m, x: m.c(checkpoint(lambda y: m.b(m.a(y).tanh()), m.i(x), use_reentrant=reentrant)),
        torch.randn(B, T, D), i=nn.Linear(D, D), a=nn.Linear(D, 9), b=nn.LayerNorm(9), c=nn.Linear(9, 4)))  # fmt: skip
    named(f"checkpoint_module_{reentrant}", lambda reentrant=reentrant: net(
        lambda m, x: m.c(checkpoint(m.a, m.i(x), use_reentrant=reentrant)),
        torch.randn(B, T, D), i=nn.Linear(D, D), a=nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)),
        c=nn.Linear(D, 4)))  # fmt: skip


@case
def frozen_parts() -> Built:
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 4))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model, torch.randn(B, T, D), square


named(
    "skipped_layer",
    lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, D), a=nn.Linear(D, 4), unused=nn.Linear(4, 4)),
)
named("windows", lambda: net(
    lambda m, x: m.a(x.view(-1, 2, 3, 2, 3, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 9, 4)).tanh().view(-1, 4, 9, 5),
    torch.randn(B, 6, 6, 4), a=nn.Linear(4, 5)))  # fmt: skip
named("two_views", lambda: net(
    lambda m, x: torch.cat(m.a(torch.cat([x, -0.5 * x])).tanh().chunk(2), -1), torch.randn(B, D), a=nn.Linear(D, 4)))  # fmt: skip
named("repeated_samples", lambda: net(
    lambda m, x: m.a(x.repeat_interleave(4, 0)).tanh().view(-1, 4, 5), torch.randn(B, D), a=nn.Linear(D, 5)))  # fmt: skip
named("last_token", lambda: net(
    lambda m, x, n: m.a(m.b(x)[torch.arange(len(x)), n]).tanh(), torch.randn(B, T, D), torch.tensor([4, 0, 2]),
    a=nn.Linear(D, 4), b=nn.Linear(D, D)))  # fmt: skip
