"""The benchmarks measure what they say: workloads are exact, wrong contenders get no time, floors are the design's."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import contenders, floor, kernels, planner, timing, training
from benchmarks.large import LARGE, SMALL
from benchmarks.models import WORKLOADS, Workload, class_losses
from fastdp import costs
from fastdp.costs import Shape

GPU = (8e14, 3e12)  # operations and bytes a second


@pytest.mark.parametrize("name", SMALL)
def test_small_variants_are_exact(name: str) -> None:
    for contender in ("fastdp", "fastdp layerwise"):
        assert training.error_of(contender, SMALL[name]._replace(small=SMALL[name])) < 2e-5, contender


@pytest.mark.parametrize("name", SMALL)
def test_small_variants_train_in_16_bits(name: str) -> None:
    place = training.Place(torch.device("cpu"), torch.bfloat16)
    errors = training.errors_of("fastdp", SMALL[name]._replace(small=SMALL[name]), place)
    assert set(errors) == {"error", "error_dtype"} and training.right(errors), errors
    times = training.interleaved(SMALL[name], ["non-private", "fastdp"], 1, place)
    assert {len(t) for t in times.values()} == {1}


def test_every_large_workload_has_its_size() -> None:
    millions = {"vit": 86.6, "gpt2": 124.4, "gpt2-large": 774.0, "llama": 1100, "llama-lora": 1101.7}
    for name, work in LARGE.items():
        with torch.device("meta"):
            model = work.build()
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions[name], rel=1e-3), name
        assert work.small is not None
    with torch.device("meta"):
        adapters = [p.numel() for p in LARGE["llama-lora"].build().parameters() if p.requires_grad]
    assert len(adapters) == 22 * 2 * 2 and sum(adapters) == 22 * 8 * (2048 + 2048 + 2048 + 256)


def test_tied_heads_are_tied() -> None:
    model = training.build(SMALL["gpt2"], training.Place(torch.device("cpu"), torch.bfloat16))
    assert model.head.weight is model.tokens.weight


# ---------------------------------------------------------------------- contenders


def _tiny() -> Workload:
    return Workload(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
                    lambda b: (torch.randn(b, 5), torch.randint(0, 3, (b,))), class_losses, 4)  # fmt: skip


def _unclipped(model: nn.Module, work: Workload, sigma: float = 1.0) -> contenders.Step:
    return contenders.nonprivate(model, work)


def _tenth_of_the_loss(model: nn.Module, work: Workload, sigma: float = 1.0) -> contenders.Step:
    def losses(out: Tensor, y: Tensor) -> Tensor:
        return 0.1 * work.losses(out, y)

    return contenders.ours()(model, work._replace(losses=losses), sigma)


def _one_percent_long(model: nn.Module, work: Workload, sigma: float = 1.0) -> contenders.Step:
    return contenders.ours(gamma=0.0, clipping=lambda n: (1 / n).clamp(max=1) * 0.99)(model, work, sigma)


def _broken(model: nn.Module, work: Workload, sigma: float = 1.0) -> contenders.Step:
    raise NotImplementedError("no rule for this model")


def _out_of_memory(model: nn.Module, work: Workload, sigma: float = 1.0) -> contenders.Step:
    inner, calls = contenders.ours()(model, work, sigma), []

    def step(x: Tensor, y: Tensor) -> None:
        calls.append(1)
        if len(calls) > 1 and sigma > 0:
            raise torch.OutOfMemoryError("out")
        inner(x, y)

    return step


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, timing.Row]:
    """The rows of a tiny model with good and bad contenders."""
    work = _tiny()
    sharp = work._replace(losses=lambda out, y: 30 * class_losses(out, y))  # so that every sample is clipped
    monkeypatch.setitem(training.MODELS, "tiny", sharp)
    made = {"unclipped": _unclipped, "one percent": _one_percent_long, "broken": _broken, "memory": _out_of_memory}
    for name, contender in made.items():
        monkeypatch.setitem(training.CONTENDERS, name, contender)
    names = ["non-private", "fastdp", "fastdp layerwise", *made]
    return {str(row["contender"]): row for row in training.run("tiny", names, 2, memory=False, roof=GPU)}


def test_a_wrong_contender_gets_no_time(rows: dict[str, timing.Row]) -> None:
    for name in ("unclipped", "one percent", "broken"):
        assert "step_ms" not in rows[name] and "ratio" not in rows[name], rows[name]
        assert not float(str(rows[name]["error"])) < training.TOLERANCE
    for name in ("fastdp", "fastdp layerwise"):
        assert float(str(rows[name]["ratio"])) > 0 and float(str(rows[name]["error"])) < training.TOLERANCE
    assert set(rows["fastdp"]) <= set(training.COLUMNS) and rows["fastdp"]["dtype"] == "float32"


def test_out_of_memory_is_said_in_the_row(rows: dict[str, timing.Row]) -> None:
    assert rows["memory"]["step_ms"] == training.OUT and "ratio" not in rows["memory"]


def test_clipping_by_layer_is_not_flat_clipping() -> None:
    work, (model, (x, y)) = _tiny(), (_tiny().build(), _tiny().batch(4))
    flat, layered = (training.exact_clipped_mean(model, work, x, 1 * y, by) for by in (False, True))
    assert max(float((a - b).abs().max()) for a, b in zip(flat, layered, strict=True)) > 1e-4


def test_a_contender_of_another_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.CONTENDERS, "loss", _tenth_of_the_loss)
    assert training.error_of("loss", _tiny()) > 0.1


# ---------------------------------------------------------------------- floors


def test_floor_of_one_product_by_hand() -> None:
    def of(t: int, *layers: tuple[int, int], frozen: int = 0) -> float:
        def build() -> nn.Module:
            model = nn.Sequential(*[nn.Linear(i, o) for i, o in layers])
            model[:frozen].requires_grad_(False)
            return model

        batch = lambda b: (torch.randn(b, t, 40), torch.zeros(b))
        return floor.floor(Workload(build, batch, class_losses, 2), (1.0, 1e-9))

    # forward and weight gradient (the data needs none), and the gram norm: T (I + O) / 2IO = 5 * 100 / 4800
    assert of(5, (40, 60)) == pytest.approx((2 + 500 / 4800) / 2)
    assert of(500, (40, 60)) == pytest.approx(3 / 2)  # directly
    assert of(500, (40, 60), (60, 40), frozen=1) == pytest.approx((1 + 3) / (1 + 2))
    assert of(500, (40, 60), (60, 40)) == pytest.approx((3 + 4) / (2 + 3))


def test_floor_by_stored_gradients_where_bytes_are_cheap() -> None:
    work = Workload(lambda: nn.Linear(40, 60), lambda b: (torch.randn(b, 500, 40), torch.zeros(b)), class_losses, 2)
    # 8 B I O bytes at 100 a second over 2 B T I O operations at 10 a second
    assert floor.floor(work, (10.0, 100.0)) == pytest.approx((2 + 8 / 100 / (2 * 500 / 10)) / 2)


def test_floors_of_the_large_workloads() -> None:
    known = {"vit": (1.05, 1.07), "gpt2": (1.23, 1.27), "gpt2-large": (1.05, 1.12), "llama": (1.08, 1.16),
             "llama-lora": (1.0, 1.02)}  # fmt: skip
    for name, (low, high) in known.items():
        assert low < floor.floor(LARGE[name], GPU) < high, (name, floor.floor(LARGE[name], GPU))


def test_floor_sees_every_product_and_attention() -> None:
    found = floor.shapes(WORKLOADS["resnet"])
    assert len(found.products) == 1 + 4 * 2 + 3 + 1 and found.attention == 0
    assert found.products[0] == floor.Product(32, 1024, 27, 32, True, False)
    found = floor.shapes(SMALL["llama"])  # T=13, 8 heads of 8, causal; forward 2 and backward 5 products
    assert found.attention == pytest.approx(2 * (3 * 8 * 8 * 13 * 13 * 4 / 2) * 3.5)


# ---------------------------------------------------------------------- tables, kernels, planner


def test_rows_are_added_to_a_file_with_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    timing.append(path, [{"a": 1, "b": 2, "left": 3}], ("a", "b"))
    timing.append(path, [{"a": 4, "c": 5}], ("a", "c"))
    with path.open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": "2", "c": "-"}, {"a": "4", "b": "-", "c": "5"}]


def test_the_commit_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDP_COMMIT", "abc1234")
    assert timing.versions()["commit"] == "abc1234"


def test_a_failing_or_wrong_operator_is_a_row_without_a_time() -> None:
    from fastdp.ops.registry import _forced

    def fails() -> None:
        raise RuntimeError("no")

    def wrong() -> Tensor:  # another result than the reference's
        return torch.full((3,), float("nan") if not _forced else 1.0)

    def off() -> Tensor:
        return torch.ones(3) * (1.0 if _forced else 1.01)

    args = torch.device("cpu"), torch.float32, GPU, 1
    assert kernels.measure(kernels.Case("linear_norm_sq x", "", fails), *args)["error"] == "failed: RuntimeError"
    for run in (wrong, off):
        assert "ms" not in kernels.measure(kernels.Case("linear_norm_sq x", "", run), *args)
    assert "ms" in kernels.measure(kernels.Case("linear_norm_sq x", "", lambda: torch.ones(3), 1.0, 1.0), *args)


@pytest.mark.parametrize("family", ["linear", "conv"])
def test_routes_of_the_planner_benchmark_agree(family: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if family == "linear":
        routes = planner.linear(Shape("linear", 3, 5, 7, 4), make)
    else:
        routes = planner.convolution(Shape("conv", 3, 16, 18, 4), 4, 3, make)
    results = {name: run() for name, run in routes.items()}
    for norms, total in results.values():  # type: ignore[misc]
        torch.testing.assert_close(norms.float(), results["direct"][0].float())
        torch.testing.assert_close(total.flatten(), results["direct"][1].flatten())


def test_planner_rows_and_summary() -> None:
    shape = Shape("linear", 2, 8, 16, 16)
    predicted = planner.routes_to_try(shape, costs.DEFAULT)
    assert set(predicted) == {"gram", "direct", "materialise"}
    assert "materialise" not in planner.routes_to_try(Shape("linear", 32, 8, 4096, 8192), costs.DEFAULT)
    routes = planner.linear(shape, lambda *size: torch.randn(size))
    row = planner.measure(shape, routes, predicted, "gram", torch.device("cpu"), 3)
    assert float(str(row["loss"])) >= 0 and row["chosen"] == "gram"
    text = planner.summary([{**row, "loss": "0.14"}, {**row, "loss": "0.16"}])
    assert "1 of 2 cases (50.0 %)" in text


def test_gpu_script_prints_its_plan() -> None:
    script = Path(planner.__file__).with_name("gpu.sh")
    done = subprocess.run(["bash", str(script), "--plan"], capture_output=True, text=True, check=True)
    for stage in ("build", "info", "tests", "sanitizer", "kernels", "planner", "training"):
        assert f"=== {stage}" in done.stdout, done.stdout
    limited = {**os.environ, "STAGES": "info"}
    done = subprocess.run(["bash", str(script), "--plan"], capture_output=True, text=True, check=True, env=limited)
    assert "=== info" in done.stdout and "=== build" not in done.stdout
