"""Labels, held-out records, persons."""

from __future__ import annotations

import pytest

from fastdp.finetune.plan import FinetuneError
from fastdp.finetune.records import load_data

from .finetune_models import options_of, reviews, texts


def load(path, *words, known=None, task="classify"):
    return load_data(options_of("model", path, "--task", task, "--epsilon", 1, *words), known)


def labelled(path, labels):
    path.write_text("text,label\n" + "".join(f"word {i},{label}\n" for i, label in enumerate(labels)))
    return path


def test_labels_are_numbered_in_order(tmp_path):
    data = load(labelled(tmp_path / "a.csv", [10, 9, 2, 10, 9, 2]), "--eval-fraction", 0)
    assert data.names == ["2", "9", "10"] and data.train.labels == [2, 1, 0, 2, 1, 0] and not data.public_labels


def test_labels_given_and_known(tmp_path):
    path = labelled(tmp_path / "a.csv", ["b", "a"] * 3)
    data = load(path, "--labels", "b,a,c", "--eval-fraction", 0)
    assert data.names == ["b", "a", "c"] and data.public_labels and data.train.labels == [0, 1] * 3
    with pytest.raises(FinetuneError, match=r"line 3: the label 'a' is none of 'b', 'c'"):
        load(path, "--labels", "b,c")
    with pytest.raises(FinetuneError, match="two or more"):
        load(path, "--labels", "b,b")
    assert load(path, known={"a": 1, "b": 0, "z": 2}).names == ["b", "a", "z"]  # those of the model
    assert load(path, known={"LABEL_0": 0, "LABEL_1": 1}).names == ["a", "b"]


def test_one_class_and_too_many(tmp_path):
    with pytest.raises(FinetuneError, match="all 8 records to train on have the label 'x'"):
        load(labelled(tmp_path / "a.csv", ["x"] * 8), "--eval-fraction", 0)
    with pytest.raises(FinetuneError, match="30 different values in 30 rows"):
        load(labelled(tmp_path / "b.csv", range(30)))


def test_whether_a_record_is_held_out_depends_on_itself_alone(tmp_path):
    found, labels = texts(400)
    path = tmp_path / "a.csv"

    def held(which):
        path.write_text("text,label\n" + "".join(f"{found[i]},{labels[i]}\n" for i in which))
        data = load(path, "--eval-fraction", 0.25)
        return set(data.train.texts), set(data.held_out.texts)

    train, out = held(range(400))
    assert not train & out and 0.15 < len(out) / len(train | out) < 0.35
    less, fewer = held(range(1, 400))
    assert less == train - ({found[0]} - less) and fewer == out - ({found[0]} - fewer)
    turned = held(reversed(range(400)))
    assert turned == (train, out)


def test_persons_are_held_out_whole(tmp_path):
    data = load(reviews(tmp_path / "a.csv", 200, people=20), "--group-by", "user", "--eval-fraction", 0.3)
    assert data.columns["group"] == "user"
    assert not set(data.train.groups) & set(data.held_out.groups)
    assert len(data.train) + len(data.held_out) == 200
    path = tmp_path / "b.csv"
    path.write_text("text,label,user\na,x,1\nb,y,\nc,y,2\n")
    with pytest.raises(FinetuneError, match="line 3: nothing says whose"):
        load(path, "--group-by", "user")


def test_a_file_to_evaluate_on(tmp_path):
    path, other = labelled(tmp_path / "a.csv", ["x", "y"] * 4), tmp_path / "b.jsonl"
    other.write_text('{"text": "p", "label": "y"}\n{"text": "q", "label": "x"}\n')
    data = load(path, "--eval", other)
    assert len(data.train) == 8 and data.held_out.labels == [1, 0]
    other.write_text('{"text": "p", "label": "z"}\n{"text": "q", "label": "x"}\n')
    with pytest.raises(FinetuneError, match="b.jsonl.*(\n|.)*the label 'z' is none of 'x', 'y'"):
        load(path, "--eval", other)
    other.write_text('{"body": "p", "label": "y"}\n')
    with pytest.raises(FinetuneError, match="no column 'text'"):
        load(path, "--eval", other)


def test_too_few(tmp_path):
    with pytest.raises(FinetuneError, match="--batch-size 9, but there are 3 persons"):
        load(reviews(tmp_path / "a.csv", 12, people=3), "--group-by", "user", "--batch-size", 9, "--eval-fraction", 0)
    path = tmp_path / "b.txt"
    path.write_text("only one\n")
    with pytest.raises(FinetuneError, match="one record is too few"):
        load(path, "--eval-fraction", 0, task="lm")


def test_the_digest_is_of_all_that_is_learnt(tmp_path):
    path = labelled(tmp_path / "a.csv", ["x", "y"] * 4)
    first = load(path, "--eval-fraction", 0).train.digest
    path.write_text(path.read_text().replace("word 3,y", "word 3,x"))
    assert load(path, "--eval-fraction", 0).train.digest != first
