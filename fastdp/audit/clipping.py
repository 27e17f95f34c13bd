"""Tests that gradients are clipped at all: one sample's step without noise must shrink with the clipping norm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .finding import Finding, Result, audit_test
from .later_steps import gain
from .measure import NORMS, Probe
from .statistics import slope

FLAT = 0.01  # of the largest change, left at the smallest C: below, the step went to zero with C


@audit_test
def no_clipping(probe: Probe, *, norms: Sequence[float] | None = None, significance: float = 0.01) -> Finding:
    """Takes one step on one sample, without noise, at clipping norms from far below its gradient's norm to far above.

    A clipped step shrinks with C, and stops growing when C reaches the gradient's norm. A step that is not clipped is
    the same at every C.

    statistic: the change of the parameters at the smallest C over the largest change; p_value: of "the change does not
    depend on C" (regression of its logarithm on that of C).
    """
    if norms is None:
        chosen, sizes = probe.regime.norms, probe.regime.changes
    else:
        chosen, sizes, _ = (list(column) for column in zip(*probe.answers(probe.strong, norms), strict=True))
    ordinary = probe.answers(probe.data(1, 17), norms or NORMS)
    seen = np.maximum(sizes, probe.resolution)
    line = slope(np.log10(chosen), np.log10(seen))
    left = float(sizes[0] / seen.max())
    result = Result(
        "the change does not depend on C", norms=chosen, changes=sizes, slope=line.slope,
        ordinary_norms=[c for c, _, _ in ordinary], ordinary_changes=[size for _, size, _ in ordinary],
        ordinary_losses=[loss for _, _, loss in ordinary],
    )  # fmt: skip
    if line.p_value > significance if norms is not None else left > FLAT:
        return result.bug(
            f"The step hardly depends on the clipping norm: at C = {chosen[0]:.0e} the parameters still move by "
            f"{100 * left:.3g} % of the largest change. The gradient is not clipped, or not by the C that was given: "
            "look at whether the clipped gradient is what the optimizer is handed, and where C is read.",
            left, line.p_value, FLAT,
        )  # fmt: skip
    return result.passed(
        f"The step follows the clipping norm and {_saturation(probe, ordinary)}.", left, line.p_value, FLAT
    )


def _saturation(probe: Probe, ordinary: Sequence[tuple[float, float, float]]) -> str:
    (_, before, _), (_, last, _) = ordinary[-2:]
    if abs(before / last - 1) > 0.5:
        return "keeps growing with it, as with normalised (automatic) clipping"
    if probe.optimizer != "sgd" or probe.learning_rate is None:
        return "stops growing at large C"
    return f"stops growing where C reaches the gradient's norm, {last / gain(probe):.3g} for an ordinary sample"
