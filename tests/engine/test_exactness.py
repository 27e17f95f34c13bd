"""Every kind of use against one-sample truth in float64, by the planner's choice and by each of its routes."""

from __future__ import annotations

import pytest
import torch

from fastdp.grad_sample.cost_model import Shape
from fastdp.ops.bounds import TOLERANCE as ENLARGED

from .. import cases
from ..routes import BUDGET, FASTEST, forced
from ..truth import against, compare, truth

TOLERANCE = 1e-5


def taken(shape: Shape, route: str) -> str:
    """What a product takes if `route` is forced: gram needs whole rows, and a single row has one norm."""
    if route == "materialise":
        return route
    if shape.family == "conv":
        return "direct" if shape.groups > 1 else route
    return "T=1" if shape.t == 1 else route


@pytest.mark.parametrize("name", cases.CASES)
def test_exact(name: str) -> None:
    model, batch, losses = cases.build(name)
    exact = truth(model, batch, losses)
    found = against(exact, model, batch, losses)
    assert found.worst < TOLERANCE, found
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not hooks, "detach left a hook"
    assert all(p.grad is None for p in model.parameters()), "autograd wrote a gradient"
    for route in FASTEST:
        with forced(route):
            found = against(exact, model, batch, losses, memory_budget=BUDGET)
        products = [use for use in found.uses if use.shape is not None]
        assert [use.route for use in products] == [taken(use.shape, route) for use in products]
        assert max(found.clipped_sum, found.per_sample, found.too_small) < TOLERANCE, (route, found)
        assert found.norms < 2 * ENLARGED, (route, found)


def main() -> None:
    """Print the worst error of every case: python -m tests.engine.test_exactness."""
    worst = 0.0
    for name in cases.CASES:
        found = compare(*cases.build(name))
        worst = max(worst, found.worst)
        print(f"{name:34s} norms {found.norms:.1e}  sum {found.clipped_sum:.1e}  per sample {found.per_sample:.1e}")
    print(f"{len(cases.CASES)} cases, worst error {worst:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
