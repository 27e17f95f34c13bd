"""Is the gradient clipped at all? The answer of one sample's step to the clipping norm, without noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .finding import BUG, OK, Finding
from .measure import NORMS, Probe
from .statistics import slope
from .trainable import Lacking
from .update import gain

NAME = "no_clipping"
FLAT = 0.01  # of the largest change, left at the smallest C: below, the step went to zero with C


def no_clipping(
    trainable: Any, *, seed: int = 0, norms: Sequence[float] | None = None, significance: float = 0.01
) -> Finding:
    """Takes one step on one sample, without noise, at clipping norms from far below its gradient's norm to far above.

    A clipped step shrinks with C, and stops growing when C reaches the gradient's norm. A step that is not clipped is
    the same at every C.

    statistic: the change of the parameters at the smallest C over the largest change; p_value: of "the change does not
    depend on C" (regression of its logarithm on that of C).
    """
    probe = Probe.of(trainable, seed)
    chosen = list(norms) if norms is not None else None
    if chosen is None:
        regime = probe.regime
        found = [(c, size, math.nan) for c, size in zip(regime.norms, regime.changes, strict=True)]
    else:
        found = probe.answers(probe.strong, chosen)
    ordinary = probe.answers(probe.data(1, 17), chosen or NORMS)
    least = probe.resolution
    sizes = np.maximum([size for _, size, _ in found], least)
    line = slope(np.log10([c for c, _, _ in found]), np.log10(sizes))
    left = float(found[0][1]) / float(sizes.max())
    data = {
        "norms": [c for c, _, _ in found],
        "changes": [size for _, size, _ in found],
        "ordinary_norms": [c for c, _, _ in ordinary],
        "ordinary_changes": [size for _, size, _ in ordinary],
        "ordinary_losses": [loss for _, _, loss in ordinary],
        "slope": line.slope,
    }
    unclipped = line.p_value > significance if norms is not None else left > FLAT
    if unclipped:
        return Finding(
            NAME, BUG,
            f"The step hardly depends on the clipping norm: at C = {found[0][0]:.0e} the parameters still move by "
            f"{100 * left:.3g} % of the largest change. The gradient is not clipped, or not by the C that was given: "
            "look at whether the clipped gradient is what the optimizer is handed, and where C is read.",
            left, line.p_value, FLAT, "the change does not depend on C", data,
        )  # fmt: skip
    return Finding(
        NAME, OK, f"The step follows the clipping norm and {_saturation(probe, ordinary)}.",
        left, line.p_value, FLAT, "the change does not depend on C", data,
    )  # fmt: skip


def _saturation(probe: Probe, found: list[tuple[float, float, float]]) -> str:
    top = found[-1][1]
    if len(found) > 1 and abs(found[-2][1] / top - 1) > 0.5:
        return "keeps growing with it, as with normalised (automatic) clipping"
    try:
        if probe.optimizer != "sgd":
            return "stops growing at large C"
        return f"stops growing where C reaches the gradient's norm, {top / gain(probe):.3g} for an ordinary sample"
    except Lacking:
        return "stops growing at large C"
