"""The Python programs on the pages of docs/ run, those of a page in their order, as one program."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp

pytestmark = pytest.mark.slow  # `make test-all` runs it

DOCS = Path(__file__).parents[2] / "docs"
# Pieces of a program that needs what they do not show: several processes, a model from a hub, a file that was written
# before. Tests of those pages' subjects run them in whole; here they must compile.
PIECES = {"architecture", "distributed", "finetune_command", "huggingface"}
APART = {"loops", "operators", "rows", "rules"}  # tests of their subjects run them, and look at what comes of it


def programs(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.S)


def pages() -> list[str]:
    return sorted(path.stem for path in DOCS.glob("*.md") if programs(path.stem))


@pytest.mark.parametrize("name", [name for name in pages() if name not in PIECES | APART])
def test_the_programs_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, object] = {"__name__": f"docs_{name}"}
    for number, program in enumerate(programs(name)):
        exec(compile(program, f"docs/{name}.md [{number}]", "exec"), space)


@pytest.mark.parametrize("program", range(5), ids=["public", "graphed", "step", "accelerate", "lightning"])
def test_each_loop_runs_with_a_model_and_data(program: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of what the page leaves to its reader: a network, records, public ones, and the imports."""
    found = programs("loops")
    assert len(found) == 5
    x, y = torch.randn(4000, 4), torch.randint(0, 2, (4000,))
    space: dict[str, Any] = {"torch": torch, "fastdp": fastdp, "F": F, "network": lambda: nn.Linear(4, 2)}
    space |= {"data": torch.utils.data.TensorDataset(x, y), "model": space["network"]()}
    space["loader"] = fastdp.poisson_loader(space["data"], expected_batch_size=400, max_physical_batch_size=256)
    space |= {"public_x": x[:8], "public_y": y[:8], "public_loader": [(x[:8], y[:8])], "batches": [(x[:32], y[:32])]}
    if program in (0, 2):
        space["optimizer"] = fastdp.DPAdamW(space["model"], lr=1e-3, noise_multiplier=1.0)
    if program == 3:
        space["accelerate"] = pytest.importorskip("accelerate")
        for state in ("AcceleratorState", "GradientState", "PartialState"):  # one a process: other tests have others
            monkeypatch.setattr(getattr(space["accelerate"].state, state), "_shared_state", {})
    if program == 4:
        space["L"] = pytest.importorskip("lightning")
        space["DPCallback"] = importlib.import_module("fastdp.lightning").DPCallback
    monkeypatch.chdir(tmp_path)  # Lightning's logs
    exec(compile(found[program], f"docs/loops.md [{program}]", "exec"), space)
    private = next(space[name] for name in ("private", "optimizer", "trainer") if name in space)
    private = private.optimizers[0] if program == 4 else private
    assert program == 1 or sum(run[2] for run in private.history) >= 10


@pytest.mark.parametrize("name", sorted(PIECES))
def test_the_pieces_compile(name: str) -> None:
    assert programs(name)
    for number, program in enumerate(programs(name)):
        compile(program, f"docs/{name}.md [{number}]", "exec")
