"""The notebooks of examples/notebooks run, cell by cell, and are saved without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # `make test-all` runs it

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return code


def run(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What all cells print, and the names that they leave."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(name)):
        exec(compile("".join(cell["source"]), f"{name}.ipynb [{number}]", "exec"), space)
    return capsys.readouterr().out, space


def test_all_are_tried() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {"classify", "language_model_lora", "audit"}


def test_classify(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib").use("agg")
    said, space = run("classify", capsys)
    assert space["accuracy"] > 0.8
    assert 2.9 < float(re.findall(r"epoch 30: epsilon ([\d.]+)", said)[0]) <= 3.0
    assert "held until the end of backward" in space["optimizer"].explain()
    drawn = [line.get_ydata() for axes in space["figure"].axes for line in axes.get_lines()]
    assert len(drawn) == 5 and list(drawn[0]) == sorted(drawn[0]) and len(drawn[0]) == 30


def test_language_model_lora(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    said, space = run("language_model_lora", capsys)
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", said)[0])
    assert last < first - 0.3 and "adapter_model.safetensors" in said


def test_audit(capsys: pytest.CaptureFixture[str]) -> None:
    _, space = run("audit", capsys)
    assert space["right"].ok and not space["wrong"].ok
    assert "minibatch_clipping" in {finding.name for finding in space["wrong"].bugs}
