"""Host time of a private step: models of many layers and tiny widths, where every kernel is over before Python is.

    python -m benchmarks.host [--models gpt cnn] [--layers 24] [--rounds 15] [--compiled] [--out FILE.csv]

Steps of all contenders are interleaved in one process of one thread, on equal weights and data; `ratio` is to the
ordinary step of the same model, `us_per_use` the time beyond it over the number of layers with parameters. What the CPU
computes here is little but not nothing. AdamW, a noise multiplier of 1, clipping norm 1; the medians of the rounds.
--compiled: also the ordinary step of a compiled model (`model.compile()`), and the replayed step that Inductor compiled
(`graphed(compile=True)`); `of_compiled` is the ratio to the former. Inductor takes a minute or two for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fastdp.utils.progress_bar import Bar

from .contenders import CONTENDERS, NotApplicable, trained
from .models import GPT, Logits, Workload, class_losses, token_losses
from .timing import Row, begin, interleaved, publish, versions

B, T, D, WORDS = 4, 8, 32, 64
CPU = torch.device("cpu")
NAMES = ("non-private", "fastdp", "fastdp graphed", "fastdp loop", "opacus hooks", "opacus ghost")
COMPILED = ("non-private compiled", "fastdp graphed compiled")
COLUMNS = ("model", "contender", "ratio", "of_compiled", "median_ms", "us_per_use", "uses")


def cnn(layers: int) -> nn.Module:
    """Convolutions of eight channels, each with a GroupNorm."""
    body: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(layers):
        body += [nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def hf_gpt2(layers: int) -> nn.Module:
    """GPT-2 of transformers, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=WORDS, n_positions=2 * T, n_embd=D, n_layer=layers, n_head=2)
    quiet = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, tie_word_embeddings=False)
    return Logits(GPT2LMHeadModel(GPT2Config(**sizes, **quiet)))


def hf_llama_lora(layers: int) -> nn.Module:
    """Llama of transformers with LoRA adapters of peft at all of its linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=WORDS, hidden_size=D, intermediate_size=2 * D, num_hidden_layers=layers)
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=2 * T, use_cache=False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return Logits(get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=targets)))


def texts(size: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, WORDS, (size, T + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 4, 4), torch.randint(0, 5, (size,))


def workloads(layers: int) -> dict[str, Workload]:
    """Four models of so many layers, as wide as a kernel's overhead."""
    return {
        "gpt": Workload(lambda: GPT(layers, D, 2, T, WORDS), texts, token_losses, B),
        "cnn": Workload(lambda: cnn(layers), images, class_losses, B),
        "hf-gpt2": Workload(lambda: hf_gpt2(layers), texts, token_losses, B),
        "llama-lora": Workload(lambda: hf_llama_lora(layers), texts, token_losses, B),
    }


def stepping(name: str, work: Workload) -> tuple[Callable[[], object], int]:
    """A contender's step on a batch of its own, warm, and its number of modules with trained parameters."""
    contender = CONTENDERS[name]
    torch.manual_seed(0)
    model = contender.prepare(work.build()).train()
    uses = sum(any(p.requires_grad for p in module.parameters(recurse=False)) for module in model.modules())
    step = contender.make(model, work)
    torch.manual_seed(1)
    x, y = work.batch(work.batch_size)
    for _ in range(3):
        step(x, y)
    assert trained(model)
    return lambda: step(x, y), uses


def measured(name: str, work: Workload, rounds: int, names: Sequence[str] = NAMES) -> list[Row]:
    """A table of one model."""
    runs, uses, rows = {}, 0, list[Row]()
    for contender in names:
        try:
            runs[contender], uses = stepping(contender, work)
        except (NotApplicable, ImportError, NotImplementedError, RuntimeError, ValueError) as problem:
            rows.append({"model": name, "contender": contender, "ratio": type(problem).__name__})
    times = interleaved(runs, CPU, rounds)
    base, compiled = times["non-private"], times.get(COMPILED[0])
    for contender, spent in times.items():
        beyond = f"{(spent - base) / uses * 1e6:.0f}"
        rows.append({"model": name, "contender": contender, "ratio": f"{spent / base:.2f}",
                     "of_compiled": f"{spent / compiled:.2f}" if compiled and contender in COMPILED else "",
                     "median_ms": f"{spent * 1e3:.1f}", "us_per_use": beyond, "uses": uses})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=tuple(workloads(1)), default=list(workloads(1)))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin("benchmarks.host")
    torch.set_num_threads(1)
    works = workloads(options.layers)
    names = (*NAMES, *COMPILED) if options.compiled else NAMES
    rows, bar = list[Row](), Bar(len(options.models))
    for number, name in enumerate(options.models):
        bar.at(number, name)
        rows += measured(name, works[name], options.rounds, names)
    bar.at(len(options.models))
    publish(rows, COLUMNS, {"layers": options.layers, **versions()}, options.out)


if __name__ == "__main__":
    main()
