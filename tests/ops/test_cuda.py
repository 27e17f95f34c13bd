"""The CUDA kernels without a GPU: nvcc compiles them without spills, and the same sources, compiled by g++ with a
stand-in for CUDA (tests/emulation), agree with the references.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdp import ops
from fastdp.ops import checks as op_checks
from fastdp.ops import cuda, noise, registry
from fastdp.ops.common import MARGIN
from fastdp.ops.kernel_inputs import trials
from fastdp.ops.registry import OPERATORS

from . import emulation, past_checks
from . import step_checks as checks
from .noise_truth import KEY, NATIVE
from .table import FAMILIES, check, check_strides, lookup_data
from .test_clip import check_clip_factors

pytestmark = pytest.mark.slow  # `make test-all` runs it

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
TARGETS = (80, 90, 100)


# ---------------------------------------------------------------------- compiling


def compiled(source: Path) -> list[dict[str, Any]]:
    """What ptxas says of each kernel of a file, for each target."""
    targets = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in TARGETS]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "nvcc",
            "-std=c++17",
            "-O3",
            *targets,
            "-Xptxas",
            "-v",
            "-fatbin",
            str(source),
            "-o",
            f"{folder}/out.fatbin",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    parts = re.split(r"Compiling entry function '", done.stderr)[1:]
    rows = []
    for part in parts:
        name, target = re.match(r"(\S+)' for 'sm_(\d+)'", part).groups()  # type: ignore[union-attr]
        number = lambda pattern, text=part: int(found[1]) if (found := re.search(pattern, text)) else 0
        rows.append(
            {
                "file": source.name,
                "kernel": name,
                "sm": int(target),
                "registers": number(r"Used (\d+) registers"),
                "shared": number(r"(\d+) bytes smem"),
                "stack": number(r"(\d+) bytes stack frame"),
                "spills": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            }
        )
    return rows


@functools.cache
def resources() -> list[dict[str, Any]]:
    """Of all kernels; kept in build/ as long as neither the sources nor nvcc change."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(
        b"".join([version, *[p.read_bytes() for p in (*SOURCES, *emulation.HEADERS, Path(__file__))]])
    )
    kept = ROOT / "build" / f"resources-{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        with ThreadPool(min(2, os.cpu_count() or 1)) as pool:
            rows = list(itertools.chain.from_iterable(pool.map(compiled, SOURCES)))
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(rows))
    return json.loads(kept.read_text())  # type: ignore[no-any-return]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
def test_every_kernel_compiles_without_spills_for_every_target() -> None:
    rows = resources()
    assert len(rows) == 3 * len({(row["file"], row["kernel"]) for row in rows}) >= 3 * 25
    assert {row["file"] for row in rows} == {source.name for source in SOURCES}
    # kernels that draw call a function where it is open what they release, and keep on the stack what it overwrites
    drawing = [row for row in rows if re.search("noisy_step|5noise", row["kernel"])]
    assert [row for row in rows if (row["spills"] or row["stack"]) and row not in drawing] == []
    assert [row for row in drawing if row["spills"] > 256 or row["stack"] > 384] == []
    # what the launch needs: 3 blocks of 256 threads a multiprocessor in float, one in double
    steps = [row for row in rows if "noisy_step" in row["kernel"]]
    assert len(steps) == 72  # of each rule and types, with earlier steps and without
    assert all(row["registers"] <= (255 if "IdE" in row["kernel"] or "Idd" in row["kernel"] else 80) for row in steps)


def test_a_build_of_cuda_that_is_asked_for_fails_where_it_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    (tmp_path / "nvcc").chmod(0o755)
    (tmp_path / "pybind11.py").write_text("get_include = lambda: '.'")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CC": "false", "CXX": "false"}
    environment["PYTHONPATH"] = str(tmp_path)
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    run = functools.partial(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False)
    done = run(env={**environment, "FASTDP_CUDA": "1"})
    assert done.returncode == 1 and "nvcc makes code for none" in done.stderr, done.stderr
    done = run(env={**environment, "FASTDP_CUDA": "0"})
    assert done.returncode == 0 and "_CUDA" not in done.stdout
    assert not list(tmp_path.rglob("*.so"))


# ---------------------------------------------------------------------- on the emulation


@pytest.fixture(scope="module")
def hooks() -> emulation.Hooks:
    if emulation.compiler() is None:
        pytest.skip("no g++ on the PATH")
    return emulation.Hooks()


def is_cuda(operator: registry.Operator) -> bool:
    return "cuda" in operator.kernels and operator.kernels["cuda"].backend == "CUDA C++"


def serve(patch: pytest.MonkeyPatch) -> None:
    """The emulated kernels, in place of the C++ ones."""
    module = emulation.module()
    patch.setattr(cuda, "_native", lambda: module)
    patch.setattr(cuda, "_place", lambda device: (0, 0))
    patch.setattr(registry, "native_cuda", lambda: module)
    for operator in OPERATORS.values():
        if is_cuda(operator):
            kernel = registry.Kernel("CUDA C++", operator.kernels["cuda"]._own.__wrapped__)
            patch.setitem(operator.kernels, "cpu", kernel)


@pytest.fixture(params=[False, True], ids=["forward", "reversed"])
def emulated(request: pytest.FixtureRequest, hooks: emulation.Hooks, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """CUDA's operators by the emulated kernels, blocks and threads in one order and in the other."""
    serve(monkeypatch)
    hooks.reverse(request.param)
    hooks.failed_assertions()
    yield "cpu"
    hooks.reverse(False)
    assert hooks.failed_assertions() == 0


ON = checks.On("cpu")  # where the emulation serves


@pytest.mark.parametrize(
    "check", [*checks.CHECKS, *past_checks.CHECKS, *checks.OF_CUDA], ids=lambda check: check.__name__
)
def test_emulated(check: Callable[[checks.On], None], emulated: str) -> None:
    check(ON)


def test_emulated_clip_factors(emulated: str) -> None:
    check_clip_factors(emulated, MARGIN)


@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_emulated_look_ups(dtype: torch.dtype, emulated: str) -> None:
    family = FAMILIES["embedding"]
    for shape in [shape for name, shape in (family.shapes | family.large).items() if "400" not in name]:
        check(family, shape, dtype, "card")
    check_strides("embedding", "(2, 37, 16, 11, 0)", dtype, "card")


@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_emulated_by_type(dtype: torch.dtype, emulated: str) -> None:
    checks.check_noise(ON, dtype)


def test_emulated_million_correlated_draws(emulated: str) -> None:
    """More draws than one launch lays out, too: of small weights and large."""
    total = torch.randn(1_000_000, generator=torch.Generator().manual_seed(3))
    few = [10, 9, 2**40, 0], [-0.5, 1.75, -1.25, 0.01]
    many = list(range(600)), [0.999**k - 0.7 for k in range(600)]
    for given, past in ((total, few), (total[:2000], many)):
        assert torch.equal(past_checks.add_noise_(given.clone(), 1.3, 11, 7, past),
                           past_checks.released(given, 1.3, 11, 7, past))  # fmt: skip


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_emulated_fifty_million_draws_have_the_bits_of_the_cpu(
    dtype: torch.dtype, hooks: emulation.Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose are those of the reference: test_noise compares the same draws."""
    serve(monkeypatch)
    total, words = torch.randn(5_000_000, generator=torch.Generator().manual_seed(3), dtype=dtype), noise.words_of(KEY)
    for begin in range(0, 50_000_000, 5_000_000):
        std, found, truth = 1 + begin / 50_000_000, total.clone(), total.clone()
        cuda.add_scaled_(found, std, 0.1, words, 11, begin)
        noise._native_add(truth, std, 0.1, words, 11, begin)
        assert torch.equal(found, truth)


@pytest.mark.parametrize(("dtype", "state_dtype"), checks.PAIRS)
@pytest.mark.parametrize(("rule", "options"), checks.RULES)
def test_emulated_steps(rule: Any, options: Any, dtype: torch.dtype, state_dtype: torch.dtype, emulated: str) -> None:
    rule(ON, dtype, state_dtype, **options)


@pytest.mark.parametrize("name", [name for name, each in OPERATORS.items() if "cpu" in each.kernels and is_cuda(each)])
def test_operators_reach_their_kernels(name: str, emulated: str) -> None:
    """As the dispatcher calls them: with the schema's arguments, and nothing returned where it has nothing."""
    returns = torch.ops.fastdp
    returns = getattr(getattr(returns, OPERATORS[name].packet), OPERATORS[name].overload)._schema.returns
    for trial in trials(name, torch.device("cpu"), torch.float32):
        found = OPERATORS[name].implementation("cpu")(*trial.args, **trial.kwargs)
        assert (found is None) == (not returns)
    ops.check_kernel(name, device="cpu")


def test_results_do_not_depend_on_the_order_of_threads(hooks: emulation.Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    ids, g, *_ = lookup_data((3, 200, 130, 9))
    results = []
    for reverse in (False, True):
        hooks.reverse(reverse)
        params, offsets = checks.problem(torch.float32, "cpu")
        cuda.noisy_sgd_step_(params, checks.sums_like(params, 0), [], offsets, step=1, **checks.COMMON)
        embedded = cuda.embedding_norm_sq(ids, g, dtype=torch.float64)
        summed = cuda.embedding_clipped_sum(ids, g, torch.rand(3, generator=torch.Generator().manual_seed(1)), 9)
        results.append([*params, embedded, summed])
    hooks.reverse(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------------- refusals


def step(params: Any, **changed: Any) -> None:
    given: dict[str, Any] = {"sums": [p.detach().float() for p in params], "offsets": [0] * len(params)}
    given.update({"step": 0, **checks.COMMON, **changed})
    cuda.noisy_sgd_step_(params, given.pop("sums"), given.pop("buffers", []), given.pop("offsets"), **given)


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"sums": [torch.zeros(6, dtype=torch.float64)]}, "float32"), ({"std": 1e39}, "std"),
     ({"momentum": 0.9, "buffers": [torch.zeros(6).half()]}, "states")],
)  # fmt: skip
def test_what_only_these_kernels_refuse(changed: Any, words: str, emulated: str) -> None:
    param = torch.ones(6)
    with pytest.raises(ValueError, match=words):
        step([param], **changed)
    assert torch.equal(param, torch.ones(6))


def test_wrong_tensors_are_refused(emulated: str) -> None:
    with pytest.raises(TypeError, match="int32"):
        cuda.noise_(torch.zeros(3, dtype=torch.int32), 1.0, checks.WORDS, 0)
    with pytest.raises(ValueError, match="contiguous"):
        cuda.noise_(torch.zeros(3, 2).mT, 1.0, checks.WORDS, 0)
    with pytest.raises(ValueError, match="autograd"):
        step([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="integers"):
        cuda.embedding_norm_sq(torch.zeros(2, 3), torch.zeros(2, 3, 4))


def test_captured_noise_without_a_counter_is_refused(emulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_checks, "capturing", lambda device: True)
    param = torch.ones(6)
    for draw in (lambda: cuda.noise_(param, 1.0, checks.WORDS, 0), lambda: step([param])):
        with pytest.raises(RuntimeError, match="every replay"):
            draw()
    assert torch.equal(param, torch.ones(6))
    step([param], counter=torch.zeros(1, dtype=torch.int64))
    assert not torch.equal(param, torch.ones(6))


def test_a_failed_launch_names_the_kernel(emulated: str, hooks: emulation.Hooks) -> None:
    hooks.fail_next_launch()
    with pytest.raises(RuntimeError, match="kernel noise was not launched: an emulated error"):
        cuda.noise_(torch.zeros(3), 1.0, checks.WORDS, 0)


def test_ids_outside_the_table_write_nothing(hooks: emulation.Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fail the device assertion, which on a GPU ends the kernel; nothing is written before."""
    serve(monkeypatch)
    hooks.failed_assertions()
    whole = torch.zeros(7, 4)
    ids = torch.tensor([[-3, 0, 5, 1, 2**40]])
    cuda.embedding_clipped_sum(ids, torch.ones(1, 5, 4), torch.ones(1), 3, out=whole[2:5])
    assert hooks.failed_assertions() == 3
    assert torch.equal(whole, torch.tensor([0, 0, 1, 1, 0, 0, 0])[:, None].expand(7, 4).float())


def test_without_the_module_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "native_cuda", lambda: "fastdp._CUDA is not installed: reinstall")
    with pytest.raises(RuntimeError, match="no CUDA kernels: fastdp._CUDA is not installed"):
        cuda._native()
