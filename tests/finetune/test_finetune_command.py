"""`python -m fastdp finetune` as its user meets it: what it says, what it writes, how it ends."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
import torch

from fastdp.finetune import command as command_module

from .finetune_models import card_of, classifier, command, language_model, reviews, transformers

pytestmark = pytest.mark.slow  # `make test-all` runs it

# gdp is computed at once; prv, the default, takes seconds
QUICK = ("--epochs", 0.5, "--batch-size", 8, "--epsilon", 8, "--device", "cpu", "--max-physical-batch-size", 8,
         "--accountant", "gdp")  # fmt: skip


def trained(folder, out):
    """Whether the saved weights differ from those of the folder."""
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    before, after = (dict(load(path).base_model.named_parameters()) for path in (folder, out / "model"))
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.fixture
def model(tmp_path):
    return classifier(tmp_path / "bert")


@pytest.fixture
def data(tmp_path):
    return reviews(tmp_path / "reviews.csv")


def test_a_run_from_beginning_to_end(tmp_path, model, data, capsys):
    out = tmp_path / "out"
    assert command(model, data, "--task", "classify", "--out", out, *QUICK) == 0
    said = capsys.readouterr().out
    for words in ("BertForSequenceClassification", "parameters (100 %)", "held out to evaluate on", "2 labels",
                  "'neg', 'pos'", "noise multiplier", "Poisson sampling: 8 of", "fastdp.verify on 4 records: exact",
                  "uses of weights", "records at once", "about", "needed for the model",
                  "step 0: epsilon 0.00, accuracy",
                  "done: epsilon", "privacy_card.md"):  # fmt: skip
        assert words in said, words
    assert trained(model, out)
    found = transformers.AutoModelForSequenceClassification.from_pretrained(out / "model")
    assert found.config.id2label == {0: "neg", 1: "pos"}
    assert len(transformers.AutoTokenizer.from_pretrained(out / "model")) == 13
    rows = list(csv.DictReader(open(out / "metrics.csv")))
    assert [int(row["step"]) for row in rows] == list(range(len(rows))) and rows[-1]["accuracy"]
    assert float(rows[-1]["epsilon"]) <= 8
    assert (out / "training.png").stat().st_size > 5000 and (out / "reliability.png").stat().st_size > 5000
    assert not (tmp_path / "out.secret.key").exists()


def test_the_card_is_right_and_can_be_computed_anew(tmp_path, model, data):
    out = tmp_path / "out"
    words = ("--task", "classify", "--out", out, "--delta", 1e-3, "--labels", "neg,pos", *QUICK, "--epsilon", 2)
    assert command(model, data, *words) == 0
    card = card_of(out)
    journal = (out / "journal.jsonl").read_text()
    assert card["steps"] == journal.count('"digest"') == sum(n for _, _, n in card["history"])
    assert card["sample_rate"] == pytest.approx(8 / 36, rel=0.3) and card["delta"] == 1e-3
    assert card["epsilon"] <= 2 < card["epsilon"] + 0.1
    assert "record added or removed" in card["neighbours"] and card["versions"]["torch"]
    run = subprocess.run([sys.executable, "-c", card["recompute"]], capture_output=True, text=True, check=True)
    assert float(run.stdout) == pytest.approx(card["epsilon"], rel=1e-9)
    page = (out / "privacy_card.md").read_text()
    assert card["recompute"] in page and f"{card['noise_multiplier']:.6g}" in page and "hyperparameters" in page
    assert str(tmp_path) not in page  # it is given away
    assert "set of labels" not in page and "Held-out records of DATA" in page


def test_a_seed_voids_the_guarantee_and_repeats_the_run(tmp_path, model, data, capsys):
    weights = []
    for name in ("a", "b"):
        out = tmp_path / name
        assert command(model, data, "--task", "classify", "--out", out, "--seed", 3, *QUICK) == 0
        said = capsys.readouterr().out
        assert "NO GUARANTEE" in said and "there is none" in said
        assert "NO GUARANTEE" in (out / "privacy_card.md").read_text() and not card_of(out)["guaranteed"]
        weights.append((out / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_dry_run_writes_nothing(tmp_path, model, data, capsys):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    out = tmp_path / "deep" / "out"
    assert command(model, data, "--task", "classify", "--out", out, "--dry-run", *QUICK) == 0
    assert "nothing was trained or written" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("kind, more", [("gpt2", {}), ("llama", {"pad": False})])
def test_a_language_model(tmp_path, kind, more, capsys):
    model = language_model(tmp_path / kind, kind, **more)
    data = tmp_path / "lines.txt"
    data.write_text("".join(f"{'very ' * (i % 9)}good film {'plot ' * 40 * (i == 3)}\n" for i in range(40)))
    out = tmp_path / "out"
    assert command(model, data, "--task", "lm", "--out", out, "--eval", data, *QUICK) == 0
    said = capsys.readouterr().out
    assert "1 record is longer than 32 tokens and cut to that" in said and "perplexity" in said
    assert ("'</s>' pads" in said) == (not more.get("pad", True))
    transformers.AutoModelForCausalLM.from_pretrained(out / "model")


def test_lora(tmp_path, model, data, capsys):
    peft = pytest.importorskip("peft")
    out = tmp_path / "out"
    assert command(model, data, "--task", "classify", "--out", out, "--lora", 2, *QUICK) == 0
    said = capsys.readouterr().out
    assert "LoRA: rank 2, alpha 4, on" in said and "adapters" in said
    assert (out / "model" / "adapter_config.json").exists() and not (out / "model" / "model.safetensors").exists()
    base = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    found = peft.PeftModel.from_pretrained(base, out / "model")
    assert any("lora_B" in name and p.abs().sum() > 0 for name, p in found.named_parameters())


def test_persons(tmp_path, model, capsys):
    out = tmp_path / "out"
    data = reviews(tmp_path / "people.csv", 60, people=20)
    assert command(model, data, "--task", "classify", "--out", out, "--group-by", "user", "--max-records-per-group", 2,
                   "--eval-fraction", 0, *QUICK) == 0  # fmt: skip
    assert "20 persons by 'user'" in capsys.readouterr().out
    card = card_of(out)
    said = refused(capsys, model, data, "--task", "classify", "--out", tmp_path / "other", "--group-by", "user", *QUICK,
                   "--max-physical-batch-size", 2)  # fmt: skip
    assert "give --max-records-per-group 2 or fewer" in said
    assert card["unit"] == "person" and "at most 2" in card["neighbours"] and card["sample_rate"] == 8 / 20


def test_the_head_alone_and_parts_left_as_they_are(tmp_path, model, data, capsys):
    out = tmp_path / "head"
    assert command(model, data, "--task", "classify", "--out", out, "--train-only", "head", *QUICK) == 0
    assert "trained: 34 of" in capsys.readouterr().out and not trained(model, out)
    dry = ("--task", "classify", "--dry-run", "--out", tmp_path / "no", *QUICK)
    assert command(model, data, "--freeze", "*embeddings*", *dry) == 0
    for words, problem in (
        (("--freeze", "no.such"), "no parameter is named like 'no.such'"),
        (("--freeze", "*"), "nothing is left to train"),
        (("--lora-alpha", "2"), "go with --lora"), (("--lora", "2", "--train-only", "head"), "exclude each other"),
        (("--lora", "2", "--lora-target", "nothing"), "--lora-target nothing"),
    ):  # fmt: skip
        assert command(model, data, *words, *dry) == 1
        assert problem in capsys.readouterr().err


def test_a_classifier_keeps_its_labels(tmp_path, data, capsys):
    model = classifier(tmp_path / "known", labels=["pos", "neg"])
    out = tmp_path / "out"
    assert command(model, data, "--task", "classify", "--out", out, *QUICK) == 0
    assert "New, not pre-trained" not in capsys.readouterr().out
    assert json.loads((out / "model" / "config.json").read_text())["id2label"] == {"0": "pos", "1": "neg"}


def test_other_labels_get_a_new_head(tmp_path, capsys):
    model, data = classifier(tmp_path / "known", labels=["pos", "neg"]), tmp_path / "three.csv"
    data.write_text("text,label\n" + "".join(f"good {'plot ' * (i % 5)}film,{'abc'[i % 3]}\n" for i in range(30)))
    assert command(model, data, "--task", "classify", "--out", tmp_path / "out", "--dry-run", *QUICK) == 0
    said = capsys.readouterr().out
    assert "New, not pre-trained: 'classifier.bias', 'classifier.weight'" in said and "3 labels" in said


# ---------------------------------------------------------------------- refusals


def refused(capsys, *words):
    """The message of a run that ends with 1 and without a traceback."""
    assert command(*words) == 1
    found = capsys.readouterr()
    assert "Traceback" not in found.err and "fastdp finetune: " in found.err
    return found.err


def test_models_that_cannot_be_had(tmp_path, model, data, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rest = (data, "--task", "classify", "--out", tmp_path / "out", *QUICK)
    assert "there is no folder" in refused(capsys, "./nowhere", *rest)
    assert "cannot be had" in refused(capsys, "nobody/has-this", *rest)
    (tmp_path / "empty").mkdir()
    assert "no config.json in it, but nothing" in refused(capsys, tmp_path / "empty", *rest)
    assert "is a file" in refused(capsys, data, *rest)
    (model / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in refused(capsys, model, *rest)


def test_tokenizers_that_do_not_fit(tmp_path, data, capsys):
    rest = ("--task", "lm", "--text-column", "text", "--out", tmp_path / "out", *QUICK)
    bare = language_model(tmp_path / "bare", pad=False, eos=False)
    assert "no padding token and no end-of-text token" in refused(capsys, bare, data, *rest)
    words = "good bad fine awful film plot actor scene very not".split()
    other = language_model(tmp_path / "other", words=[f"w{i}" for i in range(20)] + words)
    assert "they do not belong together" in refused(capsys, other, data, *rest)
    assert "take at most 32 tokens" in refused(capsys, language_model(tmp_path / "lm"), data, "--max-length", 99, *rest)
    assert "no language model" in refused(capsys, classifier(tmp_path / "bert"), data, *rest)


def test_budgets_that_cannot_be(tmp_path, model, data, capsys):
    rest = (model, data, "--task", "classify", "--out", tmp_path / "out", "--batch-size", 8, *QUICK[-2:], "--epsilon")
    assert "epsilon 0.001 cannot be reached" in refused(capsys, *rest, 0.001, "--accountant", "prv")
    for words in (("--epsilon", "0"), ("--epsilon", "-1"), ("--epsilon", "inf"), ("--delta", "1")):
        with pytest.raises(SystemExit) as found:
            command(*rest, 1, *words)
        assert found.value.code == 2
    for delta in (0.5, 0.1, 0.05):
        assert "in full would satisfy it. Leave --delta out for 0.00" in refused(capsys, *rest, 8, "--delta", delta)
    assert "random record" in refused(capsys, *rest, 8, "--delta", 0.1, "--dry-run")


def test_a_model_that_mixes_samples_is_refused(tmp_path, model, data, capsys, monkeypatch):
    made = command_module.prepare.__globals__["losses_of"]

    def coupled(*arguments):
        losses = made(*arguments)
        return lambda m, batch: losses(m, batch) * (1 + batch["labels"].float().mean())

    monkeypatch.setitem(command_module.prepare.__globals__, "losses_of", coupled)
    said = refused(capsys, model, data, "--task", "classify", "--out", tmp_path / "out", *QUICK)
    assert "cannot be trained privately" in said and not (tmp_path / "out").exists()


def test_a_full_disk_before_the_run(tmp_path, model, data, capsys, monkeypatch):
    usage = command_module.preflight.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(command_module.preflight.shutil, "disk_usage", lambda folder: usage)
    said = refused(capsys, model, data, "--task", "classify", "--out", tmp_path / "a" / "b", *QUICK)
    assert "1.0 KB are free" in said and not (tmp_path / "a").exists()


def test_a_missing_package_is_named(tmp_path, model, data, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refused(capsys, model, data, "--task", "classify", "--out", tmp_path / "out", *QUICK)
    assert "pip install 'fastdp[finetune]'" in said


def test_heavy_packages_are_imported_when_used():
    code = (
        "import sys, fastdp.__main__ as m; m.parser(); print([n for n in ('transformers', 'peft') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
