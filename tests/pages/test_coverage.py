"""The coverage benchmark itself: does its judge find what is wrong, and call by its name what is right?"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp  # noqa: F401  (its exceptions are refusals)
from benchmarks import coverage, coverage_models
from benchmarks import coverage_report as report
from benchmarks.coverage_engines import ENGINES, fastdp_step, one_by_one
from benchmarks.coverage_losses import losses_for, row_losses
from benchmarks.coverage_truth import Case, NotBuilt, Sizes, Truth, deliberate, errors_of, judge, take, truth
from benchmarks.timing import append
from fastdp.errors import SampleMixingError

SIZES = Sizes(3, 5)
CASES = coverage_models.MODELS


def status(case: Case, engine: Any = one_by_one, sizes: Sizes = SIZES) -> str:
    return judge(case, sizes, engine, "fastdp")["status"]


@pytest.mark.parametrize(
    "name", ["class_token", "experts_index_add", "gru", "checkpointed_reentrant", "masked_scatter"]
)
def test_plain_autograd_is_exact(name: str) -> None:
    assert status(CASES[name]) == "exact"


def test_fastdp_end_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """What is rightly refused is tried again as users would: with batch norms made group norms, where there are any."""
    out = tmp_path / "rows.csv"
    names = ("tied_head", "coupled_centred", "coupled_batch_norm")
    results = coverage.main(["--only", *names, "--jobs", "1", "--out", str(out)])
    assert {r["case"]: r["status"] for r in results} == {
        "tied_head": "exact", "coupled_centred": "rightly refused", "coupled_batch_norm": "rightly refused",
        "coupled_batch_norm [repaired]": "exact",
    }  # fmt: skip
    assert "exact 2 (50.0 %), rightly refused 2 (50.0 %)" in capsys.readouterr().out
    assert len(out.read_text().splitlines()) == 5


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.filterwarnings("ignore")
def test_opacus_is_asked_as_its_documentation_says(mode: str) -> None:
    pytest.importorskip("opacus")
    engine = ENGINES[f"opacus-{mode}"]
    found = judge(CASES["convolution_strided"], SIZES, engine.step, engine.package)
    assert found["status"] == "exact", found
    case = CASES["unpadded_rows"]  # beyond what it promises: marked, for Opacus alone
    assert judge(case, SIZES, engine.step, engine.package)["notes"].startswith("outside its documentation (the first")
    assert not judge(case, SIZES, one_by_one, "benchmarks")["notes"]


# ---------------------------------------------------------------------- planted faults


def unclipped(model: nn.Module, batch: dict[str, Any], losses: Any, rate: float, size: int) -> None:
    losses(model, batch).mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= rate * p.grad


def one_parameter_forgotten(model: nn.Module, batch: dict[str, Any], losses: Any, rate: float, size: int) -> None:
    kept = model.c.detach().clone()
    one_by_one(model, batch, losses, rate, size)
    with torch.no_grad():
        model.c.copy_(kept)


def slightly_too_long(model: nn.Module, batch: dict[str, Any], losses: Any, rate: float, size: int) -> None:
    one_by_one(model, batch, losses, rate * (1 + 3e-4), size)


@pytest.mark.parametrize("engine", [unclipped, one_parameter_forgotten, slightly_too_long])
def test_a_wrong_engine_is_found(engine: Any) -> None:
    assert status(CASES["class_token"], engine) == "WRONG"


def test_an_answer_for_coupled_samples_is_wrong() -> None:
    for name in ("coupled_batch_norm", "coupled_centred", "coupled_contrastive"):
        assert status(CASES[name], unclipped) == "WRONG", name
        assert status(CASES[name], fastdp_step) == "rightly refused", name


def test_a_refusal_and_a_crash_differ() -> None:
    def refuses(*_: Any) -> None:
        raise SampleMixingError("no")

    def crashes(*_: Any) -> None:
        torch.zeros(2) @ torch.zeros(3)

    assert status(CASES["gru"], refuses) == "refused"
    assert status(CASES["gru"], crashes) == "crashed"
    assert not deliberate(SampleMixingError(""), "fastdp")  # without a word


def test_a_random_model_is_a_bad_case() -> None:
    def build(sizes: Sizes) -> Any:
        model, batch, losses = CASES["gru"].build(sizes)
        return model, batch, lambda m, b: losses(m, b) * (1 + torch.rand(()))

    assert status(Case("random", build)) == "bad case"


# ---------------------------------------------------------------------- truth and batches


def test_every_process_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that dies, one that is too slow and one that is fine."""

    def dies(sizes: Sizes) -> Any:
        import os

        os._exit(3)

    def sleeps(sizes: Sizes) -> Any:
        import time

        time.sleep(60)

    todo = [("named", "one-by-one", case) for case in (Case("dies", dies), Case("sleeps", sleeps), CASES["gru"])]
    found = {r["case"]: r["status"] for r in coverage.run_all(todo, 2, 2.0)}
    assert found == {"dies": "crashed", "sleeps": "timeout", "gru": "exact"}


# ---------------------------------------------------------------------- shrinking


@dataclasses.dataclass
class Config:
    """Of the kind that transformers has."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 6
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    vocab_size: int = 50257
    image_token_id: int = 50000
    attention_dropout: float = 0.1
    layer_types: list[str] = dataclasses.field(default_factory=lambda: ["near"] * 5 + ["far"])
    depths: tuple[int, ...] = (2, 2, 6, 2)
    rms_norm_eps: float = 1e-6
    use_cache: bool = True


def test_a_configuration_is_shrunk_consistently() -> None:
    from benchmarks import coverage_generic as generic

    small = generic.shrunk(Config(), generic.PROFILES[0]())
    assert (small.hidden_size, small.num_attention_heads, small.num_key_value_heads) == (32, 4, 2)
    assert small.num_hidden_layers == 2 and small.layer_types == ["near", "far"]  # every kind of layer
    assert small.vocab_size == 128 > small.image_token_id >= 90 and small.attention_dropout == 0
    assert small.depths == (1, 1, 1, 1) and small.rms_norm_eps == 1e-6 and small.use_cache is False
    shallow = generic.shrunk(Config(), next(p for p in (make() for make in generic.PROFILES) if p.name == "shallow"))
    assert shallow.hidden_size == 4096 and shallow.num_hidden_layers == 2


def test_a_model_of_transformers() -> None:
    coverage.define_torchvision()
    pytest.importorskip("transformers")
    from benchmarks import coverage_generic as generic

    assert len(generic.class_names()) > 300
    assert status(generic.case("GPT2LMHeadModel")) == "exact"


class Frames(nn.Module):
    """Rows of two frames a sample: together, frame by frame, or mixed up; or frames first, then samples."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.order = nn.Linear(4, 4), order

    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        if self.order == "second":
            return out.transpose(0, 1)
        by_frame = torch.cat([out[:, t] for t in range(2)])
        return {"samples": out.flatten(0, 1), "frames": by_frame, "mixed": by_frame.roll(1, 0)}[self.order]


def frames(sizes: Sizes) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"x": torch.randn(sizes.batch, 2, 4), "seed": torch.arange(sizes.batch)}


@pytest.mark.parametrize("order", ["samples", "frames", "second"])
def test_rows_are_given_to_their_samples(order: str) -> None:
    model, batch = Frames(order), frames(Sizes(3))
    losses = losses_for(model, frames)
    alone = torch.cat([losses(model, take(batch, [i], 3)) for i in range(3)])
    assert torch.allclose(losses(model, batch), alone) and alone.std() > 1e-3
    truth_of = truth(Case("frames", lambda sizes: (Frames(order), frames(sizes), losses)), SIZES)
    assert truth_of.coupling < 1e-12


def test_losses_need_rows_of_samples() -> None:
    with pytest.raises(NotBuilt, match="no output whose rows"):
        losses_for(Frames("mixed"), frames)


def test_padding_counts_for_nothing() -> None:
    out, seeds, mask = torch.randn(2, 5, 7), torch.arange(2), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    changed = out.clone()
    changed[1, 3:] = 9.0
    assert torch.equal(row_losses(out, seeds, mask), row_losses(changed, seeds, mask))
    assert not torch.equal(row_losses(out, seeds), row_losses(changed, seeds))
    assert torch.allclose(row_losses(out, seeds, mask)[0], row_losses(out, seeds)[0])


def test_a_whole_update_that_cancels_is_judged_too() -> None:
    """Each parameter within its rule, the sum of all far from right."""
    want = {"p": torch.full((2,), 1e-3, dtype=torch.float64)}
    part = {"p": torch.tensor([50.0, 0.0], dtype=torch.float64)}
    exact = Truth(want, part, {"p": 100.0}, [1.0], 1.0, "float64", 0.0, 0.0)
    errors = errors_of({"p": torch.tensor([1e-3, 1e-3 + 1e-4])}, exact)
    assert errors.parameter < 1e-5 and errors.whole > 0.05 and errors.where == "p"
    assert errors_of({"p": torch.tensor([float("nan"), 0.0])}, exact).whole == float("inf")
    lower, higher, too_low = (errors_of({"p": want["p"] - m * part["p"]}, exact).whole for m in (4e-6, -4e-6, 4e-5))
    assert lower < 1e-6 and higher > 0.05 and too_low > 0.05  # the margin of clip factors, downwards only


class Steep(nn.Module):
    """Float32 rounds its gradient away, but not for a sample alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        off = 1e-2 if len(x) > 1 and x.dtype == torch.float32 else 0.0  # as another kernel for batches would round
        return out + off * out.detach()


def test_what_rounding_does_to_a_batch_is_allowed() -> None:
    def build(sizes: Sizes) -> Any:
        torch.manual_seed(0)
        batch = {"x": torch.randn(sizes.batch, 4), "seed": torch.arange(sizes.batch)}
        return Steep(), batch, lambda m, b: row_losses(m(b["x"]), b["seed"])

    found = judge(Case("steep", build), SIZES, fastdp_step, "fastdp")
    assert found["status"] == "exact" and "within 4 x" in found["message"] and found["error"] > 1e-3
    assert status(Case("steep", build), slightly_too_long) == "exact"  # no worse than rounding
    assert status(Case("steep", build), unclipped) == "WRONG"


# ---------------------------------------------------------------------- rows


def row(case: str, status: str, message: str = "", commit: str = "abc", **other: Any) -> dict[str, Any]:
    base = {"suite": "named", "engine": "fastdp", "case": case, "status": status, "message": message, "commit": commit}
    return {**base, **other}


def test_a_sweep_is_taken_up_again(tmp_path: Any) -> None:
    path = tmp_path / "rows.csv"
    assert report.done(path, "abc") == set()
    append(path, [row("a", "exact"), row("b", "exact", commit="old"), row("c", "refused", commit="abc+changes")],
           report.COLUMNS)  # fmt: skip
    assert report.done(path, "abc") == {("named", "fastdp", "a")}
    assert report.done(path, "abc+changes") == set()  # nobody knows which changes
    append(path, [row("b", "WRONG")], report.COLUMNS)
    assert {r["case"]: r["status"] for r in report.read(path)} == {"a": "exact", "b": "WRONG", "c": "refused"}


def test_a_sum_of_rows(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """In whatever order rows were written; repaired models in a line of their own; reasons grouped; shares of what was
    judged; what an engine does not claim is a footnote."""
    path, notes = tmp_path / "rows.csv", "float32; outside its documentation (batch first)"
    rows = [row(f"c{i}", "refused", f"SampleMixingError: cumsum() in module 'layers.{i}' along {i}") for i in range(3)]
    rows += [row("a", "rightly refused", suite="timm"), row("d", "refused", "TypeError: another"), row("e", "exact")]
    rows += [row("f", "not built", "no"), row("a [repaired]", "exact", suite="timm")]
    append(path, [*rows, row("b", "WRONG", engine="opacus-ghost", notes=notes)], report.COLUMNS)
    coverage.main(["--show", str(path)])
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line.startswith("|")][2:] == [
        "| named | fastdp | 6 | 5 | 1 (20.0 %) | 0 | 4 (80.0 %) | 0 | 0 | 0 | 0 | 1 (16.7 %) |",
        "| named | opacus-ghost | 1 | 1 | 0 | 0 | 0 | 1 (100.0 %) | 0 | 0 | 0 | 0 |",
        "| timm | fastdp | 1 | 1 | 0 | 1 (100.0 %) | 0 | 0 | 0 | 0 | 0 | 0 |",
        "| timm, repaired | fastdp | 1 | 1 | 1 (100.0 %) | 0 | 0 | 0 | 0 | 0 | 0 | 0 |",
    ]
    assert "- 3 x SampleMixingError: cumsum() in module '…' along #\n  c0, c1, c2" in text
    assert text.index("3 x Sample") < text.index("1 x TypeError")
    assert "opacus-ghost: outside its documentation (batch first): b (WRONG)\n" in text
