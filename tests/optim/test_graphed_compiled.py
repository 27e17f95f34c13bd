"""`graphed(compile=True)`: the private step that Inductor compiled, against the one in Python with the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn

from fastdp.errors import GraphError

from .test_graphed import B, batch, eagerly, losses, pair

pytestmark = pytest.mark.slow  # `make test-all` runs it

CLOSE = dict(rtol=1e-4, atol=1e-5)


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


def test_steps_are_those_of_python() -> None:
    """New data, padded batches, and changes of lr, noise and clipping on the way."""
    (one, first), (two, second) = pair(base="DPSGD", style="layerwise", clipping="automatic")
    step = second.graphed(losses, batch(99), compile=True)
    assert step.compiled
    for k, size in enumerate((B, B, 3, B, 1, B)):
        for optimizer in (first, second):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + k)
            optimizer.noise_multiplier = 0.7 + 0.1 * (k % 3)
            if k == 4:
                optimizer.set_clipping(None, 0.3)
        torch.testing.assert_close(eagerly(one, first, batch(k, size)), step(*batch(k, size)))
        torch.testing.assert_close(first.norms, second.norms, **CLOSE)
        assert_close(one, two)
    assert (step.replayed, step.eager) == (6, 0) and first.history == second.history
    step(*batch(9, 0))
    assert second.history != first.history


def test_where_inductor_fails_the_step_is_replayed_with_a_warning(monkeypatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch._inductor, "compile", fails)
    (one, first), (two, second) = pair()
    with pytest.warns(UserWarning, match=r"replayed, but not compiled: Inductor fails \(RuntimeError: no compiler\)"):
        step = second.graphed(losses, batch(99), compile=True)
    eagerly(one, first, batch(0)), step(*batch(0))
    assert not step.compiled and step.replayed == 1
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_another_result_is_refused(monkeypatch) -> None:
    def changing(graph: Any, *_: Any, **__: Any) -> Any:
        return lambda *given: [out * 1.01 if out.is_floating_point() else out for out in graph(*given)]

    monkeypatch.setattr(torch._inductor, "compile", changing)
    with pytest.raises(GraphError, match="the compiled step is not the recorded one"):
        pair()[1][1].graphed(losses, batch(99), compile=True)


def test_no_sample_contributes_more_than_the_clipping_norm() -> None:
    """Of the sum as it is released, whatever Inductor rounded: one sample alone, clipped, without noise."""
    options = dict(lr=1.0, noise_multiplier=0.0, max_grad_norm=0.01, loss_reduction="sum", expected_batch_size=1)
    _, (model, optimizer) = pair(base="DPSGD", **options)
    step = optimizer.graphed(losses, batch(99), compile=True)
    for k in range(8):
        before = [p.detach().double().clone() for p in model.parameters()]
        step.backward(*batch(k, 1))
        sums = optimizer._privacy._pending.values()
        total = torch.stack([s.double().square().sum() for s in sums]).sum().sqrt()
        optimizer.step()
        optimizer.zero_grad()
        assert float(optimizer.norms) > 0.01 >= float(total)
        moved = torch.stack([(p - b).square().sum() for p, b in zip(model.parameters(), before, strict=True)]).detach()
        assert float(moved.sum().sqrt()) <= 0.01 * (1 + 1e-4)  # (rounding of the parameters themselves)
