"""The Python programs on the pages of docs/ run, those of a page in their order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # `make test-all` runs it

DOCS = Path(__file__).parents[2] / "docs"
# Pieces of a program that needs what they do not show: several processes, a model from a hub, a file that was written
# before. Tests of those pages' subjects run them in whole; here they must compile.
PIECES = {"architecture", "distributed", "finetune_command", "huggingface", "loops"}
APART = {"operators", "rows", "rules"}  # tests of their subjects run them, and look at what comes of it


def programs(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.S)


def pages() -> list[str]:
    return sorted(path.stem for path in DOCS.glob("*.md") if programs(path.stem))


@pytest.mark.parametrize("name", [name for name in pages() if name not in PIECES | APART])
def test_the_programs_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, object] = {"__name__": f"docs_{name}"}
    for number, program in enumerate(programs(name)):
        exec(compile(program, f"docs/{name}.md [{number}]", "exec"), space)


@pytest.mark.parametrize("name", sorted(PIECES))
def test_the_pieces_compile(name: str) -> None:
    assert programs(name)
    for number, program in enumerate(programs(name)):
        compile(program, f"docs/{name}.md [{number}]", "exec")
