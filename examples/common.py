"""What the fine-tuning examples share: options, one training loop, a row of results.

The loop is an ordinary one. What makes it private is the optimizer and the Poisson loader; the same loop with
`--engine none` gives the figures to compare with.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastdp
from fastdp.sampling import current
from fastdp.utils.progress_bar import Bar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples run from a checkout, where benchmarks/ is

from benchmarks.timing import Row, append, versions

ENGINES = ("fastdp", "none")
COLUMNS = (
    "task", "model", "method", "engine", "setting", "epsilon_target", "epsilon", "delta", "noise_multiplier",
    "sample_rate", "batch_size", "records", "steps", "epochs", "lr", "head_lr", "clipping", "max_grad_norm",
    "trainable",
    "accuracy_dev", "accuracy", "perplexity_before", "perplexity", "nll", "ece", "seconds", "peak_mib", "note", "seed",
    "device", "threads", "torch", "transformers", "peft", "opacus", "fastdp", "commit", "date",
)  # fmt: skip
Losses = Callable[[nn.Module, Any], Tensor]  # losses of the samples of a batch, [B]


class Defaults(NamedTuple):
    """What a method is trained with where the command line does not say."""

    lr: float
    epochs: float
    batch_size: int
    head_lr: float | None = None


def parser(description: str, methods: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all examples have."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--data", type=Path, help="the folder with the data (without it, a message says where to get it)")
    made.add_argument("--model", help="a hub name or a folder; default: an installed package's, else the hub's")
    made.add_argument("--method", default=methods[0], choices=methods)
    made.add_argument("--engine", default="fastdp", choices=ENGINES, help="what makes it private; none: nothing")
    made.add_argument("--epsilon", type=float, default=3.0)
    made.add_argument("--delta", type=float, default=1e-5)
    made.add_argument("--clipping", default="local", choices=("local", "automatic", "global"))
    made.add_argument("--max-grad-norm", type=float, default=1.0)
    made.add_argument("--batch-size", type=int, help="expected size of a logical batch")
    made.add_argument("--physical-batch-size", type=int, help="default: 64; 4096 for a head on kept features")
    made.add_argument("--lr", type=float)
    made.add_argument("--head-lr", type=float, help="learning rate of the new head, where more than it is trained")
    made.add_argument("--epochs", type=float)
    made.add_argument("--records", type=int, help="train on this many records only")
    made.add_argument("--seed", type=int, default=0,
                      help="of new weights and of the order of data without privacy; private sampling and noise are "
                           "drawn from the operating system, always")  # fmt: skip
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--cache", type=Path, help="keep the features of a frozen body in this file (--method head)")
    made.add_argument("--quick", action="store_true", help="a small part of the data: two minutes on two CPU cores")
    made.add_argument("--out", type=Path, help="append a row of results to this CSV file")
    made.add_argument("--note", default="", help="a remark for the row")
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None, defaults: Callable[..., Defaults]) -> Any:
    """Parse; what was not given is filled in from defaults(method, private). Checks what belongs together."""
    options = made.parse_args(arguments)
    if options.engine != "none" and not options.epsilon > 0:
        made.error("--epsilon must be positive; without privacy: --engine none")
    for name, value in defaults(options.method, options.engine != "none")._asdict().items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.physical_batch_size is None:
        options.physical_batch_size = 4096 if options.method == "head" else 64
    return options


def need_data(options: Any, files: Sequence[str], where: str) -> Path:
    """The folder of the data; exits with where to get it if a file is missing."""
    missing = [name for name in files if options.data is None or not (options.data / name).exists()]
    if missing:
        given = f"not in {options.data}" if options.data else "give their folder as --data"
        raise SystemExit(f"this example reads {', '.join(missing)}: {given}.\n{where}")
    return Path(options.data)


def in_package(package: str, file: str = "") -> Path | None:
    """A file in an installed package, which is not imported; None if there is none."""
    found = importlib.util.find_spec(package)
    folder = Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None
    return folder / file if folder and (folder / file).exists() else None


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def groups_of(model: nn.Module, options: Any) -> list[dict[str, Any]]:
    """The optimizer's groups: the new head learns faster than what is pre-trained."""
    head = {id(p) for p in getattr(model, "head", nn.Identity()).parameters()}
    parts = [p for p in trainable(model) if id(p) in head], [p for p in trainable(model) if id(p) not in head]
    rates = options.head_lr or options.lr, options.lr
    return [{"params": part, "lr": lr, "peak": lr} for part, lr in zip(parts, rates, strict=True) if part]


def move(batch: Any, device: str) -> Any:
    """Tensors of a tuple, list or dict to the device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    return tuple(move(value, device) for value in batch)


def optimizer_of(model: nn.Module, sigma: float, options: Any) -> Any:
    """DP-AdamW, or AdamW with --engine none."""
    groups = groups_of(model, options)
    if options.engine == "none":
        return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    return fastdp.DPAdamW(model, params=groups, weight_decay=0.0, noise_multiplier=sigma, clipping=options.clipping,
                          max_grad_norm=options.max_grad_norm)  # fmt: skip


def mean(losses: Tensor) -> Tensor:
    """The mean over the samples, 0 of an empty batch."""
    return losses.sum() / max(len(losses), 1)


# ---------------------------------------------------------------------- training


def train(
    model: nn.Module, data: Any, losses: Losses, options: Any, collate: Any = None, max_steps: int | None = None
) -> Row:
    """Train in place; returns what the row of results says of the training.

    Args:
        model: what requires grad is trained.
        data: a map-style dataset. Records of like length should stand together: physical batches are cut in the
            order of the data, so that little is padded.
        losses: losses(model, batch) -> [B], each of its own sample alone.
        max_steps: end after so many logical batches, at a place planned from the start (the noise is for it).
    """
    if options.records:
        data = torch.utils.data.Subset(data, range(min(options.records, len(data))))
    private = options.engine != "none"
    options.batch_size = min(options.batch_size, len(data))
    loader = fastdp.poisson_loader(
        data, expected_batch_size=options.batch_size, max_physical_batch_size=options.physical_batch_size,
        collate_fn=collate, seed=None if private else options.seed,
    )  # fmt: skip
    steps = min(math.ceil(options.epochs * loader.steps_per_epoch), max_steps or sys.maxsize)
    sigma = 0.0
    if private:
        sigma = fastdp.noise_multiplier_for(
            target_epsilon=options.epsilon, delta=options.delta, sample_rate=loader.sample_rate, steps=steps
        )
    count = sum(p.numel() for p in trainable(model))
    print(f"{options.engine}: {count:,} trainable parameters, {len(data):,} records, sample rate "
          f"{loader.sample_rate:.4f}, {steps} steps, noise multiplier {sigma:.3f}", flush=True)  # fmt: skip
    model.to(options.device).train()
    optimizer = optimizer_of(model, sigma, options)
    epsilon = (lambda: optimizer.epsilon(options.delta)) if private else (lambda: math.inf)
    start, done, bar, seen = time.perf_counter(), 0, Bar(steps), list[Tensor]()
    while done < steps:
        for batch in loader:
            _schedule(optimizer, done, steps)
            each = losses(model, move(batch, options.device))
            (mean(each) if private else each.sum() / options.batch_size).backward()
            seen.append(each.detach())
            place = current()
            last = place is not None and place.final
            if private or last:
                optimizer.step()
                optimizer.zero_grad()
            if last:
                done += 1
                bar.at(done)
                if done == steps:
                    break
        spent, loss = time.perf_counter() - start, float(torch.cat(seen).mean())
        seen.clear()
        print(f"  step {done} of {steps}: training loss {loss:.3f}, epsilon {epsilon():.2f}, {spent:.0f} s",
              flush=True)  # fmt: skip
    spent = epsilon()
    if private:
        optimizer.detach()
    return {
        "engine": options.engine, "method": options.method, "epsilon_target": options.epsilon if private else "inf",
        "epsilon": f"{spent:.3f}", "delta": options.delta if private else "-",
        "noise_multiplier": f"{sigma:.4f}" if private else "-", "sample_rate": f"{loader.sample_rate:.6f}",
        "batch_size": options.batch_size, "records": len(data), "steps": steps,
        "epochs": f"{steps / loader.steps_per_epoch:.2f}", "lr": options.lr, "head_lr": options.head_lr or options.lr,
        "clipping": options.clipping if private else "-", "max_grad_norm": options.max_grad_norm if private else "-",
        "trainable": count, "seconds": f"{time.perf_counter() - start:.0f}",
        "peak_mib": f"{peak_mib(options.device):.0f}",
    }  # fmt: skip


def _schedule(optimizer: torch.optim.Optimizer, done: int, steps: int) -> None:
    """Warm-up over a twentieth of the steps, then linearly towards 0. By logical steps, which schedulers don't know."""
    warm = max(1, steps // 20)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * min((done + 1) / warm, (steps - done) / max(steps - warm, 1), 1.0)


def logits_of(model: nn.Module, batches: Iterable[Any], device: str) -> Tensor:
    """model(batch) of all batches, in evaluation mode."""
    model.to(device).eval()
    with torch.no_grad():
        return torch.cat([model(move(batch, device)).float().cpu() for batch in batches])


def frozen(model: nn.Module, features: Callable[[Any], Tensor], parts: Sequence[Iterable[Any]],
           labels: Sequence[Tensor], options: Any) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """(features, labels) of each part's batches: of a frozen body they are the same in every step.

    With --cache, those of an earlier run are taken if they are of as many records.
    """
    cache: Path | None = options.cache
    if cache is not None and cache.exists():
        kept = torch.load(cache, weights_only=True)
        if [len(y) for _, y in kept] == [len(y) for y in labels]:
            return [(x, y) for x, y in kept]
    print(f"features of {sum(map(len, labels)):,} records", flush=True)
    model.to(options.device).eval()
    with torch.no_grad():
        found = [torch.cat([features(move(batch, options.device)).cpu() for batch in part]) for part in parts]
    kept = list(zip(found, labels, strict=True))
    if cache is not None:
        torch.save([list(pair) for pair in kept], cache)
    return kept


def peak_mib(device: str) -> float:
    """Peak memory so far: of the allocator on a GPU, else the process's resident memory (NaN where not known)."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        return math.nan


def finish(row: Row, options: Any, **more: object) -> Row:
    """Complete the row with versions, print it, and append it to the file asked for."""
    from importlib.metadata import version

    row = {**row, "seed": options.seed, "note": options.note, **more}
    row = {**versions(options.device), "transformers": version("transformers"), "peft": version("peft"),
           "date": datetime.date.today().isoformat(), **row}  # fmt: skip
    print(", ".join(f"{name} {row[name]}" for name in COLUMNS[:28] if str(row.get(name, "")) not in ("", "-")))
    if options.out:
        append(options.out, [row], COLUMNS)
    return row


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
