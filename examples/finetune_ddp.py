"""`python -m fastdp finetune` on two processes: a small BERT with random weights learns which words are kind.

pip install 'fastdp[finetune]'
python examples/finetune_ddp.py --out OUT [--processes 2] [more options of the command]

It writes a model and 600 sentences beside OUT, and then runs, as you would with a model and data of your own,

torchrun --nproc-per-node 2 -m fastdp finetune MODEL DATA --task classify --epsilon 8 --out OUT
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

import tokenizers
import torch
import transformers

KIND, UNKIND = "good fine lovely brilliant moving".split(), "bad awful dull weak boring".split()
OTHERS = "a the film plot actor scene is was and very".split()


def write_model(folder: Path) -> None:
    """A BERT of one layer, and a tokenizer of whole words."""
    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", *KIND, *UNKIND, *OTHERS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", model_max_length=32
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)


def write_data(path: Path) -> None:
    draw = random.Random(0)
    lines = ["text,label"]
    for number in range(600):
        words = [draw.choice(OTHERS) for _ in range(draw.randint(3, 8))]
        words.insert(draw.randint(0, len(words)), draw.choice(UNKIND if number % 2 else KIND))
        lines.append(f"{' '.join(words)},{'unkind' if number % 2 else 'kind'}")
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    options, more = parser.parse_known_args()
    folder = options.out.with_name(options.out.name + "-data")
    if not folder.exists():
        folder.mkdir(parents=True)
        write_model(folder / "model")
        write_data(folder / "sentences.csv")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
    command = ["-m", "fastdp", "finetune", folder / "model", folder / "sentences.csv", "--task", "classify",
               "--epsilon", "8", "--epochs", "4", "--batch-size", "64", "--lr", "0.01", "--out", options.out,
               *more]  # fmt: skip
    start = [sys.executable, *(launcher if options.processes > 1 else []), *map(str, command)]
    sys.exit(subprocess.run(start).returncode)


if __name__ == "__main__":
    main()
