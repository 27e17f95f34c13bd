"""nn.RNN, nn.GRU, nn.LSTM and their cells, padded and packed.

Torch's fused kernels give no gradients by step; here each gate matrix is used once, for all inputs or all states
(`ops.recurrent`). Where that does not apply (projections, autocast, states of unusual layout) a layer is written in
steps of linear uses, in the formulas of torch.nn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch_axis.layout import Layout, tag, tag_of
from ..errors import BatchLayoutError
from ..ops import recurrent as steps_of
from .captured_call import Captured, Context, applied
from .forward_pass import ForwardPass
from .linear import autocast_dtype, row_sums, steps, use_of_product
from .parameter_use import Stored
from .rules import by_sample, made_of_data, refuse_sequence_of_samples, sample_layout, use_rule

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Tensor, Tensor | None], State]


def _lstm_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    h, c = state
    i, f, g, o = (gates + F.linear(h, weight, bias)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    (h,) = state
    r, z, n = gates.chunk(3, -1)
    hr, hz, hn = F.linear(h, weight, bias).chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (n + torch.sigmoid(z + hz) * (h - n),)


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
        return (activation(gates + F.linear(state[0], weight, bias)),)

    return step


_STEPS: dict[str, Step] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _rnn_step(torch.tanh),
    "rnn_relu": _rnn_step(torch.relu),
}


class _AllSteps(Captured):
    """All steps of one direction: (the input's part of the gates [T,B,G], state, active) -> (out [T,B,H], last state).

    The state's matrix has one use, by the states before the steps and the gradients of its products.
    """

    def __init__(self, forward_pass: ForwardPass, kind: str, active: Tensor | None, reverse: bool) -> None:
        super().__init__(forward_pass, kind, Layout(forward_pass.batch, 1))
        self.reverse = reverse
        self.active = active.flip(0) if reverse and active is not None else active

    def forward(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        (x, *state), (weight, bias) = data, ctx.values
        ctx.keep(weight)
        made = steps_of.forward(self.name, x.flip(0) if self.reverse else x, tuple(state), weight, bias, self.active)
        ctx.made = (made.states, made.gates, *made.extra)
        out = made.states[1:].flip(0) if self.reverse else made.states[1:].clone()
        last = [made.states[-1]] + ([made.extra[0][-1]] if self.name == "lstm" else [])
        return out, *[each.clone() for each in last]

    def saved(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        return ()

    def _gradients(
        self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The gradients of the products with the state's matrix, and of the data."""
        out, *last = grads
        out = out.flip(0) if self.reverse else out
        made = steps_of.Steps(saved[0], saved[1], saved[2:])
        x, g, state = steps_of.backward(self.name, made, ctx.values[0], out, tuple(last), self.active)
        return g, [x.flip(0) if self.reverse else x, *state]

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        (weight, bias), forward_pass = ctx.operands, ctx.forward_pass
        g, ctx.found = self._gradients(ctx, saved, grads)
        g = steps(by_sample(g, self.layout))
        if ctx.learned[0]:
            a = steps(by_sample(saved[0][:-1], self.layout))
            forward_pass.record(use_of_product(forward_pass, weight, a, g, self.name))
        if ctx.learned[1]:
            forward_pass.record(Stored(bias, row_sums(g), self.name))

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        return self._gradients(ctx, saved, grads)[1]


def _at_once(forward_pass: ForwardPass, gates: Tensor, state: State, weights: list[Tensor]) -> bool:
    """Whether all steps of a direction can be one captured call: samples along dimension 1 of the gates and 0 of the
    states, and nothing of the states a parameter."""
    layout = tag_of(gates, forward_pass.batch)
    if autocast_dtype(gates) is not None or any(forward_pass.is_parameter(h) for h in state):
        return False
    if layout is None or not layout.plain or layout.dim != 1 or layout.order is not None or gates.size(0) == 0:
        return False
    if made_of_data(forward_pass, *weights):
        return False
    for h in state:
        of_h = tag_of(h, forward_pass.batch)
        if h.shape[:1] != gates.shape[1:2] or h.dtype != gates.dtype:
            return False
        if of_h is not None and not (of_h.plain and of_h.dim == 0 and of_h.order is None):
            return False
        if of_h is None and forward_pass.is_data(h):
            return False
    return True


def _direction(forward_pass: ForwardPass, kind: str, x: Tensor, state: State, weights: list[Tensor], biased: bool,
               active: Tensor | None, reverse: bool) -> tuple[Tensor, State]:  # fmt: skip
    """One direction of one layer: x [T,B,I] -> outputs [T,B,H] and the last state."""
    step = _STEPS[kind]
    w_in, w_state, *rest = weights
    b_in, b_state = rest[:2] if biased else (None, None)
    projection = rest[-1] if len(rest) == 3 or (not biased and rest) else None  # LSTM with proj_size
    gates = F.linear(x, w_in, b_in)
    with torch._C.DisableTorchFunction():
        if projection is None and _at_once(forward_pass, gates, state, [w_state, *rest[1:2]]):
            call = _AllSteps(forward_pass, kind, active, reverse)
            out, *last = applied(call, Context(forward_pass, w_state, b_state), gates, *state)
            tag(out, Layout(forward_pass.batch, 1))
            for h in last:
                tag(h, Layout(forward_pass.batch, 0))
            return out, tuple(last)
    outputs: list[Tensor] = []
    times = range(x.size(0))
    for t in reversed(times) if reverse else times:
        new = step(gates[t], state, w_state, b_state)
        if projection is not None:
            new = (F.linear(new[0], projection), *new[1:])
        if active is not None:  # packed: samples that have ended keep their state
            new = tuple(torch.where(active[t].unsqueeze(-1), n, s) for n, s in zip(new, state, strict=True))
        state = new
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def recurrent(forward_pass: ForwardPass, kind: str, x: Tensor, hx: State, weights: list[Tensor], biased: bool,
              layers: int, dropout: float, train: bool, bidirectional: bool,
              active: Tensor | None = None) -> tuple[Tensor, State]:  # fmt: skip
    """A stack of recurrent layers: x [T,B,I], states [layers * directions, B, H]."""
    directions = 1 + bidirectional
    each = len(weights) // (layers * directions)
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            state = tuple(h[k] for h in hx)
            own = weights[k * each : (k + 1) * each]
            y, state = _direction(forward_pass, kind, x, state, own, biased, active, direction == 1)
            outputs.append(y)
            last.append(state)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout, True)
    return x, tuple(torch.stack([state[i] for state in last]) for i in range(len(hx)))


@use_rule(*[getattr(torch._VF, name) for name in _STEPS])  # type: ignore[attr-defined]
def capture_recurrent(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch._VF.lstm, gru, rnn_tanh, rnn_relu: padded (x, hx, weights, ...) or packed (data, sizes, hx, ...)."""
    name = func.__name__
    if isinstance(args[1], Tensor) and isinstance(args[3], list | tuple):
        return forward_pass.traced(_packed, forward_pass, name, *args)
    refuse_sequence_of_samples(forward_pass, args[0], 0 if args[-1] else 1, name, "goes from one sample to the next")
    return forward_pass.traced(_padded, forward_pass, name, *args)


def _results(name: str, out: Tensor, last: State) -> tuple[Tensor, ...]:
    return (out, *last) if name == "lstm" else (out, last[0])


def _padded(forward_pass: ForwardPass, name: str, x: Tensor, hx: Any, weights: list[Tensor], biased: bool, layers: int,
            dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:  # fmt: skip
    x = x.transpose(0, 1) if batch_first else x
    states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    out, last = recurrent(forward_pass, name, x, states, list(weights), biased, layers, dropout, train, bidirectional)
    return _results(name, out.transpose(0, 1) if batch_first else out, last)


def _packed(forward_pass: ForwardPass, name: str, data: Tensor, sizes: Tensor, hx: Any, weights: list[Tensor],
            biased: bool, layers: int, dropout: float, train: bool,
            bidirectional: bool) -> tuple[Tensor, ...]:  # fmt: skip
    """Packed rows are laid out by time and sample, run with a mask, and packed again."""
    layout = sample_layout(forward_pass, data, name)
    batch, counts = forward_pass.batch, [int(size) for size in sizes]  # a CPU tensor, by torch's own contract
    device = data.device
    owner = layout.owners(device) if batch > 1 else torch.zeros(data.size(0), dtype=torch.long, device=device)
    order = owner[: counts[0]]  # sorted position -> sample
    if counts[0] != batch:
        raise BatchLayoutError(f"{forward_pass.place(name)}: {counts[0]} packed sequences in a batch of {batch}")
    by_sample = torch.argsort(order)
    states = tuple(h.index_select(1, by_sample) for h in (hx if isinstance(hx, tuple | list) else (hx,)))
    with torch._C.DisableTorchFunction():
        time = torch.repeat_interleave(torch.arange(len(counts)), sizes).to(device)
        active = torch.zeros(len(counts), batch, dtype=torch.bool, device=device)
        active[time, owner] = True
        x = data.new_zeros(len(counts), batch, data.size(1)).index_put((time, owner), data)
        tag(x, Layout(batch, 1))
        tag(active, Layout(batch, 1))
    out, last = recurrent(forward_pass, name, x, states, list(weights), biased, layers, dropout, train, bidirectional,
                          active)  # fmt: skip
    with torch._C.DisableTorchFunction():
        rows = out[time, owner]
        ends = tuple(h.index_select(1, order) for h in last)
        tag(rows, Layout(batch, 0, owner=owner))
        for h in ends:
            tag(h, Layout(batch, 1, owner=order))
    return _results(name, rows, ends)


_CELLS = {"lstm_cell": "lstm", "gru_cell": "gru", "rnn_tanh_cell": "rnn_tanh", "rnn_relu_cell": "rnn_relu"}


@use_rule(*[getattr(torch._VF, name) for name in _CELLS])  # type: ignore[attr-defined]
def capture_cell(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nn.LSTMCell, GRUCell, RNNCell: (x, state, w_in, w_state, b_in, b_state)."""
    return forward_pass.traced(_cell, _CELLS[func.__name__], *args)


def _cell(name: str, x: Tensor, hx: Any, w_in: Tensor, w_state: Tensor, b_in: Tensor | None = None,
          b_state: Tensor | None = None) -> Any:  # fmt: skip
    state = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    new = _STEPS[name](F.linear(x, w_in, b_in), state, w_state, b_state)
    return new if name == "lstm" else new[0]
