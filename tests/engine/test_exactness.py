"""Every kind of use against one-sample truth in float64."""

from __future__ import annotations

import pytest
import torch

from .. import cases
from ..truth import compare

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", cases.CASES)
def test_exact(name: str) -> None:
    model, batch, losses = cases.build(name)
    found = compare(model, batch, losses)
    assert found.worst < TOLERANCE, found
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert not hooks, "detach left a hook"
    assert all(p.grad is None for p in model.parameters()), "autograd wrote a gradient"


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
