"""`python -m fastdp finetune` as its user meets it: what it says, what it writes, what it refuses."""

from __future__ import annotations

import csv
import os
import stat
import subprocess
import sys

import pytest
import torch

import fastdp
from fastdp.__main__ import parser
from fastdp.finetune import command as command_module
from fastdp.finetune import figures

from .finetune_models import (
    QUICK,
    card_of,
    classifier,
    command,
    language_model,
    refused,
    reviews,
    texts,
    tokenizer_of,
    transformers,
)

pytestmark = pytest.mark.slow  # `make test-all` runs it

CLASSIFY = ("--task", "classify")


@pytest.fixture
def model(tmp_path):
    return classifier(tmp_path / "bert")


@pytest.fixture
def data(tmp_path):
    return reviews(tmp_path / "reviews.csv", people=20)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def rows_of(out, *names):
    rows = csv.DictReader(open(out / "metrics.csv"))
    return [[float(row[name]) for name in names if row[name]] for row in rows]


def test_a_run_from_beginning_to_end(tmp_path, model, data, out, capsys):
    before = os.umask(0o002)  # of teams that share a group
    try:
        words = (*CLASSIFY, "--out", out, "--responsible", os.fsdecode(b"J\xfcrgen"), *QUICK)
        assert command(model, data, *words) == 0
    finally:
        os.umask(before)
    said = capsys.readouterr().out
    for words in ("BertForSequenceClassification", "parameters (100 %)", "held out to evaluate on", "2 labels",
                  "'neg', 'pos'", "noise multiplier", "Poisson sampling: 8 of", "fastdp.verify on 4 records: exact",
                  "uses of weights", "records at once", "about", "needed for the model",
                  "step 0: epsilon 0.00, accuracy", "done: epsilon", "privacy_card.md"):  # fmt: skip
        assert words in said, words
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    (old, found), steps = (load(place) for place in (model, out / "model")), card_of(out)["steps"]
    assert any(not torch.equal(p, q) for p, q in zip(old.bert.parameters(), found.bert.parameters(), strict=True))
    assert found.config.id2label == {0: "neg", 1: "pos"}
    assert len(transformers.AutoTokenizer.from_pretrained(out / "model")) == 13
    rows = rows_of(out, "step", "epsilon", "loss")
    assert [row[0] for row in rows] == list(range(steps + 1)) and 0 < rows[-1][1] <= 8
    assert len(rows_of(out, "accuracy")[0]) == len(rows_of(out, "accuracy")[-1]) == 1
    assert (out / "training.png").stat().st_size > 5000 and (out / "reliability.png").stat().st_size > 5000
    assert not (tmp_path / "out.secret.key").exists() and "J\\udcfcrgen" in (out / "privacy_card.md").read_text()
    modes = {path.relative_to(out).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
    shared = {name: mode for name, mode in modes.items() if name.startswith(("model/", "privacy_card"))}
    assert "model/model.safetensors" in shared and set(shared.values()) == {0o664}, shared
    alone = {name: mode for name, mode in modes.items() if name not in shared and name != "model"}
    assert {"journal.jsonl", "metrics.csv", "checkpoints", "training.png", "plan.txt", "options.json"} <= set(alone)
    assert not {name: oct(mode) for name, mode in alone.items() if mode & 0o077}


def test_a_seed_voids_the_guarantee_and_repeats_the_run(tmp_path, model, data, capsys):
    weights = []
    for name in ("a", "b"):
        out = tmp_path / name
        assert command(model, data, *CLASSIFY, "--out", out, "--seed", 3, *QUICK) == 0
        said = capsys.readouterr().out
        assert "NO GUARANTEE" in said and "there is none" in said and not card_of(out)["guaranteed"]
        weights.append((out / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("kind, more", [("gpt2", {}), ("llama", {"pad": False})])
def test_a_language_model_and_its_fused_loss(tmp_path, kind, more, capsys, monkeypatch):
    model, found = language_model(tmp_path / kind, kind, **more), []
    data = tmp_path / "lines.txt"
    data.write_text("".join(f"{'very ' * (i % 9)}good film {'plot ' * 40 * (i == 3)}\n" for i in range(40)))
    for fused in ((), ("--fused-loss",)):
        out = tmp_path / f"out{len(fused)}"
        if fused:  # evaluation, too
            monkeypatch.setattr(figures, "logits_of", lambda model: None)
        words = ("--task", "lm", "--out", out, "--eval", data, "--seed", 1, *fused, *QUICK)
        assert command(model, data, *words) == 0, capsys.readouterr().err
        found.append(rows_of(out, "loss", "perplexity"))
    said = capsys.readouterr().out
    assert "1 record is of 32 tokens: what is longer is cut" in said and "perplexity" in said
    assert ("'</s>' pads" in said) == (not more.get("pad", True))
    for stored, together in zip(*found, strict=True):
        assert stored and stored == pytest.approx(together, rel=1e-4)
    transformers.AutoModelForCausalLM.from_pretrained(out / "model")


def test_lora(model, data, out, capsys):
    peft = pytest.importorskip("peft")
    assert command(model, data, *CLASSIFY, "--out", out, "--lora", 2, *QUICK) == 0
    said = capsys.readouterr().out
    assert "LoRA: rank 2, alpha 4, on" in said and "adapters" in said
    assert (out / "model" / "adapter_config.json").exists() and not (out / "model" / "model.safetensors").exists()
    base = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    found = peft.PeftModel.from_pretrained(base, out / "model")
    assert any("lora_B" in name and p.abs().sum() > 0 for name, p in found.named_parameters())


def test_persons(tmp_path, model, out, capsys, monkeypatch):
    from fastdp.finetune.run import Trainer

    kept, made = [], Trainer.outcome
    monkeypatch.setattr(Trainer, "outcome", lambda self: kept.append(self._source.loader) or made(self))
    data = reviews(tmp_path / "people.csv", 60, people=20)
    words = (model, data, *CLASSIFY, "--eval-fraction", 0, "--group-by", "user", *QUICK)
    assert command(*words, "--out", out, "--max-records-per-group", 2) == 0
    assert "20 persons by 'user'" in capsys.readouterr().out
    card, sampler = card_of(out), kept[0].sampler
    assert sampler.size == 20 and sampler.grouping.cap == 2  # persons are drawn, not records
    assert card["unit"] == "person" and "at most 2" in card["neighbours"] and card["sample_rate"] == 8 / 20
    said = refused(capsys, *words, "--out", tmp_path / "other", "--max-physical-batch-size", 2)
    assert "give --max-records-per-group 2 or fewer" in said


def test_the_head_alone(model, data, out, capsys):
    assert command(model, data, *CLASSIFY, "--out", out, "--train-only", "head", *QUICK) == 0
    assert "trained: 34 of" in capsys.readouterr().out
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    pairs = zip(load(model).bert.parameters(), load(out / "model").bert.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_a_classifier_keeps_its_labels_or_gets_a_new_head(tmp_path, data, out, capsys):
    model, three = classifier(tmp_path / "known", labels=["pos", "neg"]), tmp_path / "three.csv"
    words = (*CLASSIFY, "--dry-run", "--out", out, *QUICK)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert command(model, data, *words) == 0
    said = capsys.readouterr().out
    assert "New, not pre-trained" not in said and "2 labels (as given): 'pos', 'neg'" in said
    assert "nothing was trained or written" in said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    three.write_text("text,label\n" + "".join(f"good {'plot ' * (i % 5)}film,{'abc'[i % 3]}\n" for i in range(30)))
    assert command(model, three, *words) == 0
    said = capsys.readouterr().out
    assert "New, not pre-trained: 'classifier.bias', 'classifier.weight'" in said and "3 labels" in said


def test_a_run_that_learnt_nothing_says_so(tmp_path, model, out, capsys):
    data = tmp_path / "d.csv"
    rows = [f"{text},{'rare' if i % 5 == 0 else 'usual'}\n" for i, text in enumerate(texts(40)[0])]
    data.write_text("text,label\n" + "".join(rows))
    words = (*CLASSIFY, "--eval-fraction", 0.4, "--lr", 1e-9, "--new-lr", 1e-9, *QUICK)
    assert command(model, data, "--out", out, *words) == 0
    said = capsys.readouterr().out
    assert "Nothing was learnt: accuracy" in said and "the share of the most frequent label" in said
    assert said.count("\n  --") == 2 and "another budget" in said and "are few" in said


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("words, said", [
    (("--freeze", "no.such"), "no parameter is named like 'no.such'"), (("--freeze", "*"), "nothing is left to train"),
    (("--lora-alpha", "2"), "go with --lora"), (("--lora", "2", "--train-only", "head"), "exclude each other"),
    (("--lora", "2", "--lora-target", "nothing"), "--lora-target nothing"),
    (("--epsilon", 0.001, "--accountant", "prv"), "epsilon 0.001 cannot be reached"),
    (("--delta", 0.5), "in full would satisfy it. Leave --delta out for 0.00"), (("--delta", 0.1), "random record"),
    (("--clipping", "adaptive", "--batch-size", 2), "--clipping adaptive counts with noise of 0.1"),
    (("--max-records-per-group", 3), "--max-records-per-group goes with --group-by COLUMN"),
    (("--eval", "reviews.csv", "--eval-fraction", 0.5), "Leave one of the two out"),
    (("--fused-loss",), "--fused-loss goes with --task lm"), (("--max-length", 99), "take at most 32 tokens"),
    (("--graphed", "--group-by", "user"), "--graphed goes with neither --group-by"),
    (("--device", "nowhere"), "--device nowhere"),
])  # fmt: skip
def test_options_that_are_refused(tmp_path, model, data, out, capsys, words, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, model, data, *CLASSIFY, "--out", out, *QUICK, *words)
    assert not out.exists()


def test_models_and_tokenizers_that_cannot_be_used(tmp_path, model, data, out, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rest = (data, *CLASSIFY, "--out", out, *QUICK)
    (tmp_path / "empty").mkdir()
    for name, said in (("./nowhere", "there is no folder"), ("nobody/has-this", "the hub does not give it"),
                       (tmp_path / "empty", "cannot be read"), (data, "cannot be read")):  # fmt: skip
        assert said in refused(capsys, name, *rest)
    text = (data, "--task", "lm", "--text-column", "text", "--out", out, *QUICK)
    assert "no language model" in refused(capsys, model, *text)
    (model / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in refused(capsys, model, *rest)
    bare = language_model(tmp_path / "bare", pad=False, eos=False)
    assert "no padding token and no end-of-text token" in refused(capsys, bare, *text)
    words = "good bad fine awful film plot actor scene very not".split()
    other = language_model(tmp_path / "other", words=[f"w{i}" for i in range(20)] + words)
    assert "they do not belong together" in refused(capsys, other, *text)
    assert command(language_model(tmp_path / "lm"), *text, "--new-lr", 0.1, "--dry-run") == 0
    assert "--new-lr has no effect" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install " in refused(capsys, model, *rest)


def test_models_that_mix_samples_are_refused(tmp_path, model, data, out, capsys, monkeypatch):
    """By their loss, or as padding, which depends on the others' lengths, counts."""
    rest = (data, *CLASSIFY, "--out", out, *QUICK)
    fnet = tmp_path / "fnet"
    tokenizer_of(fnet)
    config = transformers.FNetConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, intermediate_size=24, max_position_embeddings=32
    )
    transformers.FNetModel(config).save_pretrained(fnet)
    said = refused(capsys, fnet, *rest)
    assert "padding counts" in said and "take another model" in said
    made = command_module.prepare.__globals__["losses_of"]

    def coupled(*arguments):
        losses = made(*arguments)
        return lambda m, batch: losses(m, batch) * (1 + batch["labels"].float().mean())

    monkeypatch.setitem(command_module.prepare.__globals__, "losses_of", coupled)
    assert "cannot be trained privately" in refused(capsys, model, *rest) and not out.exists()


def test_a_full_disk_before_the_run(tmp_path, model, data, capsys, monkeypatch):
    usage = command_module.preflight.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(command_module.preflight.shutil, "disk_usage", lambda folder: usage)
    said = refused(capsys, model, data, *CLASSIFY, "--out", tmp_path / "a" / "b", *QUICK)
    assert "1.0 KB are free" in said and not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_written_is_noticed_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command_module, "prepare", lambda options: pytest.fail("the data was loaded first"))
    words = ("no model", tmp_path / "no.csv", *CLASSIFY, *QUICK, "--out")
    (tmp_path / "file").write_text("")
    for place, said in (("file", "is a file"), ("file/out", "cannot be written"), ("x" * 300, "cannot be written"),
                        (os.fsdecode(b"o\xfc"), "has bytes that are no UTF-8")):  # fmt: skip
        assert said in refused(capsys, *words, tmp_path / place)

    def on_a_disk_to_be_read(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", on_a_disk_to_be_read)
    assert "cannot be written (Read-only file system)" in refused(capsys, *words, tmp_path / "deep" / "out")


# ---------------------------------------------------------------------- the command line


RUN = ["finetune", "m", "d"]


@pytest.mark.parametrize("words, said", [
    (["fintune", "m", "d"], "did you mean 'finetune'?"), (["--verison"], "did you mean '--version'?"),
    ([*RUN, "--tsk", "lm", "--epsilon", "1"], "there is no option --tsk; did you mean '--task'?"),
    ([*RUN, "--task", "clasify", "--epsilon", "1"], "did you mean 'classify'?"),
    ([*RUN, "--task", "lm"], "required: --epsilon"), ([], "required: demo|info|finetune|tune|audit|ntk"),
    (["xyz"], "there is no command 'xyz'; there are demo, info"), (["audit", "s.py:f", "--seed", "x"], "--seed"),
    ([*RUN, "--task", "lm", "--epsilon", "0"], "above 0"), ([*RUN, "--task", "lm", "--epsilon", "inf"], "--epsilon"),
    ([*RUN, "--task", "lm", "--epsilon", "1", "--delta", "1"], "at most 0.5"),
    ([*RUN, "--task", "lm", "--epsilon", "1", "--label-range", "5,1"], "LOW must be below HIGH"),
])  # fmt: skip
def test_wrong_words_are_answered_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as found:
        parser().parse_args(words)
    err = capsys.readouterr().err
    assert found.value.code == 2 and said in err and err.count("\n") == 1 and "usage:" not in err


def test_right_words_are_taken(capsys):
    found = parser().parse_args([*RUN, "--task", "lm", "--eps", "3", "--delta=1e-5"])  # a beginning suffices
    assert found.epsilon == 3 and found.delta == 1e-5 and parser().parse_args(["info"]).command == "info"
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"fastdp {fastdp.__version__}\n"


def test_heavy_packages_are_imported_when_used():
    code = (
        "import sys, fastdp.__main__ as m; m.parser(); print({'transformers', 'peft', 'datasets'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
