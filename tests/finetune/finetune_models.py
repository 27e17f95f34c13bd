"""Tiny models with tokenizers, and runs of the command on them, for the tests of fastdp.finetune."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from fastdp.__main__ import parser  # noqa: E402
from fastdp.finetune.command import main  # noqa: E402

# gdp is computed at once; prv, the default, takes seconds
QUICK = ("--epochs", 0.5, "--batch-size", 8, "--epsilon", 8, "--device", "cpu", "--max-physical-batch-size", 8,
         "--accountant", "gdp")  # fmt: skip
WORDS = "good bad fine awful film plot actor scene very not".split()


def tokenizer_of(folder, pad=True, eos=True, words=WORDS):
    """A tokenizer of whole words, saved."""
    names = ["[UNK]"] + ["[PAD]"] * pad + ["</s>"] * eos
    vocabulary = {word: number for number, word in enumerate([*names, *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]"} | ({"pad_token": "[PAD]"} if pad else {}) | ({"eos_token": "</s>"} if eos else {})
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **special)
    found.save_pretrained(folder)
    return found


def classifier(folder, labels=None, dropout=0.1, **more):
    """A BERT of two layers: the body alone, or (labels) a classifier of them."""
    tokenizer_of(folder, **more)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    if labels is None:
        transformers.BertModel(config).save_pretrained(folder)
    else:
        config.id2label, config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def language_model(folder, kind="gpt2", **more):
    """A GPT-2 or Llama of two layers."""
    tokenizer_of(folder, **more)
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    else:
        config = transformers.LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=32,
        )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def texts(count, seed=0):
    """Sentences of 2 to 7 words, no two alike as far as there are enough, and labels that follow their first word."""
    drawn = torch.Generator().manual_seed(seed)
    found, labels = [], []
    for _ in range(count):
        length = int(torch.randint(2, 8, (), generator=drawn))
        numbers = torch.randint(0, len(WORDS), (length,), generator=drawn).tolist()
        found.append(" ".join(WORDS[i] for i in numbers))
        labels.append("pos" if numbers[0] % 2 == 0 else "neg")
    return found, labels


def reviews(path: Path, count=40, people=None):
    """A CSV of text and label, and who wrote it."""
    found, labels = texts(count)
    rows = [f"{text},{label}" + (f",p{i % people}" if people else "") for i, (text, label) in
            enumerate(zip(found, labels, strict=True))]  # fmt: skip
    path.write_text("\n".join(["text,label" + ",user" * bool(people), *rows]) + "\n")
    return path


def options_of(*words):
    return parser().parse_args(["finetune", *map(str, words)])


def command(*words):
    """The exit code of `python -m fastdp finetune WORDS`."""
    return main(options_of(*words))


def refused(capsys, *words):
    """The message of a run that ends with 1 and without a traceback."""
    assert command(*words) == 1
    found = capsys.readouterr()
    assert "Traceback" not in found.err and "fastdp finetune: " in found.err
    return found.err


def card_of(out):
    return json.loads((Path(out) / "privacy_card.json").read_text())


def writer(folder):
    """A T5 of two layers."""
    tokenizer_of(folder)
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, pad_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def seer(folder):
    """A ViT of one layer for images of 16 x 16."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
    )  # fmt: skip
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, "do_resize": True,
        "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }))  # fmt: skip
    return folder
