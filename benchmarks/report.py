"""The tables and figures of README.md and benchmarks/README.md, from the rows in benchmarks/data alone.

    python -m benchmarks.report [--data DIR] [--no-figures]

README.md is left as it is while there are no rows of the suites cpu and gpu. Figures need matplotlib, tables do not.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from . import report_data as data
from . import report_gpu
from .report_data import OK, OURS, Case, Cases, Row, figure_names, label, measured, stamp, where
from .report_text import LOST, best, cell, note, size, two
from .tables import between, table, wrapped

ROOT = Path(__file__).parent.parent
DATA, FIGURES = ROOT / "benchmarks/data", ROOT / "docs"
README, PAGE = ROOT / "README.md", ROOT / "benchmarks/README.md"
HOW = "`python -m benchmarks.training --suite {suite} --out benchmarks/data`, then `python -m benchmarks.report`"
SHOWN = 4  # workloads in README.md, which is to stay short
LINK = "[benchmarks/README.md](benchmarks/README.md)"
SUITES = {
    "cpu": "CPU",
    "gpu": "GPU",
    "quick": "Quick (tiny models: shows that the benchmark works, not how fast we are)",
}
ABOUT = (
    "Time and peak memory of one private step (noise, AdamW, flat clipping) over one ordinary step with torch's "
    "fused AdamW: medians of interleaved steps; each contender's update is checked against one-sample truth first. "
    "*Floor*: the least that an exact step can cost at the speed of torch's products, which ours exceed on this CPU."
)

HEAD = ("workload", "batch x length", "floor", "**fastdp**", "**of the floor**", "best Opacus", "speed-up",
        "memory: fastdp", "best Opacus")  # fmt: skip


def line(case: Case, group: dict[str, Row]) -> list[str]:
    """One workload: ratios of time and memory to ordinary training, ours and the best of Opacus."""
    ours, faster = group.get(OURS), data.speed_up(group)
    return [label(case), size(case), cell(ours, "floor") if data.number(ours, "floor") else "", cell(ours, "ratio"),
            two(data.of_floor(ours)), best(group, "ratio"), f"{faster:.2f}x" if faster else "",
            cell(ours, "memory_ratio"), best(group, "memory_ratio")]  # fmt: skip


# ---------------------------------------------------------------------- README.md


def headline(mine: Cases) -> str:
    """Our distance from the floor and from Opacus, over all workloads."""
    floors = [value for group in mine.values() if (value := data.of_floor(group.get(OURS))) is not None]
    faster = [value for group in mine.values() if (value := data.speed_up(group)) is not None]
    words = []
    if floors:
        words.append(f"**{min(floors):.2f} to {max(floors):.2f} of the floor, median {statistics.median(floors):.2f}**")
    if faster:
        won, run = sum(value > 1 for value in faster), sum(bool(data.best_opacus(g, "ratio")) for g in mine.values())
        spread = f"{min(faster):.2f}x to {max(faster):.2f}x, median {statistics.median(faster):.2f}x"
        words.append(f"faster than every mode of Opacus on {won} of {run} workloads that any runs ({spread})")
    return "; ".join(words)


def chosen(mine: Cases, room: int) -> Cases:
    """As many workloads as there is room for: first those where something else wins, then in the usual order."""
    lost = [case for case in mine if data.losses(mine[case])]
    kept = [*lost, *(case for case in mine if case not in lost)][:room]
    return {case: group for case, group in mine.items() if case in kept}


def summary(cases: Cases, room: int) -> str:
    """README.md's section on speed, with so many workloads; "" without rows."""
    for place in data.places(cases, "cpu")[:1]:
        if mine := measured(cases, "cpu", place):
            break
    else:
        return ""
    shown = chosen(mine, room)
    missed = [case for case in mine if case not in shown]
    lost = sum(bool(data.losses(mine[case])) for case in missed)
    more = f"{len(missed)} more workloads" + f" ({lost} with such cells)" * (lost > 0) + ", " if missed else ""
    mark = f"{LOST}: better than ours. " if any(data.losses(group) for group in mine.values()) else ""
    rest = f"{more}{'every' if more else 'Every'} contender and number, and where we lose: {LINK}."
    told = f"{mark}{note(mine.values(), commits=False)}. {rest}"
    about = wrapped(f"{ABOUT} On {where('cpu', place)}: {headline(mine)}.")
    return "\n\n".join([about, table(HEAD, [line(*item) for item in shown.items()]), wrapped(told),
                         pictures(cases, "docs/", ("cpu",))])  # fmt: skip


def pictures(cases: Cases, folder: str, suites: Iterable[str]) -> str:
    """Links to the figures that there are rows for."""
    names = [f"training_{suite}.png" for suite in suites]
    return " ".join(f"![Time and memory by model]({folder}{name})" for name in figure_names(cases) if name in names)


def stale(cases: Cases, folder: Path) -> list[str]:
    """Figures that are missing or were drawn from other rows."""
    files = {name: folder / name for name in figure_names(cases)}
    return [n for n, path in files.items() if not path.exists() or stamp(cases).encode() not in path.read_bytes()]


# ---------------------------------------------------------------------- benchmarks/README.md

FULL = ("workload, batch x length", "contender", "time", "of the floor", "step ms (20, 80 %)", "rounds", "MiB",
        "memory", "error", "")  # fmt: skip


def full(mine: Cases) -> str:
    """Every contender of every workload."""
    lines = []
    for case, group in mine.items():
        for number, name in enumerate(data.contenders(group)):
            row = group[name]
            known = {column: "" if row[column] in data.EMPTY else row[column] for column in data.NEEDED}
            if row["status"] != OK:  # no time of what is wrong
                known |= dict.fromkeys((*data.TIME, *data.MEMORY), "")
            ms = known["step_ms"] + f" ({known['p20_ms']}, {known['p80_ms']})" * bool(known["p20_ms"])
            errors = " ".join(known[column] for column in data.CHECK if known[column])
            status = "" if row["status"] == OK else row["status"]  # what is right may have a note, too
            why = ": ".join(text for text in (status, _short(known["why"])) if text)
            bold = f"**{name}**" if name == OURS else name
            lines.append([f"{label(case)}, {size(case)}" if number == 0 else "", bold, known["ratio"],
                          two(data.of_floor(row)), ms, known["rounds"],
                          known["peak_mib"], known["memory_ratio"], errors, why])  # fmt: skip
    return table(FULL, lines)


def _short(text: str) -> str:
    return textwrap.shorten(text, 90, placeholder=" ...")


def sections(cases: Cases) -> str:
    """Of each suite and device: the summary of all workloads, every contender, sweeps."""
    parts = []
    for suite, title in SUITES.items():
        here = data.places(cases, suite)
        if not here and suite != "quick":
            parts.append(f"### {title}\n\nNo rows yet: {HOW.format(suite=suite)}.")
        for place in here:
            mine = measured(cases, suite, place)
            everything = [
                group for case, group in cases.items() if (case.suite, case.device, case.threads) == (suite, *place)
            ]
            parts.append(f"### {title}: {where(suite, place)}")
            said = f"{headline(mine)}; {note(everything)}.".lstrip("; ")
            parts.append(wrapped(" ".join([said, *(report_gpu.remarks(mine) if suite == "gpu" else [])])))
            parts += [table(HEAD, [line(*item) for item in mine.items()]), full(mine)] if mine else []
            for sweep, words in (("batch", "Batch sizes"), ("length", "Lengths")):
                if swept := measured(cases, suite, place, sweep):
                    parts += [f"{words}:", table(HEAD, [line(*item) for item in swept.items()])]
            if place == here[0] and (links := pictures(cases, "../docs/", (suite,))):
                parts.append(links)
    return "\n\n".join(parts)


def where_we_lose(cases: Cases) -> str:
    """A line for each workload, batch and length where something else does better, sweeps included."""
    lines = []
    for suite in ("cpu", "gpu"):
        for place in data.places(cases, suite):
            for sweep in ("-", "batch", "length"):
                for case, group in measured(cases, suite, place, sweep).items():
                    said = data.losses(group)
                    if sweep == "-" and (compiled := data.by_compiling(group)):
                        said.append(compiled)
                    if said:
                        lines.append(
                            wrapped(f"- {SUITES[suite]}, {label(case)}, {size(case)}: {'; '.join(said)}", "  ")
                        )
    if lines:
        return "\n".join(lines)
    return "Nowhere in these rows." if any(case.suite in ("cpu", "gpu") for case in cases) else "No rows yet."


# ---------------------------------------------------------------------- placing


def readme(text: str, cases: Cases) -> str:
    """README.md of today: as it is without rows."""
    made = summary(cases, SHOWN)
    return between(text, "training", made) if made else text


def page(text: str, cases: Cases) -> str:
    """benchmarks/README.md of today."""
    blocks: dict[str, Callable[[Cases], str]] = {
        "training": sections, "losses": where_we_lose,
        "gpu kernels": lambda _: report_gpu.kernels(DATA), "gpu host": lambda _: report_gpu.host(DATA),
    }  # fmt: skip
    for name, made in blocks.items():
        text = between(text, name, made(cases))
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of training_*.csv")
    parser.add_argument("--no-figures", action="store_true")
    options = parser.parse_args(arguments)
    cases = data.newest(data.read(options.data))
    for path, made in ((README, readme), (PAGE, page)):
        path.write_text(made(path.read_text(), cases))
    if not figure_names(cases):
        none = f"no rows of the suites cpu and gpu in {options.data}"
        print(f"{none}: {HOW.format(suite='cpu')}; README.md is left as it is")
    elif not options.no_figures:
        try:
            from . import figures
        except ImportError as missing:
            raise SystemExit("the tables are written; figures need matplotlib: pip install matplotlib") from missing
        figures.draw(cases, FIGURES)


if __name__ == "__main__":
    main()
