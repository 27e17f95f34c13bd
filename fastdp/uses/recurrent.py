"""nn.RNN, nn.GRU, nn.LSTM and their cells, padded and packed, written in steps of linear uses.

The fused kernels give no gradients by step; here each gate matrix is used once for all inputs and once a
step for the states, in the formulas of torch.nn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import BatchLayoutError
from ..layouts.layout import Layout, tag
from ..recorder import Recorder
from .base import rule, sample_layout

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


def _direction(step: Step, x: Tensor, state: State, weights: list[Tensor], biased: bool, active: Tensor | None,
               reverse: bool) -> tuple[Tensor, State]:  # fmt: skip
    """One direction of one layer: x [T,B,I] -> outputs [T,B,H] and the last state."""
    w_in, w_state, *rest = weights
    b_in, b_state = rest[:2] if biased else (None, None)
    projection = rest[-1] if len(rest) == 3 or (not biased and rest) else None  # LSTM with proj_size
    gates = F.linear(x, w_in, b_in)
    outputs: list[Tensor] = []
    steps = range(x.size(0))
    for t in reversed(steps) if reverse else steps:
        new = step(gates[t], state, w_state, b_state)
        if projection is not None:
            new = (F.linear(new[0], projection), *new[1:])
        if active is not None:  # packed: samples that have ended keep their state
            new = tuple(torch.where(active[t].unsqueeze(-1), n, s) for n, s in zip(new, state, strict=True))
        state = new
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs), state


def recurrent(step: Step, x: Tensor, hx: State, weights: list[Tensor], biased: bool, layers: int, dropout: float,
              train: bool, bidirectional: bool, active: Tensor | None = None) -> tuple[Tensor, State]:  # fmt: skip
    """A stack of recurrent layers: x [T,B,I], states [layers * directions, B, H]."""
    directions = 1 + bidirectional
    each = len(weights) // (layers * directions)
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            state = tuple(h[k] for h in hx)
            y, state = _direction(step, x, state, weights[k * each : (k + 1) * each], biased, active, direction == 1)
            outputs.append(y)
            last.append(state)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout, True)
    return x, tuple(torch.stack([state[i] for state in last]) for i in range(len(hx)))


@rule(*[getattr(torch._VF, name) for name in _STEPS])  # type: ignore[attr-defined]
def capture_recurrent(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch._VF.lstm, gru, rnn_tanh, rnn_relu: padded (x, hx, weights, ...) or packed (data, sizes, hx, ...)."""
    name = func.__name__
    if isinstance(args[1], Tensor) and isinstance(args[3], list | tuple):
        return recorder.traced(_packed, recorder, name, *args)
    return recorder.traced(_padded, name, *args)


def _results(name: str, out: Tensor, last: State) -> tuple[Tensor, ...]:
    return (out, *last) if name == "lstm" else (out, last[0])


def _padded(name: str, x: Tensor, hx: Any, weights: list[Tensor], biased: bool, layers: int, dropout: float,
            train: bool, bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:  # fmt: skip
    x = x.transpose(0, 1) if batch_first else x
    states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    out, last = recurrent(_STEPS[name], x, states, list(weights), biased, layers, dropout, train, bidirectional)
    return _results(name, out.transpose(0, 1) if batch_first else out, last)


def _packed(recorder: Recorder, name: str, data: Tensor, sizes: Tensor, hx: Any, weights: list[Tensor], biased: bool,
            layers: int, dropout: float, train: bool, bidirectional: bool) -> tuple[Tensor, ...]:  # fmt: skip
    """Packed rows are laid out by time and sample, run with a mask, and packed again."""
    layout = sample_layout(recorder, data, name)
    batch, counts = recorder.batch, [int(size) for size in sizes]  # a CPU tensor, by torch's own contract
    device = data.device
    owner = layout.owners(device) if batch > 1 else torch.zeros(data.size(0), dtype=torch.long, device=device)
    order = owner[: counts[0]]  # sorted position -> sample
    if counts[0] != batch:
        raise BatchLayoutError(f"{recorder.place(name)}: {counts[0]} packed sequences in a batch of {batch}")
    by_sample = torch.argsort(order)
    states = tuple(h.index_select(1, by_sample) for h in (hx if isinstance(hx, tuple | list) else (hx,)))
    with torch._C.DisableTorchFunction():
        time = torch.repeat_interleave(torch.arange(len(counts)), sizes).to(device)
        active = torch.zeros(len(counts), batch, dtype=torch.bool, device=device)
        active[time, owner] = True
        x = data.new_zeros(len(counts), batch, data.size(1)).index_put((time, owner), data)
        tag(x, Layout(batch, 1))
        tag(active, Layout(batch, 1))
    out, last = recurrent(_STEPS[name], x, states, list(weights), biased, layers, dropout, train, bidirectional, active)
    with torch._C.DisableTorchFunction():
        rows = out[time, owner]
        ends = tuple(h.index_select(1, order) for h in last)
        tag(rows, Layout(batch, 0, owner=owner))
        for h in ends:
            tag(h, Layout(batch, 1, owner=order))
    return _results(name, rows, ends)


_CELLS = {"lstm_cell": "lstm", "gru_cell": "gru", "rnn_tanh_cell": "rnn_tanh", "rnn_relu_cell": "rnn_relu"}


@rule(*[getattr(torch._VF, name) for name in _CELLS])  # type: ignore[attr-defined]
def capture_cell(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nn.LSTMCell, GRUCell, RNNCell: (x, state, w_in, w_state, b_in, b_state)."""
    return recorder.traced(_cell, _CELLS[func.__name__], *args)


def _cell(name: str, x: Tensor, hx: Any, w_in: Tensor, w_state: Tensor, b_in: Tensor | None = None,
          b_state: Tensor | None = None) -> Any:  # fmt: skip
    state = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    new = _STEPS[name](F.linear(x, w_in, b_in), state, w_state, b_state)
    return new if name == "lstm" else new[0]
