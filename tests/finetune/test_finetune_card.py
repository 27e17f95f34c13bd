"""What the card states and leaves out, its schema, hashes and warnings; defaults; when nothing was learnt."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import math
import re
import stat
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fastdp
from fastdp.__main__ import parser
from fastdp.accounting import default_delta, epsilon_of
from fastdp.finetune import outputs, preflight
from fastdp.finetune.card import guess_of, make_card, markdown, write_card
from fastdp.finetune.figures import Simple
from fastdp.finetune.options import default_batch
from fastdp.finetune.plan import Outcome, Plan
from fastdp.finetune.verdict import advice, nothing_learnt
from fastdp.utils.formatting import at_most, duration, size

from .finetune_models import QUICK, card_of, classifier, command, options_of, reviews

ROOT = Path(fastdp.__file__).parent
SCHEMA = json.loads((ROOT / "finetune" / "privacy_card.schema.json").read_text())
TYPES = {"string": str, "number": (int, float), "integer": int, "boolean": bool, "object": dict, "array": list,
         "null": type(None)}  # fmt: skip
PLAN = dict(
    noise_multiplier=1.0, sample_rate=0.1, expected_batch_size=10, steps=20, lr=0.1, new_lr=0.1, delta=1e-4,
    target_epsilon=4.0, accountant="rdp",
)  # fmt: skip


def card(steps=20, lost=0, status="finished", group=None, evaluated="split", labels="data", adapters=False, units=None,
         **plan):  # fmt: skip
    plan = Plan(**{**PLAN, **plan})
    history = [(plan.noise_multiplier, plan.sample_rate, steps + lost)] if steps else []
    return make_card(
        model="m", task="classify", plan=plan, outcome=Outcome(status, steps, history),
        trained="1 of 1 parameters", group=group, evaluated=evaluated, labels=labels, adapters=adapters, units=units,
    )  # fmt: skip


def check(found):
    """That a card has the schema's names, types, words and patterns (jsonschema is not among the test packages)."""
    found = json.loads(json.dumps(found))
    assert set(found) == set(SCHEMA["properties"]) == set(SCHEMA["required"])
    for name, rule in SCHEMA["properties"].items():
        kinds = rule.get("type", list(TYPES))
        value, kinds = found[name], [kinds] if isinstance(kinds, str) else kinds
        assert isinstance(value, tuple(TYPES[kind] for kind in kinds if kind == "null" or kind in TYPES)), name
        assert value in rule.get("enum", [value]) and value == rule.get("const", value), name
        assert not isinstance(value, str) or re.search(rule.get("pattern", ""), value), name


def test_steps_lost_in_a_crash_are_paid_for():
    whole, crashed = card(), card(17, 3, "budget")
    assert crashed["epsilon"] == whole["epsilon"] == epsilon_of([(1.0, 0.1, 20)], 1e-4, "rdp")
    assert crashed["history"] == [(1.0, 0.1, 20)] and "3 lost in crashes" in markdown(crashed)
    assert card(17)["epsilon"] < whole["epsilon"] and card(0)["epsilon"] == 0 and card(0)["history"] == []


def test_what_it_says_depends_on_the_run(tmp_path):
    page = markdown(card())
    assert "NO GUARANTEE" not in page and "set of labels" in page and "Held-out records of DATA" in page
    assert "one record added or removed" in page and "secret key" in page and "Several records of one person" in page
    released = page.split("## Released")[1].split("##")[0]  # checkpoints hold the history and a count, too
    assert "not what lies there beside them" in released and "not finite" in released and "evaluations" in released
    page = markdown(card(seed=1, labels="given", evaluated=""))
    assert "**NO GUARANTEE**" in page and "--seed 1" in page and "secret key" not in page
    assert "set of labels" not in page and "Held-out" not in page and "(this model)" not in page
    page = markdown(card(group="user", max_records_per_group=3, evaluated="file", adapters=True))
    assert "'user'" in page and "at most 3 of them in a step" in page and "--eval" in page and "adapters" in page
    assert "Several records of one person" not in page
    assert "**NO PROVEN BOUND**" in markdown(card(accountant="gdp"))
    assert "**NO GUARANTEE**" in markdown(card(accountant="gdp", seed=1))
    for found in (card(0), card(seed=1), card(accountant="gdp"), card(17, 3, "budget"), card(units=50)):
        check(found)
    write_card(card(), tmp_path)
    assert card()["recompute"] in (tmp_path / "privacy_card.md").read_text()


@pytest.mark.parametrize("plan", [{"seed": 1}, {"accountant": "gdp"}])
def test_without_a_guarantee_nothing_is_promised(plan):
    found = card(**plan)
    page = markdown(found)
    assert "In words" not in page and "probability of at most" not in page and "The guarantee covers" not in page
    assert "Do not give this model away as a private one" in page and "**Warning**: nothing is guaranteed" in page
    assert found["guess"] == 1.0 and found["strength"] == "none" and found["warnings"] and not found["guaranteed"]


def test_bounds_are_never_said_too_small():
    """Rounded up: epsilon, delta, the share of right guesses, and the legend."""
    assert [at_most(x, 4) for x in (7.9991, 3.14101, 8.0, 1e-5, 99.9961, 0.0, math.inf)] == [
        "8", "3.142", "8", "1e-05", "100", "0", "inf",
    ]  # fmt: skip
    for noise in (0.7, 0.8, 0.9, 1.0, 1.1):
        found = card(noise_multiplier=noise, delta=1.23456749e-5)
        page, e = markdown(found), math.exp(found["epsilon"])
        epsilon, delta = re.search(r"\*\*\((\S+), (\S+)\)-differential privacy", page).groups()
        row = re.search(r"epsilon spent \| (\S+)", page)[1]
        guess = re.search(r"probability of at most (\S+) %", page)[1]
        assert found["guess"] == pytest.approx((e + found["delta"]) / (1 + e)) and 0.5 < found["guess"] < 1
        assert float(epsilon) >= found["epsilon"] and float(row) >= found["epsilon"] and float(delta) >= found["delta"]
        assert float(guess) >= 100 * found["guess"]
    for bound, epsilon in (("73.2 %", 1.0), ("99.996 %", 10.0)):
        assert f"{bound} |" in page and float(bound[:-2]) >= 100 * guess_of(epsilon, 0.0)


def test_what_is_weak_is_warned_of():
    weak = card(noise_multiplier=0.3, units=50, delta=5e-3)
    assert [line.split()[0] for line in weak["warnings"]] == ["epsilon", "delta"] and weak["strength"] == "weak"
    assert markdown(weak).count("> **Warning**") == 2 and "above 10 (this model)" in markdown(weak)
    assert card(units=50, delta=1e-3)["warnings"] == [] and card()["strength"] == "moderate"
    assert card(noise_multiplier=20.0)["strength"] == "strong"


@pytest.mark.parametrize(
    "count, delta, batch",
    [
        (10, 1e-2, 10),
        (100, 1e-3, 16),
        (6920, 1e-5, 512),
        (10_000, 1e-5, 1024),
        (10_001, 9e-6, 1024),
        (10**6, 1e-7, 2048),
    ],
)
def test_defaults(count, delta, batch):
    assert default_delta(count) == delta <= 1 / (10 * count) * (1 + 1e-9) and default_batch(count) == batch


def test_the_page_names_options_that_are_there_and_help_describes_each():
    page = (ROOT.parent / "docs" / "finetune_command.md").read_text()
    (commands,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    flags = {flag for action in commands.choices["finetune"]._actions for flag in action.option_strings}
    named = set(re.findall(r"`(--[a-z-]+)", page))
    assert len(named) > 20 and named <= flags and all(action.help for action in commands.choices["finetune"]._actions)


def test_numbers_in_words():
    assert [size(n) for n in (12, 1200, 913e6, 65e9, 6.5e12)] == ["12 B", "1.2 KB", "913 MB", "65.0 GB", "6500 GB"]
    assert [duration(s) for s in (3, 89, 90, 5400, 12_000)] == ["3 s", "89 s", "2 min", "1 h 30 min", "3 h 20 min"]


def test_the_check_sees_what_lies_behind_zeros(monkeypatch):
    """LoRA's first factors have no gradient while the second are zero; nothing of that stays in the model."""
    model, seen = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 3, bias=False)), []
    torch.nn.init.zeros_(model[1].weight)

    def verify(*args, **options):
        seen.append(fastdp.verify(*args, **options))
        return seen[-1]

    monkeypatch.setattr(preflight, "verify", verify)
    job = types.SimpleNamespace(
        model=model, data=torch.randn(9, 4), lengths=range(9), collated=lambda records: {"x": torch.stack(records)},
        loss=lambda m, batch: m(batch["x"]).square().sum(1).mean(),
    )  # fmt: skip
    assert "exact" in preflight.check(job) and seen[0].untested == [] and not model[1].weight.any()


# ---------------------------------------------------------------------- of a run


def test_a_runs_card_its_hashes_and_what_is_left_out(tmp_path, capsys):
    """Nothing in it tells of the data: neither its hash, nor figures; only a commitment whose key the owner keeps."""
    model, data, out = classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv"), tmp_path / "out"
    words = (model, data, "--task", "classify", "--labels", "neg,pos", "--out", out, *QUICK)
    assert command(*words, "--dry-run", "--epsilon", 20, "--delta", 0.02) == 0
    assert capsys.readouterr().out.count("Warning: ") == 2  # before anything is spent
    words = (*words, "--delta", 1e-3, "--epsilon", 2)
    assert command(*words, "--responsible", "A. Person <a@b.c> | team") == 0
    found, page = card_of(out), (out / "privacy_card.md").read_text()
    check(found)
    assert found["steps"] == (out / "journal.jsonl").read_text().count('"digest"') == found["history"][0][2]
    assert found["sample_rate"] == pytest.approx(8 / 36, rel=0.3) and found["epsilon"] <= 2 < found["epsilon"] + 0.1
    run = subprocess.run([sys.executable, "-c", found["recompute"]], capture_output=True, text=True, check=True)
    assert float(run.stdout) == pytest.approx(found["epsilon"], rel=1e-9) and found["recompute"] in page
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (out / "model").iterdir()}
    weights = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert found["released_files"] == hashes and found["base_model"]["files"]["model.safetensors"] == weights
    assert hashes["model.safetensors"] in page and weights in page and found["data_commitment"] in page
    assert found["begun"] <= found["finished"] and found["finished"].startswith(found["date"][:4])
    assert found["verified"] == {"result": "exact", "records": 4, "tolerance": 1e-4}
    assert r"A. Person &lt;a@b.c&gt; \| team" in page and str(tmp_path) not in page and "set of labels" not in page
    digest, kept = hashlib.sha256(data.read_bytes()).hexdigest(), json.loads((out / outputs.COMMITMENT).read_text())
    public = (out / "privacy_card.json").read_text() + page
    assert kept["files"] == {"reviews.csv": digest} and digest not in public and kept["key"] not in public
    assert stat.S_IMODE((out / outputs.COMMITMENT).stat().st_mode) == 0o600
    key, files = bytes.fromhex(kept["key"]), json.dumps(kept["files"], sort_keys=True)
    assert found["data_commitment"] == hmac.new(key, files.encode(), "sha256").hexdigest()
    errors = re.findall(r"relative errors: norms (\S+),", (out / "plan.txt").read_text())
    assert errors and errors[0] not in public and "accuracy" not in str(found.keys())
    assert command(*words, "--resume") == 0  # who is responsible may change
    after = card_of(out)
    same = ("data_commitment", "begun", "finished", "released_files", "history")
    assert after["responsible"] is None and all(after[name] == found[name] for name in same)
    assert outputs.commit(tmp_path, kept["files"]) != found["data_commitment"]  # another run has another key


# ---------------------------------------------------------------------- what was learnt


HALF = Simple(0.5, "the share of the most frequent label", 100)


@pytest.mark.parametrize("task, figures, simple, learnt", [
    ("classify", [{"accuracy": 0.5}, {"accuracy": 0.54}], HALF, False),  # within a standard error, 0.05
    ("classify", [{"accuracy": 0.5}, {"accuracy": 0.56}], HALF, True),
    ("regression", [{"r2": -3.0}, {"r2": -0.1}], Simple(0.0, "R2 of the mean", 9), False),
    ("regression", [{"r2": -3.0}, {"r2": 0.1}], Simple(0.0, "R2 of the mean", 9), True),
    ("tokens", [{"f1": 0.0}, {"f1": 0.0}], Simple(0.0, "F1 of the tag 'O'", 9), False),
    ("lm", [{"perplexity": 20.0}, {"perplexity": 21.0}], None, False),
    ("lm", [{"perplexity": 20.0}, {"perplexity": 19.0}], None, True),
    ("seq2seq", [{"token_accuracy": 0.2}, {"token_accuracy": 0.2}], None, False),
    ("classify", [{"accuracy": float("nan")}], HALF, False),
    ("classify", [{"accuracy": 1.0}], Simple(1.0, "all alike", 9), True),
    ("classify", [{"loss": 1.0}], None, True),  # not known
    ("lm", [{"perplexity": 20.0}], None, True),
])  # fmt: skip
def test_what_counts_as_learnt(task, figures, simple, learnt):
    assert (nothing_learnt(task, figures, simple) == "") == learnt


BIG = dict(sample_rate=0.5, expected_batch_size=500)


@pytest.mark.parametrize("words, share, changes, tries", [
    ((), 1.0, {}, ["--batch-size 400", "--lora 8"]),
    (("--lora", 4), 0.01, {}, ["--batch-size 400", "--lr 0.003"]), ((), 1.0, BIG, ["--lora 8", "--lr 0.003"]),
    (("--epsilon", 1), 0.1, BIG, ["--epsilon 4", "--lr 0.003"]), ((), 0.1, BIG, ["--lr 0.003", "--epochs 12"]),
    ((), 1.0, {"clipping": "automatic"}, ["--batch-size 400", "--clipping local"]),
])  # fmt: skip
def test_what_to_try_depends_on_the_run(words, share, changes, tries):
    plan = Plan(**{**PLAN, "expected_batch_size": 100, "steps": 30, "lr": 1e-3} | changes)
    options = options_of("m", "d", "--task", "lm", "--epsilon", 8, *words)
    said = advice("x", types.SimpleNamespace(plan=plan, options=options), 1000, share).splitlines()
    assert [line.strip().split(":")[0].split(",")[0] for line in said if line.startswith("  --")] == tries
