"""One number of the whole batch, taken from scores before a softmax: harmless there, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

import fastdp
from fastdp.errors import FastDPError

from ..cases import Net, square
from ..truth import compare

B, T, D = 3, 4, 6


def parts():
    torch.manual_seed(0)
    return {name: nn.Linear(D, D) for name in "abc"}


def attend(m, x, weigh):
    h = m.a(x)
    scores = torch.bmm(h, m.c(x).transpose(1, 2))
    return m.b(weigh(scores) @ h)


def both_ways(scores):
    """Rows and columns, bounded and masked, as of two kinds of tokens that look at each other."""
    scores = scores - scores.max()
    scores = torch.clamp(scores, min=-50000, max=50000)
    turned = scores.transpose(1, 2)
    turned = turned - torch.max(turned, dim=-1, keepdim=True)[0]
    scores.masked_fill_(torch.ones(T, T).triu(1).bool(), float("-inf"))
    return torch.clamp(turned, min=-5, max=5).softmax(-1) + scores.softmax(-1)


EXACT = {
    "softmax": lambda scores: (scores - scores.max()).softmax(-1),
    "its_logarithm": lambda scores: torch.log_softmax(scores - scores.mean(), 1),
    "heads": lambda scores: (
        (scores - scores.amax()).view(-1, 2, T, T // 2).transpose(1, 2).softmax(-1).reshape(-1, T, T)
    ),
    "both_ways": both_ways,
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    assert compare(Net(lambda m, x: attend(m, x, EXACT[name]), **parts()), torch.randn(B, T, D), square).worst < 1e-5


REFUSED = {
    "no_softmax": lambda scores: scores - scores.max(),
    "another_function": lambda scores: (scores - scores.max()).sigmoid(),
    "bounded_where_it_tells": lambda scores: (scores - scores.max()).clamp(min=-0.1).softmax(-1),
    "bounded_by_a_tensor": lambda scores: torch.max(scores - scores.max(), torch.full((T,), -0.5)).softmax(-1),
    "filled_with_a_number": lambda scores: (
        (scores - scores.max()).masked_fill(torch.ones(T, T).triu(1).bool(), -1.0).softmax(-1)
    ),
    "two_numbers": lambda scores: (scores - scores.max()) - (scores - scores.min()),
    "divided_by_it": lambda scores: (scores / scores.max()).softmax(-1),
    "a_number_a_column": lambda scores: (scores - scores.amax(0)).softmax(-1),
    "scaled_first": lambda scores: ((scores - scores.max()) ** 2).softmax(-1),
    "along_the_batch": lambda scores: (scores - scores.max()).softmax(0),
    "joined_with_other_scores": lambda scores: torch.cat([scores - scores.max(), scores], -1).softmax(-1)[..., :T],
    "a_view_of_it": lambda scores: (scores - scores.max())[:, :, :1].expand(-1, -1, T),
    "written_into": lambda scores: (scores - scores.max()).index_fill_(2, torch.tensor([0]), 0.0).softmax(-1),
    "infinite": lambda scores: (scores - (scores * float("inf")).max()).softmax(-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model = Net(lambda m, x: attend(m, x, REFUSED[name]), **parts())
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randn(B, T, D)).square().sum().backward()
        engine.norms()
    engine.detach()


def test_sixteen_bits_are_refused():
    """What the softmax's gradient sums to is zero but for rounding, which is not little there."""
    model = Net(lambda m, x: attend(m, x, EXACT["softmax"]), **parts()).bfloat16()
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randn(B, T, D).bfloat16()).square().sum().backward()
    engine.detach()
