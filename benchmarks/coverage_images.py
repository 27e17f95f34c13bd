"""Home-made models of graphs, points, coordinates and images, torch's own, and models that couple their samples."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .coverage_parts import D, P, add, images, lin, rows, sequence, two

# ---------------------------------------------------------------------- graphs, points, coordinates, images


def graph_attention(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    edges = (y @ y.transpose(1, 2)) > 0
    h = m.a(x)
    score = F.leaky_relu((h @ m.s)[:, :, None] + (h @ m.t)[:, None]).masked_fill(~edges, -1e9)
    return m.o(score.softmax(-1) @ h)


add("graph_attention", graph_attention, two, a=lin(D, 6), s=P(6), t=P(6), o=lin(6, 4))
add(
    "graph_convolution", lambda m, x, y: m.o(torch.softmax(y @ y.mT, -1) @ m.a(x).relu()), two, a=lin(D, 6), o=lin(6, 4)
)
add("point_net", lambda m, x: m.o(m.b(m.a(x).relu()).amax(1)), sequence, a=lin(D, 9), b=lin(9, 9), o=lin(9, 4))
add(
    "fourier_features",
    lambda m, x: m.o(torch.cat([(x @ m.f).sin(), (x @ m.f).cos()], -1).tanh()),
    rows(D),
    f=P(D, 6),
    o=lin(12, 4),
)


def radiance(m: nn.Module, x: Tensor) -> Tensor:
    waves = torch.cat([x * 2.0**k for k in range(3)], -1).sin()
    return m.b(torch.cat([x, m.a(waves).relu()], -1))


def rotation(m: nn.Module, x: Tensor) -> Tensor:
    numbers = torch.view_as_complex(m.a(x).view(*x.shape[:2], 4, 2))
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(m.angle), m.angle)).flatten(2)


add("nerf_like", radiance, sequence, a=lin(3 * D, 9), b=lin(D + 9, 4))
add("complex_rotation", rotation, sequence, a=lin(D, D), angle=P(4))


def four(x: Tensor) -> Tensor:
    """Padded to four channels."""
    return F.pad(x, (0, 0, 0, 0, 0, 4 - x.size(1)))


def unet(m: nn.Module, x: Tensor) -> Tensor:
    x = four(x)
    low = m.down(m.first(x).relu()).relu()
    return m.last(torch.cat([x, m.up(m.norm(low))], 1))


add(
    "unet",
    unet,
    images,
    first=lambda: nn.Conv2d(4, 6, 3, padding=1),
    down=lambda: nn.Conv2d(6, D, 2, stride=2),
    norm=lambda: nn.GroupNorm(2, D),
    up=lambda: nn.ConvTranspose2d(D, 5, 2, stride=2),
    last=lambda: nn.Conv2d(9, 3, 1),
)
for variant, options in {
    "dilated": dict(dilation=2),
    "grouped": dict(groups=2),
    "depthwise": dict(groups=4),
    "reflected": dict(padding=1, padding_mode="reflect"),
    "circular": dict(padding=1, padding_mode="circular"),
    "same": dict(padding="same"),
    "strided": dict(stride=2, padding=1),
}.items():
    add(f"convolution_{variant}", lambda m, x: m.a(four(x)).tanh(), images,
        a=lambda options=options: nn.Conv2d(4, 4, 3, **options))  # fmt: skip
add("channels_last", lambda m, x: m.a(four(x).contiguous(memory_format=torch.channels_last)).tanh(),
    images, a=lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last))  # fmt: skip
add("convolution_3d", lambda m, x: m.a(x[:, None]).tanh(), rows(3, 5, 5), a=lambda: nn.Conv3d(1, 4, 2))
add("instance_norm", lambda m, x: m.n(m.a(x.transpose(1, 2))).tanh(), sequence, a=lambda: nn.Conv1d(D, 6, 2),
    n=lambda: nn.InstanceNorm1d(6, affine=True))  # fmt: skip
add("transformer", lambda m, x, y: m.a(x, y), two, a=lambda: nn.Transformer(D, 2, 1, 1, 12, 0.0, batch_first=True))
add("transformer_encoder", lambda m, x: m.a(x), sequence, a=lambda: nn.TransformerEncoder(
    nn.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=True), 2, enable_nested_tensor=False))  # fmt: skip
add("quantised_base_lora", lambda m, x: F.linear(x, m.q.to(x.dtype) * 0.01) + m.v(m.u(x)), sequence, u=lin(D, 2, False),
    v=lin(2, 5, False), q=lambda: nn.Buffer(torch.randint(-127, 127, (5, D), dtype=torch.int8)))  # fmt: skip

# ---------------------------------------------------------------------- coupled by the model: right is to refuse

add(
    "coupled_batch_norm",
    lambda m, x: m.o(m.n(m.a(x)).tanh()),
    rows(D),
    a=lin(D, 6),
    n=lambda: nn.BatchNorm1d(6),
    o=lin(6, 4),
)
add("coupled_centred", lambda m, x: m.a(x - x.mean(0)).tanh(), rows(D), a=lin(D, 4))
add("coupled_contrastive", lambda m, x: m.a(x) @ m.a(x).T @ x, rows(D), a=lin(D, 4))
