"""The papers' (epsilon, delta) from their noise, batch and epochs: by GDP, as they count, and by RDP and PRV.

    python examples/papers/accounting.py

Nothing is trained and no data is read. GDP is the central limit theorem's approximation (Bu et al. 2020), which can say
less than the truth; PRV is exact to 0.01, RDP an upper bound.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.papers import common

DELTA = 1e-5


class Claim(NamedTuple):
    """A setting of the papers: Poisson sampling at rate batch / records, epochs * records / batch steps."""

    case: str
    sigma: float
    batch: int
    records: int
    epochs: float


CLAIMS = (
    Claim("MNIST CNN", 1.1, 256, 60_000, 60),
    Claim("CIFAR-10 CNN", 1.3, 250, 50_000, 60),
    Claim("Fashion-MNIST, DPLoss", 2.15, 2048, 60_000, 40),
)


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Write a row for each setting and accountant; returns them."""
    options = common.parser(__doc__ or "", "accounting").parse_args(arguments)
    claims = {claim.case: claim for claim in CLAIMS}

    def run(name: str, seed: int, kept: common.Checkpoint, tell: common.Tell) -> None:
        claim = claims[name]
        steps = int(claim.epochs * claim.records / claim.batch)
        found = common.epsilons(claim.sigma, claim.batch / claim.records, steps, DELTA)
        tell("full", found, {"train_records": claim.records, "epochs": claim.epochs, "steps": steps,
                             "batch": claim.batch, "sigma": claim.sigma, "delta": DELTA})  # fmt: skip

    return common.drive(options, "accounting", {name: claim._asdict() for name, claim in claims.items()}, run)


if __name__ == "__main__":
    main()
