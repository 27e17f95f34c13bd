"""Tests of layers that take statistics over the batch, and of samples whose gradient is NaN or infinite."""

from __future__ import annotations

import numpy as np

from .finding import Finding, Result, audit_test
from .measure import NOTHING, Probe, copies
from .trainable import Lacking, count, is_floats, joined


@audit_test
def batch_statistics(probe: Probe) -> Finding:
    """Tests whether outputs depend on other samples, and whether data reach the released state without noise.

    statistic: the largest relative change of a sample's outputs when the other samples change. Needs predict or state.
    """
    outputs, state = _coupling(probe), _state_difference(probe)
    result = Result(outputs=outputs, state=state)
    if outputs is None and state is None:
        raise Lacking("needs predict() or state() of the trainable")
    if outputs is not None and outputs > 1e-3:
        return result.bug(
            f"A sample's outputs change by {100 * outputs:.3g} % with the others in its batch: a layer takes "
            "statistics over the batch (BatchNorm in training mode). There is then no per-sample gradient; use "
            "GroupNorm or LayerNorm.", outputs, None, 1e-3,
        )  # fmt: skip
    if state:
        return result.bug(
            f"Released state beside the trained parameters depends on the data (by {state:.3g}), and there is no noise "
            "on it: running statistics (BatchNorm), buffers, or frozen weights that move all the same. Freeze it, or "
            "do not release it.", state, None, 0.0,
        )  # fmt: skip
    text = "Outputs of a sample are the same in any company" if outputs is not None else "predict() is not there"
    text += ", and no state but the parameters depends on the data." if state is not None else "."
    return result.passed(text, outputs if outputs is not None else state, None, 1e-3)


def _coupling(probe: Probe) -> float | None:
    """Largest relative change of a sample's outputs with the others in its batch."""
    if getattr(probe.trainable, "predict", None) is None:
        return None
    x, found = probe.data(1, 41)[0], []
    for number, scale in ((43, 1.0), (47, 1.0), (47, 10.0)):
        others = probe.data(7, number)[0]
        others = others * np.asarray(scale, others.dtype) if is_floats(others) else others
        found.append(probe.outputs(joined([x, others]))[0])
    size = max(float(np.linalg.norm(found[0])), 1e-12)
    return max(float(np.linalg.norm(other - found[0])) for other in found[1:]) / size


def _state_difference(probe: Probe) -> float | None:
    """How far the state after four steps on some data is from that after steps on others."""
    state = getattr(probe.trainable, "state", None)
    if state is None:
        return None
    found = []
    for number in (53, 59):
        model = probe.trainable.build(probe.seed)
        batches = [probe.data(8, number + 10 * k) for k in range(4)]
        probe.run(model, batches, NOTHING, 0.0, 1)  # trained weights, and averages of them, stay
        found.append(np.asarray(state(model), float))
    a, b = found
    other = ~((a == b) | (np.isnan(a) & np.isnan(b)))  # (a mask holds infinities)
    difference = float(np.linalg.norm(a[other] - b[other]))
    return difference / float(np.linalg.norm(a[np.isfinite(a)]) + 1e-12) if np.isfinite(difference) else np.inf


@audit_test
def nan_sample(probe: Probe) -> Finding:
    """Tests that a sample with a NaN or infinite gradient contributes at most C, and that the model stays finite.

    statistic: the change that it makes, over the largest contribution of a sample.
    """
    norm, (x, y) = probe.usual_norm, probe.data(1, 61)
    if not is_floats(x):
        raise Lacking("needs inputs that are one array of numbers, to put NaN into")
    known = probe.strong if probe.regime.kind == "linear" else (x, y)  # whose contribution is C, and not less
    company = copies(known, 8)
    base = probe.summed(company, norm)
    largest = max(probe.contribution(known, norm), probe.resolution)
    worst, result = 0.0, Result(value="")
    for value in (np.nan, np.inf):
        bad = x.copy()
        bad.reshape(-1)[0] = value
        try:
            change = probe.summed(probe.together([company, (bad, y)]), norm)
        except Exception as problem:  # noqa: BLE001  (the script's own refusal)
            raise Lacking(f"the script stops at a sample with {value}: {type(problem).__name__}") from None
        difference = float(np.linalg.norm(change - base)) / largest
        if not difference <= worst:
            worst, result.data["value"] = difference, str(value)
        if not np.isfinite(difference):
            return result.bug(
                f"One sample with {value} in its inputs makes {int((~np.isfinite(change)).sum())} of {change.size} "
                "parameters NaN or infinite: the model is destroyed, and tells that the sample was there. Select such "
                "samples away by their norm (multiplying by 0 is not enough) before the sum.", difference, None, 1.5,
            )  # fmt: skip
    result.data["slack"] = 4 * probe.resolution * probe.divisor(count(y) + 8) / largest
    if worst > 1.5 + result.data["slack"]:
        return result.bug(
            f"One sample with {result.data['value']} changes the sum by {worst:.3g} times a sample's contribution: it "
            "takes others' contributions away with its own. Look for nan_to_num after the sum, or a step that is "
            "skipped.", worst, None, 1.5,
        )  # fmt: skip
    text = "A sample with NaN or infinity contributes no more than another, and the model stays finite."
    return result.passed(text, worst, None, 1.5)
