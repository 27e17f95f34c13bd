"""Replayed steps on a device that is not one (second_device.py), and what of them no CUDA graph could hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdp.graphed import steps

from .training.test_graphed import batch, conv_net, eagerly, losses, pair, pictures
from .training.test_graphed_device import OnDevice, mlp, rows

GRAPHED = {"mlp": (mlp, rows), "net": (OnDevice, batch), "convolutions": (conv_net, pictures)}


def check_graphed(name: str, device: str) -> None:
    """Recorded and replayed there, two sizes and padding: as Python's steps, and without a number on the CPU."""
    steps.REPLAYED.add(torch.device(device).type)
    make, data = GRAPHED[name]
    (one, first), (two, second) = pair(lambda: make().to(device), "DPSGD")

    def moved(seed: int, size: int = 6) -> tuple[Tensor, ...]:
        return tuple(t.to(device) for t in data(seed, size))

    told = torch.get_device_module(device).recorded_streams()
    step = second.graphed(losses, moved(99), (3, 6))
    assert torch.get_device_module(device).recorded_streams() > told, "inputs are kept for the stream, as on a card"
    for k, size in enumerate((6, 3, 2, 6)):
        torch.testing.assert_close(eagerly(one, first, moved(k, size)).cpu(), step(*moved(k, size)).cpu())
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=1e-4, atol=1e-6)
    assert step.replayed == 4 and second.norms.device == torch.device(device)
    assert not any(program.program.beside or program.program.read for program in step._programs.values())


def scaled(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none") * scale


def shifted(model: nn.Module, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return F.cross_entropy(model(x + torch.rand(8).to(x.device)), y, reduction="none")


def check_beside(loss_fn: Any, device: str) -> None:
    """A number on the CPU that changes is replayed, but would stand in a CUDA graph as it was: it is told."""
    steps.REPLAYED.add(torch.device(device).type)
    _, (_, optimizer) = pair(lambda: mlp().to(device), "DPSGD")
    given = (*(t.to(device) for t in rows(0)), torch.tensor(0.5))
    step = optimizer.graphed(loss_fn, given)
    assert step._programs[6].program.beside, "not seen"
    first = step(*given)
    second = step(*given[:2], torch.tensor(5.0))
    assert step.replayed == 2 and (loss_fn is shifted or float(second) > 3 * float(first))
