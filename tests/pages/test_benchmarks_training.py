"""The training benchmark: truths by hand, wrong contenders get no time, limits of time and memory hold."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import contenders, exactness, memory, steps, suites, training
from benchmarks.contenders import CONTENDERS, DEFAULT, Contender, Step
from benchmarks.models import Workload, class_losses
from benchmarks.suites import SMALL

pytestmark = pytest.mark.slow  # `make test-all` runs it

OURS = [name for name in DEFAULT if name.startswith("fastdp")]
CPU16 = steps.Place(torch.device("cpu"), torch.bfloat16)


def tiny(batch_size: int = 4) -> Workload:
    return Workload(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
                    lambda b: (torch.randn(b, 5), torch.randint(0, 3, (b,))), class_losses, batch_size)  # fmt: skip


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny workload by name, and roofs that need not be measured."""
    monkeypatch.setitem(suites.OTHERS, "tiny", tiny())
    monkeypatch.setattr(training, "roofs", lambda device, dtype: (1e11, 1e10))


# ---------------------------------------------------------------------- workloads and the check


@pytest.mark.parametrize("name", SMALL)
def test_every_workload_is_exact_for_every_fastdp_contender(name: str) -> None:
    work, truth = SMALL[name], exactness.truth_of(SMALL[name])
    assert 0 < truth.clipped <= truth.samples / 2, "some samples must be clipped, most not"
    for contender in ["non-private", *OURS]:
        assert exactness.error_of(contender, work, truth=truth) < 2e-5, contender


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
    work = suites.find("cpu", "gpt", batch_size=2, length=64)
    assert work.batch(work.batch_size)[0].shape == (2, 64) and work.build().positions.weight.size(0) == 64


def test_truths_by_hand() -> None:
    work = tiny(3)
    truth = exactness.truth_of(work)
    model, (x, y) = steps.build(work).double(), steps.batch(work)
    grads = []
    for b, weight in enumerate((1.0, 1.0, 4.0)):
        loss = weight * class_losses(model(x[b : b + 1].double()), y[b : b + 1]).sum()
        found = torch.autograd.grad(loss, model.parameters())
        grads.append(dict(zip(dict(model.named_parameters()), found, strict=True)))
    norms = [math.sqrt(sum(float(g.square().sum()) for g in grad.values())) for grad in grads]
    assert sorted(norms)[1] < truth.limit < sorted(norms)[2] and truth.clipped == 1
    factors = {"none": [1.0] * 3, "local": [min(1.0, truth.limit / n) for n in norms],
               "global": [float(n <= truth.limit) for n in norms],
               "automatic": [truth.limit / (n + 0.01) for n in norms]}  # fmt: skip
    for kind, c in factors.items():
        for name, mean in truth.means[kind].items():
            torch.testing.assert_close(mean, sum(c[b] * grads[b][name] for b in range(3)) / 3)
    for layer in ("0", "2"):  # each of two by its own norm and limit / sqrt(2)
        names = [f"{layer}.weight", f"{layer}.bias"]
        own = [math.sqrt(sum(float(grad[n].square().sum()) for n in names)) for grad in grads]
        for name in names:
            wanted = sum(min(1.0, truth.limit / 2**0.5 / own[b]) * grads[b][name] for b in range(3)) / 3
            torch.testing.assert_close(truth.means["layerwise"][name], wanted)


def test_an_error_in_one_small_parameter_is_an_error() -> None:
    truth = {"large": torch.full((10, 10), 1.0), "small": torch.full((2,), 0.1)}
    wrong = {**truth, "small": 1.1 * truth["small"]}
    assert exactness.distance(truth, truth) == 0 and exactness.distance(wrong, truth) == pytest.approx(0.1)
    assert exactness.distance({"large": truth["large"]}, truth) == math.inf
    assert exactness.distance({**truth, "small": torch.full((2,), math.nan)}, truth) == math.inf


def test_samples_that_rounding_decides_are_left_out() -> None:
    """One window of max-pooling that nearly ties moved the gradient of ordinary training by 6e-3 on another device."""
    work = suites.CPU["cifar-cnn"]
    chosen = exactness.decided(work)
    assert 56 <= chosen.batch_size < work.whole and exactness.undecided(chosen) == []


def test_tf32_is_off_while_contenders_are_judged() -> None:
    def now() -> list[str]:
        return [torch._C._get_fp32_precision_getter("cuda", what) for what in ("matmul", "conv", "rnn")]

    before = now()
    with exactness.full_precision(torch.device("cuda")):
        assert now() == ["ieee"] * 3 != before
    assert now() == before


def test_in_16_bits_ordinary_training_says_how_far_rounding_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-50's own gradient is off by 0.3 there; a quarter of it is wrong."""

    def quarter(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> Step:
        factor = 1.0 if next(model.parameters()).dtype == torch.float32 else 0.25
        return contenders.nonprivate(model, work._replace(losses=lambda out, y: factor * work.losses(out, y)))

    monkeypatch.setitem(CONTENDERS, "quarter", Contender(quarter, "none"))
    found = exactness.judge(["non-private", "fastdp", "quarter"], SMALL["resnet50"], CPU16)
    assert [verdict.status for verdict in found.values()] == ["ok", "ok", "wrong"], found


# ---------------------------------------------------------------------- contenders


def _tenth_of_the_loss(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> Step:
    scaled = work._replace(losses=lambda out, y: 0.1 * work.losses(out, y))
    return contenders.ours()(model, scaled, sigma, limit)


def _one_percent_long(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> Step:
    return contenders.ours(clipping=lambda n: (limit / n).clamp(max=1) * 0.99)(model, work, sigma, limit)


def _broken(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> Step:
    raise NotImplementedError("no rule for\nthis model")


def _out_of_memory(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> Step:
    inner, calls = contenders.ours()(model, work, sigma, limit), []

    def step(x: Tensor, y: Tensor) -> None:
        calls.append(1)
        if len(calls) > 1 and sigma > 0:
            raise torch.OutOfMemoryError("out")
        inner(x, y)

    return step


def _absent(model: nn.Module) -> nn.Module:
    raise contenders.NotApplicable("not installed")


def test_a_wrong_contender_gets_no_time_and_a_failure_is_said(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "unclipped": Contender(contenders.nonprivate), "one percent": Contender(_one_percent_long),
        "other loss": Contender(_tenth_of_the_loss), "local for global": Contender(contenders.ours(), "global"),
        "flat for layers": Contender(contenders.ours(), "layerwise"),
    }  # fmt: skip
    failing = {"broken": Contender(_broken), "memory": Contender(_out_of_memory),
               "absent": Contender(contenders.nonprivate, "none", _absent)}  # fmt: skip
    for name, contender in (wrong | failing).items():
        monkeypatch.setitem(CONTENDERS, name, contender)
    names = ["non-private", *OURS, *wrong, *failing]
    found = training.rows_of(memory.Job("cpu", "tiny"), training.Options(names, 2, memory=False, roof=(1e11, 1e10)))
    rows = {str(row["contender"]): row for row in found}
    for name in wrong:
        assert rows[name]["status"] == "wrong" and rows[name]["step_ms"] == rows[name]["ratio"] == "-", rows[name]
        assert not float(str(rows[name]["error"])) < exactness.TOLERANCE
    for name in OURS:
        row = rows[name]
        ratio, least, share = (float(str(row[key])) for key in ("ratio", "floor", "of_floor"))
        assert row["status"] == "ok" and float(str(row["step_ms"])) > 0
        assert abs(share - ratio / least) < 0.011 + 0.006 * share, row  # each of the three is rounded to 0.01
    assert rows["non-private"]["ratio"] == "1.00" and rows["non-private"]["floor"] == "-"
    said = {name: (rows[name]["status"], rows[name]["why"]) for name in failing}
    assert said == {"broken": ("raises", "NotImplementedError: no rule for this model"),
                    "memory": ("out of memory", "out of memory"),
                    "absent": ("not applicable", "not installed")}  # fmt: skip
    for device in ("cpu", "cuda"):  # the kept rows have all columns
        kept = Path(training.__file__).with_name("data") / f"training_{device}.csv"
        assert set(training.COLUMNS) <= set(kept.read_text().splitlines()[0].split(","))


# ---------------------------------------------------------------------- limits


def _slow(seconds: float) -> Contender:
    def make(model: nn.Module, work: Workload, sigma: float = 1.0, limit: float = 1.0) -> Step:
        inner = contenders.nonprivate(model, work)

        def step(x: Tensor, y: Tensor) -> None:
            time.sleep(seconds)
            inner(x, y)

        return step

    return Contender(make, "none")


def test_a_contender_whose_step_takes_too_long_is_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "asleep", _slow(30))
    monkeypatch.setitem(CONTENDERS, "slow", _slow(0.3))
    runs = steps.interleaved(tiny(), ["non-private", "asleep", "slow"], 40, limit=2.5)
    assert runs["asleep"].status == "out of time" and not runs["asleep"].times
    assert runs["slow"].status == "ok" and steps.LEAST <= len(runs["slow"].times) < 10
    assert runs["non-private"].status == "ok" and len(runs["non-private"].times) == 40
    assert exactness.judge(["asleep"], tiny(), limit=0.3)["asleep"].status == "out of time"


def test_peaks_are_those_of_fresh_processes() -> None:
    job = memory.Job("quick", "mnist-cnn", small=True)
    found = memory.peaks(job, ["non-private compiled", "fastdp"])
    assert set(found) == {"fastdp"}  # a compiler's memory is not training's
    assert found["fastdp"].mib is not None and 1 < found["fastdp"].mib < 2000
    assert memory.peak(job, "fastdp", limit=0.05).status == "out of time"


def test_a_run_writes_workload_by_workload(known: None, tmp_path: Path) -> None:
    common = ["--small", "--no-memory", "--rounds", "1", "--contenders", "fastdp", "--out", str(tmp_path)]
    training.main(["--suite", "quick", "--models", "mnist-cnn", "lstm", *common])
    training.main(["--suite", "quick", "--models", "gpt", "--sweep", "length", *common])
    with (tmp_path / "training_cpu.csv").open(newline="") as file:
        found = [(r["suite"], r["sweep"], r["workload"], r["contender"], r["length"]) for r in csv.DictReader(file)]
    both = ("non-private", "fastdp")
    assert found == [("quick", "-", w, c, t) for w, t in (("mnist-cnn", "28"), ("lstm", "9")) for c in both] + [
        ("quick", "length", "gpt", c, str(t)) for t in suites.LENGTHS["quick"] for c in both
    ]
