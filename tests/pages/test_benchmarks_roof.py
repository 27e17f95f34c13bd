"""The floor on paper: the steps on the meta device are the engine's own, counts are torch's, sums are right by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastdp
from benchmarks import roof, roof_steps
from benchmarks.roof_jobs import Job, Part, Roof, tiles_of
from benchmarks.roof_rates import COUNTS, DATA_SHEET, rate
from benchmarks.suites import SMALL

pytestmark = pytest.mark.slow  # `make test-all` runs it

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent
MODELS = ("gpt2", "llama-lora", "vit-b16", "resnet50")
# in a process of its own: here Triton's kernels are interpreted (tests/conftest.py), there they are written down
SCRIPT = """
import json, sys
from benchmarks.roof_steps import steps_of
from benchmarks.suites import SMALL
print(json.dumps({name: steps_of(SMALL[name])._asdict() for name in sys.argv[1:]}))
"""


def run(*command: str, **more: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT), **more}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return json.loads(run("-c", SCRIPT, *MODELS))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_an_ordinary_step_are_torchs_count(name: str, steps: dict[str, Any]) -> None:
    work, before = SMALL[name], torch.is_autocast_enabled
    with roof_steps.as_on_a_gpu(), FlopCounterMode(display=False) as counted:
        model, x, y = roof_steps._placed(work, torch.bfloat16)
        work.losses(model(x), y).mean().backward()
    by_name = counted.get_flop_counts()["Global"]
    causal = 0.5 if name in ("gpt2", "llama-lora") else 1.0
    expected = sum(count * (causal if "attention" in str(op) else 1.0) for op, count in by_name.items())
    assert sum(part[0] for job in steps[name]["ordinary"] for part in job[2]) == expected > 0
    assert torch.is_autocast_enabled is before  # what stood for a GPU is put back


@pytest.mark.parametrize("name", MODELS)
def test_uses_are_those_of_the_engine_on_real_numbers(name: str, steps: dict[str, Any]) -> None:
    def table(plan: str) -> list[tuple[str, str]]:
        """Parameter and shape of each use."""
        lines = [line.split("  ") for line in plan.splitlines()[1:] if "uses," not in line]
        parts = [[part.strip() for part in line if part.strip()] for line in lines]
        return sorted((line[0], line[2]) for line in parts)

    torch.manual_seed(0)
    work = SMALL[name]
    model, (x, y) = work.build(), work.batch(work.batch_size)
    engine = fastdp.PerSampleGradients(model)
    work.losses(model(x), y).mean().backward()
    engine.norms()
    assert table(steps[name]["plan"]) == table(str(engine.explain()))


@pytest.mark.parametrize("name", ["gpt2", "vit-b16"])
def test_every_layer_has_its_kernels(name: str, steps: dict[str, Any]) -> None:
    """What the engine starts past its operators is seen: a norm and a sum of every linear layer, and no copies."""
    private, modules = steps[name]["private"], list(SMALL[name].build().modules())

    def jobs(kernel: str) -> list[Any]:
        return [job for job in private if job[0].startswith(kernel)]

    layers = sum(isinstance(m, nn.Linear) for m in modules)
    for kernel in ("fastdp.linear_norm_sq", "fastdp.linear_clipped_sum"):
        shapes = [job[1] for job in jobs(kernel)]
        assert len(shapes) < layers and sum(int(s.partition(" layers=")[2] or 1) for s in shapes) == layers, shapes
    assert len(jobs("fastdp.norm_affine_per_sample")) == sum(isinstance(m, nn.LayerNorm) for m in modules)
    assert len(jobs("fastdp.clip_factors")) == len(jobs("fastdp.noisy_adamw_step_")) == 1
    assert not jobs("linalg_vector_norm"), "copies in float64"
    assert not any(job[0].startswith("fastdp") for job in steps[name]["ordinary"])


def test_time_is_the_larger_of_arithmetic_and_bytes_and_the_launches() -> None:
    device = Roof(flop=100.0, bytes=10.0, float32=5.0, launch=0.5, gathers=0.1)
    assert device.seconds(Part(200.0, 5.0, 2)) == 2.0 + 1.0
    assert device.seconds(Part(20.0, 5.0, 1, float32=True)) == 4.0 + 0.5
    assert device.seconds(Part(200.0, 5.0, 0, gathers=True)) == pytest.approx(20.0)
    assert device.seconds(Part(200.0, 0.0, 0, rate=50.0)) == 4.0 and device.seconds(None) == 0


def test_bytes_and_operations_by_hand() -> None:
    def of(run: Any) -> float:
        recorder = roof_steps.Recorder({})
        with recorder:
            run()
        return sum(part.bytes for job in recorder.jobs for part in job.parts)

    x = torch.empty(4, 8, device="meta", dtype=torch.bfloat16)
    assert of(lambda: x + 1) == 2 * 64  # read and written
    assert of(lambda: x + x[:, :1].expand(4, 8)) == 64 + 4 * 2 + 64
    assert of(lambda: x.fill_(1.0)) == 64 and of(lambda: x.t()) == 0 and of(lambda: torch.empty_like(x)) == 0
    # a sum of squares in float64 makes a copy in float64: 16 bytes a number beside the reading of it
    assert of(lambda: torch.linalg.vector_norm(x, dtype=torch.float64)) == 64 + 16 * 32 + 8
    ids, weight = torch.empty(3, dtype=torch.long, device="meta"), torch.empty(1000, 8, device="meta")
    assert of(lambda: nn.functional.embedding(ids, weight)) == 3 * 8 + 2 * 3 * 8 * 4  # not the whole table
    given: dict[str, Any] = {"D_I": 100, "D_O": 40, "BLOCK_I": 64, "BLOCK_O": 64, "BLOCK": 128}
    assert tiles_of("gram_kernel", 3, given) == 2 * 3 * 128 * 128 * (128 + 64)
    given = {"P": 70, "BLOCK_P": 64, "BLOCK_O": 128, "BLOCK_N": 64, "share": 5}
    assert tiles_of("conv_kernel", 6, given) == 5 * 2 * 6 * 128 * 64 * 128
    given = {"MODE": "sum", "BLOCK_O": 128, "BLOCK_N": 128, "BLOCK_P": 64, "LAST": True, "CHUNK": 1024, "P": 130}
    flush = COUNTS["conv_kernel sum", 128, 128].flush * 2
    assert rate("conv_kernel", given) == pytest.approx(DATA_SHEET * 512 * 3 / (640 * 3 + flush))


def test_the_floor_of_a_step_by_hand() -> None:
    """An ordinary step of 10 s; a private one of 16 s: 2 s of a copy, 8 s of norms that need 4 s."""
    mm = Job("mm", "", (Part(0.0, 6.0, 0),))
    ordinary = [mm, Job("adamw", "", (Part(0.0, 4.0, 0),))]
    norms = Job("fastdp.norms", "B=1", (Part(0.0, 8.0, 0),), Part(0.0, 4.0, 0))
    steps = roof_steps.Steps(ordinary, [mm, Job("copy", "", (Part(0.0, 2.0, 0),)), norms], "")
    paper = roof.paper_of(steps, Roof(bytes=1.0))
    assert paper.seconds() == (10.0, 16.0, 10.0) and paper.losses()[0] == (("fastdp.norms", ""), 4.0)
    row = roof.summary("gpt2-large", paper, 1, 0)
    assert (row["ratio"], row["floor"], row["target"]) == ("1.60", "1.00", "1.25 not met")


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "roof.csv"
    text = run("-m", "benchmarks.roof", "--small", "--models", "gpt2-large", "--rows", "0", "--out", str(out))
    assert "fastdp.noisy_adamw_step_" in text and "furthest from its floor" in text
    assert "fastdp.linear_norm_sq gram,B=" in out.read_text()


def test_kernels_are_compiled_into_the_cache_without_a_gpu(tmp_path: Path) -> None:
    command = ("-m", "benchmarks.roof", "--compile-only", "--models", "llama-lora", "--small")
    assert run(*command, TRITON_CACHE_DIR=str(tmp_path)).endswith("llama-lora: compiled\n")
    kernels = [json.loads(path.with_suffix(".json").read_text()) for path in tmp_path.rglob("*.cubin")]
    assert len(kernels) >= 5 and {kernel["target"]["arch"] for kernel in kernels} == {90}
