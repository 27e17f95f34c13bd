"""Backwards on a side stream: norms and sums wait for it. With streams that only take notes, and on a GPU real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.engine.gradients import Gradients
from fastdp.grad_sample import device_streams

from .. import cases


class Stream:
    """Notes what waits for it, and what is kept for it."""

    def __init__(self, name: str, notes: list[Any]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(("wait", self.name, other.name))


class Device:
    """Two streams, of which one is current, as a GPU's are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[Any] = []
        self.streams = {name: Stream(name, self.notes) for name in ("main", "side")}
        self.now = "main"
        self.kept: list[tuple[str, int]] = []
        monkeypatch.setattr(device_streams, "current", lambda device: self.streams[self.now])
        monkeypatch.setattr(device_streams, "_number", lambda device: self.now)
        keep = lambda tensor, stream: self.kept.append((stream.name, id(tensor)))
        monkeypatch.setattr(Tensor, "record_stream", keep)

    def side_until_the_end(self, grad: Tensor) -> None:
        """A hook: from here on the backward runs on the side stream, as autograd does for a forward that did."""
        self.now = "side"
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: setattr(self, "now", "main"))  # before the engine's own


class Net(nn.Module):
    """A product, a norm, and a function that only the generic rule knows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.scale, self.second = nn.Parameter(torch.ones(7)), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.hypot(self.norm(self.first(x)), self.scale))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def run(device: Device, hook: Callable[[Tensor], None] | None) -> Gradients:
    seen: list[Gradients] = []

    def at_the_end(gradients: Gradients) -> None:
        device.notes.append("end")
        seen.append(gradients)

    model = Net()
    fastdp.PerSampleGradients(model, on_backward=at_the_end)
    loss = model(torch.randn(6, 5)).square().sum(1).mean()
    if hook is not None:
        loss.register_hook(hook)
    loss.backward()
    return seen[0]


def test_the_end_of_backward_waits_for_the_side_stream(device: Device) -> None:
    gradients = run(device, device.side_until_the_end)
    assert device.now == "main"
    assert device.notes == [("wait", "main", "side"), "end"]
    held = {id(tensor) for use in gradients.uses for tensor in use.holds()}
    assert held and held <= {number for name, number in device.kept if name == "main"}


@pytest.mark.parametrize("stream", ["main", "side"])
def test_inputs_of_another_stream_are_kept_for_the_forwards(device: Device, stream: str) -> None:
    """A loader's copies, made on a stream of its own: their memory waits for the stream that reads them."""

    model = cases.Net(lambda m, batch, scale: m.net(batch["x"]) * scale, net=Net())
    x, scale = torch.randn(6, 5), torch.ones(6, 1)
    fastdp.PerSampleGradients(model)
    device.now = stream
    model({"x": x}, scale)
    assert device.kept == [(stream, id(x)), (stream, id(scale))]
    with torch.no_grad():
        model.eval()({"x": x}, scale)
    assert len(device.kept) == 2, "nothing is read later"


def test_streams_change_within_a_backward(device: Device) -> None:
    model = Net()
    engine = fastdp.PerSampleGradients(model)

    def change(grad: Tensor) -> None:
        device.now = "side"  # of the first layer and of the end

    model.first.register_forward_hook(lambda module, args, out: out.register_hook(change) and None)
    model(torch.randn(6, 5)).square().sum(1).mean().backward()
    assert device.notes == [("wait", "side", "main")]
    first = [id(t) for use in engine._last().uses if use.operand is model.first.weight for t in use.holds()]
    kept = {number for name, number in device.kept if name == "side"}
    assert kept and not kept & set(first)
