"""Every program of docs/huggingface.md runs, with tiny models in place of those of the hub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ..hf_models import TINY, transformers
from ..hf_texts import llama, tokenizer

pytestmark = pytest.mark.slow  # `make test-all` runs it

datasets = pytest.importorskip("datasets")

PAGE = (Path(__file__).parent.parent.parent / "docs" / "huggingface.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
OF_HUB = {
    "HuggingFaceTB/SmolLM2-135M": llama,
    "sentence-transformers/all-MiniLM-L6-v2": lambda: transformers.BertModel(
        transformers.BertConfig(**TINY, pad_token_id=27)
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_run(number, tmp_path, monkeypatch):
    program = PROGRAMS[number]
    for package in re.findall(r"^from (trl|sentence_transformers|peft) import", program, re.M):
        pytest.importorskip(package)
    (named,) = [name for name in OF_HUB if name in program]
    torch.manual_seed(0)
    OF_HUB[named]().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    for name, value in (("CI", "1"), ("HF_HUB_OFFLINE", "1"), ("WANDB_MODE", "disabled")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    exec(compile(program.replace(named, str(tmp_path / "model")), f"program {number}", "exec"), {})
    assert (tmp_path / "out" / "privacy.json").exists()
