"""Wheels say what is in them, and the settings for builds by others name versions that there are."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(folder: Path, *, kind: str = "wheel", **settings: str) -> subprocess.CompletedProcess[str]:
    """A wheel, or the sources, by setup.py, which leaves nothing in the tree."""
    words = ["egg_info", "--egg-base", str(folder)]
    if kind == "wheel":
        words += ["build", "--build-base", str(folder / "build"), "bdist_wheel", "--bdist-dir", str(folder / "wheel")]
    else:
        words += ["sdist"]
    words += ["--dist-dir", str(folder / "dist")]
    (folder / "pybind11.py").write_text("def get_include():\n    return ''\n")
    environment = {**os.environ, "PYTHONPATH": str(folder), "CC": "/missing/compiler", "CXX": "/missing/compiler"}
    command = [sys.executable, "setup.py", "-q", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**environment, "FASTDP_CUDA": "0", **settings}, capture_output=True, text=True
    )


@pytest.mark.parametrize("settings", [{}, {"FASTDP_CPU": "0"}], ids=["compiler missing", "not wanted"])
def test_a_wheel_without_compiled_code_is_for_every_platform(tmp_path: Path, settings: dict[str, str]) -> None:
    pytest.importorskip("setuptools", "77")
    done = build(tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        said = opened.read(next(name for name in names if name.endswith("/WHEEL"))).decode()
    assert "Root-Is-Purelib: true" in said and "Tag: py3-none-any" in said
    assert {"fastdp/__init__.py", "fastdp/py.typed", "fastdp/kernels/__init__.py"} <= set(names)
    assert not [name for name in names if name.endswith(".so") or name.startswith(("kernels/", "tests/", "build/"))]


def test_a_wheel_that_must_hold_compiled_code_fails_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    done = build(tmp_path, FASTDP_CPU="1")
    assert done.returncode != 0 and not (tmp_path / "dist").exists()
    assert "missing/compiler" in done.stdout + done.stderr


def test_a_setting_that_is_none(tmp_path: Path) -> None:
    done = build(tmp_path, FASTDP_CPU="yes")
    assert done.returncode != 0 and "FASTDP_CPU must be 0 or 1, not 'yes'" in done.stderr


def test_the_sources_hold_what_any_machine_compiles(tmp_path: Path) -> None:
    """Those for GPUs, too, though the machine that packs them has no nvcc."""
    pytest.importorskip("setuptools", "77")
    done = build(tmp_path, kind="sdist")
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert any(name.endswith(".cu") for name in sources) and sources <= names
    assert {"LICENSE", "README.md", "kernels/linear.py", "fastdp/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith(("tests/", "build/"))]
