"""The papers' (epsilon, delta) from their noise, batch and epochs: by GDP, as they count, and by RDP and PRV.

    python examples/papers/accounting.py

Nothing is trained and no data is read. GDP is the central limit theorem's approximation (Bu et al. 2020), which can say
less than the truth; PRV is exact to 0.01, RDP an upper bound.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.papers import common

DELTA = 1e-5


CLAIMS = {  # sigma, batch, records, epochs: Poisson sampling at rate batch / records, epochs * records / batch steps
    "MNIST CNN": (1.1, 256, 60_000, 60),
    "CIFAR-10 CNN": (1.3, 250, 50_000, 60),
    "Fashion-MNIST, DPLoss": (2.15, 2048, 60_000, 40),
}


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Write a row for each setting and accountant; returns them."""
    options = common.parser(__doc__ or "", "accounting").parse_args(arguments)

    def run(name: str, seed: int, kept: common.Checkpoint, tell: common.Tell) -> None:
        sigma, batch, records, epochs = CLAIMS[name]
        steps = int(epochs * records / batch)
        found = common.epsilons(sigma, batch / records, steps, DELTA)
        tell("full", found, {"train_records": records, "epochs": epochs, "steps": steps, "batch": batch,
                             "sigma": sigma, "delta": DELTA})  # fmt: skip

    settings = {name: {"setting": setting} for name, setting in CLAIMS.items()}
    return common.drive(options, "accounting", settings, run)


if __name__ == "__main__":
    main()
