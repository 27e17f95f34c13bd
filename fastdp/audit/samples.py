"""What a layer takes from the others in the batch, and what a sample of NaN does to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .finding import BUG, OK, Finding, not_tested
from .measure import Probe, batch_of, copies
from .trainable import Lacking, count, joined, rows


def _norm(probe: Probe) -> float:
    """Where samples are clipped; where none are, any."""
    return probe.regime.norm if probe.regime.kind in ("linear", "switched") else 1.0


def batch_statistics(trainable: Any, *, seed: int = 0) -> Finding:
    """Tests whether outputs depend on other samples, and whether data reach the released state without noise.

    statistic: the largest relative change of a sample's outputs when the other samples change. Needs predict or state.
    """
    name = "batch_statistics"
    probe = Probe.of(trainable, seed)
    if getattr(probe.trainable, "predict", None) is None:
        outputs = None
    else:
        outputs = _coupling(probe)
    state = _state_difference(probe)
    if outputs is None and state is None:
        raise Lacking("needs predict() or state() of the trainable")
    data = {"outputs": outputs, "state": state}
    if outputs is not None and outputs > 1e-3:
        text = (
            f"A sample's outputs change by {100 * outputs:.3g} % with the others in its batch: a layer takes "
            "statistics over the batch (BatchNorm in training mode). There is then no per-sample gradient; use "
            "GroupNorm or LayerNorm."
        )
        return Finding(name, BUG, text, outputs, None, 1e-3, data=data)
    if state:
        text = (
            f"Released state beside the parameters depends on the data (by {state:.3g}), and there is no noise on it: "
            "running statistics of BatchNorm, for instance. Freeze them, or do not release them."
        )
        return Finding(name, BUG, text, state, None, 0.0, data=data)
    text = "Outputs of a sample are the same in any company" if outputs is not None else "predict() is not there"
    text += ", and no state but the parameters depends on the data." if state is not None else "."
    return Finding(name, OK, text, outputs if outputs is not None else state, None, 1e-3, data=data)


def _coupling(probe: Probe) -> float:
    x = probe.data(1, 41)[0]
    found = []
    for number, scale in ((43, 1.0), (47, 1.0), (47, 10.0)):
        others = probe.data(7, number)[0]
        if isinstance(others, np.ndarray) and others.dtype.kind == "f":
            others = others * np.asarray(scale, others.dtype)
        found.append(probe.outputs(joined([x, others]))[0])
    size = max(float(np.linalg.norm(found[0])), 1e-12)
    return max(float(np.linalg.norm(other - found[0])) for other in found[1:]) / size


def _state_difference(probe: Probe) -> float | None:
    """How far the state after a step on some data is from that after a step on others."""
    state = getattr(probe.trainable, "state", None)
    if state is None:
        return None
    found = []
    for number in (53, 59):
        model = probe.trainable.build(probe.seed)
        probe.trainable.run(model, [probe.data(8, number)], clipping_norm=1e-6, noise_multiplier=0.0, seed=1)
        found.append(np.asarray(state(model), float))
    if not found[0].size:
        return 0.0
    return float(np.linalg.norm(found[0] - found[1]) / (np.linalg.norm(found[0]) + 1e-12))


def nan_sample(trainable: Any, *, seed: int = 0) -> Finding:
    """Tests that a sample with a NaN or infinite gradient contributes at most C, and that the model stays finite.

    statistic: the change that it makes, over the contribution of a sample.
    """
    name = "nan_sample"
    probe = Probe.of(trainable, seed)
    norm = _norm(probe)
    ordinary = copies(probe.data(1, 61), 8)
    x, y = probe.data(1, 61)
    if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
        return not_tested(name, "needs inputs that are one array of numbers, to put NaN into")
    base = probe.summed(ordinary, norm)
    largest = float(np.linalg.norm(probe.summed((x, y), norm)))
    worst, what = 0.0, ""
    for value in (np.nan, np.inf):
        bad = rows(x, slice(None)).copy()
        bad.reshape(-1)[0] = value
        try:
            change = probe.summed(batch_of([ordinary, (bad, y)]), norm)
        except Exception as problem:  # noqa: BLE001  (the script's own refusal)
            return not_tested(name, f"the script stops at a sample with {value}: {type(problem).__name__}")
        difference = float(np.linalg.norm(change - base)) / max(largest, probe.resolution)
        if not np.isfinite(difference):
            text = (
                f"One sample with {value} in its inputs makes {int((~np.isfinite(change)).sum())} of {change.size} "
                "parameters NaN or infinite: the model is destroyed, and tells that the sample was there. Select such "
                "samples away by their norm (multiplying by 0 is not enough) before the sum."
            )
            return Finding(name, BUG, text, difference, None, 1.5, data={"value": str(value)})
        if difference > worst:
            worst, what = difference, str(value)
    slack = 4 * probe.resolution * probe.divisor(count(y) + 8) / max(largest, probe.resolution)
    data = {"value": what, "slack": slack}
    if worst > 1.5 + slack:
        text = (
            f"One sample with {what} changes the sum by {worst:.3g} times a sample's contribution: it takes others' "
            "contributions away with its own. Look for nan_to_num after the sum, or a step that is skipped."
        )
        return Finding(name, BUG, text, worst, None, 1.5, data=data)
    text = "A sample with NaN or infinity contributes no more than another, and the model stays finite."
    return Finding(name, OK, text, worst, None, 1.5, data=data)
