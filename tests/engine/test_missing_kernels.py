"""A run without kernels says so, once, with the command that builds them; one that wants none is quiet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fastdp.engine import attach_checks
from fastdp.errors import MissingKernelsWarning
from fastdp.ops.registry import Kernel, Operator

pytestmark = pytest.mark.slow  # `make test-all` runs it

ROOT = Path(__file__).parents[2]
TWO_OPTIMIZERS = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in f.__module__]  # which find what another tree compiled
import torch, fastdp
for _ in range(2):
    model = torch.nn.Linear(3, 2)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
    model(torch.ones(4, 3)).square().sum(1).mean().backward()
    optimizer.step()
print(torch.isfinite(model.weight).all().item(), fastdp.__file__)
"""
MISSING = "run as plain PyTorch on cpu"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This package as a fresh checkout, where nothing is compiled."""
    tree = tmp_path_factory.mktemp("a checkout")
    shutil.copytree(ROOT / "fastdp", tree / "fastdp", ignore=shutil.ignore_patterns("*.so", "__pycache__", "kernels"))
    (tree / "kernels").symlink_to(ROOT / "kernels")
    shutil.copy(ROOT / "setup.py", tree)
    return tree


def run(tree: Path, code: str = TWO_OPTIMIZERS, **settings: str) -> str:
    """Runs it there; what it says on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **settings}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment)
    assert done.returncode == 0 and f"True {tree}" in done.stdout, done.stdout + done.stderr
    return done.stderr


def test_a_checkout_without_compiled_kernels_says_so_once(checkout: Path) -> None:
    said = run(checkout)
    assert said.count(MISSING) == 1 and "<string>:7: MissingKernelsWarning" in said  # the user's line
    assert "fastdp._C is not installed: with a C++ compiler, run" in said
    assert f"`FASTDP_CPU=1 python -m pip install --no-deps -e '{checkout}'`" in said
    assert MISSING not in run(checkout, FASTDP_CPU="0")


def test_a_gpu_without_triton_and_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = {
        name: Operator(name, print, {"cuda": Kernel(backend, lambda why=why: why)})
        for name, backend, why in (
            ("a", "Triton", "no triton"),
            ("b", "Triton", "no triton"),
            ("c", "CUDA C++", "no nvcc"),
        )
    }
    operators |= {"d": Operator("d", print, {"cuda": Kernel("Triton", lambda: print)}), "e": Operator("e", print, {})}
    monkeypatch.setattr(attach_checks, "OPERATORS", operators)
    assert attach_checks.missing("cuda") == {"no triton": ["a", "b"], "no nvcc": ["c"]}
    assert attach_checks.missing("cpu") == attach_checks.missing("xpu") == {}
    with pytest.warns(MissingKernelsWarning) as told:
        attach_checks.warn_of_missing_kernels.__wrapped__("cuda")
    words = "of fastdp's 5 operators", "run as plain PyTorch on cuda, so training may take several times as long:"
    assert [str(one.message) for one in told] == [
        f"2 {words[0]} (a, b) {words[1]} no triton", f"1 {words[0]} (c) {words[1]} no nvcc"
    ]  # fmt: skip
    monkeypatch.setenv("FASTDP_CUDA", "0")
    assert attach_checks.missing("cuda") == {"no triton": ["a", "b"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach_checks.warn_of_missing_kernels.__wrapped__("cpu")
