"""Calls that a card is asked for and the CPU is not (second_device.py): clocks, generators, streams, captures."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastdp
import fastdp.optim.graphed_step
from fastdp.batch_axis.deferred_checks import AwaitedChecks, DeferredCheck
from fastdp.batch_axis.host_values import Order, known, made_known
from fastdp.batch_axis.tensor_notes import KNOWN
from fastdp.distributed.tensor import TensorParallel
from fastdp.errors import SampleMixingError
from fastdp.graphs import steps

from . import replayed
from .graphs.fake_cuda import FakeCuda
from .optim.test_graphed import eagerly, pair
from .optim.test_graphed_device import flat, mlp, rows
from .second_device_syncs import Waits


def check_rules(device: str) -> None:
    """That the stand-in refuses under capture what a card does, and nothing else; draws on its own; copies late."""
    x, on_device = torch.arange(6.0).to(device), torch.get_device_module(device)
    refused: list[Callable[[], Any]] = [
        x.cpu, x.tolist, x.nonzero, lambda: x.sum().item(), lambda: x[x > 2], lambda: torch.zeros(6).to(device),
        lambda: torch.zeros(6).copy_(x, non_blocking=True), on_device.synchronize, on_device.Event().synchronize,
    ]  # fmt: skip
    for ask in refused:
        with on_device.capturing(), pytest.raises(RuntimeError, match="when stream is capturing"):
            ask()
    before = torch.get_rng_state()
    torch.rand_like(x), F.dropout(x), torch.randn(3, device=device), torch.randperm(4, device=device)
    assert torch.equal(before, torch.get_rng_state()), "what the device draws moves the CPU's generator"
    late = torch.zeros(6, pin_memory=True)
    with on_device.capturing():
        late.copy_(x * 2 + torch.rand_like(x).floor(), non_blocking=True)
    assert not late.any(), "nobody waited for it"
    on_device.synchronize()
    assert torch.equal(late, x.cpu() * 2)


def check_clocks(device: str) -> None:
    """Each use is timed by events of its own device, whichever is the current one."""
    model, on_device = mlp().to(device), torch.get_device_module(device)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=6)
    x, y = (t.to(device) for t in rows(0))
    flat(model, x, y).mean().backward()
    optimizer.explain(profile=True)  # measures the next
    optimizer.step()
    on_device.events.clear()
    flat(model, x, y).mean().backward()
    optimizer.step()
    assert len(on_device.events) >= 4 and set(on_device.events) == {torch.device(device).index}, on_device.events
    assert "ms" in optimizer.explain(profile=True)


def check_draws(device: str) -> None:
    """A checkpointed block that is computed once more draws from the device's generator as it did before."""
    model, plain, ids = replayed.models()
    model, plain, ids = model.to(device), plain.to(device), ids.to(device)
    norms, sums, _ = replayed.run(plain, ids, None)
    again_norms, again, plan = replayed.run(model, ids, 1)
    assert "two backwards" in plan
    torch.testing.assert_close(again_norms, norms)
    replayed.close(again, sums)


def check_autocast(device: str) -> None:
    """Norms and sums are of float32 products, whatever the program's autocast makes of its own."""
    a, g = torch.randn(3, 5, 8), torch.randn(3, 5, 4)
    gradients = torch.bmm(g.double().mT, a.double())
    a, g = a.to(device), g.to(device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        assert torch.bmm(g.mT, a).dtype == torch.bfloat16
        norms = fastdp.ops.linear_norm_sq(a, g)
        total = fastdp.ops.linear_clipped_sum(a, g, torch.ones(3, device=device))
    torch.testing.assert_close(norms.cpu().double(), gradients.square().sum((1, 2)), rtol=1e-5, atol=0)
    torch.testing.assert_close(total.cpu().double(), gradients.sum(0), rtol=1e-5, atol=1e-5)


class StrictGraphs(FakeCuda):
    """Refuses, while the step is captured, what the device refuses."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.functions = device, torch.get_device_module(device)

    def capture(self, run: Callable[..., Any], given: list[Tensor]) -> tuple[Callable[[], None], list[Tensor]]:
        before = self.functions.get_rng_state(self.device)
        with self.functions.capturing():
            captured = super().capture(run, given)
        self.functions.set_rng_state(before, self.device)  # a capture draws nothing
        return captured


def check_captured(device: str) -> None:
    """A step is captured where waits are refused; its launches are Python's steps, dropout of the device included."""
    steps.REPLAYED.add(torch.device(device).type)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastdp.optim.graphed_step, "device_of", lambda _: StrictGraphs(device))
        for kind in ("DPSGD", "DPAdamW"):
            (one, first), (two, second) = pair(lambda: mlp(0.4).to(device), kind)
            step = second.graphed(flat, tuple(t.to(device) for t in rows(99)), (3, 6))
            for k, size in enumerate((6, 3, 2, 6)):
                batch = tuple(t.to(device) for t in rows(k, size))
                torch.manual_seed(k)
                wanted = eagerly(one, first, batch, flat)
                torch.manual_seed(k)
                torch.testing.assert_close(wanted, step(*batch))
                for p, q in zip(one.parameters(), two.parameters(), strict=True):
                    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
            assert step.captured and step.replayed == 4


def check_streams(device: str) -> None:
    """A forward on a stream of its own: the caller's waits for it, and what is held for the caller's."""
    on_device, model = torch.get_device_module(device), mlp().to(device)
    engine, side = fastdp.PerSampleGradients(model), torch.Stream(device)
    x = rows(0)[0].to(device)
    on_device.take_waits()
    before = on_device.recorded_streams()
    with side:
        assert on_device.current_stream(device) == side != on_device.current_stream("stub:0")
        losses = model(x).square().sum(1)
    assert on_device.recorded_streams().get(side.stream_id, 0) > 0, "the input is kept for the forward's"
    losses.mean().backward()
    assert (0, side.stream_id) in on_device.take_waits()
    told = on_device.recorded_streams().get(0, 0) - before.get(0, 0)
    assert told >= 4, "what is held of the backward is kept for the caller's"
    assert engine.norms().isfinite().all()


def check_without_events(device: str) -> None:
    """Where nothing says when an answer has come, it is waited for."""
    awaited, flag = AwaitedChecks(later=True), torch.ones((), dtype=torch.bool, device=device)
    with pytest.MonkeyPatch.context() as patch, Waits(torch.device(device).type) as waits:
        patch.delattr(torch.get_device_module(device), "current_stream")  # as torch.mps, which has events, though
        awaited.settle([DeferredCheck(flag, "it mixes", "it was asked")])
    assert sum(waits.found.values()) == 1, waits.found
    awaited.add([])  # once several processes have agreed, none raises for an earlier step, of which others may not know
    with pytest.raises(SampleMixingError, match="it was asked"):
        awaited.look()


def check_given_on_several(device: str) -> None:
    """Processes that share layers compare what they were given, on the host (lengths) and on the device."""
    split: Any = object.__new__(TensorParallel)
    split.mesh = types.SimpleNamespace(device_type=torch.device(device).type)
    lanes = [torch.rand(4, dtype=torch.float64) for _ in range(2)]
    split._lanes = [lanes[0], lanes[1].to(device)]
    found = split.take_lanes()
    assert found.device == torch.device(device)
    torch.testing.assert_close(found.cpu(), (lanes[0] + 2 * lanes[1]) % 1)


class Positions(torch.nn.Module):
    """Rows of a table, looked up by ids [B, T] that the forward makes, beside the samples' [B, T, 4]."""

    def __init__(self, rows_of: Callable[[Tensor, int, int], Tensor]) -> None:
        super().__init__()
        self.table, self.layer, self.rows_of = torch.nn.Parameter(torch.randn(9, 4)), torch.nn.Linear(4, 4), rows_of

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.rows_of(self.table, len(x), x.size(1))


def _alike(table: Tensor, b: int, t: int) -> Tensor:
    return F.embedding(torch.arange(t, device=table.device).repeat(b, 1), table)


def _by_place(table: Tensor, b: int, t: int) -> Tensor:
    return F.embedding(torch.arange(b, device=table.device)[:, None].repeat(1, t), table)


def _ids_written(table: Tensor, b: int, t: int) -> Tensor:
    """The ids are alike when they are looked at."""
    ids = torch.arange(b, device=table.device)[:, None].repeat(1, t)
    found = F.embedding(ids, table)
    ids.data.zero_()
    return found


def _rows_written(table: Tensor, b: int, t: int) -> Tensor:
    found = _alike(table, b, t)
    found.data[1:] *= 2
    return found


def _copies_of_an_order(table: Tensor, b: int, t: int) -> Tensor:
    """Copies of an order that only the device knows are no range."""
    with torch._C.DisableTorchFunction():  # as the engine itself
        order = made_known(torch.arange(t, device=table.device).flip(0), partial(torch.arange, t))
        order.__dict__[KNOWN].order = Order(t)
    copies = order.clone(), order.repeat(2)
    with torch._C.DisableTorchFunction():
        assert known(order) is not None and not any(map(known, copies))
    return _by_place(table, b, t)


def check_positions(device: str) -> None:
    """Whether looked up rows are alike is known without waiting, unless something was written out of sight."""
    x = torch.randn(3, 5, 4).to(device)
    for rows_of in (_alike, _by_place, _ids_written, _rows_written, _copies_of_an_order):
        model = Positions(rows_of).to(device)
        engine = fastdp.PerSampleGradients(model)
        if rows_of is _alike:
            model(x).square().sum((1, 2)).mean().backward()
            with Waits(torch.device(device).type) as waits:
                model(x).square().sum((1, 2)).mean().backward()
            assert not waits.found, waits.found
        else:
            with pytest.raises(SampleMixingError, match="by their place"):
                model(x).square().sum((1, 2)).mean().backward()
        engine.detach()


CHECKS = {
    "positions looked up": check_positions,
    "rules of captures": check_rules, "clocks": check_clocks, "draws of checkpointed blocks": check_draws,
    "autocast": check_autocast, "captured steps": check_captured,
    "streams": check_streams, "a device without events": check_without_events,
    "given on several devices": check_given_on_several,
}  # fmt: skip


def checks(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, check in CHECKS.items():
        yield f"calls: {name}", partial(check, device)
