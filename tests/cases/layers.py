"""Layers one by one: matrix products, convolutions, tables and norms."""

from __future__ import annotations

import torch
import torch.nn as nn

from .base import B, Built, D, P, T, V, case, ids, named, net, square

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
named("dimension_of_zero", lambda: net(
    lambda m, x: torch.cat([m.a(x).view(len(x), T, 2, 3).transpose(1, 2), m.a(x)[..., 6:].view(len(x), 1, T, 0).expand(
        -1, 2, -1, -1)], -1), torch.randn(B, T, D), a=nn.Linear(D, 6)))  # fmt: skip
named("routed_rows", lambda: net(
    lambda m, x: torch.zeros(len(x), 4, dtype=x.dtype, device=x.device).index_add(
        0, torch.arange(len(x), device=x.device).flip(0), m.a(x.flip(0)[torch.arange(len(x))]).tanh()),
    torch.randn(B, D), a=nn.Linear(D, 4)))  # fmt: skip
named("masked_tokens", lambda: net(
    lambda m, x: x.new_zeros(*x.shape[:2], 4).index_put((x[..., 0] > -1,), m.a(x[x[..., 0] > -1]).tanh()),
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
            torch.arange(B, device=i.device) if shape == "(T)" else torch.arange(B, device=i.device)[None].expand(
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
    lambda m, i: m.a(i.flatten(), torch.arange(len(i), device=i.device) * 6).tanh(), ids(B, 6, high=4), a=nn.EmbeddingBag(V, D)))  # fmt: skip
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
