"""A private step of a GPT whose head and loss are one function, against one that stores the logits.

    python -m benchmarks.fused_loss              # time, interleaved, and peak memory of fresh processes
    python -m benchmarks.fused_loss --rounds 3 --d 384 --layers 6

Peaks are those of resident memory of a process that makes two steps, of an allocator that gives freed blocks back.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.losses import linear_cross_entropy

from .memory import fresh_mib, resident_kib
from .models import GPT, token_losses
from .timing import interleaved, keep_memory

SIZES = {"d": 256, "layers": 2, "batch": 8, "length": 512, "vocabulary": 50257}
WAYS = ("stored logits", "fused")


class Model(GPT):
    """The GPT of the benchmarks, which returns the losses of samples [B]."""

    def __init__(self, way: str, **sizes: int) -> None:
        super().__init__(sizes["layers"], sizes["d"], sizes["d"] // 64, sizes["length"], sizes["vocabulary"])
        self.way = way

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        positions = torch.arange(ids.size(1), device=ids.device).repeat(ids.size(0), 1)
        hidden = self.norm(self.blocks(self.tokens(ids) + self.positions(positions)))
        if self.way == "fused":
            return linear_cross_entropy(hidden, self.head.weight, labels)
        return token_losses(F.linear(hidden, self.head.weight), labels)


class Steps:
    """Steps of one way: private ones, or ordinary ones."""

    def __init__(self, way: str, private: bool, budget: int | None, sizes: dict[str, int]) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Model(way, **sizes)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), fused=True)
        if private:
            self.optimizer = fastdp.DPAdamW(
                self.model,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                expected_batch_size=sizes["batch"],
                memory_budget=budget,
            )
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, sizes["vocabulary"], (sizes["batch"], sizes["length"] + 1), generator=generator)
        self.ids, self.labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def __call__(self) -> None:
        self.model(self.ids, self.labels).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, help="memory_budget of the private steps, in bytes")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.memory_of:
        step = Steps(*json.loads(options.memory_of))
        step(), step()
        print(resident_kib() / 1024)
        return
    keep_memory("benchmarks.fused_loss")
    sizes = {name: getattr(options, name) for name in SIZES}
    kinds = {
        f"{'private' if private else 'ordinary'}, {way}": (way, private) for private in (True, False) for way in WAYS
    }
    steps = {name: Steps(*kind, options.budget, sizes) for name, kind in kinds.items()}
    times = interleaved(steps, torch.device("cpu"), options.rounds, 1)
    del steps
    gc.collect()
    print(", ".join(f"{name} {value}" for name, value in sizes.items()), f"threads {torch.get_num_threads()}")
    for name, kind in kinds.items():
        peak = fresh_mib("benchmarks.fused_loss", [*kind, options.budget, sizes])
        print(f"{name:26s}{times[name]:8.2f} s{peak:10.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
