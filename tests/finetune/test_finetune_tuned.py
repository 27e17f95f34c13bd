"""`python -m fastdp tune finetune`: the best of several fine-tuned models, for the price of the search."""

from __future__ import annotations

import json

import pytest

from fastdp.__main__ import parsed
from fastdp.commands import tune
from fastdp.finetune import tuned
from fastdp.mechanisms import NegativeBinomialRuns, tuning_epsilon

from .finetune_models import classifier, command, reviews

pytestmark = pytest.mark.slow  # `make test-all` runs it

RUN = ("--task", "classify", "--labels", "neg,pos", "--epsilon", 2, "--batch-size", 8, "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("model"))


def search(folder, model, settings, *words, held_out="public", of_run=(), monkeypatch=None):
    """(exit code, folder of the search). Runs are made in this process."""
    data, place, out = reviews(folder / "reviews.csv", 80), folder / "settings.json", folder / "out"
    place.write_text(json.dumps(settings))
    given = ["tune", "finetune", "--settings", place, "--delta", 1e-3, "--held-out", held_out, "--out", out, *words]
    options = parsed([str(word) for word in (*given, "--", model, data, *RUN, *of_run)])
    return tune.main(options, tuned.candidates), out


@pytest.fixture
def here(monkeypatch):
    """Each run in this process."""

    def run(words, **_):
        assert words[1:4] == ["-m", "fastdp", "finetune"]
        return type("Done", (), {"returncode": command(*words[4:])})

    monkeypatch.setattr(tuned.subprocess, "run", run)


def test_a_search_by_finetune(tmp_path, model, here, capsys, monkeypatch):
    monkeypatch.setattr(NegativeBinomialRuns, "draw", lambda self: 2)
    public = reviews(tmp_path / "public.csv", 20)
    settings = [{"lr": 1e-3, "epochs": 1}, {"lr": 1e-2, "epochs": 2, "train_only": ["head"]}]
    code, out = search(tmp_path, model, settings, of_run=("--eval", public))
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "accuracy" not in said.out and "Traceback" not in said.err
    card = json.loads((out / "search.json").read_text())
    assert 0 <= card["score"] <= 1 and card["setting"] in settings
    assert [run[0][2] for run in card["histories"]] == [10, 20]  # steps
    histories = [[tuple(run) for run in history] for history in card["histories"]]
    assert card["epsilon"] == tuning_epsilon(histories, 1e-3, NegativeBinomialRuns(8.0, 0.0)) > 2
    assert {path.name for path in (out / "best").iterdir()} == {"model"}  # no curves, no card of the run alone


def test_private_held_out_records_of_the_same_file(tmp_path, model, here, monkeypatch):
    monkeypatch.setattr(NegativeBinomialRuns, "draw", lambda self: 1)
    code, out = search(tmp_path, model, [{"epochs": 0.5}], "--score-noise", 3, held_out="private")
    card = json.loads((out / "search.json").read_text())
    assert code == 0 and card["epsilon_of_held_out_records"] > 0 and card["score"] != round(card["score"])


def test_records_in_one_setting_and_persons_in_another_are_refused(tmp_path, model, capsys):
    data = reviews(tmp_path / "people.csv", 80, people=30)
    place = tmp_path / "settings.json"
    place.write_text(json.dumps([{}, {"group_by": "user"}]))
    words = ("tune", "finetune", "--settings", place, "--delta", 1e-3, "--held-out", "public", "--out", tmp_path / "o")
    options = parsed([str(word) for word in (*words, "--", model, data, *RUN, "--eval", data)])
    assert tune.main(options, tuned.candidates) == 1 and "for records, or for persons" in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting, of_run, held_out, match",
    [
        ({"lr": 1e-3}, (), "public", "as private as the others"),
        ({"out": "x"}, (), "public", "not for the settings"),
        ({"delta": 1e-5}, (), "public", "not for the settings"),
        ({}, ("--seed", 3), "public", "not for a search"),
        ({}, ("--delta=1e-5",), "public", "given to tune itself"),
        ({}, ("--eval-fraction", 0), "private", "nothing is evaluated"),
        ({}, ("--group-by", "user"), "private", "counts records, not persons"),
        ({"epsilon": 1e-9}, (), "private", "cannot be reached"),
    ],
)
def test_what_a_search_cannot_answer_for_is_refused(tmp_path, model, capsys, setting, of_run, held_out, match):
    noise = ("--score-noise", 3) if held_out == "private" else ()
    code, out = search(tmp_path, model, [setting], *noise, held_out=held_out, of_run=of_run)
    assert code == 1 and match in capsys.readouterr().err and not out.exists()
