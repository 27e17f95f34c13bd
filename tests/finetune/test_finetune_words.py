"""What the command line says of wrong words, and that an --out that cannot be written is noticed first."""

from __future__ import annotations

import json
import os
import stat

import pytest

import fastdp
from fastdp.__main__ import parser
from fastdp.finetune import command as command_module
from fastdp.finetune import folder

from .finetune_models import card_of, classifier, command, language_model, reviews
from .test_finetune_command import QUICK, refused

pytestmark = pytest.mark.slow  # `make test-all` runs it

RUN = ["finetune", "m", "d"]


@pytest.mark.parametrize("words, said", [
    (["fintune", "m", "d"], "did you mean 'finetune'?"),
    ([*RUN, "--tsk", "lm", "--epsilon", "1"], "there is no option --tsk; did you mean '--task'?"),
    ([*RUN, "--task", "clasify", "--epsilon", "1"], "did you mean 'classify'?"),
    ([*RUN, "--task=lm", "--epsilonn=3"], "there is no option --epsilonn; did you mean '--epsilon'?"),
    (["--verison"], "did you mean '--version'?"),
    ([*RUN, "--task", "lm"], "required: --epsilon"),
    ([], "required: demo|info|finetune|tune|audit|ntk"),
    (["xyz"], "there is no command 'xyz'; there are demo, info"),
    (["audit", "s.py:f", "--seed", "x"], "--seed"),
])  # fmt: skip
def test_wrong_words_are_answered_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as found:
        parser().parse_args(words)
    err = capsys.readouterr().err
    assert found.value.code == 2 and said in err and err.count("\n") == 1 and "usage:" not in err


def test_right_words_are_taken():
    found = parser().parse_args([*RUN, "--task", "lm", "--eps", "3", "--delta=1e-5"])  # a beginning suffices
    assert found.epsilon == 3 and found.delta == 1e-5
    assert parser().parse_args(["info"]).command == "info"


def test_the_version(capsys):
    with pytest.raises(SystemExit) as found:
        parser().parse_args(["--version"])
    assert found.value.code == 0 and capsys.readouterr().out == f"fastdp {fastdp.__version__}\n"


def test_a_folder_that_cannot_be_written_is_noticed_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command_module, "prepare", lambda options: pytest.fail("the data was loaded first"))
    words = ("no model", tmp_path / "no.csv", "--task", "classify", *QUICK, "--out")
    (tmp_path / "file").write_text("")
    for place, said in (("file", "is a file"), ("file/out", "is a file"), ("x" * 300, "cannot be used")):
        assert said in refused(capsys, *words, tmp_path / place)
    made = folder.tempfile.NamedTemporaryFile

    def on_a_disk_to_be_read(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(folder.tempfile, "NamedTemporaryFile", on_a_disk_to_be_read)
    assert "cannot be written (Read-only file system)" in refused(capsys, *words, tmp_path / "deep" / "out")
    monkeypatch.setattr(folder.tempfile, "NamedTemporaryFile", made)
    monkeypatch.setattr(folder.os, "access", lambda place, mode: place != tmp_path)
    said = refused(capsys, *words, tmp_path / "out")
    assert f"{tmp_path}, where the folder or its keys would lie, cannot be written" in said and "permission" in said


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_what_may_not_be_given_away_is_its_owners_alone(tmp_path):
    out = tmp_path / "out"
    before = os.umask(0o002)  # of teams that share a group
    try:
        words = ("--task", "classify", "--out", out, *QUICK)
        assert command(classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv"), *words) == 0
    finally:
        os.umask(before)
    modes = {path.relative_to(out).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
    shared = {name: mode for name, mode in modes.items() if name.startswith(("model/", "privacy_card"))}
    assert "model/model.safetensors" in shared and len(shared) > 4
    assert set(shared.values()) == {0o664}, shared
    alone = {name: mode for name, mode in modes.items() if name not in shared and name != "model"}
    assert {"journal.jsonl", "metrics.csv", "checkpoints", "training.png", "plan.txt", "options.json"} <= set(alone)
    inside = {name: mode for name, mode in alone.items() if not name.startswith("tensorboard/")}
    assert not {name: oct(mode) for name, mode in inside.items() if mode & 0o077}


def test_bytes_that_are_no_characters(tmp_path, capsys):
    """In paths and arguments: the run used to end in a traceback after its last step, before its card."""
    model, odd, out = classifier(tmp_path / "m"), tmp_path / os.fsdecode(b"d\xfc.csv"), tmp_path / "out"
    reviews(odd)
    words = (model, odd, "--task", "classify", "--responsible", os.fsdecode(b"J\xfcrgen"), *QUICK)
    assert command(*words, "--out", out) == 0, capsys.readouterr().err
    assert card_of(out)["responsible"] == os.fsdecode(b"J\xfcrgen")
    assert "J\\udcfcrgen" in (out / "privacy_card.md").read_text() and "d\\udcfc.csv" in (out / "plan.txt").read_text()
    assert command(*words, "--out", tmp_path / os.fsdecode(b"o\xfc")) == 1
    assert "has bytes that are no UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "task, row, words",
    [("classify", {"text": "good", "label": "\ud800"}, ()), ("tokens", {"tokens": ["\ud800"], "tags": ["a"]}, ()),
     ("lm", {"text": "good", "who": "\ud800"}, ("--group-by", "who"))],
)  # fmt: skip
def test_half_a_character_in_a_row(tmp_path, capsys, task, row, words):
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join([json.dumps(row)] * 20))
    model = language_model(tmp_path / "m") if task == "lm" else classifier(tmp_path / "m")
    assert command(model, data, "--task", task, "--out", tmp_path / "out", *words, *QUICK) == 1
    assert "half a surrogate pair" in capsys.readouterr().err
