"""What a resumed run of finetune repeats, and what it may not: steps, keys, environments, folders."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch

from fastdp.finetune import run_state as standing
from fastdp.finetune.job import FinetuneError
from fastdp.finetune.keys import Keys, _on_device
from fastdp.finetune.training import run, schedule
from fastdp.grad_sample import cost_model
from fastdp.optim import fused_update

from .finetune_runs import STEPS, job_of, loss, model_of
from .test_finetune_training import crash, journalled, resumed, stop_at, target, whole

# ---------------------------------------------------------------------- repeating, or not


def test_repeated_steps_are_said_to_be(tmp_path):
    crash(tmp_path / "run", 7, seed=None)
    log = stop_at(None)
    run(job_of(tmp_path / "run", seed=None, log=log), resume=True)
    steps = [(v["step"], v["replayed"]) for kind, v in log.events if kind == "step"]
    assert steps == [(k, k <= 7) for k in range(5, STEPS + 1)]
    assert len(journalled(tmp_path / "run")) == STEPS


@pytest.mark.parametrize("step", [2, 7])
def test_an_adaptive_clipping_norm_goes_on_where_it_was(tmp_path, step):
    """The norm of each step comes of a noisy count, which a repeated step draws again."""
    options = {"clipping": "adaptive", "noise_multiplier": 0.5}
    crash(tmp_path / "run", step, **options)
    found, outcome, notes = resumed(tmp_path / "run", **options)
    assert outcome.status == "finished" and outcome.lost_steps == 0 and "lost" not in notes
    assert torch.equal(found, whole(tmp_path / "whole", **options))
    assert not torch.equal(found, whole(tmp_path / "local", noise_multiplier=0.5))


def test_without_the_keys_lost_steps_count(tmp_path):
    budget = {"seed": None, "target_epsilon": target()}
    crash(tmp_path / "run", 7, **budget)
    (tmp_path / "run.secret.key").unlink()
    _, outcome, notes = resumed(tmp_path / "run", **budget)
    assert "keys are gone" in notes and "3 step(s)" in notes
    assert outcome.status == "budget" and outcome.steps == STEPS - 3 and outcome.lost_steps == 3
    assert outcome.epsilon <= target()
    assert sorted(journalled(tmp_path / "run")) == [(0, k) for k in range(7)] + [(1, k) for k in range(4, STEPS - 3)]


def test_without_a_budget_lost_steps_only_count(tmp_path):
    crash(tmp_path / "run", 7, seed=None)
    (tmp_path / "run.secret.key").unlink()
    _, outcome, _ = resumed(tmp_path / "run", seed=None)
    assert outcome.status == "finished" and outcome.steps == STEPS and outcome.lost_steps == 3
    assert outcome.epsilon == pytest.approx(target(STEPS + 3))


@pytest.mark.parametrize("name", ["threads", "torch", "device", "processor"])
def test_in_another_environment_nothing_is_repeated(tmp_path, monkeypatch, name):
    crash(tmp_path / "run", 7)
    real = standing.environment
    monkeypatch.setattr(standing, "environment", lambda model: {**real(model), name: "another"})
    _, outcome, notes = resumed(tmp_path / "run")
    assert f"{name} " in notes and "new keys" in notes and outcome.lost_steps == 3


def test_a_step_is_on_the_disk_before_its_noise(tmp_path, monkeypatch):
    events, known, sync, update = [], [], os.fsync, fused_update.step

    def step(kind, groups, state, release, *tables):
        known.append((events[-1], len(journalled(tmp_path / "run")), release.noise.step))
        update(kind, groups, state, release, *tables)

    def synced(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}") if os.path.exists("/proc/self/fd") else "journal")
        sync(descriptor)

    monkeypatch.setattr(fused_update, "step", step)
    monkeypatch.setattr(os, "fsync", synced)
    run(job_of(tmp_path / "run"))
    assert [(count, step) for _, count, step in known] == [(k + 1, k) for k in range(STEPS)]
    assert all("journal" in last for last, _, _ in known)


class Draws(list):
    """(key, step, sums) of every noise drawn."""

    def __init__(self, monkeypatch):
        real = fused_update.step

        def step(kind, groups, state, release, *tables):
            order = sorted(release.sums, key=release.offsets.__getitem__)
            whole = torch.cat([release.sums[k].flatten() for k in order])
            self.append((release.noise.key, release.noise.step, whole.numpy().tobytes()))
            real(kind, groups, state, release, *tables)

        monkeypatch.setattr(fused_update, "step", step)

    def reused(self):
        return [d for d in self if any(d[:2] == e[:2] and d[2] != e[2] for e in self)]


def test_a_resumed_run_keeps_its_physical_batches(tmp_path):
    run(job_of(tmp_path / "run", log=stop_at(6, lambda: os.kill(os.getpid(), signal.SIGINT))))
    found, _, _ = resumed(tmp_path / "run", max_physical_batch_size=3)
    assert torch.equal(found, whole(tmp_path / "whole"))
    run(job_of(tmp_path / "other", log=stop_at(6, lambda: os.kill(os.getpid(), signal.SIGINT))))
    found, outcome, _ = resumed(tmp_path / "other", max_physical_batch_size=3, keep_physical=False)
    assert outcome.lost_steps == 0 and not torch.equal(found, whole(tmp_path / "again"))


def test_a_resumed_run_takes_the_routes_it_took(tmp_path, monkeypatch):
    monkeypatch.setattr(cost_model, "_KEPT", {})
    crash(tmp_path / "run", 7)
    cost_model._KEPT.clear()
    cost_model._constants.cache_clear()
    monkeypatch.setitem(cost_model.DEFAULTS, "cpu", {job: [2 * x for x in k] for job, k in cost_model.DEFAULT.items()})
    assert cost_model.constants(torch.device("cpu"), False) != cost_model.DEFAULT  # what would be measured now
    taken = []
    monkeypatch.setattr(cost_model, "forget", lambda: taken.append(cost_model.constants(torch.device("cpu"), False)))
    assert resumed(tmp_path / "run")[1].lost_steps == 0
    assert taken == [cost_model.DEFAULT]  # what the run began with
    cost_model._constants.cache_clear()


def test_the_digest_of_sums_on_a_device():
    x = torch.randn(1000, 7)
    for changed in (x.clone(), -x, x.roll(1, 0)):
        changed[3, 3] += x[3, 3].abs() * 2e-7 if torch.equal(changed, x) else 0
        assert _on_device(changed, b"key", 3) != _on_device(x, b"key", 3)
    found = _on_device(x, b"key", 3)
    assert len(found) == 16 and found == _on_device(x.clone(), b"key", 3)
    assert found != _on_device(x, b"kez", 3) and found != _on_device(x, b"key", 4)
    assert _on_device(x.double(), b"key", 3) == _on_device(x.double(), b"key", 3)


def test_other_sums_never_get_the_same_noise(tmp_path, monkeypatch):
    draws = Draws(monkeypatch)
    crash(tmp_path / "run", 7)
    wrong = lambda model, batch: loss(model, batch) * (1 + 1e-6)  # as by another order of summation
    _, outcome, notes = resumed(tmp_path / "run", loss=wrong)
    assert "could not be repeated" in notes and outcome.lost_steps == 3 and outcome.steps == STEPS
    assert len(draws) == STEPS + 3 == len(journalled(tmp_path / "run")) and not draws.reused()
    assert len({key for key, _, _ in draws}) == 2


def test_new_noise_comes_with_new_samples(tmp_path, monkeypatch):
    keys = [Keys.new(g, seed) for g, seed in ((0, 7), (1, 7), (0, None), (0, None))]
    assert len({k.noise for k in keys}) == len({k.sampling for k in keys}) == len({k.other for k in keys}) == 4
    drawn = []
    real = np.random.SeedSequence
    monkeypatch.setattr(np.random, "SeedSequence", lambda key, **kw: (drawn.append(key), real(key, **kw))[1])
    crash(tmp_path / "run", 7, seed=None)
    resumed(tmp_path / "run", seed=None)
    assert len(set(drawn)) == 1  # repeated
    crash(tmp_path / "other", 7, seed=None)
    (tmp_path / "other.secret.key").unlink()
    resumed(tmp_path / "other", seed=None)
    assert len(set(drawn)) == 3


def test_an_interrupted_run_goes_on_with_new_keys_elsewhere(tmp_path, monkeypatch):
    """A copy of the folder and its keys, taken up on a machine that rounds otherwise, must not draw the same noise."""
    draws = Draws(monkeypatch)
    run(job_of(tmp_path / "run", log=stop_at(4, lambda: os.kill(os.getpid(), signal.SIGINT))))
    real = standing.environment
    monkeypatch.setattr(standing, "environment", lambda model: {**real(model), "processor": "another"})
    _, outcome, _ = resumed(tmp_path / "run")
    assert outcome.lost_steps == 0 and outcome.steps == STEPS and len({key for key, _, _ in draws}) == 2


def test_keys_of_another_run_are_not_taken(tmp_path, monkeypatch):
    draws = Draws(monkeypatch)
    crash(tmp_path / "run", 7, seed=None)
    kept = (tmp_path / "run.secret.key").read_bytes()
    for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    interrupt = stop_at(4, lambda: os.kill(os.getpid(), signal.SIGINT))
    run(job_of(tmp_path / "run", seed=None, log=interrupt))
    assert json.loads((tmp_path / "run.secret.key").read_bytes())["keys"] != json.loads(kept)["keys"]
    (tmp_path / "run.secret.key").write_bytes(kept)
    assert resumed(tmp_path / "run", seed=None)[1].lost_steps == 0
    assert len({key for key, _, _ in draws}) == 3 and not draws.reused()


def test_the_keys_lie_apart(tmp_path):
    crash(tmp_path / "run", 5, seed=None)
    secret = tmp_path / "run.secret.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    keys = json.loads(secret.read_bytes())["keys"]
    for path in (p for p in (tmp_path / "run").rglob("*") if p.is_file()):
        content = path.read_bytes()
        for name in ("noise", "other", "sampling"):
            assert keys[name].encode() not in content and bytes.fromhex(keys[name].zfill(64)) not in content
        assert b"fingerprint" not in content
    with pytest.raises(FinetuneError, match="must not lie"):
        run(job_of(tmp_path / "b", secret=tmp_path / "b" / "key"))
    resumed(tmp_path / "run", seed=None)
    assert not secret.exists()


def test_what_must_not_change_is_refused(tmp_path):
    crash(tmp_path / "run", 5)
    for words, changes in {
        "noise_multiplier 1.0 -> 1.5": {"noise_multiplier": 1.5},
        "lr": {"lr": 0.1},
        "another data": {"fingerprint": {"data": "b"}},
        "another model": {"model": model_of(seed=3)},
    }.items():
        with pytest.raises(FinetuneError, match=words):
            run(job_of(tmp_path / "run", **changes), resume=True)
    with pytest.raises(FinetuneError, match="holds a run already"):
        run(job_of(tmp_path / "run"))
    with pytest.raises(FinetuneError, match="gives 12"):
        run(job_of(tmp_path / "new", expected_batch_size=20.0))
    found, outcome, _ = resumed(tmp_path / "run", checkpoint_steps=1)
    assert outcome.lost_steps == 0 and torch.equal(found, whole(tmp_path / "whole"))


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    def another():
        with pytest.raises(FinetuneError, match="another process"):
            run(job_of(tmp_path / "run"), resume=True)

    run(job_of(tmp_path / "run", log=stop_at(5, another)))


def test_it_leaves_no_trace_in_the_process(tmp_path):
    job = job_of(tmp_path / "run")
    torch.manual_seed(3)
    before, python = torch.get_rng_state(), np.random.get_state()[1].copy()
    run(job)
    assert torch.equal(before, torch.get_rng_state()) and (np.random.get_state()[1] == python).all()
    assert not any(module._forward_pre_hooks for module in job.model.modules())
    assert all(p.grad is None for p in job.model.parameters())


def test_the_schedule_reaches_its_end():
    assert schedule(0, 0, 5) == 1.0 and schedule(4, 0, 5) == pytest.approx(0.2)
    assert schedule(0, 3, 2) == 0.5 and schedule(1, 3, 2) == 1.0
