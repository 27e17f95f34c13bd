"""Fine-tuning: the time and memory of one step against Opacus and ordinary training, and the tables of the docs.

    python -m benchmarks.finetuning --report                    # docs/finetuning.md from benchmarks/data/*.csv
    python -m benchmarks.finetuning --steps [--models sst2-lora] [--rounds 9] [--out FILE.csv]

Accuracies come from rows of benchmarks/data/finetuning.csv, of examples/finetune_*.py as of da2b181. Steps are those of
models of `benchmarks.finetuning_models`, measured and checked against one sample at a time as
`benchmarks.training` does, which knows these workloads by name, too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from . import training
from .finetuning_models import FINETUNING
from .steps import Place
from .tables import between, read_rows, table
from .timing import FACTS, Row, append, keep_memory, roofs, show, versions

ROOT = Path(__file__).parent.parent
RUNS, STEPS = ROOT / "benchmarks/data/finetuning.csv", ROOT / "benchmarks/data/finetuning_steps.csv"
TUNING = ROOT / "benchmarks/data/finetuning_tuning.csv"
DOC = ROOT / "docs/finetuning.md"
CONTENDERS = ("non-private", "fastdp", "opacus hooks", "opacus ghost")
SHOWN = ("model", "contender", "ratio", "floor", "step_ms", "p20_ms", "p80_ms", "peak_mib", "memory_ratio", "error",
         "error_dtype")  # fmt: skip
COLUMNS = (*SHOWN, "batch_size", "dtype", *FACTS)

# ---------------------------------------------------------------------- tables

Rows = list[dict[str, str]]


def budget(row: dict[str, str]) -> str:
    return "non-private" if row["engine"] == "none" else f"epsilon {float(row['epsilon_target']):g}"


def what(row: dict[str, str]) -> tuple[str, str, str]:
    return row["task"], row["model"], row["method"]


def mean_of(rows: Rows, column: str, digits: int = 1) -> str:
    """Mean over runs of the same thing; their number where there are several."""
    values = [float(row[column]) for row in rows]
    if not values:
        return ""
    more = f" ({len(values)} runs)" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.{digits}f}{more}"


def results(rows: Rows, column: str) -> str:
    """Test accuracy (or perplexity) by task, model and method against epsilon, of full and partial runs."""
    rows = [
        r for r in rows if r[column] not in ("", "-") and r["setting"] != "quick" and r["engine"] in ("fastdp", "none")
    ]
    budgets = ["epsilon 1", "epsilon 3", "epsilon 8", "non-private"]
    lines = []
    for key in dict.fromkeys(map(what, rows)):
        mine = [r for r in rows if what(r) == key]
        cells = [mean_of([r for r in mine if budget(r) == b], column) for b in budgets]
        lines.append([*key, *cells])
    return table(["task", "model", "trained", *budgets], lines)


def step_table(rows: Rows) -> str:
    """Ratios of time and memory to ordinary training."""
    names = [n for n in CONTENDERS if n != "non-private"]
    lines = []
    for model in dict.fromkeys(r["model"] for r in rows):
        last: dict[str, dict[str, str]] = {}
        for row in rows:  # a later measurement replaces one; time and memory may have been measured apart
            if row["model"] == model:
                found = {key: value for key, value in row.items() if value not in ("", "-")}
                last[row["contender"]] = last.get(row["contender"], {}) | found
        plain = last["non-private"]
        cells = [f"{model} ({plain['batch_size']})"]
        cells.append(f"{float(plain['step_ms']):.0f} ms, {plain.get('peak_mib', '-')} MiB")
        for name in names:
            row = last.get(name, {})
            if "ratio" in row:
                memory = f"{float(row['peak_mib']) / float(plain['peak_mib']):.2f}" if "peak_mib" in row else "-"
                cells.append(f"{row['ratio']}, {memory}")
            else:
                error = row.get("error", "-")
                cells.append({"-": "-", "inf": "fails"}.get(error, f"wrong by {error}"))
        lines.append(cells)
    return table(["model (batch)", "non-private", *names], lines)


def clipping_table(rows: Rows) -> str:
    """Tuning runs of SST-2's head, 20 epochs at learning rate 3e-3, by their clipping."""
    chosen = [r for r in rows if r["task"] == "SST-2" and r["method"] == "head" and r["engine"] == "fastdp"
              and float(r["lr"]) == 3e-3 and float(r["epochs"]) == 20 and float(r["epsilon_target"]) == 3]  # fmt: skip
    shown = ("accuracy_dev", "accuracy", "nll", "ece")
    lines = [[f"{r['clipping']}, R = {float(r['max_grad_norm']):g}", *[r[c] for c in shown]]
             for r in chosen]  # fmt: skip
    return table(["clipping", "dev", "test", "NLL", "ECE %"], lines)


def tables() -> dict[str, str]:
    """The tables of docs/finetuning.md by their names."""
    runs, steps = read_rows(RUNS), read_rows(STEPS)
    return {
        "accuracy": results(runs, "accuracy"),
        "perplexity": results(runs, "perplexity"),
        "steps": step_table(steps),
        "clipping": clipping_table(read_rows(TUNING)),
    }


def filled(text: str) -> str:
    """The document with the tables of today between their marks."""
    for name, body in tables().items():
        text = between(text, name, body)
    return text


# ---------------------------------------------------------------------- main


def step_row(row: Row) -> Row:
    """A row of `benchmarks.training` with the columns of this table; what fails has an error of inf."""
    fails = row["status"] not in ("ok", "wrong") and row["error"] == "-"
    return {**row, "model": row["workload"]} | ({"error": "inf"} if fails else {})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--report", action="store_true", help="write the tables into docs/finetuning.md")
    parser.add_argument("--steps", action="store_true", help="measure steps")
    parser.add_argument("--models", nargs="+", choices=list(FINETUNING), default=list(FINETUNING))
    parser.add_argument("--contenders", nargs="+", choices=list(training.CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=list(training.TYPES))
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    place = Place(torch.device(options.device), getattr(torch, options.dtype))
    names = list(dict.fromkeys(["non-private", *options.contenders]))
    rows: list[Row] = []
    for model in options.models if options.steps else ():
        roof = roofs(place.device, place.dtype)
        measured = training.run(model, names, options.rounds, not options.no_memory, place, roof)
        found = [step_row(row) for row in measured]
        rows += found
        if options.out:
            append(options.out, found, COLUMNS)
    if options.steps:
        print(", ".join(f"{key} {value}" for key, value in versions(place.device).items()))
        show(rows, SHOWN)
    if options.report:
        DOC.write_text(filled(DOC.read_text()))


if __name__ == "__main__":
    keep_memory("benchmarks.finetuning")
    main()
