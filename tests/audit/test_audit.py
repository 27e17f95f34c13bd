"""fastdp.audit on steps that are right, and what it says where it can say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.audit import TESTS, AuditError, Outcome, TorchTrainable, assert_private, audit
from fastdp.audit.later_steps import followed, walked
from fastdp.audit.measure import Probe

from . import audit_right as right
from .audit_hand import Hand, make_batch, small
from .audit_zoo import PLANTED

pytestmark = pytest.mark.slow  # `make test-all` runs it

NEED = {"bare": {"sensitivity", "batch_statistics", "noise_once", "poisson_sampling", "accountant"},
        "a loop with a momentum of its own": {"noise_once", "poisson_sampling", "accountant"},
        "examples/audit/by_hand.py": {"noise_once"}}  # fmt: skip


@pytest.mark.parametrize("name", right.RIGHT)
def test_a_right_step_passes_every_test(name: str) -> None:
    """Every second test, by turns; all of them, with several seeds: `python -m benchmarks.audit`."""
    names = list(TESTS)[list(right.RIGHT).index(name) % 2 :: 2]
    report = audit(right.RIGHT[name](), names, seed=3)
    assert not report.bugs, str(report)
    assert {f.name for f in report.untested} == NEED.get(name, set()) & set(names), str(report)
    assert report.exit_status == 0 and [f.name for f in report.findings] == names


@pytest.mark.parametrize("name", right.LOOPS)
def test_loops_around_optimizers_of_torch_are_right(name: str) -> None:
    report = audit(right.LOOPS[name](), seed=3)
    assert not report.bugs, str(report)
    bent = "0.0001" in name or "in the gradient" in name  # nowhere linear, beside rounding
    assert (report["sensitivity"].verdict == "not tested") == bent
    assert ("learning rate changes" in str(report["noise_independence"].sentence)) == ("that falls" in name)


def test_noise_that_fades_beside_a_schedule_is_none() -> None:
    """By an eighth at step 240, where contributions follow the learning rate alone."""
    falls = lambda inner: torch.optim.lr_scheduler.ExponentialLR(inner, 0.995)
    report = audit(right.loop_of(lambda ps: torch.optim.SGD(ps, 0.1), falls, fading=0.99945), ["noise_independence"])
    assert [finding.name for finding in report.bugs] == ["noise_independence"], str(report)


class Noisy(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + 0.1 * torch.randn_like(x))


def test_a_step_that_draws_random_numbers_tells_nothing_of_sums() -> None:
    step = right.loop_of(lambda ps: torch.optim.SGD(ps, 0.1), activation=Noisy)
    report = audit(step, ["sensitivity", "per_sample_independence"])
    assert all("the same for each seed" in finding.sentence for finding in report.untested)
    assert len(report.untested) == 2


def test_a_model_of_16_bits() -> None:
    step = right.LOOPS["a long momentum"]()
    make = step.make_model
    step.make_model = lambda: make().bfloat16()
    assert audit(step, ["no_clipping"]).ok


def test_a_rate_that_begins_at_zero_and_an_adam_that_is_said_to_be_sgd() -> None:
    warm = lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda k: min(1.0, k / 10))
    with pytest.raises(AuditError, match="learning rate that begins at 0"):
        audit(right.loop_of(lambda ps: torch.optim.SGD(ps, 0.1), warm))
    with pytest.raises(AuditError, match="this is no SGD"):
        audit(right.loop_of(lambda ps: torch.optim.Adam(ps, 0.01), activation=torch.nn.ReLU))


@pytest.mark.parametrize("seed", [2, 5])
def test_weights_that_move_far_are_no_dependence_of_samples(seed: int) -> None:
    """What differs at C and at a third of it is looked at again where the weights move less."""
    report = audit(right.RIGHT["large inputs"](), ["per_sample_independence"], seed=seed)
    assert not report.bugs, str(report)


def test_a_sample_of_infinity_may_contribute_up_to_c() -> None:
    class Clamped(Hand):
        """Ordinary gradients are far below C."""

        make_model = staticmethod(lambda: nn.Linear(12, 4))

        def loss(self, job: Any, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 0.01 * super().loss(job, flat, x.nan_to_num(0.0, 1e4, -1e4), y)

    found = audit(Clamped(), ["nan_sample"], seed=3)["nan_sample"]
    assert found.verdict == "ok" and found.statistic == pytest.approx(1, abs=0.01), found


@pytest.mark.parametrize("nothing", ["a sample without gradient", "a sample of NaN"])
def test_noise_that_is_left_out_where_the_sum_is_zero(nothing: str) -> None:
    class Quiet(Hand):
        def clipped_sum(self, job: Any, x: torch.Tensor, y: torch.Tensor, c: float) -> torch.Tensor:
            total = super().clipped_sum(job, x, y, c)
            job.quiet = len(x) > 0 and not total.any() and bool(x.isnan().all()) == (nothing == "a sample of NaN")
            return total

        def noise(self, job: Any, *given: Any) -> torch.Tensor:
            return super().noise(job, *given) * (not job.quiet)

    found = audit(Quiet(), ["noise_distribution"], seed=3)["noise_distribution"]
    assert found.verdict == "bug" and nothing in found.sentence, found


CAUSES: dict[str, dict[str, Any]] = {
    "the same whatever its seed": {"draw": lambda self, job, _: torch.linspace(-2, 2, len(job.flat))},
    "the learning rate what the audit was told": {"learning_rate": 0.01},
    "before the optimizer": {"noise": lambda self, job, *_: torch.zeros_like(job.flat)},
}


@pytest.mark.parametrize("words", CAUSES)
def test_a_finding_names_the_cause(words: str) -> None:
    found = audit(type("Wrong", (Hand,), CAUSES[words])(), ["noise_distribution"])["noise_distribution"]
    assert found.verdict == "bug" and words in found.sentence, found


def test_a_kink_of_the_sample_that_steps_are_compared_with_is_not_in_all_steps() -> None:
    def batch(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw, centres = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7)
        y = torch.randint(4, (size,), generator=draw)
        return torch.randn(4, 12, generator=centres)[y] + torch.randn(size, 12, generator=draw), y

    said = {"divisor": 32, "expected_batch_size": 32, "activation": nn.ReLU}
    step = right.loop_of(lambda ps: torch.optim.SGD(ps, 0.1), **said)
    step.made_batch = batch
    assert max(each.apart for each in walked(Probe(step, 2))) < 0.01


def test_fastdp_passes_with_the_noise_that_it_releases() -> None:
    """Noise from the operating system: tests without a p-value only, so that no chance decides."""
    names = ["no_clipping", "minibatch_clipping", "uncalibrated_noise", "noise_once", "accountant", "empty_batch"]
    assert_private(right.secure(), names)


def test_opacus_passes_but_for_nan() -> None:
    pytest.importorskip("opacus")
    report = audit(right.opacus(), seed=3)
    assert [f.name for f in report.bugs] == ["nan_sample"] and not report.untested, str(report)
    assert "NaN" in report["nan_sample"].sentence and report.exit_status == 1


def test_findings_say_what_was_measured() -> None:
    report = audit(Hand(), ["minibatch_clipping", "uncalibrated_noise", "noise_distribution"])
    assert [f.statistic for f in report.findings] == pytest.approx([-1, 1, 1], abs=0.1)
    assert all(f.sentence and f.data and f.verdict == "ok" for f in report.findings)
    assert max(f.p_value for f in report.findings[:2]) < 1e-4
    for bug, test in (("mini-batch clipping", "minibatch_clipping"), ("no clipping", "no_clipping")):
        assert audit(PLANTED[bug][0](), [test])[test].p_value > 0.99


def test_assert_private_raises_the_report() -> None:
    with pytest.raises(AssertionError, match="no_clipping") as problem:
        assert_private(PLANTED["no clipping"][0](), ["no_clipping"])
    assert "The gradient is not clipped" in str(problem.value)
    with pytest.raises(AssertionError, match="run_parts"):  # named, so it has to be run
        assert_private(right.HAND["bare"](), ["no_clipping", "noise_once"])
    assert_private(right.HAND["bare"](), skip=["epsilon_bound"])


# ---------------------------------------------------------------------- what cannot be measured


class Wrong(Hand):
    def __init__(self, **methods: Any) -> None:
        super().__init__()
        self.__dict__.update(methods)


JOB, OWN = Hand().build(0), make_batch(5, 4)
UNMEASURED: dict[str, dict[str, Any]] = {
    "the same seed": {"build": lambda seed: Hand().build(int(torch.seed() % 1000))},
    "does not give a fresh model": {"build": lambda seed: JOB},
    "must return Outcome": {"run": lambda model, batches, **_: None},
    "one flat array": {"run": lambda model, batches, **_: Outcome(0.0, np.zeros((2, 2)))},
    "changes no parameter": {"run": lambda model, batches, **_: Outcome(0.0, np.ones(3))},
    "fails on one sample .*ZeroDivisionError": {"run": lambda model, batches, **_: 1 // 0},
    "2 inputs and 1 labels": {"make_batch": lambda seed, size: (np.zeros((2, 12)), np.zeros(1, int))},
    "must be one of sgd, adam": {"optimizer": "lbfgs"},
    "positive number": {"learning_rate": -1.0},
    "whatever batch it is given": {
        "run": lambda model, batches, **given: Hand().run(model, [OWN] * len(batches), **given)
    },
}


@pytest.mark.parametrize("words", UNMEASURED)
def test_what_cannot_be_measured_is_said(words: str) -> None:
    with pytest.raises(AuditError, match=words):
        audit(Wrong(**UNMEASURED[words]))


def test_what_is_no_trainable_or_no_test_is_refused() -> None:
    with pytest.raises(AuditError, match="has no method build"):
        audit(object())  # type: ignore[arg-type]
    with pytest.raises(AuditError, match="no test 'clip'"):
        audit(Hand(), ["clip"])
    with pytest.raises(AuditError, match="either make_optimizer"):
        TorchTrainable(lambda: nn.Linear(2, 2), loss=F.cross_entropy, make_batch=make_batch)
    frozen = TorchTrainable(lambda: nn.Linear(2, 2).requires_grad_(False), train=print, loss=F.cross_entropy,
                            make_batch=make_batch)  # fmt: skip
    with pytest.raises(AuditError, match="without a trainable parameter"):
        frozen.build(0)


def test_a_script_that_fails_in_one_test_is_not_tested_there() -> None:
    step = Wrong(run_parts=lambda *_, **__: 1 // 0, run=lambda *given, **options: Hand().run(*given, **options))
    report = audit(step, ["no_clipping", "noise_once"])
    assert report["noise_once"].verdict == "not tested" and "ZeroDivisionError" in report["noise_once"].sentence
    assert report["no_clipping"].verdict == "ok"


# ---------------------------------------------------------------------- PyTorch


def trained(kind: Any = fastdp.DPSGD, lr: float = 0.1, said: str = "sgd", **options: Any) -> TorchTrainable:
    def optimizer(model: nn.Module, *, clipping_norm: float, noise_multiplier: float, expected_batch_size: float,
                  seed: int) -> Any:  # fmt: skip
        return kind(model, lr=lr, max_grad_norm=clipping_norm, noise_multiplier=noise_multiplier,
                    expected_batch_size=expected_batch_size, seed=seed, **options)  # fmt: skip

    return TorchTrainable(small, optimizer, F.cross_entropy, make_batch=make_batch, loss_kind="cross_entropy",
                          learning_rate=lr, optimizer=said)  # fmt: skip


UPDATES = {
    "Nesterov": lambda: trained(momentum=0.9, nesterov=True),
    "momentum and weight decay": lambda: trained(momentum=0.5, weight_decay=0.01),
    "RMSprop": lambda: trained(fastdp.DPRMSprop, 0.01, "adam"),
    "AdamW": lambda: trained(fastdp.DPAdamW, 0.01, "adam", weight_decay=0.1),
    "averaged": lambda: right.Averaged(),
}


@pytest.mark.parametrize("name", UPDATES)
def test_what_an_optimizer_makes_of_the_sums_is_no_bug(name: str) -> None:
    names = list(TESTS)[list(UPDATES).index(name) % 2 :: 2]
    report = audit(UPDATES[name](), names, seed=0)
    assert not report.bugs, str(report)
    assert {f.name for f in report.untested} <= {"noise_once", "poisson_sampling", "accountant"}, str(report)


class Nesterov(Hand):
    def update(self, job: Any, gradient: torch.Tensor) -> torch.Tensor:
        job.m = 0.9 * job.m + gradient
        return job.flat - 0.1 * (gradient + 0.9 * job.m)


def test_less_noise_or_more_of_a_sample_shows_under_momentum() -> None:
    quiet = lambda self, job, generator: 0.9 * Hand.draw(self, job, generator)
    loud = lambda self, norms, c: Hand.factors(self, norms, 1.05 * c)
    for kind in (right.Momentum, Nesterov):
        assert audit(type("Quiet", (kind,), {"draw": quiet})(), ["noise_distribution"], seed=1).bugs
        assert audit(type("Loud", (kind,), {"factors": loud})(), ["sensitivity"], seed=1).bugs


def test_a_step_of_adam_that_is_said_to_be_of_sgd_is_refused_with_the_remedy() -> None:
    for kind in (fastdp.DPAdam, fastdp.DPRMSprop):
        with pytest.raises(AuditError, match='Say optimizer="adam"'):
            audit(trained(kind, 0.01))


def test_a_loop_is_read_after_every_step() -> None:
    """However it takes its batches in turn; one that takes all at once is not followed, and still audited."""
    orders = {"a loop": lambda b: b, "by number": lambda b: (b[k] for k in range(len(b))), "all at once": list}
    for name, order in orders.items():
        step = right.own_loop(order)
        model, batches = step.build(0), [make_batch(k, 8) for k in range(4)]
        given = {"clipping_norm": 1.0, "noise_multiplier": 0.0, "seed": 1}
        path = step.trajectory(model, batches, **given)
        ends = [step.run(step.build(0), batches[: k + 1], **given).parameters for k in range(4)]
        assert np.allclose(path, ends, atol=1e-6) == (name != "all at once") == followed(Probe(step))


def test_a_loop_that_calls_its_model_on_samples_only_makes_steps_on_none() -> None:
    class Refusing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert len(x), "no samples"
            return super().forward(x)

    step = right.own_loop()
    step.make_model = lambda: Refusing(12, 4)
    assert audit(step, ["empty_batch"])["empty_batch"].verdict == "ok"


def test_batch_norm_that_fails_on_one_sample_is_a_bug_and_not_an_error() -> None:
    def train(model: nn.Module, batches: Any, **_: Any) -> None:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None

    network = lambda: nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    report = audit(TorchTrainable(network, train=train, loss=F.cross_entropy, make_batch=make_batch))
    assert [f.name for f in report.bugs] == ["batch_statistics"] and "BatchNorm" in report.bugs[0].sentence
    assert len(report.untested) == len(TESTS) - 1 and report.exit_status == 1


def counted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.counts += torch.bincount(y, minlength=4)


def encoded(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.encoder.data += 1e-5 * x.mean(0)


def overflown(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.mask.copy_(torch.inf * x[0].sign())


def averaged(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.average.data.lerp_(model.head.weight.data, 0.1)


@pytest.mark.parametrize(("beside", "wrong"), [(counted, True), (encoded, True), (overflown, True), (averaged, False)])
def test_state_is_all_that_is_not_trained(beside: Callable[..., None], wrong: bool) -> None:
    """Counts in a buffer of integers, frozen weights that move all the same; but an average of weights has noise."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Parameter(torch.eye(12), requires_grad=False), nn.Linear(12, 4)
            self.average = nn.Parameter(torch.zeros(4, 12), requires_grad=False)
            self.register_buffer("counts", torch.zeros(4, dtype=torch.long))
            self.register_buffer("mask", torch.full((12,), -torch.inf))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x @ self.encoder)

    def train(model: Model, batches: Any, *, clipping_norm: float, noise_multiplier: float, seed: int) -> None:
        made = fastdp.DPAdam(model.head, lr=0.001, max_grad_norm=clipping_norm, noise_multiplier=noise_multiplier,
                             expected_batch_size=8, seed=seed)  # fmt: skip
        for x, y in batches:
            made.zero_grad()
            F.cross_entropy(model(x), y).backward()
            made.step()
            beside(model, x, y)
        made.detach()

    step = TorchTrainable(Model, train=train, loss=F.cross_entropy, make_batch=make_batch, optimizer="adam")
    found = audit(step, ["batch_statistics"])["batch_statistics"]
    assert found.verdict == ("bug" if wrong else "ok") and ("frozen weights" in found.sentence) == wrong, found


def test_batches_of_dicts_dropout_and_another_precision() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.drop, self.head = nn.Embedding(9, 6), nn.Dropout(0.5), nn.Linear(6, 3)
            self.double()

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            mask = batch["mask"].unsqueeze(2)
            return self.head(self.drop((self.table(batch["ids"]) * mask).sum(1) / mask.sum(1)))

    def batch(seed: int, size: int) -> tuple[Any, Any]:
        draw = np.random.default_rng(seed)
        ids = draw.integers(0, 9, (size, 5))
        return {"ids": ids, "mask": np.ones((size, 5), np.float32)}, draw.integers(0, 3, size)

    step = trained()
    step.make_model, step.made_batch = Model, batch
    report = audit(step, skip=["noise_distribution", "noise_independence"])
    assert not report.bugs, str(report)
    assert {f.name for f in report.untested} == {"nan_sample", "noise_once", "poisson_sampling", "accountant"}
