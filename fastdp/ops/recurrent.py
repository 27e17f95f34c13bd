"""One direction of a recurrent layer, forward and backward, in the formulas of torch.nn.LSTM, GRU and RNN.

Torch's own backward gives gradients of the weights, summed over samples and steps. Here backward gives those of the
gates by step, g [T,B,G]: with the states before each step they make the use of the state's matrix a single product.
In PyTorch, what does not wait for the step after is computed for all steps at once; on the CPU, C++ computes a step of
an LSTM or GRU but for its product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .registry import cpp, define, native

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}  # blocks of H rows in a state's matrix


class Steps(NamedTuple):
    """What backward needs. states: h before each step and after the last, [T+1,B,H]; gates: after their functions,
    [T,B,G]; extra: lstm: c like states, and tanh(c) [T,B,H]; gru: the state's part of n, [T,B,H]."""

    states: Tensor
    gates: Tensor
    extra: tuple[Tensor, ...] = ()


def forward(kind: str, x: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None,
            active: Tensor | None = None) -> Steps:  # fmt: skip
    """Run all steps.

    kind: of `GATES`; x: the input's part of the gates with its bias, [T,B,G]; state: h [B,H], for lstm and c [B,H];
    weight [G,H], bias [G]: the state's; active: bool [T,B]: samples that are not keep their state. No graph is kept.
    """
    if kind == "lstm":
        states, gates, *extra = _lstm_op(x, *state, weight, bias, active)
        return Steps(states, gates, tuple(extra))
    if kind == "gru":
        states, gates, inner = _gru_op(x, *state, weight, bias, active)
        return Steps(states, gates, (inner,))
    return _rnn(kind, x, state[0], weight, bias, active)


def backward(kind: str, steps: Steps, weight: Tensor, out: Tensor, last: tuple[Tensor, ...],
             active: Tensor | None = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Gradients: (of x [T,B,G], of the state's product h W^T + b [T,B,G], of the first state).

    out: gradient of the states after each step, [T,B,H]; last: of the last state (h, for lstm and c), [B,H] each.
    """
    if kind == "lstm":
        grads, of_h, of_c = _lstm_back_op(steps.gates, *steps.extra, weight, out, *last, active)
        return grads, grads, (of_h, of_c)
    if kind == "gru":
        grads, products, of_h = _gru_back_op(steps.gates, *steps.extra, steps.states, weight, out, *last, active)
        return grads, products, (of_h,)
    return _rnn_back(kind, steps, weight, out, last[0], active)


def _begun(first: Tensor, steps: int) -> Tensor:
    """Room for a state before each step and after the last: [steps + 1, B, H]."""
    room = first.new_empty(steps + 1, *first.shape)
    room[0] = first
    return room


def _keep(active: Tensor | None, *pairs: Tensor) -> None:
    """Samples that have ended get the state before, into the state after: pairs of (before, after)."""
    if active is not None:
        for before, after in zip(pairs[::2], pairs[1::2], strict=True):
            torch.where(active.unsqueeze(1), after, before, out=after)


def _of_active(active: Tensor | None, *made: Tensor) -> tuple[Tensor, ...]:
    """The same, 0 where samples have ended."""
    return made if active is None else tuple(each.masked_fill_(~active.unsqueeze(2), 0.0) for each in made)


def _each(active: Tensor | None, steps: int) -> list[Tensor | None]:
    return [None] * steps if active is None else list(active)


# --------------------------------------------------------------------------- lstm


def _lstm(x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None,
          active: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    _check(4, x, weight, bias, active, h, c)
    t, size = len(x), h.size(1)
    states, cells = _begun(h, t), _begun(c, t)
    gates, bent = x.new_empty(x.shape), h.new_empty(t, *h.shape)
    x, turned = x if bias is None else x + bias, weight.t()
    i_f, o = gates[..., : 2 * size].unbind(), gates[..., 3 * size :].unbind()
    i, f, g = (gates[..., k * size : (k + 1) * size].unbind() for k in range(3))
    for k, (row, all_, state, cell, new, new_cell, tanh, on) in enumerate(
        zip(x, gates, states, cells, states[1:], cells[1:], bent, _each(active, t), strict=False)
    ):
        torch.addmm(row, state, turned, out=all_)
        i_f[k].sigmoid_()
        g[k].tanh_()
        o[k].sigmoid_()
        torch.mul(f[k], cell, out=new_cell).addcmul_(i[k], g[k])
        torch.tanh(new_cell, out=tanh)
        torch.mul(o[k], tanh, out=new)
        _keep(on, cell, new_cell, state, new)
    return states, *_of_active(active, gates), cells, *_of_active(active, bent)


def _lstm_back(gates: Tensor, cells: Tensor, tanh: Tensor, weight: Tensor, out: Tensor, h: Tensor, c: Tensor,
               active: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    t, b, size = tanh.shape
    i, f, g, o = gates.unflatten(2, (4, size)).unbind(2)
    slope = gates.new_empty(t, b, 4, size)  # of the cell (i, f, g) or the state (o) by the gate's argument
    torch.mul(g * i, 1 - i, out=slope[:, :, 0])
    torch.mul(cells[:-1] * f, 1 - f, out=slope[:, :, 1])
    torch.mul(i, 1 - g * g, out=slope[:, :, 2])
    torch.mul(tanh * o, 1 - o, out=slope[:, :, 3])
    through = o * (1 - tanh * tanh)  # of the state by the cell
    stays = None
    if active is not None:
        on = active.unsqueeze(2)
        slope.masked_fill_(~on.unsqueeze(3), 0.0)
        through, f, stays = through.masked_fill(~on, 0.0), f.masked_fill(~on, 1.0), (~on).to(out.dtype)
    grads = torch.empty_like(slope)
    of_c, of_h, flat = c, out[-1] + h, grads.flatten(2)
    for k in range(t - 1, -1, -1):
        of_c = torch.addcmul(of_c, of_h, through[k])
        torch.mul(slope[k, :, :3], of_c.unsqueeze(1), out=grads[k, :, :3])
        torch.mul(slope[k, :, 3], of_h, out=grads[k, :, 3])
        of_c = of_c * f[k]
        of_h = _before(out, k, flat[k], weight, of_h, stays)
    return flat, of_h, of_c


def _before(out: Tensor, k: int, of_product: Tensor, weight: Tensor, of_h: Tensor, stays: Tensor | None) -> Tensor:
    """Gradient of the state before step k, with what came out there."""
    passed = of_product @ weight if k == 0 else torch.addmm(out[k - 1], of_product, weight)
    return passed if stays is None else passed.addcmul_(of_h, stays[k])


# --------------------------------------------------------------------------- gru


def _gru(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, active: Tensor | None) -> tuple[Tensor, ...]:
    _check(3, x, weight, bias, active, h)
    t, size = len(x), h.size(1)
    states, turned = _begun(h, t), weight.t()
    gates, of_n = x.new_empty(x.shape), h.new_empty(t, *h.shape)
    r_z, n = gates[..., : 2 * size].unbind(), gates[..., 2 * size :].unbind()
    for k, (row, state, new, inner, on) in enumerate(zip(x, states, states[1:], of_n, _each(active, t), strict=False)):
        product = state @ turned if bias is None else torch.addmm(bias, state, turned)
        torch.add(row[:, : 2 * size], product[:, : 2 * size], out=r_z[k]).sigmoid_()
        r, z = r_z[k].chunk(2, 1)
        inner.copy_(product[:, 2 * size :])
        torch.addcmul(row[:, 2 * size :], r, inner, out=n[k]).tanh_()
        torch.addcmul(n[k], z, state - n[k], out=new)
        _keep(on, state, new)
    return states, *_of_active(active, gates, of_n)


def _gru_back(gates: Tensor, of_n: Tensor, states: Tensor, weight: Tensor, out: Tensor, h: Tensor,
              active: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    t, b, size = of_n.shape
    r, z, n = gates.unflatten(2, (3, size)).unbind(2)
    slope_n = (1 - z) * (1 - n * n)
    slope = torch.stack((slope_n * of_n * r * (1 - r), (states[:-1] - n) * z * (1 - z), slope_n), 2)
    inner = slope.clone()  # of the state's product, whose part of n comes by way of r
    inner[:, :, 2] *= r
    if active is not None:
        off = ~active.unsqueeze(2)
        slope.masked_fill_(off.unsqueeze(3), 0.0)
        inner.masked_fill_(off.unsqueeze(3), 0.0)
        z = z.masked_fill(off, 1.0)
    grads, products = torch.empty_like(slope), torch.empty_like(slope)
    of_h = out[-1] + h
    for k in range(t - 1, -1, -1):
        torch.mul(slope[k], of_h.unsqueeze(1), out=grads[k])
        torch.mul(inner[k], of_h.unsqueeze(1), out=products[k])
        of_h = _before(out, k, products[k].flatten(1), weight, of_h, z)
    return grads.flatten(2), products.flatten(2), of_h


# --------------------------------------------------------------------------- rnn


def _rnn(kind: str, x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, active: Tensor | None) -> Steps:
    t, turned = len(x), weight.t()
    states, gates = _begun(h, t), x.new_empty(x.shape)
    x = x if bias is None else x + bias
    for row, gate, state, new, on in zip(x, gates, states, states[1:], _each(active, t), strict=False):
        torch.addmm(row, state, turned, out=gate)
        gate.tanh_() if kind == "rnn_tanh" else gate.relu_()
        new.copy_(gate)
        _keep(on, state, new)
    return Steps(states, gates)


def _rnn_back(kind: str, steps: Steps, weight: Tensor, out: Tensor, h: Tensor,
              active: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    slope = 1 - steps.gates * steps.gates if kind == "rnn_tanh" else (steps.gates > 0).to(out.dtype)
    stays = None
    if active is not None:
        off = ~active.unsqueeze(2)
        slope, stays = slope.masked_fill(off, 0.0), off.to(out.dtype)
    grads = torch.empty_like(slope)
    of_h = out[-1] + h
    for k in range(len(slope) - 1, -1, -1):
        torch.mul(slope[k], of_h, out=grads[k])
        of_h = _before(out, k, grads[k], weight, of_h, stays)
    return grads, grads, (of_h,)


# --------------------------------------------------------------------------- C++


def _serves(*given: Tensor | None) -> bool:
    """Whether the compiled steps take them."""
    return all(tensor is None or (tensor.dtype == torch.float32 and tensor.numel()) for tensor in given)


def _places(array: Tensor | None) -> Iterable[int]:
    """The address of each step's part of a contiguous array [T, ...]; of None 0, for good."""
    if array is None:
        return itertools.repeat(0)
    return range(array.data_ptr(), array.data_ptr() + array.nbytes, array[0].nbytes)


class _Packed:
    """A matrix [depth, columns] laid out once for products of every step with rows [batch, depth]."""

    def __init__(self, matrix: Tensor, batch: int) -> None:
        self.depth, self.columns = matrix.shape
        self.batch, self.threads = batch, torch.get_num_threads()
        self.matrix = matrix.new_empty(-(-self.columns // _SLIVER) * _SLIVER * self.depth)
        self.rows = matrix.new_empty(-(-batch // _SLIVER) * _SLIVER * self.depth)
        self.multiply = native().packed_product  # type: ignore[union-attr]
        native().pack_columns(  # type: ignore[union-attr]
            matrix.data_ptr(), self.columns, self.depth, matrix.stride(1), matrix.stride(0), self.matrix.data_ptr(),
            self.threads,
        )  # fmt: skip

    def product(self, rows: int, bias: int, out: int) -> None:
        """By addresses: the product and bias into out; without one, it is added to what is there."""
        self.multiply(rows, self.matrix.data_ptr(), bias, self.batch, self.depth, self.columns, self.rows.data_ptr(),
                      out, self.threads)  # fmt: skip


_SLIVER = 16  # columns beside each other (csrc/cpu/tile.h)


def _check(gates: int, x: Tensor, weight: Tensor, bias: Tensor | None, active: Tensor | None, *states: Tensor) -> None:
    """Raises ValueError where the compiled steps would read past an end: x [T,B,gates H], states [B,H]."""
    size = states[0].shape
    rows = gates * size[-1]
    fits = len(size) == 2 and x.shape[1:] == (size[0], rows) and all(each.shape == size for each in states)
    fits = fits and weight.shape == (rows, size[1]) and (bias is None or bias.shape == (rows,))
    if not fits or (active is not None and (active.dtype != torch.bool or active.shape != x.shape[:2])):
        shapes = [None if t is None else tuple(t.shape) for t in (x, *states, weight, bias, active)]
        wanted = f"x [T,B,{gates}H], states [B,H], weight [{gates}H,H], bias [{gates}H] and active, bool [T,B]"
        raise ValueError(f"expected {wanted}; got {shapes}")


def _native_lstm(x: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None,
                 active: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    _check(4, x, weight, bias, active, h, c)
    if not _serves(x, h, c, weight, bias):
        return _lstm(x, h, c, weight, bias, active)
    states, cells, packed, x = _begun(h, len(x)), _begun(c, len(x)), _Packed(weight.t(), len(h)), x.contiguous()
    gates, bent, product = x.new_empty(x.shape), h.new_empty(len(x), *h.shape), x.new_empty(x.shape[1:])
    bias = weight.new_zeros(len(weight)) if bias is None else bias.contiguous()
    active = None if active is None else active.contiguous()
    module: Any = native()
    threads, at_product = torch.get_num_threads(), product.data_ptr()
    places = zip(*map(_places, (x, cells, states, active, gates, cells[1:], bent, states[1:])), strict=False)
    for row, cell, before, on, *after in places:
        packed.product(before, bias.data_ptr(), at_product)
        module.lstm_step(row, at_product, cell, before, on, *h.shape, *after, threads)
    return states, gates, cells, bent


def _native_lstm_back(gates: Tensor, cells: Tensor, bent: Tensor, weight: Tensor, out: Tensor, h: Tensor, c: Tensor,
                      active: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    _check(4, gates, weight, None, active, h, c, *out[:1], *cells[-1:], *bent[:1])
    if not _serves(gates, weight, out, h, c):
        return _lstm_back(gates, cells, bent, weight, out, h, c, active)
    out, active = out.contiguous(), None if active is None else active.contiguous()
    of_c, of_h = c.clone(memory_format=torch.contiguous_format), (out[-1] + h).contiguous()
    grads, passed = gates.new_empty(gates.shape), h.new_empty(h.shape)
    module: Any = native()
    threads, at_c, packed = torch.get_num_threads(), of_c.data_ptr(), _Packed(weight, len(h))
    places = zip(*map(_places, (gates, cells, bent, active, grads)), itertools.chain((0,), _places(out)), strict=False)
    for gate, cell, tanh, on, grad, before in reversed(list(places)):
        module.lstm_step_back(gate, cell, tanh, of_h.data_ptr(), before, on, *h.shape, at_c, grad,
                              passed.data_ptr(), threads)  # fmt: skip
        packed.product(grad, 0, passed.data_ptr())
        of_h, passed = passed, of_h
    return grads, of_h, of_c


def _native_gru(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None,
                active: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    _check(3, x, weight, bias, active, h)
    if not _serves(x, h, weight, bias):
        return _gru(x, h, weight, bias, active)
    states, packed, x = _begun(h, len(x)), _Packed(weight.t(), len(h)), x.contiguous()
    gates, inner, product = x.new_empty(x.shape), h.new_empty(len(x), *h.shape), x.new_empty(x.shape[1:])
    bias = weight.new_zeros(len(weight)) if bias is None else bias.contiguous()
    active = None if active is None else active.contiguous()
    module: Any = native()
    threads, at_product = torch.get_num_threads(), product.data_ptr()
    places = zip(*map(_places, (x, states, active, gates, inner, states[1:])), strict=False)
    for row, before, on, *after in places:
        packed.product(before, bias.data_ptr(), at_product)
        module.gru_step(row, at_product, before, on, *h.shape, *after, threads)
    return states, gates, inner


def _native_gru_back(gates: Tensor, inner: Tensor, states: Tensor, weight: Tensor, out: Tensor, h: Tensor,
                     active: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    _check(3, gates, weight, None, active, h, *out[:1], *states[-1:], *inner[:1])
    if not _serves(gates, weight, out, h):
        return _gru_back(gates, inner, states, weight, out, h, active)
    out, active = out.contiguous(), None if active is None else active.contiguous()
    grads, products = gates.new_empty(gates.shape), gates.new_empty(gates.shape)
    of_h, passed = (out[-1] + h).contiguous(), h.new_empty(h.shape)
    module: Any = native()
    threads, packed = torch.get_num_threads(), _Packed(weight, len(h))
    befores = itertools.chain((0,), _places(out))
    places = zip(*map(_places, (gates, inner, states, active, grads, products)), befores, strict=False)
    for gate, of_n, state, on, grad, product, before in reversed(list(places)):
        module.gru_step_back(gate, of_n, state, of_h.data_ptr(), before, on, *h.shape, grad, product,
                             passed.data_ptr(), threads)  # fmt: skip
        packed.product(product, 0, passed.data_ptr())
        of_h, passed = passed, of_h
    return grads, products, of_h


# --------------------------------------------------------------------------- operators


def _after(first: Tensor, steps: int, begun: bool = True) -> Tensor:
    return first.new_empty(steps + begun, *first.shape)


_lstm_op = define(
    "lstm_steps(Tensor x, Tensor h, Tensor c, Tensor weight, Tensor? bias, Tensor? active)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _lstm,
    lambda x, h, c, weight, bias, active: (
        _after(h, len(x)), x.new_empty(x.shape), _after(c, len(x)), _after(h, len(x), False)
    ),
    CPU=cpp(_native_lstm),
)  # fmt: skip
_lstm_back_op = define(
    "lstm_steps_backward(Tensor gates, Tensor cells, Tensor bent, Tensor weight, Tensor out, Tensor h, Tensor c,"
    " Tensor? active) -> (Tensor, Tensor, Tensor)",
    _lstm_back,
    lambda gates, cells, bent, weight, out, h, c, active: (
        gates.new_empty(gates.shape), h.new_empty(h.shape), c.new_empty(c.shape)
    ),
    CPU=cpp(_native_lstm_back),
)  # fmt: skip
_gru_op = define(
    "gru_steps(Tensor x, Tensor h, Tensor weight, Tensor? bias, Tensor? active) -> (Tensor, Tensor, Tensor)",
    _gru,
    lambda x, h, weight, bias, active: (_after(h, len(x)), x.new_empty(x.shape), _after(h, len(x), False)),
    CPU=cpp(_native_gru),
)
_gru_back_op = define(
    "gru_steps_backward(Tensor gates, Tensor inner, Tensor states, Tensor weight, Tensor out, Tensor h,"
    " Tensor? active) -> (Tensor, Tensor, Tensor)",
    _gru_back,
    lambda gates, inner, states, weight, out, h, active: (
        gates.new_empty(gates.shape), gates.new_empty(gates.shape), h.new_empty(h.shape)
    ),
    CPU=cpp(_native_gru_back),
)  # fmt: skip
