"""Replayed steps on a device that is not one (second_device.py), and what of them no CUDA graph could hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import SampleMixingError, StepError
from fastdp.graphs import steps

from .optim.test_graphed import batch, conv_net, eagerly, losses, pair, pictures
from .optim.test_graphed_device import OnDevice, mlp, rows
from .second_device_syncs import _llama

GRAPHED = {"mlp": (mlp, rows), "net": (OnDevice, batch), "convolutions": (conv_net, pictures)}


def check_graphed(name: str, device: str) -> None:
    """Recorded and replayed there, two sizes and padding: as Python's steps, and without a number on the CPU."""
    steps.REPLAYED.add(torch.device(device).type)
    make, data = GRAPHED[name]
    (one, first), (two, second) = pair(lambda: make().to(device), "DPSGD")

    def moved(seed: int, size: int = 6) -> tuple[Tensor, ...]:
        return tuple(t.to(device) for t in data(seed, size))

    told = sum(torch.get_device_module(device).recorded_streams().values())
    step = second.graphed(losses, moved(99), (3, 6))
    assert sum(torch.get_device_module(device).recorded_streams().values()) > told, (
        "inputs are kept for the stream, as on a card"
    )
    for k, size in enumerate((6, 3, 2, 6)):
        torch.testing.assert_close(eagerly(one, first, moved(k, size)).cpu(), step(*moved(k, size)).cpu())
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=1e-4, atol=1e-6)
    assert step.replayed == 4 and second.norms.device == torch.device(device)
    assert not any(program.program.beside or program.program.read for program in step._programs.values())


def check_graphed_loop(name: str, device: str) -> None:
    """The same in a loop of the user's own: what is replayed there, and padded, is Python's."""
    steps.REPLAYED.add(torch.device(device).type)
    make, data = GRAPHED[name]
    runs = [pair(lambda: make().to(device), "DPSGD", graphed=graphed)[0] for graphed in (False, True)]
    for k, size in enumerate((6, 6, 6, 5, 6)):
        given = tuple(t.to(device) for t in data(k, size))
        (one, first), (two, second) = runs
        torch.testing.assert_close(*(eagerly(*run, given).cpu() for run in runs), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(first.norms.cpu(), second.norms.cpu(), rtol=1e-4, atol=1e-6)
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=1e-4, atol=1e-6)
    graphs = runs[1][1]._privacy.graphs
    programs = [program for shape in graphs._shapes.values() for program in shape.programs]
    assert graphs.replayed == 3 and not any(each.program.beside or each.program.read for each in programs)


def check_graphed_labels(device: str) -> None:
    """transformers' mean over labels: whether samples weigh alike is a number of each batch, which replays read too."""
    steps.REPLAYED.add(torch.device(device).type)
    ids = (torch.arange(24).reshape(3, 8) % 31 + 1).to(device)
    models, graphs = [], None
    for graphed in (False, True):
        torch.manual_seed(0)
        model = _llama().to(device)
        model.config.use_cache = False
        optimizer = fastdp.DPSGD(
            model, lr=0.1, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=3, graphed=graphed
        )
        for k in range(5):
            batch = (ids + k) % 31
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
        graphs = optimizer._privacy.graphs
    assert graphs is not None and graphs.replayed == 3, graphs.reasons
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach().cpu(), rtol=1e-4, atol=1e-6)
    uneven = ids.clone()
    uneven[0, 2:] = -100
    with pytest.raises(SampleMixingError, match="labels"):
        for _ in range(4):
            models[1](input_ids=ids, labels=uneven).loss.backward()
            optimizer.step()
    assert graphs.replayed == 3


def check_capture(device: str) -> None:
    """Noise within the capture of a user's graph is refused before it is drawn or counted."""
    on_device = torch.get_device_module(device)
    for kind in (fastdp.DPSGD, fastdp.DPAdamW, lambda *given, **options: fastdp.privatize(
        torch.optim.RMSprop(given[0].parameters(), lr=0.1), given[0], **{k: v for k, v in options.items() if k != "lr"}
    )):  # fmt: skip
        model = mlp().to(device)
        optimizer = kind(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=6, sample_rate=0.1)
        given = [t.to(device) for t in rows(0)]
        losses(model, *given).mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        one, counter = torch.ones(2, 5, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        with on_device.capturing():
            with pytest.raises(StepError, match=r"optimizer\.graphed"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="every replay"):
                fastdp.ops.noise_(torch.empty(5, device=device), 1.0, bytes(32), 0)
            with pytest.raises(RuntimeError, match="FASTDP_CUDA=1"):
                fastdp.ops.noisy_sgd_step_(
                    [one[0]], [one[1]], [], [0], key=bytes(32), step=0, std=1.0, scale=1.0, lr=0.1, counter=counter
                )
        assert bool((one == 1).all())
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert optimizer.state_dict()["fastdp"]["history"] == []
        losses(model, *given).mean().backward()
        optimizer.step()
        assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        optimizer.detach()


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
