"""Tests that gradients are clipped at all: one sample's step without noise must shrink with the clipping norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .finding import Finding, Result, audit_test
from .measure import NORMS, Probe
from .statistics import slope
from .trainable import Lacking
from .update import gain

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
    sizes = [size for _, size, _ in ordinary]
    return result.passed(
        f"The step follows the clipping norm and {_saturation(probe, sizes)}.", left, line.p_value, FLAT
    )


def _saturation(probe: Probe, sizes: Sequence[float]) -> str:
    if len(sizes) > 1 and abs(sizes[-2] / sizes[-1] - 1) > 0.5:
        return "keeps growing with it, as with normalised (automatic) clipping"
    try:
        norm = sizes[-1] / gain(probe) if probe.optimizer == "sgd" else math.nan
    except Lacking:
        norm = math.nan
    if math.isnan(norm):
        return "stops growing at large C"
    return f"stops growing where C reaches the gradient's norm, {norm:.3g} for an ordinary sample"
