"""The other benchmarks measure what they say: floors are the design's, wrong operators get no time, rows are kept."""

from __future__ import annotations

import csv
import math
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastdp
from benchmarks import correlated, device, floor, host, kernels, smoke, timing, training
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.language import LSTM
from benchmarks.models import Workload, class_losses
from benchmarks.suites import GPU as LARGE
from benchmarks.suites import OTHERS, SMALL, words
from fastdp.errors import ParameterError
from fastdp.grad_sample.linear import Matmul

pytestmark = pytest.mark.slow  # `make test-all` runs it

GPU = (8e14, 3e12)  # operations and bytes a second


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------------- floors


def test_floors_by_hand() -> None:
    def of(t: int, *layers: tuple[int, int], frozen: int = 0, roof: tuple[float, float] = (1.0, 1e-9)) -> float:
        def build() -> nn.Module:
            model = nn.Sequential(*[nn.Linear(i, o) for i, o in layers])
            model[:frozen].requires_grad_(False)
            return model

        return floor.floor(Workload(build, lambda b: (torch.randn(b, t, 40), torch.zeros(b)), class_losses, 2), roof)

    # forward and weight gradient (the data needs none), and the gram norm: T (I + O) / 2IO = 5 * 100 / 4800
    assert of(5, (40, 60)) == pytest.approx((2 + 500 / 4800) / 2)
    assert of(500, (40, 60)) == pytest.approx(3 / 2)  # directly
    assert of(500, (40, 60), (60, 40), frozen=1) == pytest.approx((1 + 3) / (1 + 2))
    assert of(500, (40, 60), (60, 40)) == pytest.approx((3 + 4) / (2 + 3))
    # stored: 8 B I O bytes at 100 a second over 2 B T I O operations at 10 a second
    assert of(500, (40, 60), roof=(10.0, 100.0)) == pytest.approx((2 + 8 / 100 / (2 * 500 / 10)) / 2)


def test_floors_see_every_product_of_the_workloads() -> None:
    known = {"vit-b16": (1.05, 1.07), "gpt2": (1.23, 1.27), "gpt2-large": (1.05, 1.12), "llama-1b": (1.08, 1.16),
             "llama-lora": (1.0, 1.02), "gpt2-lora": (1.0, 1.01), "bert": (1.12, 1.17)}  # fmt: skip
    for name, (low, high) in known.items():
        assert low < floor.floor(LARGE[name], GPU) < high, (name, floor.floor(LARGE[name], GPU))
    found = floor.shapes(OTHERS["resnet"])
    assert len(found.products) == 1 + 4 * 2 + 3 + 1 and found.attention == 0
    assert found.products[0] == floor.Product(32, 1024, 27, 32, True, False)
    found = floor.shapes(SMALL["llama-1b"])  # T=13, 8 heads of 8, causal; forward 2 and backward 5 products
    assert found.attention == pytest.approx(2 * (3 * 8 * 8 * 13 * 13 * 4 / 2) * 3.5)
    sizes = [(p.t, p.i, p.o) for p in floor.shapes(words(lambda t: LSTM(97, 12, 16), 9, 97, 3)).products]
    assert sizes == [(9, 12, 64), (9, 16, 64), (9, 16, 64), (9, 16, 64), (9, 16, 97)]
    model = nn.Conv2d(8, 16, 3, padding=1, groups=4)
    work = Workload(lambda: model, lambda b: (torch.randn(b, 8, 6, 6), torch.zeros(b)), class_losses, 2)
    (grouped,) = floor.shapes(work).products
    assert grouped == floor.Product(2, 36, 2 * 9, 16, True, False, 4)
    # 18 data and 4 output channels a group: T (I + O/g) / (2 I O/g), with T = 2 of the 36 positions
    assert grouped._replace(t=2).norm_units((1.0, 1e-9)) == pytest.approx(2 * (18 + 4) / (2 * 18 * 4))


# ---------------------------------------------------------------------- rows and versions


def test_rows_are_added_to_a_file_with_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.csv"
    timing.append(path, [{"a": 1, "b": 2, "left": 3}], ("a", "b"))
    timing.append(path, [{"a": 4, "c": 5}], ("a", "c"))
    timing.append(path, [{"c": 6}], ("a", "c"))
    assert [tuple(row.values()) for row in rows_of(path)] == [("1", "2", "-"), ("4", "-", "5"), ("-", "-", "6")]
    monkeypatch.setenv("FASTDP_COMMIT", "abc1234")
    assert timing.versions()["commit"] == "abc1234" and tuple(timing.versions()) == timing.FACTS


def test_there_is_no_figure_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "missing", lambda kind: {"not built: do this": ["a"]} if kind == "cpu" else {})
    for main, command in ((training.main, ["--suite", "quick"]), (device.main, ["host", "--device", "cpu"])):
        with pytest.raises(SystemExit, match="no figure is taken without fastdp's kernels: not built: do this"):
            main(command)
    monkeypatch.setattr(timing, "missing", lambda kind: {})  # as where FASTDP_CPU=0
    timing.require_kernels()
    monkeypatch.setattr(timing, "native", lambda: "not built")
    assert str(timing.versions()["fastdp"]).endswith(", without _C")


# ---------------------------------------------------------------------- kernels, host, device, smoke, scale


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


def test_host_times_of_tiny_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "host.csv"
    monkeypatch.setattr(timing, "keep_memory", lambda module: None)
    command = ["host", "--models", "cnn", "--layers", "1", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    host.main()
    assert {"non-private", "fastdp", "fastdp graphed"} <= {row["contender"] for row in rows_of(out)}


def test_what_is_asked_of_a_device_runs_here_at_small_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A contender that fails is a row, and stops no other."""

    def fails(*_: object) -> None:
        raise RuntimeError("no graph")

    monkeypatch.setitem(CONTENDERS, "fastdp graphed", Contender(fails))  # type: ignore[arg-type]
    out, profile = tmp_path / "host.csv", tmp_path / "profile.txt"
    small = ["--device", "cpu", "--small", "--models", "gpt2"]
    device.main(["host", *small, "--out", str(out), "--profile", str(profile)])
    rows = {row["contender"]: row for row in rows_of(out)}
    assert list(rows) == list(device.CONTENDERS) and rows.pop("fastdp graphed")["wall_ms"] == "RuntimeError"
    assert all(float(row["wall_ms"]) >= float(row["host_ms"]) > 0 for row in rows.values())
    assert "aten::" in profile.read_text()
    with pytest.raises(SystemExit, match="fastdp graphed: RuntimeError: no graph"):
        device.main(["one", *small])
    monkeypatch.undo()
    device.main(["one", *small])
    assert "compiled" in capsys.readouterr().out


def test_what_users_run_on_a_gpu_runs_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def still(place: torch.device) -> float:
        model = smoke.classifier(place)
        smoke.holds(model, {name: p.detach().clone() for name, p in model.named_parameters()})
        return 0.0

    for module in ("transformers", "peft", "accelerate"):
        pytest.importorskip(module)
    with pytest.raises(SystemExit) as ended:
        smoke.main(["--device", "cpu"])
    told = capsys.readouterr().out.splitlines()
    assert not ended.value.code and [line.split()[0] for line in told] == list(smoke.CASES)
    assert all(line.endswith(" s  ok") for line in told), told
    monkeypatch.setattr(smoke, "CASES", {"still": still, "loop": smoke.loop})
    with pytest.raises(SystemExit) as ended:
        smoke.main(["--device", "cpu", "--out", str(tmp_path / "smoke.csv")])
    found = {row["case"]: row["result"] for row in rows_of(tmp_path / "smoke.csv")}
    assert ended.value.code == 1 and found == {"still": "AssertionError: 0.weight has not moved", "loop": "ok"}


def test_rows_of_correlated_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "correlated.csv"
    correlated.main(["--quick", "--out", str(out)])
    rows = rows_of(out)
    found = {(row["noise"], row["records"].split()[0]) for row in rows if row["what"] == "accuracy"}
    assert {kind for kind, _ in found} >= {"none", "Independent()", "TreeAggregation()"} and len(found) == 5
    assert sum(row["records"].startswith("Poisson") for row in rows) == 2  # seeds
    assert all(0 < float(row["value"]) <= 1 for row in rows if row["what"] == "accuracy")
    assert {row["extra_bytes"] for row in rows if row["what"] == "step"} == {"0"}
    assert "+-" in capsys.readouterr().out


def test_the_data_and_the_rate_of_correlated_noise() -> None:
    ids, owners = correlated.lines(50)
    assert ids.shape == (50 * len(correlated.MODULES), correlated.LENGTH) and (owners.bincount() == 50).all()
    assert 0 <= ids.min() and ids.max() < correlated.BUCKETS and (ids[:, :18] > 0).all()
    for best in (0.1, 0.9, 0.011):  # in the middle, above and below
        tried: list[float] = []

        def score(rate: float, best: float = best, tried: list[float] = tried) -> float:
            tried.append(rate)
            return -abs(math.log(rate / best))

        assert correlated.best_rate(score, 0.1) == pytest.approx(best, rel=0.02) and len(set(tried)) == len(tried) <= 6


@pytest.mark.parametrize(("lora", "copies"), [(0, 1), (4, 1), (0, 2)])
def test_a_step_on_many_ranks_sends_what_an_ordinary_one_does(lora: int, copies: int) -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from benchmarks import scale

    ordinary, private = (scale.one_step(scale.Setting("small", 8, 32, lora, copies), kind) for kind in (False, True))
    assert private.sent["all-gather"] == ordinary.sent["all-gather"]
    (number, size), (ordinary_number, ordinary_size) = (m.sent["reduce-scatter"] for m in (private, ordinary))
    assert number <= ordinary_number  # small sums go together, and with the number of samples that contribute nothing
    assert size <= 1.03 * ordinary_size + 8 * 64  # padded to whole shares; the number goes to each of 8 ranks
    more = private.sent.get("all-reduce", (0, 0))[1] - ordinary.sent.get("all-reduce", (0, 0))[1]
    assert more <= 8 + 0.01 * ordinary_size
    for kind in ("weights", "moments"):
        assert private.peak_by[kind] == ordinary.peak_by[kind]


def test_a_sharded_backward_lets_go_of_what_it_has_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from benchmarks import scale

    alive, held, made, summed = weakref.WeakSet[Matmul](), list[int](), Matmul.__init__, Matmul.clipped_sum
    monkeypatch.setattr(Matmul, "__init__", lambda use, *args: (made(use, *args), alive.add(use))[0])
    monkeypatch.setattr(Matmul, "clipped_sum", lambda *args: (held.append(len(alive)), summed(*args))[1])
    scale.one_step(scale.Setting("layer", 8, 128), True)
    count = len(held) // 2  # two steps
    assert held == 2 * list(range(count, 0, -1)) and count >= 8


def test_rows_of_a_step_on_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from benchmarks import scale

    out = tmp_path / "rows.csv"
    scale.main(["--sizes", "layer", "--ranks", "64", "--lora", "16", "--out", str(out)])
    assert "reduce-scatter" in capsys.readouterr().out
    ordinary, private = rows_of(out)
    assert 0 < float(private["peak_gib"]) <= 1.05 * float(ordinary["peak_gib"])  # adapters hold no more


def test_parameters_without_numbers_are_refused() -> None:
    with FakeTensorMode(), pytest.raises(ParameterError, match="fake, without values"):
        fastdp.DPSGD(nn.Linear(2, 2), lr=0.1, noise_multiplier=1.0, expected_batch_size=2)
