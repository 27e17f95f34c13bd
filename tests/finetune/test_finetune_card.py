"""What the card states, what the options default to, and that the page of the command lists them all."""

from __future__ import annotations

import argparse
import json
import math
import re
import types
from pathlib import Path

import pytest
import torch

import fastdp
from fastdp.__main__ import parser
from fastdp.accounting import epsilon_of
from fastdp.finetune import preflight
from fastdp.finetune.card import guess_of, make_card, write_card
from fastdp.finetune.options import default_batch, default_delta
from fastdp.finetune.plan import Outcome, Plan
from fastdp.finetune.plots import in_text, write_plots
from fastdp.utils.formatting import at_most, duration, size

PLAN = dict(
    noise_multiplier=1.0, sample_rate=0.1, expected_batch_size=10, steps=20, lr=0.1, new_lr=0.1, delta=1e-4,
    target_epsilon=4.0, accountant="rdp",
)  # fmt: skip


def card(steps=20, lost=0, status="finished", group=None, evaluated="split", labels="data", adapters=False, units=None,
         **plan):  # fmt: skip
    return make_card(
        model="m", task="classify", plan=Plan(**{**PLAN, **plan}), outcome=Outcome(status, steps, 0.0, lost),
        target=4.0, trained="1 of 1 parameters", group=group, evaluated=evaluated, labels=labels, adapters=adapters,
        units=units,
    )  # fmt: skip


def test_steps_lost_in_a_crash_are_paid_for():
    whole, crashed = card(), card(17, 3, "budget")
    assert crashed.epsilon == whole.epsilon == epsilon_of([(1.0, 0.1, 20)], 1e-4, "rdp")
    assert crashed.history == [(1.0, 0.1, 20)] and "3 lost in crashes" in crashed.markdown()
    assert card(17).epsilon < whole.epsilon
    assert card(0).epsilon == 0 and card(0).history == []


def test_what_it_says_depends_on_the_run(tmp_path):
    page = card().markdown()
    assert "NO GUARANTEE" not in page and "set of labels" in page and "Held-out records of DATA" in page
    assert "one record added or removed" in page and "secret key" in page
    released = page.split("## Released")[1].split("##")[0]  # checkpoints hold the history and a count, too
    assert "not what lies there beside them" in released and "not finite" in released and "evaluations" in released
    page = card(seed=1, labels="given", evaluated="").markdown()
    assert "**NO GUARANTEE**" in page and "--seed 1" in page and "secret key" not in page
    assert "set of labels" not in page and "Held-out" not in page
    page = card(group="user", max_records_per_group=3, evaluated="file", adapters=True).markdown()
    assert "'user'" in page and "at most 3 of them in a step" in page and "--eval" in page and "adapters" in page
    found = card(accountant="gdp")
    assert "**NO PROVEN BOUND**" in found.markdown() and not found.guaranteed and card().guaranteed
    assert "**NO GUARANTEE**" in card(accountant="gdp", seed=1).markdown()
    write_card(card(), tmp_path)
    kept = json.loads((tmp_path / "privacy_card.json").read_text())
    assert kept["epsilon"] == card().epsilon and kept["recompute"] in (tmp_path / "privacy_card.md").read_text()


def test_bounds_are_never_said_too_small():
    """Rounded up: epsilon, delta, the share of right guesses, and the legend."""
    assert [at_most(x, 4) for x in (7.9991, 3.14101, 8.0, 1e-5, 99.9961, 0.0, math.inf)] == [
        "8", "3.142", "8", "1e-05", "100", "0", "inf",
    ]  # fmt: skip
    for noise in (0.7, 0.8, 0.9, 1.0, 1.1):
        found = card(noise_multiplier=noise, delta=1.23456749e-5)
        page = found.markdown()
        epsilon, delta = re.search(r"\*\*\((\S+), (\S+)\)-differential privacy", page).groups()
        row = re.search(r"epsilon spent \| (\S+)", page)[1]
        guess = re.search(r"probability of at most (\S+) %", page)[1]
        assert float(epsilon) >= found.epsilon and float(row) >= found.epsilon and float(delta) >= found.delta
        assert float(guess) >= 100 * found.guess
    for bound, epsilon in (("73.2 %", 1.0), ("99.996 %", 10.0)):
        assert f"{bound} |" in page and float(bound[:-2]) >= 100 * guess_of(epsilon, 0.0)


@pytest.mark.parametrize("plan", [{"seed": 1}, {"accountant": "gdp"}])
def test_without_a_guarantee_nothing_is_promised(plan):
    found = card(**plan)
    page, kept = found.markdown(), json.loads(found.as_json())
    assert "In words" not in page and "probability of at most" not in page and "The guarantee covers" not in page
    assert "Do not give this model away as a private one" in page and "**Warning**: nothing is guaranteed" in page
    assert kept["guess"] == 1.0 and kept["strength"] == "none" and kept["warnings"]


def test_the_bound_on_guesses():
    found = card()
    e = math.exp(found.epsilon)
    assert found.guess == pytest.approx((e + found.delta) / (1 + e)) and 0.5 < found.guess < 1


@pytest.mark.parametrize("count, delta", [(10, 1e-2), (6920, 1e-5), (10_000, 1e-5), (10_001, 9e-6), (30, 3e-3)])
def test_default_delta(count, delta):
    assert default_delta(count) == delta <= 1 / (10 * count) * (1 + 1e-9)


def test_default_batch():
    assert [default_batch(n) for n in (3, 100, 6920, 10**6)] == [3, 16, 512, 2048]


def test_the_page_lists_every_option():
    page = (Path(__file__).parent.parent.parent / "docs" / "finetune_command.md").read_text()
    table = page.split("## Options")[1].split("## ")[0]
    (commands,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    flags = [flag for action in commands.choices["finetune"]._actions for flag in action.option_strings]
    missing = [flag for flag in flags if f"`{flag}" not in table and flag not in ("-h", "--help")]
    assert not missing
    assert all(action.help for action in commands.choices["finetune"]._actions)


def test_without_matplotlib_the_plot_is_text(tmp_path, monkeypatch):
    rows = {0: {"accuracy": 0.5}, 1: {"loss": 0.7, "epsilon": 1.0}, 2: {"loss": 0.35, "epsilon": 1.5, "accuracy": 0.8}}
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert write_plots(tmp_path, rows, "classify", None, 2.0) == ["training.txt"]
    text = (tmp_path / "training.txt").read_text()
    assert "#" * 40 in text and "step 2: accuracy 0.8" in text
    assert in_text({}, "lm") == "no step was made\n"


def test_numbers_in_words():
    assert [size(n) for n in (12, 1200, 913e6, 65e9, 6.5e12)] == ["12 B", "1.2 KB", "913 MB", "65.0 GB", "6500 GB"]
    assert [duration(s) for s in (3, 89, 90, 5400, 12_000)] == ["3 s", "89 s", "2 min", "1 h 30 min", "3 h 20 min"]


def test_the_check_sees_what_lies_behind_zeros(monkeypatch):
    """LoRA's first factors have no gradient while the second are zero; nothing of that stays in the model."""

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
            torch.nn.init.zeros_(self.second.weight)

        def forward(self, x):
            return self.second(self.first(x))

    model, seen = Adapted(), []

    def verify(*args, **options):
        seen.append(fastdp.verify(*args, **options))
        return seen[-1]

    monkeypatch.setattr(preflight, "verify", verify)
    job = types.SimpleNamespace(
        model=model, data=range(9), length=lambda i: i, batch=lambda places: {"x": torch.randn(len(places), 4)},
        loss=lambda m, batch: m(batch["x"]).square().sum(1).mean(),
    )  # fmt: skip
    line = preflight.check(job)
    assert "exact" in line and seen[0].untested == [] and not model.second.weight.any()
