"""Home-made models and torch's own: the ways people write them, each in a few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .coverage_losses import row_losses
from .coverage_truth import Built, Case, Sizes, shake

D, V = 8, 23
Forward = Callable[..., Tensor]
MODELS: dict[str, Case] = {}


class Net(nn.Module):
    """A forward given as a function of (module, inputs)."""

    def __init__(self, forward: Forward, parts: dict[str, Any]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def square(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return row_losses(model(*[v for k, v in batch.items() if k != "seed"]), batch["seed"])


def add(name: str, forward: Forward, inputs: Callable[[Sizes], list[Tensor]], **parts: Callable[[], Any]) -> None:
    """A case: parts are made after the seed is set; inputs are samples first."""

    def build(sizes: Sizes) -> Built:
        torch.manual_seed(7)
        model = Net(forward, {n: make() for n, make in parts.items()})
        batch = {f"x{i}": t for i, t in enumerate(inputs(sizes))}
        return shake(model).train(), {**batch, "seed": torch.arange(3, 3 + sizes.batch)}, square

    assert name not in MODELS, name
    MODELS[name] = Case(name, build)


def P(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(0.5 * torch.randn(shape))


def lin(i: int, o: int, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(i, o, bias=bias)


def rows(*shape: int) -> Callable[[Sizes], list[Tensor]]:
    return lambda s: [torch.randn(s.batch, *shape)]


def sequence(s: Sizes) -> list[Tensor]:
    return [torch.randn(s.batch, s.tokens, D)]


def ids(s: Sizes) -> list[Tensor]:
    return [torch.randint(0, V, (s.batch, s.tokens))]


def two(s: Sizes) -> list[Tensor]:
    return sequence(s) + sequence(s)


def images(s: Sizes) -> list[Tensor]:
    return [torch.randn(s.batch, s.batch, 8, 8)]  # as many channels as samples


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
add("one_sample_at_a_time", lambda m, x: torch.stack([m.a(row.tanh()).sum(0) for row in x]), sequence, a=lin(D, 5))
add("unpadded_rows", lambda m, x: m.a(x.flatten(0, 1)[torch.arange(x[..., 0].numel())]).view(len(x), -1, 5), sequence,
    a=lin(D, 5))  # fmt: skip
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


def cases() -> dict[str, Case]:
    from . import coverage_variants

    return {**MODELS, **coverage_variants.cases()}
