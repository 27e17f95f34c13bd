"""All steps of a recurrent layer, forward and backward, against torch's layers and autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastdp.ops import recurrent

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


def made(kind: str, t: int, b: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, tuple[Tensor, ...]]:
    """torch's layer of 4 inputs and 5 states, the input's part of its gates [T,B,G], and a first state."""
    torch.manual_seed(2)
    options = {"nonlinearity": kind[4:]} if kind.startswith("rnn") else {}
    layer = KINDS[kind](4, 5, **options).to(dtype)
    x = torch.randn(t, b, 4, dtype=dtype)
    return layer, x, tuple(torch.randn(b, 5, dtype=dtype) for _ in range(1 + (kind == "lstm")))


def gates(layer: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight_ih_l0, layer.bias_ih_l0).detach()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_sample_leaves_the_others_as_they_are(kind: str) -> None:
    layer, x, state = made(kind, 4, 3)
    weight, bias, x = layer.weight_hh_l0.detach(), layer.bias_hh_l0.detach(), gates(layer, x)
    of_out, last = torch.randn(4, 3, 5, dtype=torch.float64), tuple(torch.randn_like(s) for s in state)
    clean = recurrent.forward(kind, x, state, weight, bias)
    grads = recurrent.backward(kind, clean, weight, of_out, last)
    x[2, 1] = torch.nan
    steps = recurrent.forward(kind, x, state, weight, bias)
    assert torch.equal(steps.states[:, [0, 2]], clean.states[:, [0, 2]]) and steps.states[3, 1].isnan().all()
    again = recurrent.backward(kind, steps, weight, of_out, last)
    for one, other in zip((*again[:2], *again[2]), (*grads[:2], *grads[2]), strict=True):
        assert torch.equal(one[..., [0, 2], :], other[..., [0, 2], :])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_and_strides_and_bfloat16(kind: str) -> None:
    layer, x, state = made(kind, 5, 3)
    weight, bias, x = layer.weight_hh_l0.detach(), layer.bias_hh_l0.detach(), gates(layer, x)
    out, last = torch.randn(5, 3, 5, dtype=torch.float64), tuple(torch.randn_like(s) for s in state)
    steps = recurrent.forward(kind, x, state, weight, bias)
    turned = lambda t: t.mT.contiguous().mT
    again = recurrent.forward(kind, turned(x), tuple(map(turned, state)), turned(weight), bias)
    torch.testing.assert_close(again.states, steps.states)
    found = recurrent.backward(kind, again, turned(weight), turned(out), tuple(map(turned, last)))
    torch.testing.assert_close(found, recurrent.backward(kind, steps, weight, out, last))
    empty = recurrent.forward(kind, x[:, :0], tuple(s[:0] for s in state), weight, bias)
    nothing = recurrent.backward(kind, empty, weight, out[:, :0], tuple(s[:0] for s in last))
    assert empty.states.shape == (6, 0, 5) and nothing[0].shape == x[:, :0].shape
    short = [recurrent.forward(kind, x.to(t), tuple(s.to(t) for s in state), weight.to(t), bias.to(t))
             for t in (torch.bfloat16, torch.float32)]  # fmt: skip
    assert short[0].states.dtype == torch.bfloat16
    torch.testing.assert_close(short[0].states.float(), short[1].states, rtol=0.05, atol=0.05)
