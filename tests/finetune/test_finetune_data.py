"""From a file to records: columns, cells, labels, who is held out. Nothing is repaired or dropped in silence."""

from __future__ import annotations

import gzip
import json

import pytest

from fastdp.finetune.plan import FinetuneError
from fastdp.finetune.records import class_name, load_data

from .finetune_models import options_of, reviews, texts


def load(path, *words, task="classify", known=None):
    fraction = () if "--eval-fraction" in words or "--eval" in words else ("--eval-fraction", 0)
    return load_data(options_of("model", path, "--task", task, "--epsilon", 1, *fraction, *words), known)


@pytest.fixture
def written(tmp_path):
    def write(text, name="a.csv", encoding="utf-8"):
        path = tmp_path / name
        path.write_bytes(text.encode(encoding))
        return path

    return write


def read(data):
    return [each["text"] for each in data.train], [each.get("label") for each in data.train]


WORDS = (["a b", "c"], [1, 0])


@pytest.mark.parametrize(
    "name, text, words, found",
    [
        ("a.csv", 'text,label\n"ein ""gutes"", ja",1\n\n"zwei\nZeilen",1.0\nNA,0\n', (),
         (['ein "gutes", ja', "zwei\nZeilen", "NA"], [1, 1, 0])),
        ("a.csv", "\ufefftext;label\r\na b;y\r\nc;x\r\n", (), WORDS),
        ("a.csv", "text#label\na b#y\nc#x\n", ("--delimiter", "#"), WORDS),
        ("a.tsv", 'text\tlabel\n"a b\t1\n"no"\t0\n', (), (['"a b', '"no"'], [1, 0])),
        ("a.tsv", 'text\tlabel\n"a b"\ty\nc\tx\n', ("--quote", '"'), WORDS),
        ("a.tsv", "a b\t1\nc\t0\n", ("--columns", "text,label"), WORDS),
        ("a.csv", "id,Review,class\n1,a b,y\n2,c,x\n", (), WORDS),  # usual names, in any case
        ("a.csv", "text,mood\na b,y\nc,x\n", (), WORDS),  # or what is left
        ("a.jsonl", '{"text": "a b", "label": true}\n{"text": "c", "label": false, "more": [1]}\n', (), WORDS),
        ("a.json", '[{"text": "a b", "label": 1}, {"text": "c", "label": 0}]', (), WORDS),
        ("a.dat", "text,label\na b,1\nc,0\n", ("--format", "csv"), WORDS),
    ],
)  # fmt: skip
def test_files_of_any_origin(written, name, text, words, found):
    assert read(load(written(text, name), *words)) == found


def test_encodings_packed_files_lines_and_parquet(written, tmp_path):
    path = written("text,label\ngood,1\nschön,0\n", encoding="latin-1")
    with pytest.raises(FinetuneError, match="can't decode byte 0xf6.*--encoding"):
        load(path)
    assert read(load(path, "--encoding", "latin-1"))[0] == ["good", "schön"]
    for name, text in (("a.txt.gz", b"first\n\nsecond\n"), ("a.csv.gz", b"text,label\na,0\nb,1\n")):
        (tmp_path / name).write_bytes(gzip.compress(text))
    assert read(load(tmp_path / "a.csv.gz")) == (["a", "b"], [0, 1])
    assert read(load(tmp_path / "a.txt.gz", task="lm"))[0] == ["first", "second"]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table(
        {"text": ["a", None, "c", "d"], "label": [1.0, 0.0, float("nan"), 0.0]}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(FinetuneError, match="row 2: no text\n  row 3: no label"):
        load(tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet", "--skip-bad-rows", 2).names == ["0", "1"]


def test_nothing_of_the_records_is_left_in_a_cache(written, monkeypatch, tmp_path):
    """datasets would keep a copy of private records in its cache, for ever."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for name, text in (("a.jsonl", '{"text": "SECRET", "label": 1}\n' * 2), ("a.csv", "text,label\nSECRET,1\n")):
        with pytest.raises(FinetuneError, match="two are needed"):
            load(written(text, name))
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path]
    assert not [path for path in left if b"SECRET" in path.read_bytes()]


@pytest.mark.parametrize(
    "name, text, words, match",
    [
        ("a.csv", "", (), "cannot be read as csv"),
        ("a.csv", "text,label\n", (), "no records"),
        ("a.csv", 'text,label\n"open,1\nb,0\n', (), "EOF inside string"),
        ("a.csv", "text,label\na,1,7\nb,0,7\n", (), "more fields than the 2 columns"),
        ("a.csv", "text,label\na,1\nb,0,7\n", (), "Expected 2 fields in line 3"),
        ("a.dat", "x", (), "--format"),
        ("a.jsonl", "x", ("--columns", "text,label"), "are for CSV and TSV"),
        ("a.jsonl", '{"text"\n', (), "JSON parse error"),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}\n', (), "surrogate"),
        ("a.jsonl", '{"text": "e", "label": 1, "label": 0}\n', (), "specified twice"),
        ("a.parquet", "x", (), "cannot be read as parquet"),
        ("a.csv", "text,label\na,1\n", ("--encoding", "klingon"), "unknown encoding"),
        ("a.csv", "text,label\na,1\n", ("--delimiter", "##"), "one character"),
        ("a.csv", "id,Review\n1,a\n", ("--text-column", "reviw"), r"no column 'reviw'.*did you mean 'Review'"),
        ("a.csv", "a,b,c\n1,2,3\n", (), "which column.*Give --text-column"),
        ("a.csv", "text,b,c\n1,2,3\n", (), "which column.*Give --label-column"),
        ("a.csv", "a,b\n1,2\n", ("--label-column", "a", "--text-column", "a"), "given twice"),
        ("a.tsv", "a fine film\t1\nnot good\t0\n", ("--text-column", "text"), "If the first line is a record"),
        ("a.csv", "text,label\n" + "t,x\n" * 8, (), "'x' only: two are needed"),
        ("a.csv", "text,label\n" + "t,x\n" * 8, ("--labels", "x,y"), "the same label"),
        ("a.csv", "text,label\n" + "".join(f"t,{i}\n" for i in range(30)), (), "30 different values in 30 rows"),
        ("a.csv", "text,label\nt,a\nu,b\n", ("--labels", "b,c"), "row 1: the label 'a' is none of 'b', 'c'"),
        ("a.csv", "text,label\nt,a\nu,b\n", ("--labels", "b,b"), "two or more"),
        ("a.csv", "text,label,who\nt,a,1\nu,b,\n", ("--group-by", "who"), "row 2: nothing says whose"),
        ("a.csv", "text,label\nt,a\nu,b\n", ("--batch-size", 3), "--batch-size 3, but there are 2 records"),
        ("a.csv", "text,label\nt,a\nu,b\n", ("--eval-fraction", 0.9), "are left to train on"),
    ],
)  # fmt: skip
def test_what_is_refused(written, name, text, words, match):
    with pytest.raises(FinetuneError, match=match):
        load(written(text, name), *words)


def test_no_file_and_a_folder(tmp_path):
    reviews(tmp_path / "reviews.csv")
    with pytest.raises(FinetuneError, match="no file.*did you mean 'reviews.csv'"):
        load(tmp_path / "review.csv")
    with pytest.raises(FinetuneError, match="is a folder.*--task images"):
        load(tmp_path)


def test_bad_rows_are_named_and_refused_or_skipped(written):
    path = written("text,label\ngood,1\n,1\nbad,\nnice,nan\nok,0\n")
    with pytest.raises(FinetuneError) as found:
        load(path)
    for words in ("row 2: no text", "row 3: no label", "row 4: no label", "3 of 5 rows", "--skip-bad-rows 3"):
        assert words in str(found.value)
    with pytest.raises(FinetuneError, match="3 of 5"):
        load(path, "--skip-bad-rows", 2)
    data = load(path, "--skip-bad-rows", 3)
    assert read(data)[0] == ["good", "ok"] and "left out" in data.said[0]
    with pytest.raises(FinetuneError) as found:
        load(written("text,label\na,1\nb,0\n" + ",1\n" * 50))
    assert str(found.value).count("no text") == 10 and "and 40 more" in str(found.value)
    with pytest.raises(FinetuneError, match="of type list, expected a string(.|\n)*right --task"):
        row = {"prompt": "p", "chosen": [{"content": "fine"}], "rejected": [{"content": "bad"}]}
        load(written(json.dumps(row) + "\n", "a.jsonl"), task="preference")


def test_labels_are_numbered_in_order_given_or_known(written, tmp_path):
    path = written("text,label\n" + "".join(f"t {i},{label}\n" for i, label in enumerate([10, 9, 2] * 2)))
    data = load(path)
    assert data.names == ["2", "9", "10"] and read(data)[1] == [2, 1, 0] * 2 and not data.public
    data = load(path, "--labels", "9,10,2,x")
    assert data.names == ["9", "10", "2", "x"] and data.public and read(data)[1] == [1, 0, 2] * 2
    assert load(path, known={"10": 1, "9": 0, "2": 2}).names == ["9", "10", "2"]  # those of the model
    assert load(path, known={"LABEL_0": 0, "LABEL_1": 1}).names == ["2", "9", "10"]
    other = tmp_path / "b.jsonl"
    other.write_text('{"text": "p", "label": 9}\n{"text": "q", "label": 2.0}\n')
    data = load(path, "--eval", other)
    assert len(data.train) == 6 and [each["label"] for each in data.held_out] == [1, 0]
    for text, match in (('{"text": "p", "label": "z"}\n', "'z' is none of"), ('{"body": "p"}\n', "no column 'text'")):
        other.write_text(text)
        with pytest.raises(FinetuneError, match=match):
            load(path, "--eval", other)


@pytest.mark.parametrize("value, name", [(1, "1"), (1.0, "1"), ("1.0", "1"), (" a ", "a"), (True, "true"),
                                         ("True", "true"), ("NA", "NA"), ("-2", "-2")])  # fmt: skip
def test_one_class_one_name(value, name):
    assert class_name(value) == name


@pytest.mark.parametrize(
    "task, text, words, labels",
    [
        ("regression", "text,rating\na,1\nb,2.5\nc,5\n", (), [1.0, 2.5, 5.0]),
        ("regression", "text,rating\na,1\nb,2.5\nc,5\n", ("--label-range", "1,5"), [-1.0, -0.25, 1.0]),
        ("multi-label", 'text,labels\nt,a\nu,a|b\nv,"[""b""]"\nw,[]\n', (), [[1, 0], [1, 1], [0, 1], [0, 0]]),
        ("multi-label", "text,a,b\nt,1,0\nu,true,1\nv,0,no\n", ("--label-column", "a,b"), [[1, 0], [1, 1], [0, 0]]),
        ("tokens", "words,tags\ngood film,O B-X\nbad,O\n", (), [[1, 0], [1]]),
        ("seq2seq", "document,summary\na,x y\nb,z\n", (), ["x y", "z"]),
        ("preference", "prompt,chosen,rejected\np,good,bad\nq,x,y\n", (), [["good", "bad"], ["x", "y"]]),
    ],
)  # fmt: skip
def test_cells_of_each_task(written, task, text, words, labels):
    assert read(load(written(text), *words, task=task))[1] == labels


def test_a_word_a_line(written):
    data = load(written("-DOCSTART- -X- O\n\ngood JJ O\nfilm NN B-X\n\n\nbad JJ O\n", "a.conll"), task="tokens")
    assert read(data) == ([["good", "film"], ["bad"]], [[1, 0], [1]]) and data.names == ["B-X", "O"]


@pytest.mark.parametrize(
    "task, text, words, match",
    [
        ("regression", "text,y\na,1\nb,many\n", (), "row 2: the label 'many' is no number"),
        ("regression", "text,y\na,1\nb,inf\n", (), "not finite"),
        ("regression", "text,y\na,1\nb,nan\n", (), "row 2: no label"),
        ("regression", "text,y\na,1\nb,5\n", ("--label-range", "1,4"), "the label 5 is outside --label-range 1,4"),
        ("regression", "text,y\na,1\nb,1\n", (), "the same label"),
        ("multi-label", "text,a,b\nt,1,0\nu,2,0\n", ("--label-column", "a,b"), "row 2: a is '2', expected 0 or 1"),
        ("multi-label", "text,a,b\nt,1,0\nu,0,1\n", ("--label-column", "a,x"), "no column 'x'"),
        ("multi-label", "text,a,b\nt,1,0\nu,0,1\n", ("--label-column", "a,b", "--labels", "p,q"), "whose names are"),
        ("multi-label", "text,labels\nt,a|b\nu,\n", (), r"row 2: no labels \(\[\] stands"),
        ("tokens", "words,tags\ngood film,O\nbad,B\n", (), "row 1: 2 words, but 1 tags"),
        ("tokens", "words,tags\ngood film,O O\nbad,O\n", ("--labels", "O,B"), "the same label"),
        ("tokens", "words,tags,more\na,O,x\nb,B,y\n", ("--pair-column", "more"), "--pair-column does not go with"),
        ("preference", "prompt,chosen,rejected\np,fine,fine\n", (), "the chosen and the rejected answer are the same"),
        ("preference", "prompt,chosen,rejected\np,a,b\n", ("--rejected-column", "lost"), "no column 'lost'"),
        ("seq2seq", "document,summary\na,x\nb,y\n", ("--labels", "a,b"), "--labels does not go with --task seq2seq"),
    ],
)  # fmt: skip
def test_cells_that_are_refused(written, task, text, words, match):
    with pytest.raises(FinetuneError, match=match):
        load(written(text), *words, task=task)


def test_whether_a_record_is_held_out_depends_on_itself_alone(written):
    """The guarantee of training needs it: one record more or less in the file moves no other."""
    found, labels = texts(400)

    def sides(which):
        text = "text,label\n" + "".join(f"{found[i]},{labels[i]}\n" for i in which)
        data = load(written(text), "--eval-fraction", 0.25)
        return {each["text"] for each in data.train}, {each["text"] for each in data.held_out}

    train, out = sides(range(400))
    assert not train & out and 0.15 < len(out) / len(train | out) < 0.35
    less, fewer = sides(range(1, 400))
    assert less == train - ({found[0]} - less) and fewer == out - ({found[0]} - fewer)
    assert sides(reversed(range(400))) == (train, out)


def test_persons_are_held_out_whole(tmp_path):
    data = load(reviews(tmp_path / "a.csv", 200, people=20), "--group-by", "user", "--eval-fraction", 0.3)
    assert not set(data.groups) & {each["group"] for each in data.held_out}
    assert len(data.train) + len(data.held_out) == 200 and data.columns["group"] == "user"
