"""The loop of finetune: right steps, the budget, interruption, and resuming where a repetition is not possible."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from torch import nn

from fastdp.accounting import epsilon_of
from fastdp.finetune.job import FinetuneError
from fastdp.finetune.keys import Keys
from fastdp.finetune.training import run, schedule
from fastdp.sampling import PoissonSampler

from .finetune_runs import RECORDS, STEPS, collate, job_of, loss, model_of, plan_of, records, weights


class Stopped(Exception):
    pass


def stop_at(step, how=None):
    """A log that ends the run after a step: abruptly, or `how` (a function)."""
    events = []

    def log(kind, values):
        events.append((kind, values))
        if kind == "step" and values["step"] == step:
            if how is None:
                raise Stopped
            how()

    log.events = events
    return log


def crash(folder, step, **changes):
    with pytest.raises(Stopped):
        run(job_of(folder, log=stop_at(step), **changes), resume=(folder / "journal.jsonl").exists())


def resumed(folder, **changes):
    """(weights, outcome, notes) of the run taken up and brought to its end."""
    log = stop_at(None)
    job = job_of(folder, log=log, **changes)
    outcome = run(job, resume=True)
    return weights(job.model), outcome, " ".join(v["text"] for kind, v in log.events if kind == "note")


def whole(folder, **changes):
    """Weights of an uninterrupted run."""
    job = job_of(folder, **changes)
    assert run(job).status == "finished"
    return weights(job.model)


def journalled(folder):
    lines = [json.loads(line[9:]) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [(line["g"], line["step"]) for line in lines if "digest" in line]


def target(steps=STEPS):
    return epsilon_of([(1.0, 0.25, steps)], plan_of().delta, "gdp")


# ---------------------------------------------------------------------- the steps


def test_without_noise_it_is_one_sample_truth(tmp_path):
    model, truth = model_of().eval(), model_of().double()
    for m in (model, truth):
        m.drop.p = 0.0
    plan = {"noise_multiplier": 0.0, "clipping": "local", "max_grad_norm": 0.3}
    outcome = run(job_of(tmp_path / "run", model, **plan))
    assert outcome.status == "finished" and outcome.steps == STEPS and outcome.epsilon == float("inf")
    assert not model.training
    keys = Keys.new(0, 7)
    draws = list(PoissonSampler(RECORDS, 0.25, STEPS, None, keys.sampling))
    trained = [p for p in truth.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, weight_decay=0.01)
    data = records()
    for step, places in enumerate(draws):
        total = [torch.zeros_like(p) for p in trained]
        for place in places:
            one = collate([data[place]])
            one["mask"] = one["mask"].double()
            gradient = torch.autograd.grad(loss(truth, one), trained)
            norm = torch.sqrt(sum(g.square().sum() for g in gradient))
            total = [t + g * min(1.0, 0.3 / float(norm)) for t, g in zip(total, gradient, strict=True)]
        for p, t in zip(trained, total, strict=True):
            p.grad = t / (RECORDS / 4)
        optimizer.param_groups[0]["lr"] = 0.05 * schedule(step, 3, STEPS)
        optimizer.step()
    assert torch.allclose(weights(model).double(), weights(truth), rtol=1e-4, atol=2e-5)


def test_the_plans_steps_are_made_and_fit_the_budget(tmp_path):
    job = job_of(tmp_path / "run", target_epsilon=target(), evaluate=lambda m: {"x": float(m.training)},
                 evaluate_every=5)  # fmt: skip
    outcome = run(job)
    assert outcome.status == "finished" and outcome.steps == STEPS == len(journalled(tmp_path / "run"))
    assert outcome.epsilon == pytest.approx(target()) and outcome.lost_steps == 0
    assert [row["step"] for row in outcome.history] == [5, 10, STEPS] and outcome.history[0]["x"] == 0.0
    again = job_of(tmp_path / "run", target_epsilon=target())
    assert run(again, resume=True).status == "finished" and torch.equal(weights(again.model), weights(job.model))
    assert len(journalled(tmp_path / "run")) == STEPS and not (tmp_path / "run.secret.key").exists()


def test_it_stops_before_the_step_that_would_exceed_the_budget(tmp_path):
    outcome = run(job_of(tmp_path / "run", target_epsilon=target(8) + 1e-6))
    assert outcome.status == "budget" and outcome.steps == 8 and outcome.epsilon <= target(8) + 1e-6


def test_a_seed_repeats_and_its_absence_does_not(tmp_path):
    a, b, c, d = (whole(tmp_path / name, seed=seed) for name, seed in zip("abcd", (1, 1, None, None), strict=True))
    assert torch.equal(a, b) and not torch.equal(c, d) and not torch.equal(a, c)


def test_samples_that_are_not_finite_are_reported(tmp_path):
    def bad(model, batch):
        each = nn.functional.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"], reduction="none")
        return torch.where(batch["ids"][:, 0] == records()[0][0][0], each * float("nan"), each).mean()

    log = stop_at(None)
    job = job_of(tmp_path / "run", loss=bad, log=log)
    outcome = run(job)
    assert outcome.nonfinite > 0 and torch.isfinite(weights(job.model)).all()
    assert [v["nonfinite"] for kind, v in log.events if kind == "step"][-1] == outcome.nonfinite


@pytest.mark.parametrize("how", ["forward", "backward"])
def test_out_of_memory_the_batch_is_repeated_in_halves(tmp_path, how, recwarn):
    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise torch.OutOfMemoryError("planted")

    calls = []

    def tight(model, batch):
        out = model(batch["ids"], batch["mask"])
        calls.append(len(out))
        full = len(out) > 2 and len(calls) > 3  # in the midst of a logical batch, which has sums by then
        if full and how == "forward":
            raise torch.OutOfMemoryError("planted")
        out = Full.apply(out) if full else out
        return nn.functional.cross_entropy(out, batch["labels"])

    models = [model_of(), model_of()]
    for model in models:
        model.drop.p = 0.0
    log = stop_at(None)
    outcome = run(job_of(tmp_path / "a", models[0], loss=tight, log=log))
    run(job_of(tmp_path / "b", models[1], max_physical_batch_size=2))
    assert torch.allclose(weights(models[0]), weights(models[1]), rtol=1e-5, atol=1e-6)
    assert outcome.steps == STEPS == len(journalled(tmp_path / "a"))
    assert calls[:4] == [5, 2, 5, 5]
    assert not any("left before its last" in str(w.message) for w in recwarn)
    assert any("out of memory" in v.get("text", "") for _, v in log.events)
    with pytest.raises(FinetuneError, match="single sample"):
        run(job_of(tmp_path / "c", loss=lambda m, b: (_ for _ in ()).throw(torch.OutOfMemoryError("all"))))


def test_people(tmp_path):
    people = [i // 3 for i in range(RECORDS)]
    plan = {"expected_batch_size": RECORDS / 12, "max_physical_batch_size": 6, "max_records_per_group": 2}
    all_at_once = whole(tmp_path / "a", group_by=people, **plan)
    crash(tmp_path / "b", 6, group_by=people, **plan)
    found, outcome, _ = resumed(tmp_path / "b", group_by=people, **plan)
    assert torch.equal(found, all_at_once) and outcome.lost_steps == 0 and outcome.steps == STEPS
    with pytest.raises(FinetuneError, match="max_records_per_group"):
        run(job_of(tmp_path / "c", group_by=people, **{**plan, "max_physical_batch_size": 1}))


# ---------------------------------------------------------------------- interruption


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    former = signal.getsignal(signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = tmp_path / str(number)
        outcome = run(job_of(folder, log=stop_at(6, lambda n=number: os.kill(os.getpid(), n))))
        assert outcome.status == "interrupted" and outcome.steps == 6 and outcome.lost_steps == 0
        found, outcome, notes = resumed(folder)
        assert outcome.status == "finished" and not notes and torch.equal(found, whole(tmp_path / f"whole{number}"))
    assert signal.getsignal(signal.SIGINT) is former


def test_the_second_ctrl_c_ends_it_at_once(tmp_path):
    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            (lambda: None)()  # handlers run between instructions

    with pytest.raises(KeyboardInterrupt):
        run(job_of(tmp_path / "run", log=stop_at(6, twice)))
    found, outcome, notes = resumed(tmp_path / "run")
    assert "repeating 2 step(s)" in notes and outcome.lost_steps == 0
    assert torch.equal(found, whole(tmp_path / "whole"))
