"""What the README and the command line promise, run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastdp
from fastdp.calibration import calibration
from fastdp.commands import demo, info
from fastdp.ops.registry import OPERATORS

ROOT = Path(__file__).parent.parent.parent


def test_quick_start_runs(capsys):
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 17
    exec(compile(code, "README", "exec"), {})
    out = capsys.readouterr().out
    assert "exact" in out and "0.weight" in out


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_info_tells_versions_backends_and_devices():
    done = subprocess.run(
        [sys.executable, "-m", "fastdp", "info"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    for word in ("torch", "opacus", "C++ kernels", "Triton", "CUDA", "devices"):
        assert word in done.stdout
    made_of = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("[tool")[0]
    for extra in set(re.findall(r"^(\w+) = ", made_of, re.M)) - {"all", "test", "docs"}:
        assert f"extra {extra} " in done.stdout
    assert done.stdout.endswith("Nothing is missing.\nTry it: python -m fastdp demo\n")


def test_info_ends_with_what_to_do(monkeypatch):
    monkeypatch.setattr(info, "EXTRAS", {"sentences": ("there_is_no_such_module", "torch"), "gpu": ("torch",)})
    monkeypatch.setattr(info, "native_status", lambda: "fastdp._C is not installed: run this")
    told = info.report()
    assert re.search(r"extra sentences +missing there_is_no_such_module\n", told)
    cpu, extra, last = told.splitlines()[-3:]
    assert cpu.endswith("without C++ kernels: fastdp._C is not installed: run this") and last.startswith("Try it: ")
    assert extra == (
        "For the extra sentences, if you need it: pip install 'accelerate>=1.1' datasets 'peft>=0.18' "
        "'sentence-transformers>=6' 'transformers>=5'"
    )


def _backend(kernel: Any) -> str:
    if kernel is None:
        return "PyTorch"
    return kernel.backend + (f", else {kernel.instead.backend}" if kernel.instead is not None else "")


def test_the_page_says_which_backend_serves_which_operator():
    text = (ROOT / "docs" / "operators.md").read_text()
    table = (
        re.search(r"\| operator \| CPU \| CUDA \| `fastdp/ops/` \|\n(.*?)\n\n", text, re.S).group(1).splitlines()[1:]
    )
    written = {}
    for line in table:
        names, cpu, cuda, file = (cell.strip() for cell in line.strip("|").split("|"))
        source = (ROOT / "fastdp" / "ops" / file.strip("`")).read_text()
        written |= {name: (cpu, cuda) for name in re.findall(r"`(\w+)`", names) if f'"{name}(' in source}
    registered = {
        name: tuple(_backend(o.kernels.get(device)) for device in ("cpu", "cuda"))
        for name, o in OPERATORS.items()
        if "." not in name
    }
    assert written == registered


def test_the_examples_of_the_operators_run(capsys):
    """All of them, in their order, as one script."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "operators.md").read_text(), re.S)
    assert len(blocks) == 6
    exec(compile("\n".join(blocks), "operators.md", "exec"), {})
    assert not any(operator.own for operator in OPERATORS.values())
    assert "Tensor a, Tensor g" in capsys.readouterr().out


def test_no_command_is_an_error_that_lists_them():
    done = subprocess.run([sys.executable, "-m", "fastdp"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "demo" in done.stderr


def test_demo_in_short(monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "EPOCHS", 3)
    monkeypatch.setattr(demo, "step_times", lambda x, y: {"non-private": 1.0, "fastdp": 1.5})
    demo.main(tmp_path)
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("fastdp   ")).split()
    assert float(row[1]) > 50 and float(row[3]) <= demo.EPSILON
    for name in ("loss.png", "reliability.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_calibration_by_hand():
    """Four predictions in two bins: gaps |0.9 - 0.5| and |0.6 - 1|."""
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]])
    found = calibration(p.log(), torch.tensor([0, 1, 0, 1]), bins=4)
    assert found.accuracy == 0.75
    assert found.ece == pytest.approx(0.5 * 0.4 + 0.5 * 0.4)
    assert found.mce == pytest.approx(0.4)
    assert found.nll == pytest.approx(-(torch.tensor([0.9, 0.1, 0.6, 0.6]).log().mean()).item())
    assert found.bin_count.tolist() == [0, 0, 2, 2]
    with pytest.raises(ValueError, match="logits"):
        calibration(p, torch.tensor([0]))


def test_the_errors_page_quotes_messages_of_the_code() -> None:
    said = []
    for path in (ROOT / "fastdp").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        said += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    quoted = re.findall(r'"([a-z][^"|]{8,})"', (ROOT / "docs/errors.md").read_text(encoding="utf-8"))
    parts = [part.strip() for quote in quoted for part in quote.split("...")]
    text = "\n".join(said)
    assert len(parts) > 30 and [part for part in parts if part not in text] == []


# ---------------------------------------------------------------------- the site (`make docs`)


def test_the_reference_has_every_public_name() -> None:
    named = set(re.findall(r"^::: fastdp\.(\w+)", (ROOT / "docs/api.md").read_text(), flags=re.M))
    modules = {"ops"}  # docs/operators.md
    results = {"CompatibilityReport", "VerifyReport", "PrivacyEngine"}  # of functions named there; docs/opacus.md
    assert set(fastdp.__all__) - modules - results <= named


def test_the_site_has_every_page() -> None:
    pages = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.M))
    assert pages == {path.name for path in (ROOT / "docs").glob("*.md")}
