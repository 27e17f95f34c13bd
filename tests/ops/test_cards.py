"""GPUs that compiled code does not run on: what is built by which nvcc, and what serves where there is no code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fastdp.commands import info
from fastdp.ops import registry
from fastdp.ops.noise_reference import STREAM

ROOT = Path(__file__).parent.parent.parent
FAKE = """#!/bin/sh
case "$*" in
--list-gpu-code) echo "{known}";;
*) echo "$@" >> {log}
   while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done;;
esac
"""


def commands(folder: Path, known: str) -> list[str]:
    """What setup.py asks an nvcc that knows these GPUs, and that is at its usual place only."""
    log, home = folder / "log", folder / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text(FAKE.format(known=known, log=log))
    (home / "bin" / "nvcc").chmod(0o755)
    (folder / "pybind11.py").write_text("get_include = lambda: '.'")
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "CUDA_HOME": str(home), "FASTDP_CUDA": "1"}
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder)]
    environment |= {"PYTHONPATH": str(folder), "CC": "false", "CXX": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stderr.splitlines()[-1:] if done.returncode else log.read_text().splitlines()


def test_nvcc_is_asked_what_it_knows(tmp_path: Path) -> None:
    """An nvcc before Blackwell; the device file is not asked for, nor is nvcc on the PATH."""
    lines = commands(tmp_path, "sm_52 sm_80 sm_86 sm_90")
    assert "-shared" in lines[-1] and len(lines) > 5
    for line in lines[:-1]:
        assert "code=sm_80" in line and "code=sm_90" in line and "code=compute_90 " in line
        assert "100" not in line.split(" -c ")[0].replace(str(tmp_path), "")
        assert "-DFASTDP_CUDA_TARGETS=80_90 " in line


def test_an_nvcc_that_knows_no_such_gpu(tmp_path: Path) -> None:
    assert "makes code for none of 80, 90, 100" in commands(tmp_path, "sm_35 sm_52")[0]


@pytest.mark.parametrize(
    ("arch", "targets", "runs"),
    [
        (80, [80, 90, 100], True), (86, [80, 90, 100], True), (89, [80], True), (90, [80], True), (75, [80, 90], False),
        (70, [80, 90, 100], False), (100, [80, 90], True), (120, [80, 90, 100], True), (86, [90, 100], False),
        (103, [80, 90, 100], True), (90, [80, 100], False),
    ],
)  # fmt: skip
def test_what_a_gpu_runs(arch: int, targets: list[int], runs: bool) -> None:
    """Machine code of its generation, or PTX of the last target, which is for every later GPU."""
    assert registry.runs_on(arch, targets) is runs


def test_a_gpu_without_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU of two that the extension has no code for: neither gets it, and `info` says why."""
    module = ModuleType("fastdp._CUDA")
    module.targets = "80_90_100"  # type: ignore[attr-defined]
    monkeypatch.setattr(registry, "_module", lambda name, remedy: module)
    load = registry.native_cuda.__wrapped__
    assert load() is module
    monkeypatch.setattr(registry, "gpus", lambda: [("cuda:0", 90), ("cuda:1", 75)])
    reason = load()
    assert isinstance(reason, str) and "sm_80, sm_90, sm_100" in reason and "cuda:1, which is sm_75" in reason
    monkeypatch.setattr(info, "native_cuda", lambda: reason)
    monkeypatch.setattr(info, "triton_module", lambda name: reason)  # what these load would stay
    monkeypatch.setattr(info, "served", dict)
    assert "none for cuda:1" in info.report()
    monkeypatch.setattr(registry, "gpus", lambda: [("cuda:0", 103)])
    assert load() is module


def test_an_extension_built_from_older_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise would be another, beside Triton's and other ranks'."""
    module = ModuleType("fastdp._C")
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: module)
    assert registry._module("fastdp._C", "run this") == (
        "fastdp._C was built from older sources, and would draw other noise: run this"
    )
    module.stream = STREAM  # type: ignore[attr-defined]
    assert registry._module("fastdp._C", "run this") is module


def test_a_gpu_too_old_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    load = registry.triton_module.__wrapped__
    monkeypatch.setattr(registry, "gpus", lambda: [("cuda:0", 75)])
    assert load("linear") == "Triton needs sm_80; cuda:0 is sm_75"
    kernel = registry.triton("linear", "linear_norm_sq")
    monkeypatch.setattr(registry, "triton_module", load)
    operator = registry.Operator("name(Tensor a) -> Tensor", lambda a: a, {"cuda": kernel})
    assert operator.served_by("cuda") == "PyTorch (Triton needs sm_80; cuda:0 is sm_75)"
    assert operator.implementation("cuda") is operator.reference


def test_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_capability=lambda number: [(8, 6), (10, 0)][number],
    )
    monkeypatch.setattr(registry.torch, "cuda", found)
    monkeypatch.setattr(registry.torch.version, "cuda", "13.0")
    assert registry.gpus() == [("cuda:0", 86), ("cuda:1", 100)]
    monkeypatch.setattr(registry.torch.version, "cuda", None)
    assert registry.gpus() == []
