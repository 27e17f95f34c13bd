"""How often fastdp.audit calls a right step a bug, and how often it finds planted ones: the steps of
tests/audit/audit_zoo.py and tests/audit/audit_right.py, over seeds of weights, data and noise.

    python -m benchmarks.audit --seeds 20 --out benchmarks/data/audit.csv   # goes on where it was stopped
    python -m benchmarks.audit --report     # the tables of docs/audit.md, from that file
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdp.audit import TESTS, audit
from fastdp.utils.progress_bar import Bar
from tests.audit import audit_right
from tests.audit.audit_zoo import PLANTED

from .tables import between, read_rows
from .timing import append, commit

ROOT = Path(__file__).parent.parent
DATA, PAGE = ROOT / "benchmarks/data/audit.csv", ROOT / "docs/audit.md"
COLUMNS = ("kind", "name", "seeds", "commit", *TESTS)
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


def run(path: Path, seeds: int) -> None:
    """Measure what is not in the file yet."""
    done = {(row["kind"], row["name"]) for row in read_rows(path)}
    missing = [item for item in steps().items() if item[0] not in done]
    bar = Bar(len(missing))
    for number, ((kind, name), made) in enumerate(missing):
        bar.at(number, f"{kind}, {name}")
        row = measure(kind, name, made, seeds, commit())
        append(path, [row], COLUMNS)
        bugs = ", ".join(f"{test} {row[test]}" for test in TESTS if row[test] not in ("0", "-"))
        bar.clear()
        print(f"{kind} {name}: {bugs or 'no bug found'}", flush=True)


# ---------------------------------------------------------------------- tables


def sort_key(row: Row) -> tuple[int, int]:
    return row["kind"] != "right", list(steps()).index((row["kind"], row["name"]))


def alarms(rows: list[Row]) -> str:
    """Right steps: which tests raised an alarm, and the names of the steps without one."""
    right = sorted((row for row in rows if row["kind"] == "right"), key=sort_key)
    quiet, lines = [], []
    for row in right:
        raised = [f"`{test}` at {row[test]} of {row['seeds']} seeds" for test in TESTS if row[test] not in ("0", "-")]
        if raised:
            lines.append(f"- {row['name']}: {', '.join(raised)}")
        else:
            quiet.append(row["name"])
    return "\n".join([f"- no alarm: {'; '.join(quiet)}", *lines])


def detections(rows: list[Row]) -> str:
    """How many bugs are planted for each test, and which it missed at some seeds."""
    planted, missed = [], []
    for test in TESTS:
        mine = [row for row in rows if row["kind"] == "bug" and test in PLANTED[row["name"]][1]]
        planted.append(f"{test} {len(mine)}")
        pairs = [(row["name"], int(row[test].replace("-", "0")), int(row["seeds"])) for row in mine]
        missed += [f"- {test}: {name}, {found} of {seeds}" for name, found, seeds in pairs if found < seeds]
    return "\n".join([f"Bugs planted for each test: {', '.join(planted)}.", "", *(missed or ["None was missed."])])


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
    for name, made in (("summary", summary), ("alarms", alarms), ("detections", detections)):
        text = between(text, name, made(rows))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--report", action="store_true", help="write the tables into docs/audit.md, measure nothing")
    options = parser.parse_args()
    if options.report:
        PAGE.write_text(filled(PAGE.read_text(), read_rows(options.out)))
        return
    run(options.out, options.seeds)
    print(summary(read_rows(options.out)))


if __name__ == "__main__":
    main()
