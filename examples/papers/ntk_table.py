"""Table 1 of the convergence paper, measured on small random networks: `python -m fastdp ntk`, as rows.

    python examples/papers/ntk_table.py [--quick] [--steps 20000] [--only TEXT] [--plots DIR]

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


def picture(results: Sequence[Result], path: Path) -> None:
    """Shares as a grid of shades, the paper's claims written in."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    shares = [[n / of if of else 0.5 for n, of in zip(r.held, r.of, strict=True)] for r in results]
    axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for y, result in enumerate(results):
        claims = result.row.paper or (None,) * 6
        for x, (n, networks, claim) in enumerate(zip(result.held, result.of, claims, strict=True)):
            said = {True: "guaranteed", False: "not guaranteed", None: ""}[claim]
            dark = n in (0, networks)
            axes.text(
                x,
                y,
                f"{n} of {networks}\n{said}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    axes.set_yticks(range(len(results)), [r.row.name for r in results], fontsize=8)
    axes.set_xticks(range(len(COLUMNS)), COLUMNS, fontsize=8)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measure, print, write rows."""
    made = common.parser(__doc__ or "")
    made.add_argument("--networks", type=int, help="of each seed (default: 20; quick: 8)")
    made.add_argument("--steps", type=int, help="of gradient descent, at most (default: 20000; quick: 2000)")
    made.add_argument("--only", default="", metavar="TEXT", help="ways of clipping with this in their name")
    options = made.parse_args(arguments)
    rows = [row for row in ROWS if options.only in row.name]
    if not rows:
        made.error(f"--only: none of {', '.join(row.name for row in ROWS)}")
    networks = options.networks or (8 if options.quick else 20)
    steps = options.steps or (2000 if options.quick else 20_000)
    mode, results = "quick" if options.quick else "full" if (networks, steps) == (20, 20_000) else "short", []
    for seed in common.seeds(options):
        nets, results = draw(networks, seed), []
        for row in rows:
            start = time.perf_counter()
            found = measure(nets, row, steps, Bar(steps).part(0, row.name))
            results.append(found)
            each = zip(COLUMNS, found.held, found.of, strict=True)
            shares = {f"share: {name}": n / of for name, n, of in each if of}
            common.write(options.out, common.rows(
                options, "Table 1, the NTK", row.name, mode, seed, {**shares, "loss left": found.left},
                train_records=8, steps=steps, batch=8, sigma=0.0, clipping=row.clipping, style=row.style,
                seconds=time.perf_counter() - start,
            ))  # fmt: skip
        print(f"\nseed {seed}: {networks} networks, {steps} steps; in brackets what the paper guarantees\n")
        print(table(results))
        print("\n".join(f"guaranteed by the paper, and not seen: {line}" for line in broken(results)))
    path = common.picture(options, "ntk_table")
    if path is not None:
        picture(results, path)
    return results


if __name__ == "__main__":
    main()
