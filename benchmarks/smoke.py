"""What users run, in short, on a GPU (or here): whether it trains at all, and how long it takes.

    python -m benchmarks.smoke [--device cuda] [--only loop trainer] [--out FILE.csv]

A line for each, as it ends: "ok", what is not installed, or the error, and the seconds, those of the first step and of
the rest apart. Weights must have moved and be finite, epsilon must be finite. The exit code is 1 if one failed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fastdp

from .steps import one_line
from .timing import Row, append, synchronize, versions

STEPS = 5
COLUMNS = ("case", "result", "first_s", "rest_s")
WORDS, LENGTH = 101, 16
PRIVATE: dict[str, Any] = dict(noise_multiplier=1.0, max_grad_norm=1.0)


def table() -> TensorDataset:
    """Two hundred rows with a label each."""
    return TensorDataset(torch.randn(200, 20), torch.randint(0, 2, (200,)))


def classifier(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)


def trained(model: nn.Module, optimizer: Any, batches: Iterable[Any], step: Callable[[Any], object]) -> float:
    """A few steps and what must hold after them; the seconds of the first one."""
    device, first = next(model.parameters()).device, 0.0
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    for number, batch in enumerate(itertools.islice(batches, STEPS)):
        begin = time.perf_counter()
        step(batch)
        if number == 0:
            synchronize(device)
            first = time.perf_counter() - begin
    holds(model, before)
    assert math.isfinite(optimizer.epsilon(delta=1e-5)), "epsilon is not finite"
    return first


def holds(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        if name in before:
            assert torch.isfinite(p).all(), f"{name} is not finite"
            assert not torch.equal(p, before[name]), f"{name} has not moved"


def loop(device: torch.device, graphed: bool = False, at_once: int = 32, **options: Any) -> float:
    """README's loop; `graphed`: its forwards and backwards replayed, as CUDA graphs on a GPU."""
    model, data = classifier(device), table()

    def losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        x, y = (t.to(device, non_blocking=True) for t in batch)
        return F.cross_entropy(model(x), y)

    fastdp.verify(model, losses, data[:8])
    batches = fastdp.poisson_loader(data, expected_batch_size=20, max_physical_batch_size=at_once, **options)
    optimizer = fastdp.DPAdamW(model, lr=1e-3, graphed=graphed, **PRIVATE)

    def step(batch: Sequence[Tensor]) -> None:
        assert batch[0].is_pinned() or not options or device.type != "cuda", "not in pinned memory"
        losses(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    first = trained(model, optimizer, batches, step)
    assert not graphed or "replayed: 0" not in optimizer.explain(), optimizer.explain()
    return first


def loop_graphed(device: torch.device) -> float:
    return loop(device, graphed=True, at_once=8)


def workers(device: torch.device) -> float:
    """The same, with batches from other processes in pinned memory."""
    return loop(device, num_workers=2, pin_memory=device.type == "cuda")


def graphed(device: torch.device) -> float:
    """The same, replayed: as a CUDA graph on a GPU."""
    model, data = classifier(device), table()
    batches = fastdp.poisson_loader(data, expected_batch_size=20)
    optimizer = fastdp.DPAdamW(model, lr=1e-3, **PRIVATE)
    example = [t.to(device) for t in next(iter(DataLoader(data, 20)))]
    replayed = optimizer.graphed(
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"), example, sizes=(64,)
    )
    first = trained(model, optimizer, batches, lambda batch: replayed(*(t.to(device) for t in batch)))
    assert replayed.replayed and not replayed.eager, f"not replayed: {replayed.reasons}"
    assert replayed.captured or device.type != "cuda", "replayed, but not as a CUDA graph"
    return first


def lora(device: torch.device) -> float:
    """A Llama with adapters, and the loss of transformers."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, max_position_embeddings=LENGTH, use_cache=False)  # fmt: skip
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, init_lora_weights=False))
    model = adapted.to(device, torch.bfloat16)
    batches = fastdp.poisson_loader(TensorDataset(torch.randint(0, WORDS, (64, LENGTH))), expected_batch_size=8)
    optimizer = fastdp.DPAdamW(model, lr=1e-1, **PRIVATE)

    def step(batch: Sequence[Tensor]) -> None:
        ids = batch[0].to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, optimizer, batches, step)


def trainer(device: torch.device) -> float:
    """A GPT-2 by DPTrainer under bf16 autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, TrainingArguments

    from fastdp.hf import DPTrainer, PrivacyArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    before = {name: p.detach().to(device, copy=True) for name, p in model.named_parameters()}
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, WORDS, (64, LENGTH))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_train_batch_size=8, max_steps=STEPS, bf16=True,
                                      use_cpu=device.type == "cpu", report_to="none", save_strategy="no",
                                      disable_tqdm=True, max_grad_norm=0.0)  # fmt: skip
        made = DPTrainer(model=model, args=arguments, train_dataset=rows,
                         privacy=PrivacyArguments(noise_multiplier=1.0, delta=1e-5))  # fmt: skip
        made.remove_callback(PrinterCallback)
        made.train()
    holds(model, before)
    return math.nan


CASES = {
    "loop": loop,
    "loop-graphed": loop_graphed,
    "workers": workers,
    "graphed": graphed,
    "lora": lora,
    "trainer": trainer,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    told = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    device, facts, failed = torch.device(told.device), versions(told.device), False
    for name in told.only:
        torch.manual_seed(0)
        begin, first, result = time.perf_counter(), math.nan, "ok"
        try:
            first = CASES[name](device)
            synchronize(device)
        except ModuleNotFoundError as missing:
            result = f"{missing.name} is not installed"
        except Exception as problem:  # noqa: BLE001  (the next is tried all the same)
            result, failed = f"{type(problem).__name__}: {one_line(problem)}", True
            traceback.print_exc()
        rest = time.perf_counter() - begin - (0.0 if math.isnan(first) else first)
        row: Row = {"case": name, "result": result, "first_s": "-" if math.isnan(first) else f"{first:.2f}",
                    "rest_s": f"{rest:.2f}"}  # fmt: skip
        print(f"{name:<12} {row['first_s']:>6} + {row['rest_s']:>6} s  {result}", flush=True)
        append(told.out, [row | facts], (*COLUMNS, *facts))
    sys.exit(failed)


if __name__ == "__main__":
    main()
