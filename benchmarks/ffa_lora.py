"""LoRA with its first factor frozen (FFA-LoRA, arXiv 2403.12313) against LoRA, both private.

    python -m benchmarks.ffa_lora [--out FILE.csv]      # ten minutes on one core

`loss`: a tiny Llama learns characters of Python's standard library, which is public, then by adapters of rank 8 the
"private" text of this repository's documents, in records of 32 characters. Nats per character on records left out, by
seed and learning rate, at EPSILON. `step`: one text of 1024 tokens through a layer of the size of Llama 1.1B.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastdp

from .large import Llama, with_lora
from .timing import Row, begin, interleaved, publish, versions

EPSILON, DELTA, LENGTH, BATCH, STEPS, SEEDS = 3.0, 1e-5, 32, 256, 60, 5
WAYS, RATES = ("LoRA", "FFA-LoRA"), (3e-3, 6e-3, 1e-2, 2e-2)
COLUMNS = ("what", "way", "rate", "seed", "value", "trained")


def trained(model: Any, way: str, first: str) -> int:
    for name, p in model.named_parameters():
        if way == "FFA-LoRA" and first in name:
            p.requires_grad_(False)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def records(paths: list[Path]) -> Tensor:
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths).encode("ascii", "ignore")
    return torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)


def train(model: Any, optimizer: Any, batches: Any) -> None:
    for ids in batches:
        logits = getattr(out := model(ids), "logits", out)
        F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def quality() -> Iterator[Row]:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base: Any = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                                             num_attention_heads=4, max_position_embeddings=LENGTH))  # fmt: skip
    public = records(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    draws = (public[torch.randint(len(public), (64,))] for _ in range(1500))
    train(base, torch.optim.AdamW(base.parameters(), lr=3e-3), draws)
    text = records(sorted(Path(__file__).parents[1].glob("docs/*.md")))
    text = text[torch.randperm(len(text), generator=torch.Generator().manual_seed(0))]
    for seed, rate, way in ((s, r, w) for s in range(SEEDS) for r in RATES for w in WAYS):
        torch.manual_seed(seed)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(copy.deepcopy(base), config)
        row: Row = {"what": "loss", "way": way, "rate": rate, "seed": seed, "trained": trained(model, way, "lora_A")}
        loader = fastdp.poisson_loader(text[1000:], expected_batch_size=BATCH, steps=STEPS)  # type: ignore[arg-type]
        train(model, fastdp.DPAdam(model, lr=rate, target_epsilon=EPSILON, delta=DELTA, steps=STEPS, loader=loader),
              loader)  # fmt: skip
        with torch.no_grad():
            yield {**row, "value": f"{float(model(text[:1000], labels=text[:1000]).loss):.4f}"}


def times() -> Iterator[Row]:
    ids, runs, sizes = torch.randint(0, 512, (1, 1024)), {}, {}
    for way in WAYS:
        model: Any = with_lora(Llama(1, vocabulary=512))
        sizes[way] = trained(model, way, "down")
        optimizer = fastdp.DPAdamW(model, lr=1e-4, noise_multiplier=1.0, expected_batch_size=1)
        runs[way] = lambda model=model, optimizer=optimizer: train(model, optimizer, [ids])
    spent = interleaved(runs, torch.device("cpu"), 9)
    for way in WAYS:
        yield {"what": "step", "way": way, "value": f"{spent[way] / spent['LoRA']:.3f}", "trained": sizes[way]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin("benchmarks.ffa_lora")
    publish([*times(), *quality()], COLUMNS, versions(), options.out)


if __name__ == "__main__":
    main()
