"""What only the values show: masks that keep samples apart, rows that are counted, positions that are found.

Each pattern is exact where it keeps to the sample, and its dangerous neighbour is refused.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fastdp
from fastdp.errors import FastDPError

from ..cases import Net, P, square
from ..truth import compare

B, T, D = 3, 4, 6
ROWS = torch.arange(B).repeat_interleave(T)


def parts():
    torch.manual_seed(0)
    return {"a": nn.Linear(D, D), "b": nn.Linear(D, D), "table": nn.Embedding(9, D), "w": P(D), "v": P(4, D)}


def batch_of():
    """Rows [B, T, D], ids [B, T] with two zeros in each sample, and sizes [B, 2] whose product is T."""
    torch.manual_seed(1)
    ids = torch.tensor([[0, 3, 0, 1], [2, 0, 0, 5], [4, 1, 0, 0]])
    return torch.randn(B, T, D), ids, torch.tensor([[1, 4], [2, 2], [4, 1]])


def apart(x, hidden, dtype):
    """A mask [1, 1, rows, rows] of a batch whose samples lie one after another, T rows each."""
    owner = torch.arange(len(x)).repeat_interleave(T)
    same = owner[:, None] == owner
    if dtype is not torch.bool:
        same = torch.zeros(same.shape, dtype=x.dtype).masked_fill(~same, hidden)
    return same[None, None]


def packed_attention(m, x, mask):
    h = m.a(x).flatten(0, 1)[None, None]
    return m.b(F.scaled_dot_product_attention(h, h, h.tanh(), mask)[0, 0].view(x.shape))


def global_tokens(m, x, ids, sizes, narrowed=None):
    """Every token also looks at the chosen ones of its sample (zeros among the ids), however many these are."""
    chosen = ids == 0
    chosen[:, 1] |= ids[:, 1] == 3
    count = chosen.sum(1)
    most = count.max()
    where = chosen.nonzero(as_tuple=True)
    slots = torch.arange(most) < count[:, None]
    h = m.a(x)
    keys = h.new_zeros(len(h), most, D)
    keys[slots.nonzero(as_tuple=True)] = h[where]
    scores = torch.cat([(h @ keys.mT).masked_fill(~slots[:, None], -1e9), h @ h.mT], -1).softmax(-1)
    if narrowed is not None:
        return m.b(narrowed(scores, most))
    return m.b(scores.narrow(-1, 0, most) @ keys + scores.narrow(-1, most, T) @ h)


def counted(m, x, sizes, index=None, meet=lambda h, found: h + found):
    """The size of the picture that each row is of, by counting the rows of all pictures."""
    ends = sizes.prod(1).cumsum(0)
    index = (torch.arange(len(x) * T) >= ends[:, None]).sum(0) if index is None else index(ends)
    found = sizes[index, 1].to(x.dtype)[:, None]
    return m.b(meet(m.a(x).flatten(0, 1), found).tanh()).view(len(x), -1, D)


def found_at(m, x, ids, column):
    """Positions of the zeros as data."""
    return m.b(m.a(x) * column((ids == 0).nonzero(), len(ids)).to(x.dtype)[:, :1, None])


def zeros_first(m, x, ids, table):
    """Of a table, each sample's places of zeros, then its others."""
    mask = torch.cat([ids == 0, ids != 0], 1)
    return m.b(m.a(x) * table(ids)[mask].reshape(len(ids), T, 1).to(x.dtype))


def listed(m, x, ids, where=lambda b: b):
    """A loop that writes down which tokens of the sample are zeros, for every query."""
    tokens = torch.full((len(ids), B * T, T), 8)
    for b in range(len(ids)):
        found = (ids[b] == 0).nonzero().flatten()
        for query in range(B * T):
            tokens[where(b) % len(ids), query, : len(found)] = found
    return m.b(m.a(x) + m.table(tokens).sum(2)[:, :T])


def spectra(m, x, of=lambda z: z):
    """Numbers as frequencies over time, and back."""
    window = torch.hann_window(8, dtype=x.dtype)
    z = torch.stft(m.a(x).flatten(1), 8, 2, window=window, return_complex=True)
    return m.b(torch.istft(of(z * z.abs()), 8, 2, window=window).reshape(len(x), -1, D))


def turned(m, x):
    """A grid that each sample chooses, and its picture there."""
    theta = torch.eye(2, 3).to(x) + 0.1 * m.b(x)[:, 0].view(-1, 2, 3)
    grid = F.affine_grid(theta, [len(x), 1, 2, 2], align_corners=False)
    return F.grid_sample(m.a(x)[:, None], grid, align_corners=False)


def routed(m, x, chosen):
    """Mixtral's pick of tokens, behind a new dimension."""
    h = m.a(x).flatten(0, 1)
    (i,) = torch.where(chosen.flatten())
    return h.view(x.shape) + torch.zeros_like(h).index_add_(0, i, m.b(h[None, i].reshape(-1, D))).view(x.shape)


def nothing_hidden(m, x):
    h = m.a(x)
    h[torch.ones(x.shape[:2]).eq(0)] = -1e9
    return m.b(h)


def transitions(m, x, ids):
    """Rows of a parameter by labels, one sample at a time, after memory of constants was filled."""
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[:, :] = m.a(x)
    return torch.stack([row + m.v[i[0] % 4] * m.w[i[1] % D] for row, i in zip(out, ids, strict=True)])


EXACT = {
    "turned": lambda m, x, ids, sizes: turned(m, x),
    "an empty mask": lambda m, x, ids, sizes: nothing_hidden(m, x),
    "rows_of_a_parameter": lambda m, x, ids, sizes: transitions(m, x, ids),
    "routed": lambda m, x, ids, sizes: routed(m, x, ids == 0),
    "routed_one": lambda m, x, ids, sizes: routed(m, x, ids == 5),
    "routed_of_one_sample": lambda m, x, ids, sizes: routed(m, x, (ids == 4) | (ids == 1) & (ids[:, :1] == 4)),
    "spectra": lambda m, x, ids, sizes: spectra(m, x),
    "own_positions_first": lambda m, x, ids, sizes: zeros_first(
        m, x, ids, lambda ids: torch.arange(T).repeat(2).expand(len(ids), -1)
    ),
    "listed_by_sample_and_query": lambda m, x, ids, sizes: listed(m, x, ids),
    "mask_of_truths": lambda m, x, ids, sizes: packed_attention(m, x, apart(x, 0, torch.bool)),
    "mask_of_infinities": lambda m, x, ids, sizes: packed_attention(m, x, apart(x, -torch.inf, None)),
    "mask_of_lowest": lambda m, x, ids, sizes: packed_attention(m, x, apart(x, torch.finfo(x.dtype).min, None)),
    "split_by_own_sizes": lambda m, x, ids, sizes: torch.stack(
        [m.b(one).mean(0) * one[-1] for one in m.a(x).flatten(0, 1).split([h * w for h, w in sizes])]
    ),
    "one_by_one_repeated": lambda m, x, ids, sizes: (
        torch.cat([h.repeat_interleave(1, 0) + F.one_hot(i, D) for h, i in zip(m.a(x).split(1), ids, strict=True)])
        * torch.ones(len(x), 1, 1).to(x)
    ),
    "global_tokens": global_tokens,
    "rows_counted": lambda m, x, ids, sizes: counted(m, x, sizes),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    assert compare(Net(EXACT[name], **parts()), batch_of(), square).worst < 1e-5


def leaking(x, change):
    mask = apart(x, -torch.inf, None).clone()
    change(mask[0, 0])
    return mask


def one_key_seen(mask):
    mask[0, -1] = 0


def nothing_seen(mask):
    """All keys as low: softmax gives every one the same weight."""
    mask[1] = torch.finfo(mask.dtype).min


def faintly_seen(mask):
    mask[mask < 0] = -30.0


REFUSED = {
    "spectra_across": lambda m, x, ids, sizes: spectra(m, x, lambda z: z.permute(2, 1, 0).repeat(3, 1, 5)[:, :, :13]),
    "places_first": lambda m, x, ids, sizes: zeros_first(
        m, x, ids, lambda ids: torch.arange(len(ids) * 2 * T).view(len(ids), -1)
    ),
    "listed_for_another": lambda m, x, ids, sizes: listed(m, x, ids, lambda b: b + 1),
    "mask_with_a_hole": lambda m, x, ids, sizes: packed_attention(m, x, leaking(x, one_key_seen)),
    "mask_of_a_blind_row": lambda m, x, ids, sizes: packed_attention(m, x, leaking(x, nothing_seen)),
    "mask_that_is_weak": lambda m, x, ids, sizes: packed_attention(m, x, leaking(x, faintly_seen)),
    "no_mask": lambda m, x, ids, sizes: packed_attention(m, x, None),
    "mask_of_truths_with_a_hole": lambda m, x, ids, sizes: packed_attention(
        m, x, apart(x, 0, torch.bool) | (torch.arange(len(x) * T) == 0)
    ),
    "split_elsewhere": lambda m, x, ids, sizes: m.b(torch.stack([p.sum(1) for p in m.a(x).split(list(sizes[1]), 1)])),
    "split_across": lambda m, x, ids, sizes: torch.stack(
        [m.b(p).sum(0) for p in m.a(x).flatten(0, 1).split([h + w for h, w in sizes[:2]] + [sizes[2, 0] - 1])]
    ),
    "middle_column": lambda m, x, ids, sizes: global_tokens(
        m, x, ids, sizes, lambda scores, most: scores.narrow(-1, most, 1) * x
    ),
    "cut_by_one_sample": lambda m, x, ids, sizes: m.b(m.a(x).narrow(1, 0, sizes[1, 0])),
    "rows_counted_and_used_alone": lambda m, x, ids, sizes: counted(m, x, sizes, meet=lambda h, found: found * m.w),
    "rows_counted_of_others": lambda m, x, ids, sizes: counted(
        m, x, sizes, lambda ends: (torch.arange(len(x) * T) >= ends[:, None] - 2).sum(0).clamp(max=2)
    ),
    "rows_counted_backwards": lambda m, x, ids, sizes: counted(
        m, x, sizes, lambda ends: (torch.arange(len(x) * T) < ends[:, None]).sum(0) - 1
    ),
    "samples_found": lambda m, x, ids, sizes: found_at(m, x, ids, lambda found, n: found[:, 0].view(n, 2)),
    "columns_exchanged": lambda m, x, ids, sizes: found_at(m, x, ids, lambda found, n: found.flip(1)[:, 1].view(n, 2)),
    "columns_exchanged_in_place": lambda m, x, ids, sizes: found_at(
        m, x, ids, lambda found, n: found.copy_(found.flip(1))[:, 1].view(n, 2)
    ),
    "first_found": lambda m, x, ids, sizes: found_at(m, x, ids, lambda found, n: found[:n, 1].view(n, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model = Net(REFUSED[name], **parts())
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(*batch_of()).square().sum().backward()
        engine.norms()
    engine.detach()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_what_a_mask_cannot_hide(value):
    """A weight of zero times infinity is not zero; and a score may overflow to it."""
    model = Net(lambda m, x: packed_attention(m, x, apart(x, 0, torch.bool)), **parts())
    x = torch.randn(B, T, D)
    x[1, 2, 3] = value
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError, match="attends from one sample to another"):
        model(x).square().sum().backward()
    engine.detach()


def packed(m, x, rows):
    """Three rows of each sample, made known where they enter the tokens; returned beside what is made of them."""
    h = m.a(rows)
    return {"out": m.b(x + h.view(len(x), 3, D).sum(1, keepdim=True)), "rows": h}


def test_an_intermediate_that_the_model_also_returns():
    """Its gradient comes from what the model made of it, which says whose rows it held."""
    model = Net(lambda m, x, rows: packed(m, x, rows.flatten(0, 1))["out"], **parts())
    batch = torch.randn(B, T, D), torch.randn(B, 3, D)
    truth = compare(model, batch, square)
    assert truth.worst < 1e-5
    wanted = fastdp.PerSampleGradients(model)
    square(model, batch).mean().backward()
    norms = wanted.norms()
    wanted.detach()
    model.function = packed
    engine = fastdp.PerSampleGradients(model)
    weights = torch.linspace(0.5, 1.5, T * D)
    out = model(batch[0], batch[1].flatten(0, 1).clone())
    (out["out"].flatten(1) * weights).square().mean(1).mean().backward()
    torch.testing.assert_close(engine.norms(), norms)
    out = model(batch[0], batch[1].flatten(0, 1).clone())
    with pytest.raises(FastDPError, match="mark_rows"):  # the loss takes the rows themselves
        (out["out"].square().sum() + out["rows"].square().sum()).backward()
    engine.detach()


def scaled_in_part(m, x):
    """A table made of parameters, changed through a view of it."""
    table = m.v * 2
    table[..., 2:] *= m.w[2:]
    return m.b(x + table)


def written_behind(m, x):
    """Through a view of a view, and by two views of which the second does not know of the first."""
    table = m.v * 2
    first, second = table[:2], table[1:]
    first.mul_(m.w)
    second.mul_(m.w)
    return m.b(x + table)


def added_to_zeros(m, x):
    """`k[0] += w` is a write through a view of the zeros, and one of that view to them."""
    table = x.new_zeros(3, D, D)
    table[0] += m.w
    table[1, :, 1:] -= m.w[1:]
    table[2].diagonal().add_(m.w)
    table[0] *= m.w
    return m.b(x @ table[0] + x @ table[1] + x @ table[2])


def copied_to_zeros(m, x):
    table = x.new_zeros(2, D, D)
    table.view(-1)[:D].copy_(m.w)
    table[1, :2].copy_(m.w)
    return m.b(x @ table[0] + x @ table[1])


@pytest.mark.parametrize("forward", [scaled_in_part, added_to_zeros, copied_to_zeros, written_behind])
def test_parameters_written_through_a_view(forward):
    model = Net(forward, **parts())
    try:
        assert compare(model, torch.randn(B, T, D), square).worst < 1e-5
    except FastDPError:
        assert forward is written_behind
