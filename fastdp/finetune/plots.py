"""Pictures of a run: loss, epsilon and metrics by step, and how far the probabilities can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..calibration import Calibration, reliability_diagram
from .figures import Simple
from .tasks import headline as headline_of


def write_plots(folder: Path, rows: dict[int, dict[str, float]], task: str, found: Calibration | None,
                budget: float, simple: Simple | None = None) -> list[str]:  # fmt: skip
    """Write training.png and, for a classifier that was evaluated, reliability.png; without matplotlib training.txt.

    simple: what can be had without learning, drawn as a line.

    Returns the names of the files.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        (folder / "training.txt").write_text(in_text(rows, task, simple=simple))
        return ["training.txt"]
    headline = headline_of(task)
    panels = [("loss", "training loss (NOT private)"), ("epsilon", f"epsilon spent, of {budget:g}")]
    if any(headline in row for row in rows.values()):
        panels.append((headline, f"{headline} of held-out records"))
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    for place, (name, title) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        steps, values = _series(rows, name)
        axes.plot(steps, values, color="#4477aa", lw=1.2, marker="o" if len(steps) < 30 else None, ms=3)
        if name == "epsilon":
            axes.axhline(budget, color="#bb5566", ls="--", lw=1)
            axes.set_ylim(0, None)
        if name == headline and simple is not None:
            axes.axhline(simple.value, color="#bb5566", ls="--", lw=1, label=simple.words)
            axes.legend(fontsize=7, frameon=False)
        axes.set(xlabel="step")
        axes.set_title(title, fontsize=10)
    figure.savefig(folder / "training.png", dpi=120)
    if found is None:
        return ["training.png"]
    reliability_diagram({"held-out records": found}, folder / "reliability.png")
    return ["training.png", "reliability.png"]


def in_text(rows: dict[int, dict[str, float]], task: str, lines: int = 20, simple: Simple | None = None) -> str:
    """The same as a table of bars, about so many lines."""
    steps = sorted(step for step in rows if "loss" in rows[step])
    if not steps:
        return "no step was made\n"
    some = sorted(set(steps[:: max(1, len(steps) // lines)]) | {steps[-1]})
    highest = max(rows[step]["loss"] for step in some) or 1.0
    text = [f"{'step':>6} {'epsilon':>8} {'loss':>8}"]
    for step in some:
        row: dict[str, Any] = rows[step]
        bar = "#" * max(0, round(40 * row["loss"] / highest)) if row["loss"] == row["loss"] else ""
        text.append(f"{step:>6} {row.get('epsilon', 0):>8.3f} {row['loss']:>8.4f} {bar}")
    name = headline_of(task)
    text += [f"step {step}: {name} {rows[step][name]:.4g}" for step in sorted(rows) if name in rows[step]]
    if simple is not None:
        text.append(f"{simple.words}: {simple.value:.4g}")
    return "\n".join(text) + "\n"


def _series(rows: dict[int, dict[str, float]], name: str) -> tuple[list[int], list[float]]:
    steps = [step for step in sorted(rows) if name in rows[step]]
    return steps, [rows[step][name] for step in steps]
