"""`graphed=True`: tensors that a forward leaves elsewhere, objects of others, and two models in one loop."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp

from .test_graphed_forwards import B, D, Net, at_once, batch  # noqa: F401  (at_once is for every test)
from .test_graphed_forwards_changes import FROM, Model, later, loss_of, plain, run, told_of


class Kept:
    """Where a forward leaves what it does not return."""

    many: list[Tensor] = []
    last: Tensor | None = None


def kept_outside(detached: bool, m: Model, x: Tensor) -> Tensor:
    Kept.last = m.rows(x).detach() if detached else m.rows(x)
    Kept.many += [] if detached else [Kept.last.square().sum(1).mean()]
    return m.head(m.rows(x))


@pytest.mark.parametrize(
    "taken, detached, start",
    [("many", False, 0), ("many", False, FROM), ("last", False, 0), ("last", True, 0), ("last", True, FROM)],
)
def test_tensors_left_outside_of_modules_go_through_python(taken: str, detached: bool, start: int) -> None:
    def step(m: Model, k: int) -> Tensor:
        Kept.many.clear()
        loss = loss_of(m(batch(k)[0]), k)
        if k < start:
            return loss
        assert Kept.last is not None and len(Kept.many) == (not detached)
        return loss + (Kept.many[0] if taken == "many" else Kept.last.square().sum(1).mean())

    told = told_of(functools.partial(kept_outside, detached), step)
    assert told.replayed == 0 and "leaves tensors behind" in told.told()


class Lazy:
    """An object whose class is not to be asked for, as web frameworks have them."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("outside of a request")


def test_objects_of_others_are_left_alone() -> None:
    kept = [Lazy(), weakref.proxy(gone := nn.Identity())]
    del gone
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, optimizer = run(plain, later(lambda m: None), True)
    assert optimizer._privacy.graphs.replayed > 3 and len(kept) == 2


@pytest.mark.parametrize("jointly", [False, True])
def test_two_models_before_their_backwards(jointly: bool) -> None:
    """They share a module without parameters, whose call within one model's forward is no forward of the other's. Rows
    that were marked for a third model, which every forward takes for its own, are nothing that a forward leaves."""
    nodes, graph_of_node = torch.randn(5, D), torch.tensor([0, 0, 1, 1, 1])
    fastdp.mark_rows(nodes, graph_of_node, samples=2)

    def run(graphed: bool) -> tuple[list[Any], list[nn.Module]]:
        models, shared = [Net(), Net()], nn.Dropout(0.3)
        options: dict[str, Any] = dict(lr=0.1, noise_multiplier=0.5, expected_batch_size=B, sample_rate=0.1, seed=3)
        for model in models:
            model.dropout = shared
        optimizers = [fastdp.DPSGD(model, graphed=graphed, **options) for model in models]
        torch.manual_seed(1)
        for k in range(6):
            losses = [F.cross_entropy(model(batch(k)[0])["logits"], batch(k)[1]) for model in models]
            for loss in [sum(losses)] if jointly else losses:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return optimizers, models

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (_, plain), (optimizers, models) = run(False), run(True)
    assert [optimizer._privacy.graphs.replayed for optimizer in optimizers] == [4, 3]
    for a, b in zip(nn.ModuleList(plain).parameters(), nn.ModuleList(models).parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
