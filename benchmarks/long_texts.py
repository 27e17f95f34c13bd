"""Norms and steps of long texts: time, and memory beside what ordinary training holds.

    python -m benchmarks.long_texts [--tokens 4096 16384 65536] [--out FILE.csv]      # half an hour on two cores

`norms`: the squared norm of one text's gradient of a linear layer, 512 to 512, float32. "two grams" is ghost clipping
as it is usually written, with both T x T matrices stored; above STORED tokens it is not run. `mib` is what a fresh
process holds beside the data. `step`: one text through decoder layers of the size of Llama 1.1B (d 2048, 32 heads over
4, hidden 5632), in full and by LoRA of rank 8; ratio to the ordinary step, medians of interleaved steps. `whole`: what
all 22 layers and the head hold at the peak under activation checkpointing, of tensors without numbers
(`benchmarks.scale`).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastdp
from fastdp import ops

from . import scale
from .contenders import trained
from .large import Llama, with_lora
from .memory import fresh_mib, resident_kib
from .models import token_losses
from .timing import Row, begin, interleaved, publish, versions

D = 512
STORED = 16384  # tokens whose grams are 1 GiB each
LAYERS = {4096: 2, 16384: 1}  # of the timed step
COLUMNS = ("what", "tokens", "way", "ms", "ratio", "mib")
CPU = torch.device("cpu")


def two_grams(a: Tensor, g: Tensor) -> Tensor:
    return ((a @ a.mT) * (g @ g.mT)).sum((1, 2))


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weight gradient": lambda a, g: a[0].T @ g[0],  # what ordinary training computes of the layer
    "fastdp": ops.linear_norm_sq,
    "fastdp, streamed gram": lambda a, g: ops.linear_norm_sq(a, g, method="gram"),
    "two grams": two_grams,
}


def data(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, g = (torch.randn(1, tokens, D, generator=generator) for _ in range(2))
    return a, g


def measure(way: str, tokens: int) -> float:
    """MiB that the job holds beside its data and what it loads, in this fresh process."""
    WAYS[way](*data(64))
    a, g = data(tokens)
    before = resident_kib()
    WAYS[way](a, g)
    return (resident_kib() - before) / 1024


def norms(tokens: int, rounds: int) -> Iterator[Row]:
    a, g = data(tokens)
    ways = {way: run for way, run in WAYS.items() if tokens <= STORED or way in ("weight gradient", "fastdp")}
    expected = (a[0].double().T @ g[0].double()).square().sum()
    for way, run in ways.items():
        found = run(a, g).double()
        assert way == "weight gradient" or abs(float(found) / float(expected) - 1) < 1e-5, way
    times = interleaved({way: lambda run=run: run(a, g) for way, run in ways.items()}, CPU, rounds, 1)  # type: ignore[misc]
    for way in ways:
        mib = fresh_mib("benchmarks.long_texts", [way, tokens])
        yield {"what": "norms", "tokens": tokens, "way": way, "ms": f"{times[way] * 1e3:.1f}",
               "ratio": f"{times[way] / times['weight gradient']:.2f}", "mib": f"{mib:.0f}"}  # fmt: skip


def step_of(tokens: int, lora: bool, private: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model: Any = Llama(LAYERS[tokens], vocabulary=D)
    model = with_lora(model) if lora else model
    optimizer: Any = torch.optim.AdamW(trained(model), lr=1e-4, fused=True)
    if private:
        optimizer = fastdp.DPAdamW(model, lr=1e-4, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
    ids = torch.randint(0, D, (1, tokens))

    def step() -> None:
        token_losses(model(ids), ids).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(tokens: int, rounds: int) -> Iterator[Row]:
    for lora in (False, True):
        runs = {name: step_of(tokens, lora, name != "ordinary") for name in ("ordinary", "fastdp")}
        times = interleaved(runs, CPU, rounds, 1)
        for name, spent in times.items():
            yield {"what": f"step, {'LoRA' if lora else 'full'}, layers: {LAYERS[tokens]}", "tokens": tokens,
                   "way": name, "ms": f"{spent * 1e3:.0f}", "ratio": f"{spent / times['ordinary']:.3f}"}  # fmt: skip


def wholes(tokens: int) -> Iterator[Row]:
    for lora in (0, 8):
        held = {}
        for name in ("ordinary", "fastdp"):
            meter = scale.one_step(scale.Setting("1b", 1, tokens, lora), name == "fastdp")
            held[name] = sum(meter.peak_by.values()) / 2**20
            yield {"what": f"whole, {'LoRA' if lora else 'full'}", "tokens": tokens, "way": name,
                   "ratio": f"{held[name] / held['ordinary']:.3f}", "mib": f"{held[name]:.0f}"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.memory_of:
        print(measure(*json.loads(options.memory_of)))
        return
    begin("benchmarks.long_texts")
    rows = list[Row]()
    for tokens in options.tokens:
        rows += norms(tokens, max(options.rounds, 5))
        rows += steps(tokens, options.rounds) if tokens in LAYERS else ()
        rows += wholes(tokens)
    publish(rows, COLUMNS, versions(), options.out, 3)


if __name__ == "__main__":
    main()
