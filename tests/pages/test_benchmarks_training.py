"""The training benchmark: workloads are exact, wrong contenders get no time, limits of time and memory hold."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import contenders, exactness, memory, steps, suites, timing, training
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.models import Workload, class_losses
from benchmarks.suites import SMALL

OURS = [name for name in CONTENDERS if name.startswith("fastdp")]
CPU16 = steps.Place(torch.device("cpu"), torch.bfloat16)
CONTRACT = (
    "suite,sweep,workload,contender,batch_size,length,dtype,status,why,ratio,floor,of_floor,step_ms,p20_ms,p80_ms,rounds,"
    "peak_mib,memory_ratio,largest_batch,largest_batch_ratio,error,error_dtype,device,threads,torch,triton,opacus,fastdp,"
    "commit,date"
)

# ---------------------------------------------------------------------- workloads


@pytest.mark.parametrize("name", SMALL)
def test_every_workload_is_exact_for_every_fastdp_contender(name: str) -> None:
    work, truth = SMALL[name], exactness.truth_of(SMALL[name])
    assert 0 < truth.clipped <= truth.samples / 2, "some samples must be clipped, most not"
    for contender in ["non-private", *OURS]:
        assert exactness.error_of(contender, work, truth=truth) < 2e-5, contender


@pytest.mark.parametrize("name", ["gpt2", "vit-b16", "convnext-t", "llama-lora"])
def test_small_variants_train_in_16_bits(name: str) -> None:
    verdict = exactness.judge(["fastdp"], SMALL[name], CPU16)["fastdp"]
    assert verdict.status == "ok" and verdict.error is not None and verdict.error_dtype is not None, verdict
    runs = steps.interleaved(SMALL[name], ["non-private", "fastdp"], 1, CPU16)
    assert {len(run.times) for run in runs.values()} == {1}


def test_every_workload_has_its_size() -> None:
    millions = {"gpt2": 124.4, "gpt2-large": 774.0, "llama-1b": 1100, "bert": 109.48, "roberta": 124.65,
                "vit-b16": 86.57, "convnext-t": 28.589, "resnet18": 11.6895, "resnet50": 25.557, "mnist-cnn": 0.02601,
                "cifar-cnn": 0.55057}  # fmt: skip
    for name, size in millions.items():
        work = suites.CPU.get(name) or suites.GPU[name]
        with torch.device("meta"):
            model = work.build()
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(size, rel=1e-3), name
    with torch.device("meta"):
        adapters = [p.numel() for p in suites.GPU["llama-lora"].build().parameters() if p.requires_grad]
    assert len(adapters) == 22 * 2 * 2 and sum(adapters) == 22 * 8 * (2048 + 2048 + 2048 + 256)
    assert all(work.small for suite in suites.SUITES.values() for work in suite.values())


def test_tied_heads_are_tied_and_padding_is_there() -> None:
    model = steps.build(SMALL["gpt2"], CPU16)
    assert model.head.weight is model.tokens.weight
    ids = SMALL["roberta"].batch(4)[0]
    assert ids[0].ne(1).all() and ids[-1].eq(1).any()


def test_a_workload_of_another_size() -> None:
    work = suites.find("cpu", "gpt", batch_size=2, length=64)
    assert work.batch(work.batch_size)[0].shape == (2, 64) and work.build().positions.weight.size(0) == 64
    with pytest.raises(ValueError, match="no other length"):
        suites.find("cpu", "resnet18", length=64)


# ---------------------------------------------------------------------- contenders


def tiny(batch_size: int = 4) -> Workload:
    return Workload(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
                    lambda b: (torch.randn(b, 5), torch.randint(0, 3, (b,))), class_losses, batch_size)  # fmt: skip


def _tenth_of_the_loss(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> contenders.Step:
    def losses(out: Tensor, y: Tensor) -> Tensor:
        return 0.1 * work.losses(out, y)

    return contenders.ours()(model, work._replace(losses=losses), sigma, limit)


def _one_percent_long(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> contenders.Step:
    return contenders.ours(clipping=lambda n: (limit / n).clamp(max=1) * 0.99)(model, work, sigma, limit)


def _broken(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> contenders.Step:
    raise NotImplementedError("no rule for\nthis model")


def _out_of_memory(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> contenders.Step:
    inner, calls = contenders.ours()(model, work, sigma, limit), []

    def step(x: Tensor, y: Tensor) -> None:
        calls.append(1)
        if len(calls) > 1 and sigma > 0:
            raise torch.OutOfMemoryError("out")
        inner(x, y)

    return step


def _slow(seconds: float) -> object:
    def make(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> contenders.Step:
        inner = contenders.nonprivate(model, work)

        def step(x: Tensor, y: Tensor) -> None:
            time.sleep(seconds)
            inner(x, y)

        return step

    return make


def _absent(model: nn.Module) -> nn.Module:
    raise contenders.NotApplicable("not installed")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, timing.Row]:
    """The rows of a tiny model with good and bad contenders."""
    monkeypatch.setitem(suites.OTHERS, "tiny", tiny())
    made = {
        "unclipped": Contender(contenders.nonprivate), "one percent": Contender(_one_percent_long),
        "other loss": Contender(_tenth_of_the_loss), "broken": Contender(_broken),
        "memory": Contender(_out_of_memory), "absent": Contender(contenders.nonprivate, "none", _absent),
        "local for global": Contender(contenders.ours(), "global"),
        "flat for layers": Contender(contenders.ours(), "layerwise"),
    }  # fmt: skip
    for name, contender in made.items():
        monkeypatch.setitem(CONTENDERS, name, contender)
    found = training.run("tiny", ["non-private", *OURS, *made], 2, memory=False, roof=(1e11, 1e10))
    return {str(row["contender"]): row for row in found}


def test_a_wrong_contender_gets_no_time(rows: dict[str, timing.Row]) -> None:
    for name in ("unclipped", "one percent", "other loss", "local for global", "flat for layers"):
        assert rows[name]["status"] == "wrong" and rows[name]["step_ms"] == rows[name]["ratio"] == "-", rows[name]
        assert not float(str(rows[name]["error"])) < exactness.TOLERANCE
    for name in OURS:
        row = rows[name]
        assert row["status"] == "ok" and float(str(row["ratio"])) > 0 and float(str(row["step_ms"])) > 0
        ratio, least, share = (float(str(row[key])) for key in ("ratio", "floor", "of_floor"))
        assert abs(share - ratio / least) < 0.011 + 0.006 * share, row  # each of the three is rounded to 0.01
    assert rows["non-private"]["ratio"] == "1.00" and rows["non-private"]["floor"] == "-"


def test_failures_are_said_in_the_row(rows: dict[str, timing.Row]) -> None:
    assert rows["broken"]["status"] == "raises"
    assert rows["broken"]["why"] == "NotImplementedError: no rule for this model"
    assert rows["memory"]["status"] == "out of memory" and rows["memory"]["ratio"] == "-"
    assert rows["absent"]["status"] == "not applicable" and rows["absent"]["why"] == "not installed"


def test_rows_have_the_columns_in_order(rows: dict[str, timing.Row], tmp_path: Path) -> None:
    assert ",".join(training.COLUMNS) == CONTRACT
    assert all(set(row) == set(training.COLUMNS) for row in rows.values())
    timing.append(tmp_path / "x.csv", list(rows.values()), training.COLUMNS)
    with (tmp_path / "x.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        assert ",".join(reader.fieldnames or ()) == CONTRACT
        assert all(value != "" for row in reader for value in row.values())


def test_the_committed_rows_have_the_columns() -> None:
    for device in ("cpu", "cuda"):
        path = Path(training.__file__).with_name("data") / f"training_{device}.csv"
        assert path.read_text().splitlines()[0] == CONTRACT


# ---------------------------------------------------------------------- limits


def test_a_contender_whose_step_takes_too_long_is_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "asleep", Contender(_slow(30), "none"))  # type: ignore[arg-type]
    monkeypatch.setitem(CONTENDERS, "slow", Contender(_slow(0.3), "none"))  # type: ignore[arg-type]
    begin = time.perf_counter()
    runs = steps.interleaved(tiny(), ["non-private", "asleep", "slow"], 40, limit=2.5)
    assert runs["asleep"].status == "out of time" and not runs["asleep"].times
    assert runs["slow"].status == "ok" and steps.LEAST <= len(runs["slow"].times) < 10
    assert runs["non-private"].status == "ok" and len(runs["non-private"].times) == 40
    assert time.perf_counter() - begin < 25  # asleep: 30


def test_a_check_that_takes_too_long_is_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "asleep", Contender(_slow(30), "none"))  # type: ignore[arg-type]
    assert exactness.judge(["asleep"], tiny(), limit=0.3)["asleep"].status == "out of time"


def test_contenders_that_do_not_fit_together_run_in_groups() -> None:
    needs = {"non-private": 10.0, "a": 30.0, "b": 40.0, "c": 30.0, "d": 500.0}
    names = list(needs)
    assert steps.grouped(names, needs, 1000) == [names]
    found = steps.grouped(names, needs, 80)
    assert found == [["non-private", "a", "b"], ["non-private", "c"], ["non-private", "d"]]
    assert steps.grouped(["non-private"], needs, 5) == [["non-private"]]


def test_groups_are_each_compared_with_ordinary_training_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suites.OTHERS, "tiny", tiny())
    monkeypatch.setattr(training, "room_mib", lambda place: 1e-6)
    options = training.Options(["non-private", "fastdp", "fastdp global"], 2, memory=False)
    found = training.measure(memory.Job("cpu", "tiny"), options)
    assert found.bases["fastdp"] is not found.bases["fastdp global"]
    assert found.runs["non-private"] is found.bases["fastdp"]


@pytest.mark.parametrize(("fixed", "each"), [(300.0, 38.5), (5.0, 0.9), (3990.0, 20.0), (0.0, 1700.0)])
def test_the_largest_batch_is_found(fixed: float, each: float) -> None:
    asked: list[int] = []

    def needs(size: int) -> float:
        asked.append(size)
        return fixed + each * size + 3 * (size % 2)  # not quite a line

    best = memory.largest_batch(needs, 4096, 8)
    true = max(b for b in range(1, 5000) if fixed + each * b + 3 * (b % 2) <= 4096)
    assert 0.97 * true - 1 <= best <= true and fixed + each * best <= 4096, (best, true, asked)
    assert len(asked) <= 8


def test_the_largest_batch_where_nothing_is_known_of_failures() -> None:
    assert abs(memory.largest_batch(lambda size: 10.0 * size if size <= 37 else None, math.inf, 4, 12) - 37) <= 1
    # memory runs out below what its line predicts: halved, not crept down to
    assert abs(memory.largest_batch(lambda size: 10.0 * size if size <= 37 else None, 4096, 4, 12) - 37) <= 1
    assert memory.largest_batch(lambda size: None, math.inf, 8) == 0


def test_peaks_are_those_of_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = memory.Job("quick", "mnist-cnn", small=True)
    found = memory.peaks(job, ["non-private compiled", "fastdp"])
    assert set(found) == {"fastdp"}  # a compiler's memory is not training's
    assert found["fastdp"].mib is not None and 1 < found["fastdp"].mib < 2000
    assert memory.peak(job, "fastdp", limit=0.05).status == "out of time"
    monkeypatch.setattr(memory, "MAIN", "benchmarks.absent")
    failed = memory.peak(job, "fastdp")
    assert failed.status == "raises" and "benchmarks.absent" in failed.why


def test_a_run_writes_workload_by_workload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training, "roofs", lambda device, dtype: (1e11, 1e10))
    common = ["--small", "--no-memory", "--rounds", "1", "--contenders", "fastdp", "--out", str(tmp_path)]
    training.main(["--suite", "quick", "--models", "mnist-cnn", "lstm", *common])
    training.main(["--suite", "quick", "--models", "gpt", "--sweep", "length", *common])
    with (tmp_path / "training_cpu.csv").open(newline="") as file:
        found = [(r["suite"], r["sweep"], r["workload"], r["contender"], r["length"]) for r in csv.DictReader(file)]
    both = ("non-private", "fastdp")
    assert found == [("quick", "-", w, c, t) for w, t in (("mnist-cnn", "28"), ("lstm", "9")) for c in both] + [
        ("quick", "length", "gpt", c, str(t)) for t in suites.LENGTHS["quick"] for c in both
    ]


def test_memory_of_one_process_is_each_contenders_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the allocator's peak, without what was held before the contender was built."""
    held = iter([100 * 2**20, 400 * 2**20])
    resets: list[steps.Place] = []
    monkeypatch.setattr(steps, "held_bytes", lambda place: next(held))
    monkeypatch.setattr(steps, "reset_peak", resets.append)
    monkeypatch.setattr(steps, "peak_since", lambda place, before: 1000.0 - before / 2**20)
    monkeypatch.setitem(suites.OTHERS, "tiny", tiny())
    options = training.Options(["non-private", "fastdp"], 2, here=True)
    monkeypatch.setattr(training, "peaks", lambda *args: pytest.fail("a process of its own"))
    rows = {row["contender"]: row for row in training.rows_of(memory.Job("cpu", "tiny"), options)}
    assert [rows[name]["peak_mib"] for name in ("non-private", "fastdp")] == ["900", "600"] and len(resets) == 2
    assert rows["fastdp"]["memory_ratio"] == "0.67"
    with pytest.raises(SystemExit, match="GPU"):
        training.main(["--suite", "quick", "--memory-here"])


def test_patience_for_a_first_step_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fastdp", "fastdp global", "opacus hooks"):
        monkeypatch.setitem(contenders.CONTENDERS, name, contenders.CONTENDERS[name])
    monkeypatch.setattr(training, "roofs", lambda device, dtype: (1e11, 1e10))
    seen: dict[str, float] = {}
    monkeypatch.setattr(training, "judge", lambda names, *rest: {})

    def rows_of(*args: object) -> list[timing.Row]:
        seen.update({name: contenders.CONTENDERS[name].patience for name in ("fastdp", "opacus hooks")})
        return []

    monkeypatch.setattr(training, "rows_of", rows_of)
    training.main(["--suite", "quick", "--models", "lstm", "--contenders", "fastdp", "opacus hooks", "--patience", "4"])
    assert seen == {"fastdp": 4.0, "opacus hooks": 1.0}
