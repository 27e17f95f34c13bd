"""Table 1 of the convergence paper, measured on small random networks: `python -m fastdp ntk`, as rows.

    python examples/papers/ntk_table.py [--quick] [--steps 20000] [--only TEXT]

No data is read. A seed is a draw of networks and of their data. The rows say in which share of the networks a
property held: one that the paper guarantees should in all of them, one that it does not guarantee need not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.papers import common
from fastdp.commands.ntk_table import COLUMNS, ROWS, Result, broken, draw, measure, table
from fastdp.utils.progress_bar import Bar


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measure, print, write rows."""
    made = common.parser(__doc__ or "", "ntk_table")
    made.add_argument("--networks", type=int, help="of each seed (default: 20; quick: 8)")
    made.add_argument("--steps", type=int, help="of gradient descent, at most (default: 20000; quick: 2000)")
    made.add_argument("--only", default="", metavar="TEXT", help="ways of clipping with this in their name")
    options = made.parse_args(arguments)
    rows = {row.name: row for row in ROWS if options.only in row.name}
    if not rows:
        made.error(f"--only: none of {', '.join(row.name for row in ROWS)}")
    networks = options.networks or (8 if options.quick else 20)
    steps = options.steps or (2000 if options.quick else 20_000)
    mode = "quick" if options.quick else "full" if (networks, steps) == (20, 20_000) else "short"
    results: dict[str, Result] = {}

    def run(name: str, seed: int, kept: common.Checkpoint, tell: common.Tell) -> None:
        row, start = rows[name], time.perf_counter()
        found = results[name] = measure(draw(networks, seed), row, steps, Bar(steps).part(0, name))
        each = zip(COLUMNS, found.held, found.of, strict=True)
        metrics = {f"share: {column}": n / of for column, n, of in each if of} | {"loss left": found.left}
        tell(mode, metrics, {"train_records": 8, "steps": steps, "batch": 8, "sigma": 0.0, "clipping": row.clipping,
                             "style": row.style, "seconds": time.perf_counter() - start})  # fmt: skip

    setting = {"networks": networks, "steps": steps}
    common.drive(options, "Table 1, the NTK", dict.fromkeys(rows, setting), run)
    print(f"\nthe last seed: {networks} networks, {steps} steps; in brackets what the paper guarantees\n")
    print(table(list(results.values())))
    print("\n".join(f"guaranteed by the paper, and not seen: {line}" for line in broken(list(results.values()))))
    return list(results.values())


if __name__ == "__main__":
    main()
