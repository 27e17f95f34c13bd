"""Fine-tuning: the time and memory of one step against Opacus and ordinary training, and the tables of the docs.

    python -m benchmarks.finetuning --report                    # docs/finetuning.md from benchmarks/data/*.csv
    python -m benchmarks.finetuning --steps [--models sst2-lora] [--rounds 9] [--out FILE.csv]

Accuracies come from examples/finetune_*.py, which append their rows to benchmarks/data/finetuning.csv. Steps are those
of the same models, of their real sizes with random weights (nothing is downloaded), measured and checked against one
sample at a time as `benchmarks.training` does.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fastdp.losses import causal_lm_loss, classification_loss

from . import memory, training
from .models import Workload
from .steps import Place
from .suites import FLOORLESS, OTHERS
from .timing import FACTS, Row, append, keep_memory, roofs, show, versions

ROOT = Path(__file__).parent.parent
RUNS, STEPS = ROOT / "benchmarks/data/finetuning.csv", ROOT / "benchmarks/data/finetuning_steps.csv"
TUNING = ROOT / "benchmarks/data/finetuning_tuning.csv"
DOC = ROOT / "docs/finetuning.md"
sys.path.insert(0, str(ROOT / "examples"))

# ---------------------------------------------------------------------- steps of the examples' models


class Sentences(nn.Module):
    """The classifier of finetune_sst2.py on one tensor [B, 2, T]: token ids, and the mask of what is no padding."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier((x[:, 0], x[:, 1]))


class Words(nn.Module):
    """A causal language model: ids [B, T] -> logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


def minilm(method: str) -> nn.Module:
    import finetune_sst2
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return Sentences(trained_a_little(finetune_sst2.prepare(BertModel(config, add_pooling_layer=False), method)))


def smollm2() -> nn.Module:
    import finetune_shakespeare
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
                         use_cache=False)  # fmt: skip
    return Words(trained_a_little(finetune_shakespeare.with_lora(LlamaForCausalLM(config), 8)))


def squeezenet() -> nn.Module:
    import cifar10_networks
    import finetune_cifar10

    body = cifar10_networks.SqueezeNet()
    return trained_a_little(finetune_cifar10.Classifier(body, body.width, 96))


def vit() -> nn.Module:
    import cifar10_networks
    import finetune_cifar10
    from transformers import Dinov2Config, Dinov2Model

    body = Dinov2Model(Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14))
    made = cifar10_networks.ViT(cifar10_networks.resized(body, 70))
    return trained_a_little(finetune_cifar10.Classifier(made, made.width, 70))


def trained_a_little(model: nn.Module) -> nn.Module:
    """Zeros (heads, LoRA's second factors) made small numbers: behind zeros there is no gradient to check."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=0.02)
    return model


def sentences(b: int) -> tuple[Tensor, Tensor]:
    """Of 32 tokens, of which the last are padding, as sorted by length in training: few."""
    ids, mask = torch.randint(1000, 30000, (b, 32)), torch.ones(b, 32, dtype=torch.long)
    mask[::4, -3:] = 0
    return torch.stack([ids * mask, mask], 1), torch.randint(0, 2, (b,))


def images(b: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (b, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (b,))


def words(b: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 49152, (b, 64))
    return ids, ids


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return classification_loss(logits, labels, "none")


def of_words(logits: Tensor, ids: Tensor) -> Tensor:
    return causal_lm_loss(logits, ids, reduction="none")


WORKLOADS = {
    "sst2-full": Workload(lambda: minilm("full"), sentences, of_classes, 16),
    "sst2-lora": Workload(lambda: minilm("lora"), sentences, of_classes, 16),
    "sst2-lora-64": Workload(lambda: minilm("lora"), sentences, of_classes, 64),  # as in training
    "squeezenet-full": Workload(squeezenet, images, of_classes, 16),
    "vit-full": Workload(vit, images, of_classes, 16),
    "smollm2-lora": Workload(smollm2, words, of_words, 4),
}
CONTENDERS = ("non-private", "fastdp", "opacus hooks", "opacus ghost")
SHOWN = ("model", "contender", "ratio", "floor", "step_ms", "p20_ms", "p80_ms", "peak_mib", "memory_ratio", "error",
         "error_dtype")  # fmt: skip
COLUMNS = (*SHOWN, "batch_size", "dtype", *FACTS)

# ---------------------------------------------------------------------- tables

Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


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
    runs, steps = read(RUNS), read(STEPS)
    return {
        "accuracy": results(runs, "accuracy"),
        "perplexity": results(runs, "perplexity"),
        "steps": step_table(steps),
        "clipping": clipping_table(read(TUNING)),
    }


def filled(text: str) -> str:
    """The document with the tables of today between their marks."""
    for name, body in tables().items():
        mark = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.S)
        if not mark.search(text):
            raise ValueError(f"the document has no place for the table {name}")
        text = mark.sub(lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text)  # type: ignore[misc]
    return text


# ---------------------------------------------------------------------- main


def register() -> None:
    """Make `benchmarks.training`, and the fresh processes that it starts, know these workloads."""
    OTHERS.update(WORKLOADS)
    FLOORLESS.update(WORKLOADS)
    memory.MAIN = "benchmarks.finetuning"


def step_row(row: Row) -> Row:
    """A row of `benchmarks.training` with the columns of this table; what fails has an error of inf."""
    fails = row["status"] not in ("ok", "wrong") and row["error"] == "-"
    return {**row, "model": row["workload"]} | ({"error": "inf"} if fails else {})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--report", action="store_true", help="write the tables into docs/finetuning.md")
    parser.add_argument("--steps", action="store_true", help="measure steps")
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=list(training.CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory", action="store_true", help="measure memory only")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=list(training.TYPES))
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    register()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if options.memory_of:
        memory.measure(options.memory_of)
        return
    place = Place(torch.device(options.device), getattr(torch, options.dtype))
    names = list(dict.fromkeys(["non-private", *options.contenders]))
    if options.steps:
        print(", ".join(f"{key} {value}" for key, value in versions(place.device).items()))
        rows = []
        for model in options.models:
            roof = roofs(place.device, place.dtype)
            found = training.run(model, names, options.rounds, not options.no_memory, place, roof)
            rows += (found := [step_row(row) for row in found])
            if options.out:
                append(options.out, found, COLUMNS)
        show(rows, SHOWN)
    if options.memory:
        for model in options.models:
            peaks = memory.peaks(memory.Job("cpu", model, options.device, options.dtype), names)
            for name, peak in peaks.items():
                if peak.mib is None:  # a peer that fails on this model has no memory either
                    print(f"{model}, {name}: {peak.status}, {peak.why}", file=sys.stderr)
            common = {"model": model, "batch_size": WORKLOADS[model].batch_size, **versions(place.device)}
            rows = [{**common, "contender": n, "peak_mib": f"{p.mib:.0f}"} for n, p in peaks.items() if p.mib]
            show(rows, ("model", "contender", "peak_mib"))
            if options.out:
                append(options.out, rows, COLUMNS)
    if options.report:
        DOC.write_text(filled(DOC.read_text()))


if __name__ == "__main__":
    keep_memory("benchmarks.finetuning")
    main()
