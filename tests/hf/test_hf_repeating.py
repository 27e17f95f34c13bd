"""Runs of DPTrainer that are killed and resumed: the weights of the whole run, and every noised step in the log."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
import random
import signal
import sys

import pytest
import torch

from fastdp.accounting import epsilon_of
from fastdp.errors import AccountingError
from fastdp.optim import fused_update, private_optimizer

from ..hf_models import gpt2, private, texts, trainer_of, transformers, weights

STEPS = 8
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:noise_seed"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked"),
]


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def run(folder, seed=None, stop=None, privacy=None, model=None, **options):
    """10 records a step of 50, 5 steps an epoch, a checkpoint every third step, dropout."""
    options = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, "learning_rate": 0.01,
        "lr_scheduler_type": "linear", "optim": "adamw_torch", "per_device_train_batch_size": 5,
        "gradient_accumulation_steps": 2, **options,
    }  # fmt: skip
    chosen = {"noise_multiplier": 1.0, "noise_seed": seed, "repeat_lost_steps": True, **(privacy or {})}
    trainer = trainer_of(folder, model or gpt2(dropout=0.1), texts(50, "next"), private(**chosen), **options)
    if stop is not None:
        trainer.add_callback(StopAt(stop))
    return trainer


def crashed(folder, stop, **options):
    trainer = run(folder, stop=stop, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=(folder / "run_log.jsonl").exists())


def resumed(folder, **options):
    trainer = run(folder, **options)
    trainer.train(resume_from_checkpoint=True)
    return trainer


def whole(folder, **options):
    trainer = run(folder, **options)
    trainer.train()
    return trainer


def logged(folder):
    """(generation, step) of the whole lines of the log."""
    path = folder / "run_log.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found = [json.loads(line[9:]) for line in lines]
    return [(line["g"], line["step"]) for line in found if "digest" in line]


def same(one, other):
    ours, theirs = weights(one.model), weights(other.model)
    return all(torch.equal(ours[name], p) for name, p in theirs.items())


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_lost_steps_are_repeated_bit_for_bit_at_no_cost(tmp_path, stop):
    crashed(tmp_path / "run", stop, seed=3)
    assert (tmp_path / "run.secret.key").stat().st_mode & 0o777 == 0o600
    again = resumed(tmp_path / "run", seed=3)
    assert same(again, whole(tmp_path / "whole", seed=3))
    assert again.history == [(1.0, 0.2, STEPS)] and logged(tmp_path / "run") == [(0, k) for k in range(STEPS)]
    assert not (tmp_path / "run.secret.key").exists()


def test_without_a_seed_the_keys_repeat_them(tmp_path):
    """The same run twice: once it ends, once it is killed and taken up again."""
    crashed(tmp_path / "run", 5)
    os.system(f"cp -r {tmp_path}/run {tmp_path}/copy && cp {tmp_path}/run.secret.key {tmp_path}/copy.secret.key")
    one = resumed(tmp_path / "run")
    crashed(tmp_path / "copy", 7)
    other = resumed(tmp_path / "copy")
    assert same(one, other) and one.history == other.history == [(1.0, 0.2, STEPS)]


def test_without_its_keys_they_count(tmp_path):
    budget = {"noise_multiplier": None, "target_epsilon": 1.5}
    crashed(tmp_path, 5, privacy=budget)
    (tmp_path.parent / f"{tmp_path.name}.secret.key").unlink()
    again = resumed(tmp_path, privacy=budget)
    assert again.state.global_step == STEPS - 2 and again.history[0][2] == STEPS and again.epsilon() <= 1.5
    assert sorted(logged(tmp_path)) == [(0, k) for k in range(5)] + [(1, k) for k in range(3, STEPS - 2)]


@pytest.mark.parametrize("name", ["threads", "torch", "processor"])
def test_in_another_environment_nothing_is_repeated(tmp_path, monkeypatch, name):
    from fastdp.hf import repeating

    crashed(tmp_path / "run", 5, seed=3)
    real = repeating.environment
    monkeypatch.setattr(repeating, "environment", lambda *known: {**real(*known), name: "another"})
    assert resumed(tmp_path / "run", seed=3).history == [(1.0, 0.2, STEPS + 2)]


def test_other_sums_never_get_the_same_noise(tmp_path, monkeypatch):
    drawn, real = collections.defaultdict(set), fused_update.step

    def step(kind, groups, state, release, *tables):
        sums = b"".join(release.sums[k].numpy().tobytes() for k in sorted(release.sums, key=release.offsets.get))
        drawn[release.noise.key, release.noise.step].add(sums)
        real(kind, groups, state, release, *tables)

    monkeypatch.setattr(fused_update, "step", step)
    crashed(tmp_path / "run", 5)
    other = gpt2(dropout=0.1)
    losses = type(other).forward

    @functools.wraps(losses)
    def rounded(self, *args, **named):  # as by another order of summation
        found = losses(self, *args, **named)
        found["logits"] = found["logits"] * (1 + 1e-6)
        return found

    monkeypatch.setattr(type(other), "forward", rounded)
    again = resumed(tmp_path / "run", model=other)
    assert again.history == [(1.0, 0.2, STEPS + 2)] and {g for g, _ in logged(tmp_path / "run")} == {0, 1}
    assert len(drawn) == STEPS + 2 and all(len(sums) == 1 for sums in drawn.values())


def test_what_must_not_change_is_refused(tmp_path):
    crashed(tmp_path, 5, seed=3)
    with pytest.raises(AccountingError, match="is of a run already"):
        run(tmp_path, seed=3).train()
    with pytest.raises(AccountingError, match="noise_multiplier 1.0 -> 2.0"):
        run(tmp_path, seed=3, privacy={"noise_multiplier": 2.0}).train(resume_from_checkpoint=True)
    other = run(tmp_path, seed=3)
    other.fingerprint = {"data": "another"}
    with pytest.raises(AccountingError, match="another data"):
        other.train(resume_from_checkpoint=True)
    again = resumed(tmp_path, seed=3, save_steps=1, per_device_train_batch_size=10, gradient_accumulation_steps=1)
    assert again.history == [(1.0, 0.2, STEPS)]  # repeated with the batches they had


def test_a_damaged_line_counts_and_is_not_repeated(tmp_path):
    crashed(tmp_path, 5, seed=3)
    path = tmp_path / "run_log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[-2] = b"?" + lines[-2]
    path.write_bytes(b"".join(lines) + b'0123 {"g":0,"st')  # the last one was never synced
    assert resumed(tmp_path, seed=3).history == [(1.0, 0.2, STEPS + 2)]
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.raises(AccountingError, match="first line"):
        run(tmp_path, seed=3).train(resume_from_checkpoint=True)


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    class Another(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with pytest.raises(AccountingError, match="another process"):
                run(tmp_path).train(resume_from_checkpoint=True)
            raise KeyboardInterrupt

    trainer = run(tmp_path)
    trainer.add_callback(Another())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


# ---------------------------------------------------------------------- SIGKILL


class Events:
    """Counts what happens in this process, and ends it by SIGKILL at one of the events: (name, which of that name)."""

    def __init__(self, fatal):
        self.fatal, self.names = fatal, collections.Counter()

    def __call__(self, name):
        self.names[name] += 1
        if self.fatal == (name, self.names[name]):
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, name, function):
        def call(*args, **options):
            self(f"before {name}")
            result = function(*args, **options)
            self(f"after {name}")
            return result

        return call

    def watch(self, noise_log):
        """Put events around everything that leaves a trace, and note every noise that is drawn with its sums."""
        write, update, out = os.write, fused_update.step, os.open(noise_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def half(file, data):
            self("before write")
            if self.fatal == ("half a write", self.names["half a write"] + 1):
                write(file, data[: len(data) // 2])
            self("half a write")
            return write(file, data)

        def noised(kind, groups, state, release, *tables):
            found = hashlib.sha256(repr((release.std, release.scale)).encode())
            for key in sorted(release.sums, key=release.offsets.__getitem__):
                found.update(release.sums[key].numpy())
            line = [hashlib.sha256(release.noise.key).hexdigest(), release.noise.step, found.hexdigest()]
            write(out, json.dumps(line).encode() + b"\n")
            self("before noise and update")
            update(kind, groups, state, release, *tables)
            self("after the update")

        os.write, os.fsync, os.replace = half, self.around("fsync", os.fsync), self.around("rename", os.replace)
        private_optimizer.fused_update.step = noised
        for name in ("_save_optimizer_and_scheduler", "_save_rng_state"):
            method = getattr(transformers.Trainer, name)
            setattr(transformers.Trainer, name, self.around(name, method))


def attempt(folder, seed, fatal=None):
    """Run or resume in a process of its own. Its result if it came to its end."""
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            events = Events(fatal)
            trainer = run(folder / "run", seed=seed)
            events.watch(folder / "noise.log")
            trainer.train(resume_from_checkpoint=(folder / "run" / "run_log.jsonl").exists())
            events.fatal = None
            found = {"weights": weights(trainer.model), "history": trainer.history, "events": dict(events.names)}
            torch.save(found, folder / "result.pt")
            os._exit(0)
        except BaseException as problem:  # noqa: BLE001 (nothing may go on in a fork)
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert not (os.WIFEXITED(status) and os.WEXITSTATUS(status)), "an attempt failed"
    return torch.load(folder / "result.pt", weights_only=False) if os.WIFEXITED(status) else None


def noised(folder):
    """Digests of the sums that noise was drawn for, by key and step."""
    found = collections.defaultdict(set)
    path = folder / "noise.log"
    for line in path.read_text().splitlines() if path.exists() else ():
        key, step, sums = json.loads(line)
        found[key, step].add(sums)
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_at_any_event_a_run_comes_to_the_same_end(tmp_path):
    for name in ("whole", *map(str, range(3))):
        (tmp_path / name).mkdir()
    reference, chance = attempt(tmp_path / "whole", 7), random.Random(0)
    names = sorted(reference["events"])
    kills = 0
    for number in range(3):
        folder, found = tmp_path / str(number), None
        for _ in range(4):
            name = names.pop(chance.randrange(len(names))) if names else "before fsync"
            found = attempt(folder, 7, (name, chance.randint(1, reference["events"][name])))
            assert len(noised(folder)) <= len(logged(folder / "run"))  # at no moment is a step unaccounted
            if found is not None:
                break
            kills += 1
        found = found or attempt(folder, 7)
        assert all(torch.equal(found["weights"][name], p) for name, p in reference["weights"].items())
        assert logged(folder / "run") == [(0, k) for k in range(STEPS)] and found["history"] == reference["history"]
        assert all(len(sums) == 1 for sums in noised(folder).values())
    assert kills >= 5
    assert epsilon_of(reference["history"], 1e-3, "gdp") > 0
