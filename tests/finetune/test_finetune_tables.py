"""Files of records as people have them: bad rows by line, nothing repaired or dropped in silence."""

from __future__ import annotations

import csv
import gzip
import json
import math

import pytest

from fastdp.finetune.labels import class_name
from fastdp.finetune.plan import FinetuneError
from fastdp.finetune.records import load_data
from fastdp.finetune.tables import read_table

from .finetune_models import options_of, reviews


def load(path, *words, task="classify"):
    return load_data(options_of("model", path, "--task", task, "--epsilon", 1, "--eval-fraction", 0, *words))


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_csv_of_any_origin(tmp_path, encoding, ending):
    lines = ["text,label", '"ein ""gutes"" Stück, ja",1', '"über', 'zwei Zeilen",0', "", "日本語 🎬,1.0"]
    path = write(tmp_path / "a.csv", ending.join(lines) + ending, encoding)
    table = read_table(path)
    assert table.lines == [2, 3, 6]
    data = load(path)
    assert data.train.texts[0] == 'ein "gutes" Stück, ja' and data.train.texts[2] == "日本語 🎬"
    assert data.train.texts[1].split() == ["über", "zwei", "Zeilen"]
    assert data.names == ["0", "1"] and data.train.labels == [1, 0, 1]  # "1" and "1.0" are one class


def test_delimiters_are_found_or_given(tmp_path):
    for mark in ";\t|,":
        assert load(write(tmp_path / "a.csv", f"text{mark}label\na b{mark}x\nc{mark}y\n")).train.texts == ["a b", "c"]
    path = write(tmp_path / "b.csv", "text#label\na,b#x\nc,d#y\n")
    assert load(path, "--delimiter", "#").train.texts == ["a,b", "c,d"]
    with pytest.raises(FinetuneError, match="one character"):
        load(path, "--delimiter", "##")


def test_quotes_are_text_in_tsv(tmp_path):
    path = write(tmp_path / "a.tsv", 'text\tlabel\n"what a film\t1\nshe said "no"\t0\n')
    assert load(path).train.texts == ['"what a film', 'she said "no"']
    quoted = write(tmp_path / "b.tsv", 'text\tlabel\n"a\tb"\t1\nc\t0\n')
    with pytest.raises(FinetuneError, match=r"line 2: 3 fields, expected 2 \(if fields are quoted: --quote"):
        load(quoted)
    assert load(quoted, "--quote", '"').train.texts == ["a\tb", "c"]


def test_a_quote_without_an_end_takes_one_line_and_no_more(tmp_path):
    rows = "".join(f"word {i},{i % 2}\n" for i in range(20))
    path = write(tmp_path / "a.csv", 'text,label\n"open,1\n' + rows)
    table = read_table(path)
    assert [bad.line for bad in table.bad] == [2] and "not closed" in table.bad[0].reason
    assert len(table) == 20 and table.lines[0] == 3


def test_a_long_text_is_read(tmp_path):
    limit = csv.field_size_limit()
    path = write(tmp_path / "a.csv", f"text,label\n{'very ' * 60_000},1\nb,0\n")
    assert len(load(path).train.texts[0]) == 300_000
    assert csv.field_size_limit() == limit


def test_bad_rows_are_named_and_refused_or_skipped(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\ngood,1\n,1\nbad,\nfine,0,7\nnice,nan\nawful,0.5\nok,0\n")
    with pytest.raises(FinetuneError) as found:
        load(path)
    said = str(found.value)
    for line, reason in ((3, "no text"), (4, "no label"), (5, "3 fields, expected 2"), (6, "no label"),
                         (7, "the label 0.5 is a fraction")):  # fmt: skip
        assert f"line {line}: {reason}" in said
    assert "5 of 7 rows" in said and "--skip-bad-rows 5" in said
    with pytest.raises(FinetuneError, match="allows 4"):
        load(path, "--skip-bad-rows", 4)
    data = load(path, "--skip-bad-rows", 5)
    assert data.train.texts == ["good", "ok"] and "left out" in data.said[0]


def test_many_bad_rows_are_counted_not_listed(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\na,1\nb,0\n" + ",1\n" * 50)
    with pytest.raises(FinetuneError) as found:
        load(path)
    assert str(found.value).count("no text") == 10 and "and 40 more" in str(found.value)


def test_no_file_nothing_in_it_and_a_folder(tmp_path):
    reviews(tmp_path / "reviews.csv")
    with pytest.raises(FinetuneError, match="no file.*did you mean 'reviews.csv'"):
        load(tmp_path / "review.csv")
    for text, words in (("", "is empty"), (" \n\n", "is empty"), ("text,label\n", "no records below its header")):
        with pytest.raises(FinetuneError, match=words):
            load(write(tmp_path / "a.csv", text))
    with pytest.raises(FinetuneError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(FinetuneError, match="--format"):
        load(write(tmp_path / "a.dat", "x"))


def test_another_encoding_is_told_by_line(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\ngood,1\nschön,0\n", "latin-1")
    with pytest.raises(FinetuneError, match="line 3 has the byte 0xf6.*--encoding"):
        load(path)
    assert load(path, "--encoding", "latin-1").train.texts[1] == "schön"
    with pytest.raises(FinetuneError, match="no encoding 'klingon'"):
        load(path, "--encoding", "klingon")


def test_columns(tmp_path):
    path = write(tmp_path / "a.csv", "id,Review,label,label\n1,a,x,y\n2,b,y,x\n")
    with pytest.raises(FinetuneError, match="2 columns named 'label'"):
        load(path, "--label-column", "label")
    with pytest.raises(FinetuneError, match=r"no column 'reviw'.*did you mean 'Review'(.|\n)*It has: 'id', 'Review'"):
        load(path, "--text-column", "reviw", "--label-column", "id")
    other = write(tmp_path / "b.csv", "a,b,c\n1,2,3\n")
    with pytest.raises(FinetuneError, match="which column.*--label-column.*'a', 'b', 'c'"):
        load(other)
    with pytest.raises(FinetuneError, match="given twice"):
        load(other, "--label-column", "a", "--text-column", "a")
    data = load(write(tmp_path / "c.csv", "id,Review,class\n1,a,x\n2,b,y\n"))  # usual names, in any case
    assert data.columns == {"text": "Review", "label": "class"}
    data = load(write(tmp_path / "d.csv", "text,mood\na,x\nb,y\n"))  # or what is left
    assert data.columns == {"text": "text", "label": "mood"}


def test_a_file_without_a_header(tmp_path):
    path = write(tmp_path / "a.tsv", "a fine film\t1\nnot good\t0\n")
    with pytest.raises(FinetuneError, match="--columns text,label"):
        load(path)
    assert load(path, "--columns", "text,label").train.texts == ["a fine film", "not good"]
    with pytest.raises(FinetuneError, match="looks like data"):
        load(path, "--text-column", "text", "--label-column", "1")


def test_json_lines(tmp_path):
    rows = [{"text": "a\u2028b", "label": True}, {"text": "c", "label": False, "more": [1]}, {"text": "d"}, 7]
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
                 + '\n{"text": "e", "label": 1, "label": 0}\n{"text": 5, "label": true}\n{"text"\n'
                 + '{"text": "\\ud800", "label": true}\n')  # fmt: skip
    with pytest.raises(FinetuneError) as found:
        load(path)
    for words in ("line 3: no label", "line 4: a JSON int", "line 5: 'label' is given more than once",
                  "line 6: the text is of type int", "line 7: no JSON", "line 8: the text holds half"):  # fmt: skip
        assert words in str(found.value)
    data = load(path, "--skip-bad-rows", 6)
    assert data.train.texts == ["a\u2028b", "c"] and data.names == ["false", "true"]
    with pytest.raises(FinetuneError, match="are for CSV and TSV"):
        load(path, "--columns", "text,label")
    listed = write(tmp_path / "b.json", json.dumps(rows[:2]))
    assert load(listed).train.labels == [1, 0]


def test_parquet_with_holes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", None, "c", "d"], "label": [1.0, 0.0, math.nan, 0.0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(FinetuneError, match="row 2: no text\n  row 3: no label"):
        load(tmp_path / "a.parquet")
    data = load(tmp_path / "a.parquet", "--skip-bad-rows", 2)
    assert data.names == ["0", "1"] and data.train.labels == [1, 0]
    with pytest.raises(FinetuneError, match="no Parquet file"):
        load(write(tmp_path / "b.parquet", "text,label\n"))


def test_lines_of_text_and_packed_files(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"first line\n\nsecond line\r\n"))
    assert load(path, task="lm").train.texts == ["first line", "second line"]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(FinetuneError, match="cannot be read"):
        load(path, task="lm")


@pytest.mark.parametrize("value, name", [(1, "1"), (1.0, "1"), ("1.0", "1"), (" a ", "a"), (True, "true"),
                                         ("True", "true"), ("NA", "NA"), ("-2", "-2")])  # fmt: skip
def test_one_class_one_name(value, name):
    assert class_name(value) == name


@pytest.mark.parametrize("value", [None, math.nan, "", " ", "NaN", 0.5, "0.5", math.inf, [1], {}])
def test_what_is_no_class(value):
    with pytest.raises(ValueError, match="label"):
        class_name(value)
