"""Rows of parameters alone, taken out of rows joined with data: their gradient is of the sample that uses them."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fastdp
from fastdp.errors import FastDPError

from ..cases import Net, P, square
from ..truth import compare

B, T, D, FRAMES = 3, 4, 6, 2


def joined(m, x):
    """Frames [B * FRAMES, T, D] of a batch [B, FRAMES * T, D], a class token before each, positions added."""
    frames = m.a(x).view(-1, T, D)
    rows = torch.cat([m.token.expand(len(frames), 1, D), frames], 1)
    return F.dropout(rows + m.places, 0.0)


def frames_first(m, x):
    """The tokens of the first frames, which are the first sample's, serve all samples; they are all the same."""
    rows = joined(m, x)
    tokens = rows[: len(x), 0, :].unsqueeze(1)
    return m.b(torch.cat([tokens, rows[:, 1:].reshape(x.shape)], 1).tanh())


def windows(m, x):
    """Repeated for windows in another order than the windows lie."""
    rows = torch.cat([m.token.expand(len(x), 1, D), m.a(x)], 1) + m.table
    tokens = rows[:, :1].repeat(FRAMES, 1, 1)
    pixels = rows[:, 1:].reshape(len(x) * FRAMES, T, D)
    return m.b(torch.cat([tokens, pixels], 1).tanh().view(len(x), -1, D))


def written_back(m, x):
    """Of the joined rows the token is changed where it lies."""
    rows = torch.cat([m.token.expand(len(x), 1, D), m.a(x)], 1)
    rows[:, :1] += 0.5
    return m.b(rows.tanh())


def scaled_after(m, x):
    """Joined, then scaled by data: nothing is of parameters alone any more."""
    rows = torch.cat([m.token.expand(len(x), 1, D), m.a(x)], 1) * x[:, :1]
    return m.b(rows[:, :1].tanh()) + rows[:, 1:2]


def parts():
    torch.manual_seed(0)
    shapes = {"token": (1, 1, D), "places": (1, T + 1, D), "table": (1, FRAMES * T + 1, D)}
    return {**{n: P(*s) for n, s in shapes.items()}, "a": nn.Linear(D, D), "b": nn.Linear(D, D)}


@pytest.mark.parametrize("forward", [frames_first, windows, written_back, scaled_after])
def test_exact(forward):
    assert compare(Net(forward, **parts()), torch.randn(B, FRAMES * T, D), square).worst < 1e-5


def random_rows(m, x):
    """Dropout is drawn for each row: the first sample's are its own."""
    rows = F.dropout(torch.cat([m.token.expand(len(x) * FRAMES, 1, D), m.a(x).view(-1, T, D)], 1), 0.5)
    return m.b(torch.cat([rows[: len(x), :1], rows[:, 1:].reshape(x.shape)], 1))


def too_many(m, x):
    """The token and the first row of data."""
    rows = joined(m, x)
    return m.b(torch.cat([rows[: len(x), :2], rows[:, 1:].reshape(x.shape)], 1))


def written_to(m, x):
    """A write into what was taken would be a write into the joined rows."""
    rows = torch.cat([m.token.expand(len(x), 1, D), m.a(x)], 1)
    rows[:, 0].mul_(2.0)
    return m.b(rows.tanh())


def overwritten(m, x):
    """Data has been written over the token in the meantime."""
    rows = joined(m, x)
    rows[:, 0] = rows[:, 1]
    return m.b(torch.cat([rows[: len(x), :1], rows[:, 1:].reshape(x.shape)], 1))


@pytest.mark.parametrize("forward", [random_rows, too_many, written_to, overwritten])
def test_refused(forward):
    engine = fastdp.PerSampleGradients(Net(forward, **parts()))
    with pytest.raises(FastDPError):
        engine.model(torch.randn(B, FRAMES * T, D)).square().sum().backward()
        engine.norms()
    engine.detach()


def changed_after_it_was_used(m, x):
    """Autograd keeps nothing of the terms of a sum: it would not complain."""
    token = m.token * 2
    y = m.a(x) + token
    token.mul_(3.0)
    return m.b(y)


def changed_after_it_was_joined(m, x):
    token = m.token * 2
    rows = torch.cat([token.expand(len(x), 1, D), m.a(x)], 1)
    token.mul_(3.0)
    return m.b(torch.cat([rows[:, :1] + token, rows[:, 1:]], 1).tanh())


def changed_between_two_uses(m, x):
    token = m.token * 2
    y = m.a(x) + token
    token.mul_(3.0)
    return m.b(y + token)


@pytest.mark.parametrize("forward", [changed_between_two_uses, changed_after_it_was_used, changed_after_it_was_joined])
def test_written_to_after_its_use(forward):
    """The gradient would be taken through what was written later."""
    engine = fastdp.PerSampleGradients(Net(forward, **parts()))
    with pytest.raises(FastDPError, match="after it had been used"):
        engine.model(torch.randn(B, T, D))
    engine.detach()
