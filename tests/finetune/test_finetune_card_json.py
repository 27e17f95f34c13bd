"""The card for machines: its schema, its hashes, what is left out of it; and the warnings of a weak guarantee."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import stat
from pathlib import Path

import pytest

from fastdp.finetune import card as card_module
from fastdp.finetune import hashes

from .finetune_models import card_of, classifier, command, options_of, reviews
from .test_finetune_card import card
from .test_finetune_command import QUICK

pytestmark = pytest.mark.slow  # `make test-all` runs it

SCHEMA = json.loads((Path(card_module.__file__).parent / "privacy_card.schema.json").read_text())
TYPES = {"string": str, "number": (int, float), "integer": int, "boolean": bool, "object": dict, "array": list,
         "null": type(None)}  # fmt: skip
KNOWN = {"type", "description", "properties", "required", "additionalProperties", "items", "enum", "const", "pattern",
         "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "title", "$id",
         "$schema"}  # fmt: skip


def problems(value, schema, place="card"):
    """What does not fit, by the part of JSON Schema that the card's uses."""
    assert set(schema) <= KNOWN, f"{place}: the test does not know {set(schema) - KNOWN}"
    types = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", list(TYPES))
    fits = [kind for kind in types if isinstance(value, TYPES[kind]) and (kind == "boolean" or value is not True)]
    if not fits or (isinstance(value, bool) and "boolean" not in types):
        return [f"{place} is {value!r}, expected {types}"]
    found = []
    if "enum" in schema and value not in schema["enum"] or "const" in schema and value != schema["const"]:
        found.append(f"{place} is {value!r}")
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{place} is {value!r}")
    if isinstance(value, int | float):
        low, high = schema.get("minimum", value), schema.get("maximum", value)
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if not low <= value <= high or (above is not None and value <= above) or (below is not None and value >= below):
            found.append(f"{place} is {value}")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{place} has {len(value)} items")
        found += [p for i, each in enumerate(value) for p in problems(each, schema.get("items", {}), f"{place}[{i}]")]
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{place} has no {name!r}" for name in schema.get("required", ()) if name not in value]
        for name, each in value.items():
            if name in known or isinstance(others, dict):
                found += problems(each, known.get(name, others), f"{place}.{name}")
            elif others is False:
                found.append(f"{place} has {name!r}")
    return found


def test_the_validator_of_this_test_finds_what_is_wrong():
    right = json.loads(card().as_json())
    assert problems(right, SCHEMA) == []
    for change in ({"epsilon": "4"}, {"epsilon": -1.0}, {"delta": 0}, {"unit": "city"}, {"steps": 1.5}, {"more": 1},
                   {"history": [[1, 2]]}, {"not_covered": []}, {"released_files": {"a": "b"}}, {"guaranteed": 1},
                   {"verified": {"result": "exact"}}, {"begun": "yesterday"}, {"schema": "urn:other"}):  # fmt: skip
        assert problems({**right, **change}, SCHEMA), change
    assert problems({name: value for name, value in right.items() if name != "epsilon"}, SCHEMA)


def test_cards_of_all_kinds_fit_the_schema():
    for found in (card(), card(0), card(seed=1), card(accountant="gdp"), card(group="user", max_records_per_group=3),
                  card(17, 3, "budget"), card(units=50)):  # fmt: skip
        assert problems(json.loads(found.as_json()), SCHEMA) == []


def test_by_jsonschema_where_it_is_installed():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(card().as_json()))


def test_the_schema_is_in_the_package():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "finetune/*.json" in project["tool"]["setuptools"]["package-data"]["fastdp"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(a run's folder, its data, its model)."""
    place = tmp_path_factory.mktemp("run")
    model, data, out = classifier(place / "bert"), reviews(place / "reviews.csv"), place / "out"
    words = ("--task", "classify", "--labels", "neg,pos", "--responsible", "A. Person <a@b.c> | team", *QUICK)
    assert command(model, data, "--out", out, *words) == 0
    return out, data, model


def test_the_card_of_a_run_fits_and_its_hashes_are_right(finished):
    out, _, model = finished
    found = card_of(out)
    assert problems(found, SCHEMA) == []
    assert found["released_files"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                                       for path in (out / "model").iterdir()}  # fmt: skip
    weights = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert found["base_model"]["files"]["model.safetensors"] == weights
    assert found["begun"] <= found["finished"] and found["finished"].startswith(found["date"][:4])
    assert found["verified"] == {"result": "exact", "records": 4, "tolerance": 1e-4}
    page = (out / "privacy_card.md").read_text()
    assert found["released_files"]["model.safetensors"] in page and weights in page and found["data_commitment"] in page
    assert (
        r"A. Person &lt;a@b.c&gt; \| team" in page
        and "exact within 0.0001" in page
        and "1, to 10 (this model)" not in page
    )


def test_nothing_in_the_card_tells_of_the_data(finished):
    """Neither its hash, nor figures of private records; only a commitment whose key stays with the owner."""
    out, data, _ = finished
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    public = (out / "privacy_card.json").read_text() + (out / "privacy_card.md").read_text()
    kept = json.loads((out / hashes.COMMITMENT).read_text())
    assert kept["files"] == {"reviews.csv": digest} and digest not in public and kept["key"] not in public
    assert stat.S_IMODE((out / hashes.COMMITMENT).stat().st_mode) == 0o600
    key, files = bytes.fromhex(kept["key"]), json.dumps(kept["files"], sort_keys=True)
    assert card_of(out)["data_commitment"] == hmac.new(key, files.encode(), "sha256").hexdigest()
    fields = set(card_of(out))
    assert not fields & {"nonfinite", "accuracy", "nll", "loss", "labels", "records"} and "accuracy" not in str(fields)
    errors = re.findall(r"relative errors: norms (\S+),", (out / "plan.txt").read_text())
    assert errors and errors[0] not in public


def test_a_commitment_has_a_key_of_its_own_and_keeps_it(tmp_path):
    files = {"a.csv": "0" * 64}
    places = [tmp_path / name for name in "ab"]
    for place in places:
        place.mkdir()
    first, second = (hashes.commit(place, files) for place in places)
    assert first != second == hashes.commit(places[1], files)
    assert hashes.commit(places[1], {"a.csv": "1" * 64}) != second
    (places[0] / hashes.COMMITMENT).write_text("damaged")
    assert len(hashes.commit(places[0], files)) == 64


def test_what_is_weak_is_warned_of(tmp_path, capsys):
    weak = card(noise_multiplier=0.3, units=50, delta=5e-3)
    assert [line.split()[0] for line in weak.warnings] == ["epsilon", "delta"] and weak.strength == "weak"
    page = weak.markdown()
    assert page.count("> **Warning**") == 2 and "above 10 (this model)" in page
    assert card(units=50, delta=1e-3).warnings == [] and "Warning" not in card(units=50, delta=1e-3).markdown()
    assert card(noise_multiplier=20.0).strength == "strong" and card().strength == "moderate"
    assert "(this model)" not in card(seed=1).markdown()
    assert "Several records of one person" in card().markdown()
    assert "Several records of one person" not in card(group="user", max_records_per_group=2).markdown()
    model, data = classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv")
    words = ("--task", "classify", "--out", tmp_path / "no", "--dry-run", *QUICK, "--epsilon", 20, "--delta", 0.02)
    assert command(model, data, *words) == 0
    assert capsys.readouterr().out.count("Warning: ") == 2  # before anything is spent


def test_the_bounds_of_the_legend():
    assert card_module.guess_of(1, 0) == pytest.approx(0.73, abs=0.002)
    assert card_module.guess_of(10, 0) == pytest.approx(0.99995, abs=1e-5)


def test_who_is_responsible_may_change_when_a_run_is_resumed(finished, capsys):
    out, data, model = finished
    before = card_of(out)
    words = ("--task", "classify", "--labels", "neg,pos", "--out", out, "--resume", *QUICK)
    assert command(model, data, *words) == 0, capsys.readouterr().err
    after = card_of(out)
    assert after["responsible"] is None and after["data_commitment"] == before["data_commitment"]
    assert (
        after["begun"] == before["begun"]
        and after["finished"] == before["finished"]
        and after["released_files"] == before["released_files"]
    )
    assert options_of("m", "d", "--task", "lm", "--epsilon", 1).responsible is None
