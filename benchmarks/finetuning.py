"""The tables of docs/finetuning.md, from the rows in benchmarks/data.

    python -m benchmarks.finetuning

Accuracies come from rows of benchmarks/data/finetuning.csv, of examples/finetune_*.py as of da2b181, and steps from
benchmarks/data/finetuning_steps.csv. `benchmarks.training` measures steps of the models of
`benchmarks.finetuning_models` again.
"""

from __future__ import annotations

from pathlib import Path

from .tables import between, read_rows, table

ROOT = Path(__file__).parent.parent
RUNS, STEPS = ROOT / "benchmarks/data/finetuning.csv", ROOT / "benchmarks/data/finetuning_steps.csv"
TUNING = ROOT / "benchmarks/data/finetuning_tuning.csv"
DOC = ROOT / "docs/finetuning.md"
CONTENDERS = ("fastdp", "opacus hooks", "opacus ghost")

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
        for name in CONTENDERS:
            row = last.get(name, {})
            if "ratio" in row:
                memory = f"{float(row['peak_mib']) / float(plain['peak_mib']):.2f}" if "peak_mib" in row else "-"
                cells.append(f"{row['ratio']}, {memory}")
            else:
                error = row.get("error", "-")
                cells.append({"-": "-", "inf": "fails"}.get(error, f"wrong by {error}"))
        lines.append(cells)
    return table(["model (batch)", "non-private", *CONTENDERS], lines)


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


if __name__ == "__main__":
    DOC.write_text(filled(DOC.read_text()))
