"""`python -m fastdp tune`: the best of a secret number of runs is released alone, for the price that was said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from fastdp.__main__ import parsed
from fastdp.commands import tune
from fastdp.mechanisms import NegativeBinomialRuns, tuning_epsilon
from fastdp.utils.formatting import at_most

pytestmark = pytest.mark.slow  # `make test-all` runs it

TRAIN = """
import os, sys, warnings
import fastdp, torch
seen = []

def train(setting, folder):
    print("SECRET out"); print("SECRET err", file=sys.stderr); os.write(1, b"SECRET 1"); warnings.warn("SECRET warning")
    os.system("echo SECRET child")
    seen.append(1)
    assert len(seen) == 1, "a run finds what another has left"
    (folder / "model").write_text(str(setting["lr"]))
    with open({log!r}, "a") as log:
        log.write(f"{{setting['lr']}}\\n")
    return setting["lr"], [(setting["noise_multiplier"], setting["sample_rate"], setting["steps"])]

def noisy(setting, folder):
    return [1.0] * 70 + [0.0] * 30, [(1.0, 0.1, 10)]

def outside(setting, folder):
    return [2.0, 0.5], [(1.0, 0.1, 10)]

def number(setting, folder):
    return torch.tensor(0.5), [(1.0, 0.1, 10)]

def more(setting, folder):
    return 1.0, [(1.0, 0.1, 11)]

def unknown(setting, folder):
    return 1.0, [(1.0, None, 10)]

def alone(setting, folder):
    return 1.0

def fails(setting, folder):
    raise ValueError("SECRET record")

def exits(setting, folder):
    raise SystemExit(0)

def nan(setting, folder):
    return float("nan") if setting["lr"] == 1 else -1.0, [(1.0, 0.1, 10)]

def optimizer(setting, folder):
    model = torch.nn.Linear(2, 1)
    rates = {{"noise_multiplier": 1.0, "sample_rate": 0.1, "expected_batch_size": 2}}
    made = fastdp.DPSGD(model, lr=0.1, seed=setting.get("key"), **rates)
    model(torch.ones(2, 2)).sum(1).mean().backward()
    made.step()
    return 0.5, made
"""
SPENT = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10}


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search of settings by a function of the file above; (exit code, its folder)."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(TRAIN.format(log=str(log)))
    monkeypatch.setattr(sys, "path", list(sys.path))
    numbers = iter(range(100))

    def run(name="train", settings=None, *words, held_out="public", out=None):
        place = tmp_path / "settings.json"
        settings = [{"lr": lr, **SPENT} for lr in (1, 2, 3)] if settings is None else settings
        place.write_text(json.dumps(settings))
        out = tmp_path / f"out{next(numbers)}" if out is None else out
        given = ["tune", f"{script}:{name}", "--settings", place, "--delta", 1e-4, "--held-out", held_out, "--out", out]
        options = parsed([str(word) for word in (*given, *words)])
        return tune.main(options, lambda *_: pytest.fail("not of finetune")), out

    run.log = log
    return run


def test_the_best_of_the_runs_is_released_and_nothing_else(search, capfd):
    code, out = search("train", None, "--expected-runs", 5)
    told = "".join(capfd.readouterr())
    assert code == 0 and "SECRET" not in told
    made = [float(line) for line in search.log.read_text().split()]
    card = json.loads((out / "search.json").read_text())
    assert card["score"] == max(made) == card["setting"]["lr"] == float((out / "best" / "model").read_text())
    assert {path.name for path in out.iterdir()} == {"best", "search.json", "search_card.md"}
    said = tuning_epsilon([[(1.0, 0.1, 10)]], 1e-4, NegativeBinomialRuns(5.0, 0.0))
    assert card["epsilon"] == said and f"epsilon {at_most(said, 4)}" in told and card["status"] == "done"
    page = (out / "search_card.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(compile(code, "search_card.md", "exec"), {})
    assert float(capfd.readouterr().out) == pytest.approx(said)
    assert str(out.parent) not in page  # it is given away
    # not again, neither with other runs nor with another number of them
    code, _ = search("train", None, out=out)
    assert code == 1 and "cannot be repeated or taken up" in capfd.readouterr().err
    assert json.loads((out / "search.json").read_text()) == card


def test_private_held_out_records_get_noise_and_an_epsilon(search, capsys):
    found = [search("noisy", [SPENT], "--score-noise", 5, "--expected-runs", 1.001, held_out="private") for _ in "ab"]
    cards = [json.loads((out / "search.json").read_text()) for _, out in found]
    scores = [card["score"] for card in cards]
    assert scores[0] != scores[1] and all(abs(score - 70) < 40 and score != 70 for score in scores)
    said = tuning_epsilon([[(5.0, 1.0, 1)]], 1e-4, NegativeBinomialRuns(1.001, 0.0))
    assert cards[0]["epsilon_of_held_out_records"] == said
    for name, match in (("outside", "between 0 and 1"), ("number", "a list")):
        code, out = search(name, [SPENT], "--score-noise", 5, held_out="private")
        assert code == 1 and match in capsys.readouterr().err and not (out / "best").exists()
    code, _ = search("noisy", [SPENT], held_out="private")
    assert code == 1 and "Give --score-noise" in capsys.readouterr().err
    code, _ = search("train", None, "--score-noise", 5)
    assert code == 1 and "public records need no noise" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, match",
    [
        ("more", "spent more than its setting says"),
        ("unknown", "not known"),
        ("alone", "must return"),
        ("fails", "failed with ValueError in .*script.py, line"),
        ("exits", "failed with SystemExit"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_a_run_that_would_break_the_account_ends_the_search(search, capfd, name, match):
    code, out = search(name, [{"lr": 1, **SPENT}])
    told = "".join(capfd.readouterr())
    assert code == 1 and "SECRET" not in told
    assert re.search(match, told), told
    assert not (out / "best").exists() and not (out / ".runs").exists()
    if name != "nothing":
        assert json.loads((out / "search.json").read_text())["status"] == "failed"
        assert search(name, [{"lr": 1, **SPENT}], out=out)[0] == 1


def test_an_interrupted_search_releases_nothing_and_is_over(search, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "_best", interrupt)
    code, out = search()
    assert code == 130 and "cannot be taken up" in capsys.readouterr().err
    assert json.loads((out / "search.json").read_text())["status"] == "interrupted"
    assert {path.name for path in out.iterdir()} == {"search.json"}


def test_an_optimizer_tells_what_it_spent_and_whether_its_noise_is_secret(search, capsys):
    assert search("optimizer", [SPENT])[0] == 0
    assert search("optimizer", [{**SPENT, "key": 3}])[0] == 1
    assert "by seed=" in capsys.readouterr().err
    assert search("optimizer", [{**SPENT, "sample_rate": 0.05, "steps": 1}])[0] == 1


@pytest.mark.parametrize(
    "settings, match",
    [
        ([], "a list of objects"),
        ([1], "a list of objects"),
        ([{"lr": 1}], "lacks noise_multiplier, sample_rate, steps"),
        ([{**SPENT, "seed": 1}], "has a seed"),
        ([SPENT, SPENT], "there twice"),
        ([{**SPENT, "noise_multiplier": 0}], "no noise"),
        ([{**SPENT, "noise_multiplier": "1"}], "no run of"),
        ([{**SPENT, "sample_rate": 1.5}], "sample rate in"),
        ([{"history": [[1.0, 0.1]]}], "history must be a list"),
    ],
)
def test_settings_without_an_account_are_refused(search, capsys, settings, match):
    code, out = search("train", settings)
    assert code == 1 and match in capsys.readouterr().err and not out.exists()


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs/tuning.md").read_text(encoding="utf-8")
    script, python = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "my_script.py").write_text(script)
    (tmp_path / "settings.json").write_text(re.search(r"```json\n(.*?)```", text, re.S)[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(NegativeBinomialRuns, "draw", lambda self: 1)
    for words in re.findall(r"^python -m fastdp (tune my_script.*)$", text, re.M):
        assert tune.main(parsed(words.split()), None) == 0
    assert (tmp_path / "search" / "best" / "model.pt").exists()
    capsys.readouterr()
    exec(compile(python, "tuning.md", "exec"), {})
    assert 3.5 < float(capsys.readouterr().out) < 8
    table = [float(cell) for cell in re.search(r"\| epsilon \|(.*)\|", text)[1].split("|")]
    means = [1 + 1e-6, 2, 5, 10, 20, 100, 1000]
    assert table == [round(tuning_epsilon([[(1.0, 0.01, 1000)]], 1e-5, NegativeBinomialRuns(m, 0)), 2) for m in means]
