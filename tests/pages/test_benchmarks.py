"""The benchmarks measure what they say: floors are the design's, wrong operators get no time, rows are kept."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import device, floor, kernels, planner, timing, training
from benchmarks.language import LSTM
from benchmarks.models import Workload, class_losses
from benchmarks.suites import GPU as LARGE
from benchmarks.suites import OTHERS, SMALL, words
from benchmarks.vision import resnet18
from fastdp.grad_sample import cost_model
from fastdp.grad_sample.cost_model import Shape

GPU = (8e14, 3e12)  # operations and bytes a second


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
    known = {"vit-b16": (1.05, 1.07), "gpt2": (1.23, 1.27), "gpt2-large": (1.05, 1.12), "llama-1b": (1.08, 1.16),
             "llama-lora": (1.0, 1.02), "gpt2-lora": (1.0, 1.01), "bert": (1.12, 1.17)}  # fmt: skip
    for name, (low, high) in known.items():
        assert low < floor.floor(LARGE[name], GPU) < high, (name, floor.floor(LARGE[name], GPU))


def test_floor_sees_every_product_and_attention() -> None:
    found = floor.shapes(OTHERS["resnet"])
    assert len(found.products) == 1 + 4 * 2 + 3 + 1 and found.attention == 0
    assert found.products[0] == floor.Product(32, 1024, 27, 32, True, False)
    found = floor.shapes(SMALL["llama-1b"])  # T=13, 8 heads of 8, causal; forward 2 and backward 5 products
    assert found.attention == pytest.approx(2 * (3 * 8 * 8 * 13 * 13 * 4 / 2) * 3.5)


def test_floor_of_a_grouped_convolution_by_hand() -> None:
    def of(groups: int) -> floor.Product:
        def batch(b: int) -> tuple[Tensor, Tensor]:
            return torch.randn(b, 8, 6, 6), torch.zeros(b)

        model = nn.Conv2d(8, 16, 3, padding=1, groups=groups)
        return floor.shapes(Workload(lambda: model, batch, class_losses, 2)).products[0]

    assert of(4) == floor.Product(2, 36, 2 * 9, 16, True, False, 4)
    slow = (1.0, 1e-9)  # no bytes to store gradients in
    assert of(8).norm_units(slow) == 1.0  # depthwise: the gram matrix would be dearer than the product
    # 18 data and 4 output channels a group: T (I + O/g) / (2 I O/g), with T = 2 of the 36 positions
    assert of(4)._replace(t=2).norm_units(slow) == pytest.approx(2 * (18 + 4) / (2 * 18 * 4))


def test_floor_sees_recurrent_layers() -> None:
    found = floor.shapes(words(lambda t: LSTM(97, 12, 16), 9, 97, 3))
    first, second, head = found.products[:2], found.products[2:4], found.products[4]
    # the embedding's output needs a gradient, so the first layer's products with the data have one
    assert first == [floor.Product(3, 9, 12, 64, True, True), floor.Product(3, 9, 16, 64, True, True)]
    assert second == [floor.Product(3, 9, 16, 64, True, True)] * 2 and head == floor.Product(3, 9, 16, 97, True, True)


def test_floor_of_the_first_convolution_needs_no_input_gradient() -> None:
    found = floor.shapes(Workload(lambda: resnet18(8, 10, 2), SMALL["resnet18"].batch, class_losses, 2))
    assert [p.input_gradient for p in found.products].count(False) == 1 and not found.products[0].input_gradient
    assert len(found.products) == 1 + 16 + 3 + 1


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


def test_there_is_no_figure_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "missing", lambda kind: {"not built: do this": ["a"]} if kind == "cpu" else {})
    with pytest.raises(SystemExit, match="no figure is taken without fastdp's kernels: not built: do this"):
        timing.require_kernels()
    for main, command in ((training.main, ["--suite", "quick"]), (device.main, ["host", "--device", "cpu"])):
        with pytest.raises(SystemExit, match="no figure"):
            main(command)
    monkeypatch.setattr(timing, "missing", lambda kind: {})  # as where FASTDP_CPU=0
    timing.require_kernels()
    monkeypatch.setattr(timing, "native", lambda: "not built")
    assert str(timing.versions()["fastdp"]).endswith(", without _C")
    monkeypatch.undo()
    assert "without" not in str(timing.versions()["fastdp"]) and tuple(timing.versions()) == timing.FACTS


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
    predicted = planner.routes_to_try(shape, cost_model.DEFAULT)
    assert set(predicted) == {"gram", "direct", "materialise"}
    assert "materialise" not in planner.routes_to_try(Shape("linear", 32, 8, 4096, 8192), cost_model.DEFAULT)
    routes = planner.linear(shape, lambda *size: torch.randn(size))
    row = planner.measure(shape, routes, predicted, "gram", torch.device("cpu"), 3)
    assert float(str(row["loss"])) >= 0 and row["chosen"] == "gram"
    text = planner.summary([{**row, "loss": "0.14"}, {**row, "loss": "0.16"}])
    assert "1 of 2 cases (50.0 %)" in text
