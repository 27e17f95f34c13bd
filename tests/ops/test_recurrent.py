"""All steps of a recurrent layer, forward and backward, against torch's layers and autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastdp.grad_sample.recurrent import _STEPS as STEPS
from fastdp.ops import recurrent

KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward_are_those_of_the_formulas(kind, masked):
    torch.manual_seed(1)
    t, b, h = 5, 3, 4
    g = recurrent.GATES[kind] * h
    x = torch.randn(t, b, g, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn(b, h, dtype=torch.float64, requires_grad=True) for _ in range(1 + (kind == "lstm")))
    weight, bias = torch.randn(g, h, dtype=torch.float64) / 2, torch.randn(g, dtype=torch.float64)
    active = torch.tensor([[True, step < 3, step < 1] for step in range(t)]) if masked else None

    outs, now = [], state
    for k in range(t):
        new = STEPS[kind](x[k], now, weight, bias)
        if active is not None:
            new = tuple(torch.where(active[k].unsqueeze(1), n, s) for n, s in zip(new, now, strict=True))
        now = new
        outs.append(now[0])
    out = torch.stack(outs)
    steps = recurrent.forward(kind, x.detach(), tuple(s.detach() for s in state), weight, bias, active)
    torch.testing.assert_close(steps.states[1:], out.detach(), rtol=1e-12, atol=1e-12)
    of_out, last = torch.randn_like(out), tuple(torch.randn_like(s) for s in now)
    want = torch.autograd.grad([out, *now], [x, *state], [of_out, *last])
    of_x, of_product, of_state = recurrent.backward(kind, steps, weight, of_out, last, active)
    for found, truth in zip((of_x, *of_state), want, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
    assert of_product.shape == x.shape


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
def test_states_and_gradients_of_weights_are_those_of_torchs_layer(kind: str) -> None:
    """The gradients by step make those of both matrices, and their clipped sum, by one product each."""
    layer, x, state = made(kind, 6, 3)
    steps = recurrent.forward(kind, gates(layer, x), state, layer.weight_hh_l0.detach(), layer.bias_hh_l0.detach())
    given = tuple(s[None] for s in state)
    out, last = layer(x, given if kind == "lstm" else given[0])
    torch.testing.assert_close(steps.states[1:], out.detach(), rtol=1e-12, atol=1e-12)
    of_out, of_last = torch.randn_like(out), tuple(torch.zeros_like(s) for s in state)
    of_x, of_product, _ = recurrent.backward(kind, steps, layer.weight_hh_l0.detach(), of_out, of_last)
    c = torch.tensor([0.3, 0.0, 1.7], dtype=torch.float64)
    wanted = torch.autograd.grad((out * of_out * c.view(1, 3, 1)).sum(), list(layer.parameters()))
    found = [torch.einsum("b,tbg,tbi->gi", c, *pair) for pair in ((of_x, x), (of_product, steps.states[:-1]))]
    found += [torch.einsum("b,tbg->g", c, rows) for rows in (of_x, of_product)]
    for name, one, truth in zip(("w_ih", "w_hh", "b_ih", "b_hh"), found, wanted, strict=True):
        torch.testing.assert_close(one, truth, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


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
def test_a_sample_that_has_ended_keeps_its_state_and_gets_no_gradient(kind: str) -> None:
    layer, x, state = made(kind, 4, 3)
    weight, x = layer.weight_hh_l0.detach(), gates(layer, x)
    active = torch.tensor([[True, True, False], [True, False, False], [True, False, False], [True, False, False]])
    x[1:, 1], x[:, 2] = torch.inf, torch.inf  # padding is not looked at
    steps = recurrent.forward(kind, x, state, weight, None, active)
    assert torch.equal(steps.states[4, 2], state[0][2]) and torch.equal(steps.states[4, 1], steps.states[1, 1])
    zeros = tuple(torch.zeros_like(s) for s in state)
    of_x, of_product, of_state = recurrent.backward(
        kind, steps, weight, torch.zeros_like(steps.states[1:]), zeros, active
    )
    assert not any(bool(part.any()) for part in (of_x, of_product, *of_state))
    last = tuple(torch.randn_like(s) for s in state)
    short = recurrent.forward(kind, x[:1, 1:2], tuple(s[1:2] for s in state), weight, None)
    wanted = recurrent.backward(kind, short, weight, torch.zeros_like(short.states[1:]), tuple(s[1:2] for s in last))
    found = recurrent.backward(kind, steps, weight, torch.zeros_like(steps.states[1:]), last, active)
    torch.testing.assert_close(found[0][:1, 1:2], wanted[0])
    torch.testing.assert_close(found[1][:1, 1:2], wanted[1])
    assert torch.equal(found[2][0][2], last[0][2]) and not found[0][1:, 1].any()


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
