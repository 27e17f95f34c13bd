"""Are our sensitivities those of JAX-Privacy and Opake, and are BandMF's coefficients as good?

    python -m benchmarks.sensitivity_peers

Prints, as Markdown tables, the sensitivity of strategies of correlated noise under several participations by fastdp, by
JAX-Privacy and by Opake, with the largest relative difference. Where one of them gives an upper bound alone, the note
says so, and how ours compares with the smaller one of theirs. The exit code is 1 if exact values differ by more than
1e-9, or the noise of our coefficients of banded encoders is more than 1 % above that of JAX-Privacy's.

Opake's closed form for lambda counts the last participation in full where the steps are no multiple of the separation:
there it is a bound. Its general functions round to torch's default type, which is set to double precision here.

Needs, beside fastdp's own needs, in an environment of its own (Opake 0.16.1 fails to import on Python 3.11.7):

    pip install jax jax-privacy "opake[dpftrl]==0.16.1"
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from fastdp.accounting.participation import Participation
from fastdp.mechanisms import Banded, Bisr, Independent, Lambda, Matrix, Strategy, TreeAggregation, sensitivity
from fastdp.mechanisms.banded import best_coefficients
from fastdp.mechanisms.encoders import Toeplitz

from .tables import table

try:
    import jax
    import jax.numpy as jnp
    import torch
    from jax_privacy.matrix_factorization import sensitivity as jax_sensitivity
    from jax_privacy.matrix_factorization import toeplitz as jax_toeplitz
    from opake.api.dpftrl.noise import _sensitivity as opake_sensitivity
    from opake.api.dpftrl.noise import _toeplitz as opake_toeplitz
    from opake.dpftrl.noise import bisr_strategy, lambda_cgd_strategy
except ImportError as missing:
    raise SystemExit(
        f'{missing}. This compares with other libraries: pip install jax jax-privacy "opake[dpftrl]==0.16.1"'
    ) from None

LARGEST = 1e-9
STEPS = 240


class Peer(NamedTuple):
    """What a library says: a value, and whether it is a bound."""

    value: float
    bound: bool = False


def fixed(period: int) -> Participation:
    return Participation("fixed order", period, period)


def apart(separation: int) -> Participation:
    """Any steps that are so far apart."""
    return Participation("separated", 1, separation)


def cases() -> Iterator[tuple[str, Strategy, Participation]]:
    for strategy in (Independent(), Lambda(0.5), Lambda(0.9), Lambda(0.99), Bisr(2), Bisr(4), Bisr(16)):
        yield repr(strategy), strategy, fixed(24)
        yield repr(strategy), strategy, apart(7)
    yield "Bisr(4), once", Bisr(4), fixed(STEPS)
    yield "Bisr(4), every step", Bisr(4), fixed(1)
    yield "Bisr(4, momentum=0.9)", Bisr(4, momentum=0.9), fixed(24)
    banded = Banded(4, coefficients=[1, 0.5, 0.3, 0.1])
    yield "Banded(4), given", banded, fixed(24)
    yield "Banded(4), given", banded, apart(5)
    yield "Banded(4), given, designed", Matrix(encoder=Toeplitz(banded.weights).encoder(STEPS) * _band(4)), apart(5)
    yield "Banded(8), optimised", Banded(8, steps=STEPS), fixed(24)
    yield "TreeAggregation()", TreeAggregation(), fixed(24)
    yield "TreeAggregation()", TreeAggregation(), fixed(STEPS)
    random = np.random.default_rng(0)
    yield (
        "Matrix, random, C >= 0",
        Matrix(encoder=np.tril(random.random((STEPS, STEPS))) + 9 * np.eye(STEPS)),
        fixed(24),
    )
    signed = Matrix(encoder=np.tril(random.standard_normal((STEPS, STEPS))) + 9 * np.eye(STEPS))
    yield "Matrix, random, signed", signed, fixed(24)
    yield "Matrix, random, signed", signed, apart(24)
    yield "TreeAggregation()", TreeAggregation(), apart(24)


def _band(bands: int) -> np.ndarray:
    lag = np.subtract.outer(np.arange(STEPS), np.arange(STEPS))
    return (lag >= 0) & (lag < bands)


def _is_monotone(strategy: Strategy) -> bool:
    c = strategy.encoder(STEPS)[:, 0]
    return isinstance(strategy, Toeplitz) and bool((c >= 0).all() and (np.diff(c) <= 0).all())


def by_jax(strategy: Strategy, part: Participation) -> Peer:
    encoder = jnp.asarray(strategy.encoder(STEPS))
    gram = np.asarray(encoder.T @ encoder)
    if part.kind == "fixed order":
        return Peer(jax_sensitivity.fixed_epoch_sensitivity(encoder, STEPS // part.period), bool((gram < 0).any()))
    if _is_monotone(strategy):
        squared = jax_toeplitz.minsep_sensitivity_squared(encoder[:, 0], part.separation, n=STEPS)
        return Peer(math.sqrt(float(squared)))
    if strategy.bands and strategy.bands <= part.separation and isinstance(strategy, Matrix):
        return Peer(jax_sensitivity.get_sensitivity_banded(encoder, part.separation))
    return Peer(jax_sensitivity.get_min_sep_sensitivity_upper_bound(encoder, part.separation), True)


def by_opake(strategy: Strategy, part: Participation) -> Peer | None:
    """None: it has nothing of this strategy in a fixed order."""
    separation = part.separation
    options: dict[str, Any] = {"n_steps": STEPS, "min_sep": separation, "max_participations": None}
    if isinstance(strategy, Lambda):
        found = lambda_cgd_strategy(lambda_=strategy.weight, normalized=False).sensitivity(**options)
        return Peer(found, bool(STEPS % separation))
    if isinstance(strategy, Bisr):
        bands, momentum, _ = strategy.settings
        return Peer(bisr_strategy(bandwidth=bands, normalized=False, momentum=momentum).sensitivity(**options))
    encoder = torch.tensor(strategy.encoder(STEPS))
    if _is_monotone(strategy):
        return Peer(math.sqrt(opake_toeplitz.minsep_sensitivity_squared(encoder[:, 0], separation, n=STEPS)))
    if isinstance(strategy, Toeplitz):
        return Peer(math.sqrt(opake_toeplitz.minsep_sensitivity_upper_bound(encoder[:, 0], separation, n=STEPS)), True)
    if part.kind == "fixed order":
        return None
    if strategy.bands and strategy.bands <= separation:
        return Peer(opake_sensitivity.get_sensitivity_banded(encoder, separation))
    return Peer(opake_sensitivity.get_min_sep_sensitivity_upper_bound(encoder, separation), True)


def judged(ours: float, peers: list[Peer]) -> tuple[str, str, bool]:
    """The largest difference from exact values, or from the smallest bound; a note; whether all is well."""
    exact = [ours / peer.value - 1 for peer in peers if not peer.bound]
    bounds = [ours / peer.value - 1 for peer in peers if peer.bound]
    gap = max(exact, key=abs) if exact else max(bounds)
    if exact:
        note = "the other is a bound, and larger" if bounds and min(bounds) < -LARGEST else ""
    elif abs(gap) <= LARGEST:
        note = "bounds"
    else:
        note = f"bounds, ours is {'larger' if gap > 0 else 'smaller'}"
    return f"{gap:+.1e}", note, all(abs(gap) <= LARGEST for gap in exact)


def sensitivities() -> bool:
    rows, well = [], True
    for name, strategy, part in cases():
        ours = sensitivity(strategy, STEPS, part)
        peers = [by_jax(strategy, part), by_opake(strategy, part)]
        gap, note, fine = judged(ours, [peer for peer in peers if peer])
        place = f"{part.kind}, {part.separation}"
        cells = [f"{peer.value:.10g}" if peer else "-" for peer in peers]
        rows.append([name, place, f"{ours:.10g}", *cells, gap, note if fine else f"DIFFERS; {note}"])
        well = well and fine
    print(table(["strategy", "participation", "fastdp", "JAX-Privacy", "Opake", "difference", "note"], rows))
    return well


def banded() -> bool:
    """The noise of sums at the same sensitivity, with the coefficients of both."""
    rows, well = [], True
    for steps, bands in ((100, 2), (200, 4), (1000, 8), (1000, 16), (2000, 32)):
        theirs = jax_toeplitz.optimize_banded_toeplitz(steps, bands)
        found = best_coefficients(bands, steps)
        cut = Banded(bands, steps=steps).designed
        errors = [math.sqrt(float(jax_toeplitz.loss(jnp.asarray(c), steps))) for c in (found, cut, theirs)]
        rows.append([f"{steps}", f"{bands}", *(f"{e:.5g}" for e in errors), f"{errors[0] / errors[2] - 1:+.2%}",
                     f"{errors[1] / errors[2] - 1:+.2%}"])  # fmt: skip
        well = well and errors[0] <= 1.01 * errors[2]
    head = ["steps", "bands", "fastdp", "fastdp, 64 draws", "JAX-Privacy", "difference", "price of 64 draws"]
    print("\nRoot mean squared noise of sums, at sensitivity 1\n\n" + table(head, rows))
    return well


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    torch.set_default_dtype(torch.float64)
    well = [sensitivities(), banded()]
    print("\n" + ("All agree." if all(well) else "NOT all agree."))
    sys.exit(not all(well))


if __name__ == "__main__":
    main()
