"""The fine-tuning examples on tiny random stand-ins, and the tables of docs/finetuning.md against the rows kept."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.slow  # `make test-all` runs it

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))
pytest.importorskip("transformers")
pytest.importorskip("peft")

import cifar10_networks as networks  # noqa: E402
import common  # noqa: E402
import finetune_cifar10 as cifar10  # noqa: E402
import finetune_shakespeare as shakespeare  # noqa: E402
import finetune_sst2 as sst2  # noqa: E402

from benchmarks import exactness, finetuning  # noqa: E402
from benchmarks.finetuning_models import FINETUNING  # noqa: E402
from benchmarks.tables import read_rows  # noqa: E402

from . import pictures  # noqa: E402

WORDS = "a film that is good bad dull fine".split()


class Tokenizer:
    """Words (or characters) to numbers."""

    def __call__(self, text: str | list[str], **_: Any) -> dict[str, list[Any]]:
        if isinstance(text, str):
            return {"input_ids": [ord(c) % 40 for c in text]}
        return {"input_ids": [[1, *(2 + WORDS.index(w) for w in line.split()), 0] for line in text]}


def tiny_sentences(name: str, method: str, seed: int) -> tuple[sst2.Classifier, Tokenizer]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=24, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    return sst2.prepare(BertModel(config, add_pooling_layer=False), method), Tokenizer()


def tiny_images(network: str, where: str | None, size: int, seed: int) -> cifar10.Classifier:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return cifar10.Classifier(body, 32, size)


def tiny_words(where: str | None, seed: int, rank: int) -> tuple[nn.Module, Tokenizer]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, use_cache=False)  # fmt: skip
    return shakespeare.with_lora(LlamaForCausalLM(config), rank), Tokenizer()


_known: dict[str, float] = {}


@pytest.fixture(autouse=True)
def noise_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a noise multiplier takes a second, and the runs here ask for the same few."""
    search = common.fastdp.noise_multiplier_for

    def known(**arguments: Any) -> float:
        if str(arguments) not in _known:
            _known[str(arguments)] = search(**arguments)
        return _known[str(arguments)]

    monkeypatch.setattr(common.fastdp, "noise_multiplier_for", known)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with tiny files of all three data sets."""
    draw = np.random.default_rng(0)
    for name, count in zip(sst2.FILES, (48, 12, 12), strict=True):
        lines = [f"{' '.join(draw.choice(WORDS, draw.integers(2, 7)))}\t{i % 2}" for i in range(count)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    for name in ("one_gut.txt", "two_gut.txt", "two_gut_f.txt"):
        (tmp_path / name).write_text(f"{name} " + "to be or not to be, " * 60)
    (tmp_path / "weights").touch()
    pictures.write(tmp_path / "cifar10_jpeg.npz", draw, 60, 20)
    return tmp_path


SHORT = ["--epochs", "2", "--batch-size", "16", "--physical-batch-size", "5", "--device", "cpu"]
EXAMPLES = {
    "sst2": (sst2.main, tiny_sentences, ("lora", "full", "head")),
    "cifar10": (cifar10.main, tiny_images, ("head", "full")),
    "shakespeare": (shakespeare.main, tiny_words, ("lora",)),
}
CASES = [(name, method) for name, (_, _, methods) in EXAMPLES.items() for method in methods]


def run(name: str, data: Path, *arguments: str) -> dict[str, Any]:
    main, loader, _ = EXAMPLES[name]
    more = ["--length", "12", "--test-records", "8", "--steps", "6"] if name == "shakespeare" else []
    return dict(main(["--data", str(data), *SHORT, *more, *arguments], loader=loader))


@pytest.mark.parametrize(("name", "method"), CASES)
def test_private_training_reaches_its_epsilon_and_leaves_a_row(name: str, method: str, data: Path, capsys) -> None:
    out = data / "rows.csv"
    run(name, data, "--method", method, "--epsilon", "4", "--out", str(out))
    with out.open(newline="") as file:
        reader = csv.DictReader(file)
        (row,), header = list(reader), reader.fieldnames
    assert tuple(header or ()) == common.COLUMNS
    assert 3.9 < float(row["epsilon"]) <= 4 and float(row["noise_multiplier"]) > 0
    assert row["method"] == method and float(row["nll"]) > 0 and row["torch"] == torch.__version__
    text = capsys.readouterr().out
    assert "fastdp.verify: exact" in text and "epsilon 4.00" in text.replace("3.99", "4.00")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_same_script_trains_without_privacy(name: str, data: Path) -> None:
    method = EXAMPLES[name][2][0]
    rows = [run(name, data, "--method", method, "--engine", "none", "--lr", "0") for _ in range(2)]
    assert rows[0]["nll"] == rows[1]["nll"] and rows[0]["epsilon"] == "inf" and rows[0]["noise_multiplier"] == "-"
    trained = run(name, data, "--method", method, "--engine", "none", "--lr", "0.02", "--head-lr", "0.02")
    assert trained["nll"] != rows[0]["nll"]


def test_head_on_kept_features_is_the_whole_model(data: Path) -> None:
    cache = data / "features.pt"
    first = run("cifar10", data, "--method", "head", "--engine", "none", "--cache", str(cache))
    assert cache.exists()
    second = run("cifar10", data, "--method", "head", "--engine", "none", "--cache", str(cache))
    assert first["nll"] == second["nll"]
    model = tiny_images("", None, 64, 0).eval()
    (x, _), (kept, _) = cifar10.read(data)[0], torch.load(cache, weights_only=True)[0]
    torch.testing.assert_close(model.head(kept[:5]), model(x[:5]))


def test_what_is_missing_is_said_with_where_to_get_it(tmp_path: Path) -> None:
    for main, word in ((sst2.main, "glue"), (cifar10.main, "cifar10"), (shakespeare.main, "Gutenberg")):
        with pytest.raises(SystemExit, match=word):
            main(["--data", str(tmp_path / "nowhere")], loader=lambda *_: (nn.Linear(1, 1), Tokenizer()))
    with pytest.raises(SystemExit, match="squeezenet1_1"):
        cifar10.load("squeezenet", None, 64, 0)


# ---------------------------------------------------------------------- pre-trained weights


def test_vit_keeps_its_positions_at_its_own_size() -> None:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=56, patch_size=14)
    torch.manual_seed(0)
    body = Dinov2Model(config).eval()
    x = torch.rand(2, 3, 28, 28)
    wanted = body(x).last_hidden_state  # made for the size in every forward
    made = networks.ViT(networks.resized(body, 28))
    torch.testing.assert_close(made.body(x).last_hidden_state, wanted)
    assert made(x).shape == (2, 24) and made.body.embeddings.position_embeddings.shape[1] == 5
    assert networks.renamed("encoder.layer.0.attention.output.dense.bias") == "encoder.layer.0.attention.o_proj.bias"


# ---------------------------------------------------------------------- figures


@pytest.mark.parametrize("name", ["sst2-lora", "squeezenet-full"])
def test_steps_are_measured_of_exact_contenders(name: str) -> None:
    work = FINETUNING[name]._replace(batch_size=2)
    assert exactness.error_of("fastdp", work) < 1e-4


def test_the_document_has_the_tables_of_the_rows() -> None:
    text = finetuning.DOC.read_text()
    assert finetuning.filled(text) == text, "python -m benchmarks.finetuning --report"
    rows = read_rows(finetuning.RUNS)
    assert rows and all(row["commit"] != "-" and row["date"] for row in rows)
    for row in rows:
        if row["engine"] != "none":
            assert float(row["epsilon"]) <= float(row["epsilon_target"]), row
