"""The floor on paper: the steps on the meta device are the engine's own, counts are torch's, sums are right by hand."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastdp
from benchmarks import roof, roof_steps
from benchmarks.models import Workload
from benchmarks.roof_jobs import Job, Part, Roof, bytes_of, bytes_of_launch, tiles_of
from benchmarks.suites import GPU, SMALL
from benchmarks.timing import append

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent
MODELS = ("gpt2", "llama-lora", "vit-b16", "resnet50")
# in a process of its own: here Triton's kernels are interpreted (tests/conftest.py), there they are written down
SCRIPT = """
import json, sys, torch
from benchmarks.roof_steps import steps_of
from benchmarks.suites import SMALL
found = {}
for name in sys.argv[1:]:
    ordinary, private, plan = steps_of(SMALL[name])
    found[name] = {"ordinary": ordinary, "private": private, "plan": plan}
print(json.dumps(found))
"""


def run(*command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return json.loads(run("-c", SCRIPT, *MODELS))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- against torch and the engine


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_an_ordinary_step_are_torchs_count(name: str, steps: dict[str, Any]) -> None:
    work = SMALL[name]
    with roof_steps.as_on_a_gpu(), FlopCounterMode(display=False) as counted:
        model, x, y = roof_steps._placed(work, torch.bfloat16)
        work.losses(model(x), y).mean().backward()
    by_name = counted.get_flop_counts()["Global"]
    causal = 0.5 if name in ("gpt2", "llama-lora") else 1.0
    expected = sum(count * (causal if "attention" in str(op) else 1.0) for op, count in by_name.items())
    found = sum(part[0] for job in steps[name]["ordinary"] for part in job[2])
    assert found == expected > 0


def table(plan: str) -> list[tuple[str, ...]]:
    """Parameter, function and shape of each use."""
    lines = [line for line in plan.splitlines()[1:] if "uses," not in line]
    return [tuple(part for part in line.split("  ") if part.strip())[:3] for line in lines]


@pytest.mark.parametrize("name", MODELS)
def test_uses_are_those_of_the_engine_on_real_numbers(name: str, steps: dict[str, Any]) -> None:
    torch.manual_seed(0)
    work = SMALL[name]
    model, (x, y) = work.build(), work.batch(work.batch_size)
    engine = fastdp.PerSampleGradients(model)
    work.losses(model(x), y).mean().backward()
    engine.norms()
    known = table(str(engine.explain()))
    found = table(steps[name]["plan"])
    clean = lambda rows: sorted((row[0].strip(), row[2].strip()) for row in rows)
    assert clean(found) == clean(known)


def test_every_layer_has_its_kernels(steps: dict[str, Any]) -> None:
    def count(name: str, kernel: str) -> int:
        return sum(job[0].startswith(kernel) for job in steps[name]["private"])

    norms = sum(isinstance(m, nn.LayerNorm) for m in SMALL["vit-b16"].build().modules())
    assert count("vit-b16", "fastdp.norm_affine_per_sample") == norms
    groups = sum(isinstance(m, nn.GroupNorm) for m in SMALL["resnet50"].build().modules())
    assert count("resnet50", "fastdp.group_affine_per_sample") == groups
    for name in MODELS:
        assert count(name, "fastdp.clip_factors") == count(name, "fastdp.noisy_adamw_step_") == 1
    assert count("gpt2", "fastdp.embedding_norm_sq") and count("gpt2", "fastdp.embedding_clipped_sum")
    for name in MODELS:  # the ordinary step is within the private one, but for its weight gradients and its optimizer
        assert not any(job[0].startswith("fastdp") for job in steps[name]["ordinary"])
        attention = lambda step: [job for job in step if "attention" in job[0]]
        assert attention(steps[name]["ordinary"]) == attention(steps[name]["private"])
        copies = lambda step: sum(job[0] == "clone" for job in step)
        # but small layers, taken together, are laid side by side, and sides of convolutions with channels last, once
        # for norm and sum; no result of a layer is copied (`captured._owned`)
        norms = [job for job in steps[name]["private"] if job[0].startswith(("fastdp.conv_norm", "fastdp.linear_norm"))]
        sides = 2 * sum(int(job[1].partition(" layers=")[2] or 1) for job in norms)
        more = min(sides, 26) + 12 if name == "resnet50" else 2
        assert copies(steps[name]["private"]) <= copies(steps[name]["ordinary"]) + more


@pytest.mark.parametrize("name", ["gpt2", "vit-b16"])
def test_layers_of_one_launch_are_counted_each(name: str, steps: dict[str, Any]) -> None:
    """What the engine starts past its operators is seen: a norm and a sum of every linear layer, and no copies."""
    layers = sum(isinstance(m, nn.Linear) for m in SMALL[name].build().modules())
    for kernel in ("fastdp.linear_norm_sq", "fastdp.linear_clipped_sum"):
        shapes = [job[1] for job in steps[name]["private"] if job[0].startswith(kernel)]
        assert len(shapes) < layers and sum(int(s.partition(" layers=")[2] or 1) for s in shapes) == layers, shapes
    assert not any(job[0] == "linalg_vector_norm" for job in steps[name]["private"]), "copies in float64"


def test_shapes_are_those_of_transformers() -> None:
    """The workloads have as many trained numbers as the models whose names they bear."""
    transformers = pytest.importorskip("transformers", minversion="5")
    large = transformers.GPT2Config(n_embd=1280, n_layer=36, n_head=20)
    llama = transformers.LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
                                     num_attention_heads=32, num_key_value_heads=4)  # fmt: skip
    pairs = {
        "gpt2": transformers.GPT2LMHeadModel, "gpt2-large": transformers.GPT2LMHeadModel,
        "llama-1b": transformers.LlamaForCausalLM, "vit-b16": transformers.ViTForImageClassification,
    }  # fmt: skip
    configs = {"gpt2": transformers.GPT2Config(), "gpt2-large": large, "llama-1b": llama,
               "vit-b16": transformers.ViTConfig(num_labels=1000)}  # fmt: skip
    for name, kind in pairs.items():
        with torch.device("meta"):
            ours, theirs = GPU[name].build(), kind(configs[name])
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()), name


# ---------------------------------------------------------------------- by hand


def test_time_is_the_larger_of_arithmetic_and_bytes_and_the_launches() -> None:
    device = Roof(flop=100.0, bytes=10.0, float32=5.0, launch=0.5, gathers=0.1)
    assert device.seconds(Part(200.0, 5.0, 2)) == 2.0 + 1.0
    assert device.seconds(Part(20.0, 5.0, 1)) == 0.5 + 0.5
    assert device.seconds(Part(20.0, 5.0, 1, float32=True)) == 4.0 + 0.5
    assert device.seconds(Part(200.0, 5.0, 0, gathers=True)) == pytest.approx(20.0)
    assert device.seconds(None) == 0


def test_bytes_by_hand() -> None:
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
    assert bytes_of(torch.ops.aten.copy_.default, (x, x), {}, x) == 128


def test_operations_of_tiles_by_hand() -> None:
    given = {"D_I": 100, "D_O": 40, "BLOCK_I": 64, "BLOCK_O": 64, "BLOCK": 128}
    assert tiles_of("gram_kernel", 3, given) == 2 * 3 * 128 * 128 * (128 + 64)
    given = {"T": 70, "BLOCK_T": 64, "BLOCK_O": 128, "BLOCK_I": 128, "share": 5}
    assert tiles_of("direct_kernel", 6, given) == 2 * 6 * 128 * 128 * 128
    assert tiles_of("clipped_kernel", 6, given) == 5 * 2 * 6 * 128 * 128 * 128
    assert tiles_of("another_kernel", 6, given) is None


def test_bytes_of_launches_by_address() -> None:
    """Tables of addresses, what lies there, and sums written to memory of their own."""
    table, c, out = (torch.empty(n, dtype=kind, device="meta") for n, kind in
                     ((3, torch.int64), (2, torch.float32), (4, torch.float64)))  # fmt: skip
    kind = SimpleNamespace(primitive_bitwidth=16)
    given = {"p_a": table, "p_g": table, "p_c": c, "p_out": table, "B": 2, "T": 5, "D_I": 4, "D_O": 6, "TYPE": kind}
    assert bytes_of_launch(given) == 3 * 24 + 8 + 3 * 2 * 5 * 10 * 2
    given["OUT"] = SimpleNamespace(primitive_bitwidth=32)
    assert bytes_of_launch(given) == 3 * 24 + 8 + 3 * 2 * 5 * 10 * 2 + 3 * 24 * 4
    assert bytes_of_launch({"p_x": table, "p_out": out, "B": 2, "N": 7, "TYPE": kind}) == 24 + 32 + 3 * 2 * 7 * 2


def steps_by_hand() -> roof_steps.Steps:
    """An ordinary step of 10 s; a private one of 16 s: 2 s of a copy, 8 s of norms that need 4 s."""
    mm = Job("mm", "", (Part(0.0, 6.0, 0),))
    ordinary = [mm, Job("adamw", "", (Part(0.0, 4.0, 0),))]
    norms = Job("fastdp.norms", "B=1", (Part(0.0, 8.0, 0),), Part(0.0, 4.0, 0))
    return roof_steps.Steps(ordinary, [mm, Job("copy", "", (Part(0.0, 2.0, 0),)), norms], "")


def test_floor_and_what_a_target_needs() -> None:
    paper = roof.paper_of(steps_by_hand(), Roof(bytes=1.0))
    assert paper.seconds() == (10.0, 16.0, 10.0)
    assert paper.losses()[0] == (("fastdp.norms", ""), 4.0)
    assert paper.needed(1.6) == [] and [key[0] for key, _ in paper.needed(1.2) or []] == ["fastdp.norms"]
    assert [key[0] for key, _ in paper.needed(1.0) or []] == ["fastdp.norms", "copy"] and paper.needed(0.9) is None
    assert "is met" in roof.verdict(paper, 1.6) and "fastdp.norms (-4000.00 ms)" in roof.verdict(paper, 1.2)
    assert "out of reach" in roof.verdict(paper, 0.9)


# ---------------------------------------------------------------------- the command


def test_measured_rows_stand_beside_the_predicted_ones(tmp_path: Path) -> None:
    measured = tmp_path / "kernels_cuda.csv"
    append(measured, [{"operator": "norms", "shape": "B=1", "dtype": "bfloat16", "ms": "7.5"},
                      {"operator": "norms", "shape": "B=1", "dtype": "float32", "ms": "9"}],
           ("operator", "shape", "dtype", "ms"))  # fmt: skip
    trained = tmp_path / "training_cuda.csv"
    columns = ("workload", "contender", "dtype", "sweep", "step_ms")
    append(trained, [dict(zip(columns, row, strict=True)) for row in
                     (("m", "fastdp", "bfloat16", "-", "30"), ("m", "non-private", "bfloat16", "-", "20"))],
           columns)  # fmt: skip
    rows = roof.measured_rows([measured, trained])
    paper = roof.paper_of(steps_by_hand(), Roof(bytes=1.0), shapes=True)
    table = {row["kernel"]: row for row in roof.lines(paper, roof.kernel_ms(rows, "bfloat16"))}
    assert table["fastdp.norms B=1"]["measured ms"] == "7.500" and "measured ms" not in table["mm"]
    found = roof.summary("m", paper, roof.step_ms(rows, "m", "bfloat16"), (1, 0))
    assert found["measured"] == "1.50 (30.0 / 20.0 ms)" and found["ratio"] == "1.60"


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "roof.csv"
    text = run("-m", "benchmarks.roof", "--small", "--models", "gpt2-large", "--plan", "--rows", "0", "--out", str(out))
    assert "target 1.25" in text and "fastdp.noisy_adamw_step_" in text and "furthest from its floor" in text
    assert "layers.0.up.weight" in text  # the plan
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    shape = [row["shape"] for row in rows if row["kernel"] == "fastdp.linear_norm_sq gram"]
    assert any("B=" in text and "T=13" in text for text in shape), shape


def test_models_of_transformers() -> None:
    pytest.importorskip("transformers", minversion="5")
    text = run("-m", "benchmarks.roof", "--models", "hf-vit-b16", "--rows", "3")
    ordinary = float(text.splitlines()[-1].split()[3])
    assert "target 1.2" in text and 10 < ordinary < 20  # 11.3 Tflop in products and attention, and the bytes beside


def test_what_stands_for_a_gpu_is_put_back() -> None:
    before = torch.is_autocast_enabled
    work = Workload(lambda: nn.Linear(3, 2), lambda b: (torch.randn(b, 3), torch.zeros(b)), lambda x, y: x.sum(1), 2)
    with roof_steps.as_on_a_gpu():
        assert not torch.is_autocast_enabled("meta")
        roof_steps._placed(work, torch.float32)
    assert torch.is_autocast_enabled is before
    with pytest.raises(fastdp.errors.ParameterError, match="meta"):
        fastdp.PerSampleGradients(nn.Linear(3, 2, device="meta"))


def test_kernels_are_compiled_into_the_cache_without_a_gpu(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.roof", "--compile-only", "--models", "llama-lora", "--small"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("llama-lora: compiled\n"), done.stderr
    kernels = list(tmp_path.rglob("*.cubin"))
    assert len(kernels) >= 5 and all(
        json.loads(path.with_suffix(".json").read_text())["target"]["arch"] == 90 for path in kernels
    )
