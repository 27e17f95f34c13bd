"""What finetune writes: whole or not there, whatever happens to the disk."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess

import pytest
import torch

from fastdp.finetune import checkpoint
from fastdp.finetune.checkpoint import Checkpoints, SaveError, new_file
from fastdp.finetune.job import FinetuneError
from fastdp.finetune.journal import Entry, Journal
from fastdp.finetune.training import run

from .finetune_runs import STEPS, job_of, weights
from .test_finetune_training import crash, journalled, resumed, stop_at, whole


def state(value):
    return {"x": torch.full((100,), float(value)), "step": value}


def test_a_file_is_whole_or_what_it_was(tmp_path):
    path = tmp_path / "file"
    with new_file(path, 0o600) as file:
        file.write(b"first")
    with pytest.raises(ZeroDivisionError), new_file(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == 0o600


def test_the_last_two_checkpoints_are_kept(tmp_path):
    kept = Checkpoints(tmp_path / "checkpoints")
    assert kept.load() is None
    for step in (0, 5, 10, 15):
        kept.save(step, state(step))
    assert kept.steps() == [15, 10] and len(list((tmp_path / "checkpoints").iterdir())) == 4
    step, found = kept.load()
    assert step == 15 and torch.equal(found["x"], state(15)["x"])


@pytest.mark.parametrize("how", ["cut", "bit", "gone", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how):
    kept = Checkpoints(tmp_path)
    kept.save(5, state(5))
    path = kept.save(10, state(10))
    content = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(content[:-7])
    elif how == "bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "gone":
        path.unlink()
    else:
        path.with_suffix(".json").write_text("{")
    notes = []
    assert kept.load(notes.append)[0] == 5 and "step-00000010.pt is damaged" in notes[0]
    kept.save(7, state(7))  # the damaged one is of no use, and does not count as one of two
    assert kept.steps() == [7, 5]


def test_a_run_goes_on_from_the_checkpoint_before(tmp_path):
    crash(tmp_path / "run", 10)
    newest = max((tmp_path / "run" / "checkpoints").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-3])
    found, outcome, notes = resumed(tmp_path / "run")
    assert "damaged" in notes and "repeating 6 step(s)" in notes
    assert outcome.lost_steps == 0 and torch.equal(found, whole(tmp_path / "whole"))
    crash(tmp_path / "other", 10)
    for path in (tmp_path / "other" / "checkpoints").glob("*.pt"):
        path.write_bytes(b"")
    with pytest.raises(FinetuneError, match="10 private steps were made: they cost epsilon 3"):
        resumed(tmp_path / "other")


# ---------------------------------------------------------------------- the journal


def test_the_journal_reads_what_it_wrote(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, {"lr": 0.1})
    journal.begin(0, {"threads": 1})
    for step in range(3):
        journal.add(0, step, Entry("ab", 4))
    with pytest.raises(FinetuneError, match="another process"):
        Journal(path, {"lr": 0.1})
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content + b'0123 {"g":0,"st')  # never synced: its noise was not drawn
    again = Journal(path, {"lr": 0.1})
    assert again.count == 3 and again.run == journal.run and again.environments == {0: {"threads": 1}}
    assert path.read_bytes() == content and again.repeatable(0, 1) == 2 and again.repeatable(0, 3) == 0
    again.add(1, 2, Entry("cd", None))
    assert again.generation == 1 and again.repeatable(1, 1) == 0
    again.close()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"ab", b"cb")
    path.write_bytes(b"".join(lines))
    damaged = Journal(path, {"lr": 0.1})
    assert damaged.count == 4 and damaged.damaged == 1  # still a step
    damaged.close()
    path.write_bytes(b"".join([b"x" + lines[0], *lines[1:]]))
    with pytest.raises(FinetuneError, match="first line"):
        Journal(path, {"lr": 0.1})


def test_a_damaged_line_counts_and_is_not_repeated(tmp_path):
    crash(tmp_path / "run", 7)
    path = tmp_path / "run" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[-2] = b"?" + lines[-2]
    path.write_bytes(b"".join(lines))
    _, outcome, notes = resumed(tmp_path / "run")
    assert "cannot be repeated" in notes and outcome.lost_steps == 3


# ---------------------------------------------------------------------- a full disk


class Full:
    """No space from the n-th write on, for files whose name holds a word."""

    def __init__(self, monkeypatch, word, after):
        self.count, self.on = 0, True
        real, write = checkpoint._Hashed.write, os.write

        def hashed(file, data):
            if word == "step-" and word in os.readlink(f"/proc/self/fd/{file.file.fileno()}"):
                self.count += 1
                if self.on and self.count > after:
                    file.file.write(memoryview(data)[:10])
                    file.problem = OSError(errno.ENOSPC, "No space left on device")
                    raise file.problem
            return real(file, data)

        def plain(descriptor, data):
            if word == "journal":
                self.count += 1
                if self.on and self.count > after:
                    return write(descriptor, data[: len(data) // 2])
            return write(descriptor, data)

        monkeypatch.setattr(checkpoint._Hashed, "write", hashed)
        monkeypatch.setattr(os, "write", plain)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="files are told apart by /proc")
def test_no_space_for_checkpoints(tmp_path, monkeypatch):
    crash(tmp_path / "run", 5)
    full = Full(monkeypatch, "step-", 3)
    log = stop_at(None)
    with pytest.raises(SaveError, match=r"no space left.*MiB are free there.*untouched. Free some space, and resume"):
        run(job_of(tmp_path / "run", log=log), resume=True)
    notes = [v["text"] for kind, v in log.events if kind == "note"]
    assert any("would have to be repeated" in text for text in notes)
    assert Checkpoints(tmp_path / "run" / "checkpoints").load()[0] == 4
    assert not list((tmp_path / "run" / "checkpoints").glob("*unfinished"))
    full.on = False
    found, outcome, _ = resumed(tmp_path / "run")
    assert outcome.lost_steps == 0 and torch.equal(found, whole(tmp_path / "whole"))


def test_no_space_for_the_journal(tmp_path, monkeypatch):
    full = Full(monkeypatch, "journal", 8)
    with pytest.raises(SaveError, match="could not be journalled, so it was not made"):
        run(job_of(tmp_path / "run"))
    full.on = False
    assert len(journalled_whole(tmp_path / "run")) == 7
    found, outcome, _ = resumed(tmp_path / "run")
    assert outcome.lost_steps == 0 and outcome.steps == STEPS == len(journalled(tmp_path / "run"))
    assert torch.equal(found, whole(tmp_path / "whole"))


def journalled_whole(folder):
    """Steps of the lines that have an end."""
    lines = (folder / "journal.jsonl").read_bytes().split(b"\n")[:-1]
    return [line for line in lines if b"digest" in line]


def test_no_permission(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, *args, **options):
        if "step-00000004" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    log = stop_at(None)
    job = job_of(tmp_path / "run", log=log)
    assert run(job).status == "finished"  # the next one can be written
    assert any("may not be written (Permission denied)" in v.get("text", "") for _, v in log.events)


@contextlib.contextmanager
def small_disk(path, size):
    path.mkdir()
    if os.name != "posix" or os.geteuid() or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
    ).returncode:  # fmt: skip
        pytest.skip("only root mounts a small disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_really_full(tmp_path):
    with small_disk(tmp_path / "disk", "96k") as disk:
        (disk / "ballast").write_bytes(bytes(4096))
        log = stop_at(6, lambda: fill(disk / "filler"))
        with pytest.raises(SaveError, match="no space left"):
            run(job_of(disk / "run", log=log))
        (disk / "filler").unlink()
        job = job_of(disk / "run")
        outcome = run(job, resume=True)
        assert outcome.status == "finished" and outcome.lost_steps == 0
        assert torch.equal(weights(job.model), whole(tmp_path / "whole"))


def fill(path):
    with contextlib.suppress(OSError), open(path, "wb") as file:
        while True:
            file.write(bytes(1024))
            file.flush()


def test_the_plan_is_in_the_journal(tmp_path):
    crash(tmp_path / "run", 2)
    head = json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[0][9:])
    assert head["plan"]["noise_multiplier"] == 1.0 and "max_physical_batch_size" not in head["plan"]
