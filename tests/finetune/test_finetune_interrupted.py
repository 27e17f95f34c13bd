"""The command when something comes in between: Ctrl-C, a full disk, other options, another run in the folder."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from fastdp.finetune import outputs, progress

from .finetune_models import card_of, classifier, command, reviews

pytestmark = pytest.mark.slow  # `make test-all` runs it

STEPS = ("--epochs", 1, "--batch-size", 8, "--epsilon", 8, "--device", "cpu", "--accountant", "gdp",
         "--max-physical-batch-size", 8)  # fmt: skip


@pytest.fixture
def words(tmp_path):
    model, data = classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv")
    return (model, data, "--task", "classify", "--out", tmp_path / "out", "--eval-fraction", 0, *STEPS)


@pytest.fixture
def at_step(monkeypatch):
    """at_step(2, action): do something when a step's line is drawn."""
    made = progress.Progress.step

    def set_up(number, action):
        def step(self, values):
            made(self, values)
            if values["step"] == number:
                action()

        monkeypatch.setattr(progress.Progress, "step", step)

    return set_up


def begun(words, at_step, capsys, number=2):
    """A run stopped by Ctrl-C after a step."""
    at_step(number, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert command(*words) == 130
    at_step(-1, None)
    return capsys.readouterr().out


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, words, at_step, capsys):
    said = begun(words, at_step, capsys)
    assert "Interrupted after step 2 of 5" in said and "--resume" in said and "epsilon" in said
    out = tmp_path / "out"
    assert not (out / "model").exists() and (tmp_path / "out.secret.key").exists()
    assert command(*words, "--resume") == 0
    card = card_of(out)
    assert card["steps"] == 5 and card["lost_steps"] == 0 and card["history"][0][2] == 5 and card["epsilon"] <= 8
    assert (out / "metrics.csv").read_text().count("\n") == 6  # of both processes
    assert not (tmp_path / "out.secret.key").exists()
    capsys.readouterr()
    assert command(*words, "--resume") == 0  # nothing is left to do: it costs nothing
    assert card_of(out)["history"] == card["history"]


def test_adaptive_clipping(tmp_path, words, capsys):
    """The norm follows the median; the budget is the same, as the count is part of the noise multiplier."""
    words = [*words, "--clipping", "adaptive", "--max-physical-batch-size", 4]
    assert command(*words, "--batch-size", 2) == 1
    assert "--clipping adaptive counts with noise of 0.1" in capsys.readouterr().err
    assert command(*words, "--batch-size", 12) == 0
    card, page = card_of(tmp_path / "out"), (tmp_path / "out" / "privacy_card.md").read_text()
    assert card["clipping"] == "adaptive" and card["epsilon"] <= 8
    assert "adaptive, from norm 1 on to the median norm" in page


def test_what_changed_is_named(tmp_path, words, at_step, capsys):
    begun(words, at_step, capsys)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert command(*words, "--lr", 0.1, "--epochs", 2, "--resume") == 1
    said = capsys.readouterr().err
    assert "--lr: was not given, now 0.1" in said and "--epochs: was 1.0, now 2.0" in said
    path = words[1]
    text = path.read_text()
    path.write_text(text.replace("good", "bad"))
    assert command(*words, "--resume") == 1
    assert "another data (training records)" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    path.write_text(text)
    assert command(*words, "--resume", "--max-physical-batch-size", 2) == 0  # it changes nothing that counts


def test_a_folder_in_use_is_left_alone(tmp_path, words, at_step, capsys):
    assert command(*words, "--resume") == 1
    assert "there is no run in" in capsys.readouterr().err
    begun(words, at_step, capsys)
    assert command(*words) == 1
    assert "holds a run already: go on with it by --resume" in capsys.readouterr().err
    other = tmp_path / "other"
    other.mkdir()
    (other / "letters.txt").write_text("dear")
    assert command(*words, "--out", other) == 1
    assert "is not empty" in capsys.readouterr().err
    assert command(*words, "--out", other / "letters.txt") == 1
    assert "is a file" in capsys.readouterr().err


def test_a_full_disk_at_the_end_loses_nothing(tmp_path, words, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "save_model", full)
        assert command(*words) == 1
    said = capsys.readouterr().err
    assert "no space left to write" in said and "--resume writes what is missing" in said and "Traceback" not in said
    out = tmp_path / "out"
    assert not (out / "model").exists()
    assert command(*words, "--resume") == 0
    assert (out / "model" / "config.json").exists() and card_of(out)["steps"] == 5


def test_interrupted_before_the_first_step(tmp_path, words, capsys, monkeypatch):
    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("fastdp.finetune.prepare.encode", stopped)
    assert command(*words) == 130
    assert "interrupted" in capsys.readouterr().err and not (tmp_path / "out").exists()
