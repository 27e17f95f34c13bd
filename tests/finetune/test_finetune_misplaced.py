"""An option that would have no effect is refused, by its name and with what to do, before anything is written."""

from __future__ import annotations

import json

import pytest

from .finetune_models import card_of, classifier, command, language_model, reviews, texts
from .test_finetune_command import QUICK

pytestmark = pytest.mark.slow  # `make test-all` runs it


def refused(capsys, *words):
    assert command(*words, *QUICK) == 1
    return capsys.readouterr().err


@pytest.fixture
def out(tmp_path):
    yield tmp_path / "out"
    assert not (tmp_path / "out").exists()


def test_a_second_text_of_words_and_tags(tmp_path, out, capsys):
    rows = [{"tokens": ["good", "film"], "more": "very bad", "tags": ["A", "O"]} for _ in range(20)]
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    said = refused(capsys, classifier(tmp_path / "m"), data, "--task", "tokens", "--pair-column", "more", "--out", out)
    assert "--pair-column does not go with --task tokens" in said


def test_a_label_of_a_language_model(tmp_path, out, capsys):
    model, data = language_model(tmp_path / "m"), reviews(tmp_path / "d.csv")
    said = refused(capsys, model, data, "--task", "lm", "--label-column", "label", "--out", out)
    assert "--label-column does not go with --task lm" in said


def test_names_of_labels_that_are_columns(tmp_path, out, capsys):
    data = tmp_path / "d.jsonl"
    found, _ = texts(20)
    data.write_text("\n".join(json.dumps({"text": t, "x": i % 2, "y": i % 3 == 0}) for i, t in enumerate(found)))
    words = ("--task", "multi-label", "--label-column", "x,y", "--labels", "p,q", "--out", out)
    assert "whose names are the labels" in refused(capsys, classifier(tmp_path / "m"), data, *words)


def test_records_that_would_be_used_for_nothing(tmp_path, out, capsys):
    """--eval FILE and a share of DATA: half of the data would have been left out without a word."""
    model, data, other = classifier(tmp_path / "m"), reviews(tmp_path / "d.csv"), reviews(tmp_path / "e.csv", 12)
    words = (model, data, "--task", "classify", "--eval", other, "--out", out)
    assert "Leave one of the two out" in refused(capsys, *words, "--eval-fraction", 0.5)
    assert command(*words, "--eval-fraction", 0, "--dry-run", *QUICK) == 0
    assert "40 records of" in capsys.readouterr().out


def test_a_bound_for_persons_without_persons(tmp_path, capsys):
    model, data, out = classifier(tmp_path / "m"), reviews(tmp_path / "d.csv", people=20), tmp_path / "out"
    words = (model, data, "--task", "classify", "--out", out)
    said = refused(capsys, *words, "--max-records-per-group", 3)
    assert "--max-records-per-group goes with --group-by COLUMN" in said and not out.exists()
    assert command(*words, "--group-by", "user", *QUICK) == 0
    assert "at most 8 of them in a step" in card_of(out)["neighbours"]
    assert command(*words, "--group-by", "user", "--resume", *QUICK) == 0, capsys.readouterr().err


def test_a_rate_for_new_weights_where_there_are_none(tmp_path, capsys):
    model, data = language_model(tmp_path / "m"), reviews(tmp_path / "d.csv")
    words = ("--task", "lm", "--new-lr", 0.1, "--out", tmp_path / "out", "--dry-run", *QUICK)
    assert command(model, data, *words) == 0
    assert "--new-lr has no effect" in capsys.readouterr().out


def test_a_model_that_padding_changes_has_a_remedy(tmp_path, out, capsys):
    from .finetune_models import tokenizer_of, transformers

    tokenizer_of(tmp_path / "m")
    config = transformers.FNetConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, intermediate_size=24, max_position_embeddings=32
    )
    transformers.FNetModel(config).save_pretrained(tmp_path / "m")
    said = refused(capsys, tmp_path / "m", reviews(tmp_path / "d.csv"), "--task", "classify", "--out", out)
    assert "padding counts" in said and "take another model" in said


def test_rows_of_another_task(tmp_path, out, capsys):
    """Not "is it the format (--delimiter, --quote)?", of a file that has neither."""
    data = tmp_path / "d.jsonl"
    row = {"prompt": "good", "chosen": [{"role": "assistant", "content": "fine"}], "rejected": [{"content": "bad"}]}
    data.write_text("\n".join([json.dumps(row)] * 20))
    said = refused(capsys, language_model(tmp_path / "m"), data, "--task", "preference", "--out", out)
    assert "of type list, expected a string" in said and "right --task?" in said and "--delimiter" not in said
