"""Runs killed with SIGKILL and resumed: the same weights, every noised step in the journal, no noise on two sums.

`python -m tests.finetune.test_finetune_kill --kills 200` for the long run. Every attempt is a process of its own,
forked from one that has imported torch. It is killed from outside after a random time, or kills itself at a random one
of its events: before and after each write (also half of it), sync, rename and deletion, between journal and noise,
after the update.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from fastdp.accounting import epsilon_of
from fastdp.finetune import checkpoint, training
from fastdp.optim import fused_update, private_optimizer
from fastdp.optim.private_step import PrivateStep

from .finetune_runs import STEPS, job_of, plan_of, weights

KILLS_OF_A_RUN = 5


class Events:
    """Counts what happens in this process, and ends it at one of the events: (name, the how manieth of that name)."""

    def __init__(self, fatal: tuple[str, int] | None) -> None:
        self.fatal = fatal
        self.names = collections.Counter()

    def next(self, name: str) -> bool:
        """Whether the next event of this name is the last."""
        return self.fatal == (name, self.names[name] + 1)

    def __call__(self, name: str) -> None:
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

    def watch(self, noise_log: Path) -> None:
        """Put events around everything that leaves a trace, and note every noise that is drawn with its sums."""
        write, update = os.write, fused_update.step
        out = os.open(noise_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

        def half(file, data):
            self("before write")
            if self.next("half a write"):
                write(file, data[: len(data) // 2])
            self("half a write")
            return write(file, data)

        def into_file(hashed, data):
            view = memoryview(data)
            self("before write of a checkpoint")
            hashed.file.write(view[: len(view) // 2])
            hashed.file.flush()
            self("half a write of a checkpoint")
            hashed.file.write(view[len(view) // 2 :])
            hashed.hash.update(view)
            hashed.bytes += view.nbytes
            return view.nbytes

        def noised(kind, groups, state, release, *tables):
            found = hashlib.sha256(repr((release.std, release.scale)).encode())
            for key in sorted(release.sums, key=release.offsets.__getitem__):
                found.update(release.sums[key].numpy())
            line = [hashlib.sha256(release.noise.key).hexdigest(), release.noise.step, found.hexdigest()]
            write(out, json.dumps(line).encode() + b"\n")
            self("before noise and update")
            update(kind, groups, state, release, *tables)
            self("after the update")

        os.write, os.fsync = half, self.around("fsync", os.fsync)
        os.replace, os.unlink = self.around("rename", os.replace), self.around("deletion", os.unlink)
        checkpoint._Hashed.write = into_file
        private_optimizer.fused.step = noised
        PrivateStep.release = self.around("release", PrivateStep.release)


def attempt(folder: Path, seed: int | None, fatal: tuple[str, int] | None = None, seconds: float | None = None) -> bool:
    """Run or resume in a process of its own. True where it came to its end; its results are then in result.pt."""
    child = os.fork()
    if not child:
        try:
            events = Events(fatal)
            events.watch(folder / "noise.log")
            spent = []
            close = training._Loop.close
            training._Loop.close = lambda loop: (spent.extend(loop.privacy.ledger.history), close(loop))
            target = epsilon_of([(1.0, 0.25, STEPS)], plan_of().delta, "gdp")
            job = job_of(folder / "run", seed=seed, target_epsilon=target)
            outcome = training.run(job, resume=True)
            events.fatal = None
            result = {"weights": weights(job.model), "spent": spent, "events": dict(events.names),
                      "outcome": vars(outcome), "target": target}  # fmt: skip
            torch.save(result, folder / "result.pt")
        except BaseException as problem:  # noqa: BLE001 (nothing may go on in a fork)
            print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"an attempt failed with status {os.WEXITSTATUS(status)}")
    return os.WIFEXITED(status)


def journalled(folder: Path) -> list[tuple[int, int]]:
    """(generation, step) of the whole lines of the journal."""
    path = folder / "run" / "journal.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [(entry["g"], entry["step"]) for entry in (json.loads(line[9:]) for line in lines) if "digest" in entry]


def drawn(folder: Path) -> dict[tuple[str, int], set[str]]:
    """Digests of the sums that noise was drawn for, by key and step."""
    found = collections.defaultdict(set)
    path = folder / "noise.log"
    for line in path.read_text().splitlines() if path.exists() else ():
        key, step, sums = json.loads(line)
        found[key, step].add(sums)
    return found


def finished(folder: Path) -> dict:
    return torch.load(folder / "result.pt", weights_only=False)


class Figures(collections.Counter):
    """kills, resumes, runs, differing, unaccounted, reused: what the last line says."""


def check(folder: Path, figures: Figures, reference=None) -> None:
    """A run came to its end: compare weights, journal, accountant and the log of noise."""
    result = finished(folder)
    entries, noised = journalled(folder), drawn(folder)
    journal = set(entries)
    figures["runs"] += 1
    figures["reused"] += sum(len(sums) > 1 for sums in noised.values())
    figures["unaccounted"] += max(0, len(noised) - len(journal))
    figures["unaccounted"] += abs(sum(n for _, _, n in result["spent"]) - len(journal))
    figures["doubled"] += len(entries) - len(journal)
    figures["over budget"] += result["outcome"]["epsilon"] > result["target"]
    if reference is not None:
        figures["differing"] += not torch.equal(result["weights"], reference["weights"])
        figures["differing"] += result["outcome"]["status"] != "finished" or result["outcome"]["lost_steps"] != 0
        figures["differing"] += len(journal) != STEPS
        figures["differing"] += result["outcome"]["history"] != reference["outcome"]["history"]


def event_of(chance: random.Random, events: dict, first: float = 0.0) -> tuple[str, int]:
    """One of a run's events, every name as likely; first: leave out so great a part of each name's."""
    name = chance.choice(sorted(events))
    return name, chance.randint(1 + int(first * events[name]), events[name])


def killed(folder: Path, seed: int | None, chance: random.Random, figures: Figures, kills: int, events: dict) -> None:
    """Kill a run that many times, unless it ends before."""
    for number in range(kills):
        by_time = chance.random() < 0.2
        where = {"seconds": chance.uniform(0.0, 0.5)} if by_time else {"fatal": event_of(chance, events)}
        figures["resumes"] += number > 0
        if attempt(folder, seed, **where):
            return
        figures["kills"] += 1
        figures["unaccounted"] += max(0, len(drawn(folder)) - len(journalled(folder)))


def seeded_run(root: Path, chance: random.Random, figures: Figures, reference: dict) -> None:
    folder = root / "x"
    killed(folder, 7, chance, figures, KILLS_OF_A_RUN, reference["events"])
    attempt(folder, 7)
    figures["resumes"] += 1
    check(folder, figures, reference)


def secret_run(root: Path, chance: random.Random, figures: Figures, reference: dict) -> None:
    """Without a seed: the same keys, once uninterrupted and once killed."""
    folder, other = root / "x", root / "copy"
    while not attempt(folder, None, fatal=event_of(chance, reference["events"], 0.3)):
        figures["kills"] += 1
        if (folder / "run" / "checkpoints").is_dir() and (folder / "run.secret.key").exists():
            break
    shutil.copytree(folder, other)
    figures["resumes"] += 1
    attempt(other, None)
    killed(folder, None, chance, figures, KILLS_OF_A_RUN, reference["events"])
    attempt(folder, None)
    figures["resumes"] += 1
    check(other, figures)
    check(folder, figures, finished(other))


def lost_run(root: Path, chance: random.Random, figures: Figures, reference: dict) -> None:
    """The keys are deleted on the way, or the newest checkpoint is damaged as well: fewer steps, none unaccounted."""
    folder = root / "x"
    killed(folder, None, chance, figures, 2, reference["events"])
    (folder / "run.secret.key").unlink(missing_ok=True)
    killed(folder, None, chance, figures, 2, reference["events"])
    whole = sorted((folder / "run" / "checkpoints").glob("*.json"))
    if len(whole) > 1:
        newest = whole[-1].with_suffix(".pt")
        newest.write_bytes(newest.read_bytes()[:-100])
    attempt(folder, None)
    figures["resumes"] += 1
    check(folder, figures)


def main(kills: int, seed: int) -> Figures:
    chance, figures = random.Random(seed), Figures()
    root = Path(tempfile.mkdtemp())
    try:
        (root / "reference").mkdir()
        training.run(job_of(root / "warm", steps=1))  # what is imported late is imported here, once
        attempt(root / "reference", 7)
        reference = finished(root / "reference")
        print(f"{sum(reference['events'].values())} events in a run: {reference['events']}")
        number = 0
        while figures["kills"] < kills:
            for way in (seeded_run, secret_run, lost_run):
                place = root / str(number)
                (place / "x").mkdir(parents=True)
                way(place, chance, figures, reference)
                shutil.rmtree(place)
                number += 1
    finally:
        shutil.rmtree(root)
    names = ("kills", "resumes", "runs", "differing", "unaccounted", "doubled", "reused", "over budget")
    print(", ".join(f"{name} {figures[name]}" for name in names))
    return figures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="attempts are forked")
def test_killed_runs_come_to_the_same_end():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FASTDP_CALIBRATE": "0"}
    command = [sys.executable, "-m", "tests.finetune.test_finetune_kill", "--kills", "12"]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "differing 0, unaccounted 0, doubled 0, reused 0, over budget 0" in done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = main(options.kills, options.seed)
    bad = sum(found[name] for name in ("differing", "unaccounted", "doubled", "reused", "over budget"))
    sys.exit(bad > 0)
