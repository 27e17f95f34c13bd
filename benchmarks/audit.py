"""How often fastdp.audit calls a right step a bug, and how often it finds planted ones: the steps of
tests/audit/audit_zoo.py and tests/audit/audit_right.py, over seeds of weights, data and noise.

    python -m benchmarks.audit --seeds 20 --out benchmarks/data/audit.csv   # goes on where it stopped
    python -m benchmarks.audit --report     # the tables of docs/audit.md, from that file
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdp.audit import TESTS, audit
from fastdp.utils.progress_bar import Bar
from tests.audit import audit_right
from tests.audit.audit_zoo import PLANTED

ROOT = Path(__file__).parent.parent
DATA, PAGE = ROOT / "benchmarks/data/audit.csv", ROOT / "docs/audit.md"
COLUMNS = ("kind", "name", "seeds", "commit", *TESTS)
SHORT = {
    "no_clipping": "NC", "minibatch_clipping": "MB", "uncalibrated_noise": "UN", "sensitivity": "SE",
    "per_sample_independence": "PI", "batch_statistics": "BS", "nan_sample": "NaN", "noise_distribution": "ND",
    "noise_scale": "NS", "noise_independence": "NI", "noise_once": "NO", "poisson_sampling": "PS", "empty_batch": "EB",
    "accountant": "AC", "epsilon_bound": "EP",
}  # fmt: skip
Row = dict[str, str]


def steps() -> dict[tuple[str, str], Callable[[], Any]]:
    """Everything that is audited, by kind and name."""
    right = {("right", name): made for name, made in audit_right.RIGHT.items()}
    right["right", "Opacus, hooks"] = audit_right.opacus
    return right | {("bug", name): made for name, (made, _) in PLANTED.items()}


def measure(kind: str, name: str, made: Callable[[], Any], seeds: int, commit: str) -> Row:
    """How many seeds' audits found a bug, by test; "-" where the test could not be run.

    Of a planted bug the tests that are to find it; the others once, with an "x" where they found it too.
    """
    found, ran = dict.fromkeys(TESTS, 0), dict.fromkeys(TESTS, 0)
    wanted = list(TESTS) if kind == "right" else list(PLANTED[name][1])
    for seed in range(seeds):
        for finding in audit(made(), wanted if seed else None, seed=seed).findings:
            found[finding.name] += finding.verdict == "bug"
            ran[finding.name] += finding.verdict != "not tested"
    counts = {test: str(found[test]) if ran[test] else "-" for test in TESTS}
    counts |= {test: "x" for test in TESTS if test not in wanted and found[test]}
    return {"kind": kind, "name": name, "seeds": str(seeds), "commit": commit, **counts}


def read(path: Path = DATA) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(path: Path, seeds: int, limit: float, part: tuple[int, int]) -> int:
    """Measure what is not in the file yet, for at most so many seconds; returns how many steps are left."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    begun = time.monotonic()
    missing = [item for number, item in enumerate(steps().items()) if number % part[1] == part[0]]
    done = {(row["kind"], row["name"]) for row in read(path)}
    missing = [item for item in missing if item[0] not in done]
    bar = Bar(len(missing))
    for number, ((kind, name), made) in enumerate(missing):
        bar.at(number, f"{kind}, {name}")
        if time.monotonic() - begun > limit:
            return len(missing) - number
        row = measure(kind, name, made, seeds, commit.strip())
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        bugs = ", ".join(f"{test} {row[test]}" for test in TESTS if row[test] not in ("0", "-"))
        bar.clear()
        print(f"{kind} {name}: {bugs or 'no bug found'}", flush=True)
    return 0


# ---------------------------------------------------------------------- tables


def sort_key(row: Row) -> tuple[int, int]:
    return row["kind"] != "right", list(steps()).index((row["kind"], row["name"]))


def alarms(rows: list[Row]) -> str:
    """Right steps: alarms of each test."""
    right = sorted((row for row in rows if row["kind"] == "right"), key=sort_key)
    head = ["right step", *SHORT.values()]
    lines = [[f"{row['name']} ({row['seeds']})", *(_cell(row, test) for test in TESTS)] for row in right]
    return _table(head, lines)


def detections(rows: list[Row]) -> str:
    """Planted bugs: how many seeds each test found them at; those that are to find it in bold."""
    head = ["bug", *SHORT.values()]
    lines = []
    for row in sorted((row for row in rows if row["kind"] == "bug"), key=sort_key):
        wanted = PLANTED[row["name"]][1]
        lines.append(
            [f"{row['name']} ({row['seeds']})", *(f"**{row[t]}**" if t in wanted else _cell(row, t) for t in TESTS)]
        )
    return _table(head, lines)


def _cell(row: Row, test: str) -> str:
    return "" if row[test] == "0" else row[test]


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def summary(rows: list[Row]) -> str:
    """Rates in one paragraph."""
    right = [row for row in rows if row["kind"] == "right"]
    known = [row for row in right if row["name"] != "Opacus, hooks"]
    trials = sum(int(row["seeds"]) for row in known for test in TESTS if row[test] != "-")
    false = sum(int(row[test]) for row in known for test in TESTS if row[test] != "-")
    bugs = [row for row in rows if row["kind"] == "bug"]
    wanted = [(int(row["seeds"]), int(row[test].replace("-", "0"))) for row in bugs for test in PLANTED[row["name"]][1]]
    asked, found = (sum(pair[k] for pair in wanted) for k in (0, 1))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    rates = 100 * false / max(trials, 1), 100 * found / max(asked, 1)
    return (
        f"False alarms: {false} of {trials} tests on {len(known)} right steps ({rates[0]:.2f} %), {_range(known)} "
        f"seeds each, Opacus's hooks aside. Planted bugs: {len(bugs)}, {_range(bugs)} seeds each, found by the tests "
        f"named for them in {found} of {asked} trials ({rates[1]:.1f} %). Commits {commits}."
    )


def _range(rows: list[Row]) -> str:
    """20, or 5 to 20."""
    seeds = sorted({int(row["seeds"]) for row in rows}) or [0]
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


def filled(text: str, rows: list[Row]) -> str:
    """The page with its tables made anew."""
    if not rows:
        return text
    for name, table in (("summary", summary(rows)), ("alarms", alarms(rows)), ("detections", detections(rows))):
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, table=table: m[1] + table + "\n" + m[2], text, flags=re.S)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds, after which no step is begun")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th step from the k-th, for several processes")
    parser.add_argument("--report", action="store_true", help="write the tables into docs/audit.md, measure nothing")
    options = parser.parse_args()
    if options.report:
        PAGE.write_text(filled(PAGE.read_text(), read(options.out)))
        return
    part = tuple(int(number) for number in options.part.split("/"))
    left = run(options.out, options.seeds, options.limit, (part[0], part[1]))
    print(summary(read(options.out)) if not left else f"{left} steps left: run it again")


if __name__ == "__main__":
    main()
