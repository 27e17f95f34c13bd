"""The models of docs/finetuning.md, and its tables against the rows kept."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow  # `make test-all` runs it

pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks import exactness, finetuning  # noqa: E402
from benchmarks.finetuning_models import FINETUNING  # noqa: E402
from benchmarks.tables import read_rows  # noqa: E402


@pytest.mark.parametrize("name", ["sst2-lora", "sst2-full"])
def test_steps_are_measured_of_exact_contenders(name: str) -> None:
    work = FINETUNING[name]._replace(batch_size=2)
    assert exactness.error_of("fastdp", work) < 1e-4


def test_the_document_has_the_tables_of_the_rows() -> None:
    text = finetuning.DOC.read_text()
    assert finetuning.filled(text) == text, "python -m benchmarks.finetuning"
    rows = read_rows(finetuning.RUNS)
    assert rows and all(row["commit"] != "-" and row["date"] for row in rows)
    for row in rows:
        if row["engine"] != "none":
            assert float(row["epsilon"]) <= float(row["epsilon_target"]), row
