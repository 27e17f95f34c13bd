"""Ways of mixing samples that were once let through, each in a small program: refused. Beside them, what must work.

Batch, sequence and width are all 3, so sizes tell nothing.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.errors import FastDPError

from ..cases import Net
from ..programs_by_hand import run

B = 3


def in_order(m, x):
    """Rows sorted by what they hold: which sample stands where depends on all."""
    h = m.a(x)
    return h[h[:, 0].argsort()]


def into(shape_of, write):
    """x * 1 plus a buffer of zeros that `write` has put data into through a view."""

    def function(m, x):
        buffer = torch.zeros(B, B, dtype=x.dtype)
        write(shape_of(buffer), x, m.a(x))
        return m.a(x) + buffer

    return function


def seen_before(m, x):
    buffer = torch.zeros(B, B, dtype=x.dtype)
    view = buffer[0]
    buffer.copy_(x)
    return m.a(x) + view


def laid_anew(m, x):
    h = x.clone()
    view = h[0]
    h[torch.tensor([1, 2, 0])] = m.a(x)
    return torch.stack([view, view * 2, view])


def emptied(m, x):
    h = in_order(m, x)
    h[0] = 0.0
    return h


def packed_by_the_wrong_side(m, x):
    h = m.a(x).unsqueeze(1).expand(B, B, B)
    packed = nn.utils.rnn.pack_padded_sequence(h, torch.tensor([3, 2, 2]))
    return nn.utils.rnn.pad_packed_sequence(packed)[0]


def other_states(state):
    def function(m, x):
        h = m.a(x)
        return m.recurrent(h.unsqueeze(1), (state(h).contiguous(), h[None]))[0].squeeze(1)

    return function


def written(write):
    def function(m, x):
        h = m.a(x) * 1.0
        write(h, x)
        return h

    return function


def ids(x):
    return (x * 3).long()


MIXING = {
    "written_by_others": written(lambda h, x: h.__setitem__((x[:, 0] > 0).roll(1), 0.0)),
    "column_of_others": written(
        lambda h, x: h.__setitem__((torch.arange(B), ids(x).flip(0)[:, 0] % B), h.detach()[:, 0] * 2)
    ),
    "picked_by_data": lambda m, x: m.a(x)[ids(x)[:, 0] % B],
    "one_row_picked_for_all": lambda m, x: m.a(x) + m.a(x)[0][ids(x)[:, 0] % B],
    "softmax_by_default": lambda m, x: F.softmax(m.a(x)[:, None]),  # of three dimensions: the first
    "rows_before": lambda m, x: F.pad(m.a(x), (0, 0, -1, 1)) + m.a(x),
    "renorm_in_place": lambda m, x: m.a(x).clone().renorm_(2, 1, 0.5),
    "addmm_in_place": lambda m, x: m.a(x).addmm_(x, x),
    "put_in_place": lambda m, x: m.a(x).clone().put_(torch.arange(9).view(3, 3).t(), m.a(x)),
    "complex": lambda m, x: torch.fft.fft(torch.fft.fft(m.a(x), dim=1), dim=0).real,
    "whole_numbers_flipped": lambda m, x: m.a(x) * torch.flipud(ids(x)),
    "whole_numbers_sorted": lambda m, x: m.a(x) * torch.msort(ids(x)),
    "whole_numbers_multiplied": lambda m, x: m.a(x) + (ids(x) @ ids(x)).to(x.dtype),
    "whole_numbers_shifted": lambda m, x: m.a(x) * F.pad(ids(x), (0, 0, 1, -1)),
    "is_among": lambda m, x: m.a(x) * torch.isin(ids(x), ids(x) + 1),
    "a_product_of_zeros": lambda m, x: m.a(x) + (x * 0) @ (x * 0) + x @ x,
    "new_tensor": lambda m, x: m.a(x) + x.new_tensor(x.detach().mT),
    "new_tensor_of_itself": lambda m, x: m.a(x)[x.new_tensor(x).argsort(0).flatten()[:B]],
    "full": lambda m, x: m.a(x) + torch.full((B,), x.max()),
    "new_full": lambda m, x: m.a(x) + x.new_full((B,), x.max()),
    "through_a_transpose": into(lambda buffer: buffer.t(), lambda view, x, h: view.copy_(x)),
    "through_a_transpose_by_index": into(lambda buffer: buffer.t(), lambda view, x, h: view.__setitem__(..., x)),
    "a_column_into_a_row": into(lambda buffer: buffer[0], lambda view, x, h: view.copy_(x[:, 0])),
    "a_learned_column_into_a_row": into(lambda b: b[0], lambda view, x, h: view.__setitem__(slice(None), h[:, 0])),
    "out_in_a_row": into(lambda buffer: buffer[0], lambda view, x, h: torch.mul(x[:, 0], 2, out=view)),
    "a_view_seen_before": seen_before,
    "a_view_of_rows_laid_anew": laid_anew,
    "data_set": lambda m, x: setattr(y := torch.zeros_like(x), "data", x.t()) or m.a(x) + y,
    "windows_beyond_a_row": lambda m, x: torch.stack([h.as_strided((2, B), (B, 1), 0) for h in m.a(x)]),
    "the_base_of_a_row": lambda m, x: torch.stack([h._base.mean(0) for h in m.a(x).unbind()]),
    "instance_norm": lambda m, x: F.instance_norm(m.a(x).t().unsqueeze(0)).squeeze(0).t(),
    "other_state": other_states(lambda h: h.flip(0)[None]),
    "mean_state": other_states(lambda h: h.mean(0).expand(1, B, B)),
    "packed": packed_by_the_wrong_side,
    "first_of_an_order_by_number": lambda m, x: (lambda h: torch.stack([h[i] for i in range(2)]))(in_order(m, x)),
    "first_of_an_order": lambda m, x: in_order(m, x)[torch.tensor([0, 1])],
    "first_of_an_order_selected": lambda m, x: in_order(m, x).index_select(0, torch.tensor([0, 1])),
    "first_of_an_order_gathered": lambda m, x: in_order(m, x).gather(0, torch.zeros(1, B).long()),
    "masked_order": lambda m, x: in_order(m, x)[torch.tensor([True, False, False])],
    "repeated_order": lambda m, x: in_order(m, x).repeat_interleave(torch.tensor([2, 0, 1]), 0),
    "triangle_of_an_order": lambda m, x: in_order(m, x).tril(),
    "diagonal_of_an_order": lambda m, x: in_order(m, x).fill_diagonal_(0),
    "filled_order": lambda m, x: in_order(m, x).index_fill(0, torch.tensor([0]), 0.0),
    "order_written_by_place": emptied,
    "repeated_as_others_say": lambda m, x: m.a(x).repeat_interleave((x[:, 0] > 0).long().flip(0) + 1, 0),
    "cut_after_repeats": lambda m, x: m.a(x).repeat_interleave((x[:, 0] > 0).long() + 1, 0)[:2],
    "constants_dealt_out": lambda m, x: m.a(x).masked_scatter(x > 0, torch.arange(9.0).to(x.dtype)),
    "added_by_index": lambda m, x: (h := m.a(x)).index_put((torch.tensor([1, 2, 0]),), h, accumulate=True),
}


def model_of(function):
    torch.manual_seed(0)
    recurrent = nn.LSTM(B, B, batch_first=True).requires_grad_(False)
    return Net(lambda m, x: m.b(function(m, x)), a=nn.Linear(B, B), b=nn.Linear(B, B), recurrent=recurrent)


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_refused(name):
    model = model_of(MIXING[name])
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randn(B, B)).flatten(1).square().sum(1).mean().backward()
    engine.detach()


def filled(m, x):
    buffer = torch.zeros(B, B, dtype=x.dtype)
    for i in range(B):
        buffer[:, i].copy_(m.a(x)[:, i])
    return buffer


def filled_by_rows(m, x):
    buffer = torch.zeros(B, B, dtype=x.dtype)
    for i in range(B):
        buffer[i].copy_(m.a(x)[i])
    return buffer


def out_of_a_product(m, x):
    buffer = torch.zeros(B, B, dtype=x.dtype)
    torch.mul(x, 2, out=buffer)
    return m.a(buffer)


def restored(m, x):
    order = x[:, 0].argsort()
    return m.a(x)[order].tanh()[order.argsort()]


def padded(m, x):
    return nn.utils.rnn.pad_sequence([one[: 1 + i].unsqueeze(1).expand(-1, B) for i, one in enumerate(m.a(x))], True)


SEPARATE = {
    "filled": filled,
    "filled_by_rows": filled_by_rows,
    "out": out_of_a_product,
    "restored": restored,
    "own_state": other_states(lambda h: h[None]),
    "cholesky": lambda m, x: torch.linalg.cholesky((h := m.a(x))[:, :, None] * h[:, None] + torch.eye(B)),
    "triangle": lambda m, x: m.a(x).unsqueeze(1).expand(B, B, B).tril(),
    "softmax_by_default": lambda m, x: F.softmax(m.a(x)),  # of two dimensions: the second
}


@pytest.mark.parametrize("name", SEPARATE)
def test_what_keeps_samples_apart_is_exact(name):
    model = model_of(SEPARATE[name])
    x = torch.randn(B, B)
    engine = fastdp.PerSampleGradients(model)
    model(x).flatten(1).square().sum(1).mean().backward()
    found = engine.norms().double()
    engine.detach()
    grads = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)).flatten(1).square().sum(1))(
        {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    )
    truth = torch.stack([g.flatten(1).double().square().sum(1) for g in grads.values()]).sum(0).sqrt()
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)


def test_samples_of_different_lengths_padded():
    model = model_of(padded)
    engine = fastdp.PerSampleGradients(model)
    model(torch.randn(B, B)).flatten(1).square().sum(1).mean().backward()
    assert engine.norms().shape == (B,)
    engine.detach()


def test_rows_picked_by_data_are_refused_in_a_sum_too() -> None:
    with pytest.raises(FastDPError, match="by another's data"):
        run(lambda m, h: h[(h[:, 0] > 0).long()], lambda out, labels: out.square().sum(), reduction="sum")
