"""The run of the command: killed, interrupted, taken up; a full disk; its two learning rates; batches that fit."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fastdp.errors import StepError
from fastdp.finetune import batch_size, prepare, run
from fastdp.finetune.files import SaveError, write
from fastdp.finetune.plan import FinetuneError
from fastdp.optim.graphed_step import GraphedStep

from .finetune_models import card_of, classifier, command, options_of, refused, reviews, transformers

pytestmark = pytest.mark.slow  # `make test-all` runs it

STEPS = ("--epochs", 1, "--batch-size", 8, "--epsilon", 8, "--device", "cpu", "--accountant", "gdp",
         "--max-physical-batch-size", 4, "--eval-fraction", 0)  # fmt: skip


@pytest.fixture
def words(tmp_path):
    model, data = classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv", people=30)
    return (model, data, "--task", "classify", "--out", tmp_path / "out", *STEPS)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def at_step(monkeypatch):
    """at_step(2, action): do something when a step is logged."""
    made = run.Between.on_log

    def set_up(number, action):
        def on_log(self, args, state, control, logs=None, **more):
            if state.global_step == number and "loss" in logs:
                action()
            made(self, args, state, control, logs=logs, **more)

        monkeypatch.setattr(run.Between, "on_log", on_log)

    return set_up


def weights(out):
    found = transformers.AutoModelForSequenceClassification.from_pretrained(out / "model")
    return torch.nn.utils.parameters_to_vector(found.parameters()).detach()


@pytest.mark.parametrize("persons", [(), ("--group-by", "user", "--max-records-per-group", 2)])
def test_killed_and_resumed_it_is_the_run_that_would_have_been(tmp_path, words, out, persons):
    words = [*words, "--seed", 5, "--epochs", 2, "--checkpoint-every", 3, *persons]
    assert command(*words, "--out", tmp_path / "whole") == 0
    steps, journal = card_of(tmp_path / "whole")["steps"], out / "journal.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    line = [sys.executable, "-m", "fastdp", "finetune", *map(str, words)]
    started = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while started.poll() is None and (not journal.exists() or journal.read_text().count('"digest"') < 4):
        time.sleep(0.005)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not (out / "model").exists()
    assert command(*words, "--resume") == 0
    assert torch.equal(weights(out), weights(tmp_path / "whole"))
    card = card_of(out)
    assert card["lost_steps"] == 0 and card["steps"] == steps
    assert card["history"] == [[card["noise_multiplier"], card["sample_rate"], steps]]  # the ledger's, and the plan's
    assert journal.read_text().count('"digest"') == steps
    # the log is part of the checkpoints: every step has one row, whichever process made it
    assert (out / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()


def test_steps_that_cannot_be_repeated_are_paid_for(tmp_path, words, out, at_step, capsys):
    def crash():
        raise KeyboardInterrupt

    at_step(3, crash)
    assert command(*words) == 130
    at_step(-1, None)
    (tmp_path / "out.secret.key").unlink()
    assert command(*words, "--resume") == 0
    assert "the run's keys are gone: the run goes on with new keys: 3 step(s)" in capsys.readouterr().out
    card = card_of(out)
    assert (card["steps"], card["lost_steps"]) == (2, 3) and card["epsilon"] <= 8 and "ended early" in card["status"]
    assert command(*words, "--resume") == 0  # nothing is left to do
    assert card_of(out)["history"] == card["history"]


def test_ctrl_c_saves_and_says_how_to_go_on_and_what_has_changed(tmp_path, words, out, at_step, capsys):
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert command(*words) == 130
    at_step(-1, None)
    said = capsys.readouterr().out
    assert "Interrupted after step 2 of 5" in said and "--resume" in said and "epsilon" in said
    assert not (out / "model").exists() and (tmp_path / "out.secret.key").exists()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert "holds a run already: go on with it by --resume" in refused(capsys, *words)
    said = refused(capsys, *words, "--lr", 0.1, "--epochs", 2, "--resume")
    assert "--lr: was not given, now 0.1" in said and "--epochs: was 1, now 2.0" in said.replace("1.0", "1")
    text = words[1].read_text()
    words[1].write_text(text.replace("good", "bad"))
    said = refused(capsys, *words, "--resume")
    assert "another data (training records), tokens" in said and "is untouched" in said
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    words[1].write_text(text)
    kept = (out / "options.json").read_text()
    (out / "options.json").unlink()
    assert "another plan" in refused(capsys, *words, "--resume", "--new-lr", 0.3)  # the journal knows it, too
    (out / "options.json").write_text(kept)
    assert command(*words, "--resume", "--max-physical-batch-size", 2) == 0  # it changes nothing that counts
    card = card_of(out)
    assert card["steps"] == 5 and card["lost_steps"] == 0 and card["history"][0][2] == 5 and card["epsilon"] <= 8
    assert (out / "metrics.csv").read_text().count("\n") == 6  # of both processes
    assert not (tmp_path / "out.secret.key").exists()
    other = tmp_path / "other"
    assert "there is no run in" in refused(capsys, *words, "--resume", "--out", other)
    other.mkdir()
    (other / "letters.txt").write_text("dear")
    assert "is not empty" in refused(capsys, *words, "--out", other)


def test_adaptive_clipping(words, out, capsys):
    """The norm follows the median; the budget is the same, as the count is part of the noise multiplier."""
    assert command(*words, "--clipping", "adaptive", "--batch-size", 12) == 0
    card, page = card_of(out), (out / "privacy_card.md").read_text()
    assert card["clipping"] == "adaptive" and card["epsilon"] <= 8
    assert "adaptive, from norm 1 on to the median norm" in page


def test_a_full_disk(tmp_path, words, out, capsys, monkeypatch):
    saved = transformers.Trainer._save_checkpoint

    def full(self, *arguments):
        if self.state.global_step == 2:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
        saved(self, *arguments)

    def no_space(*arguments, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", full)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", no_space)
        said = refused(capsys, *words)  # at the end
        assert "no space left to write" in said and "--resume writes what is missing" in said
    assert not (out / "model").exists() and not list(out.rglob("*.unfinished"))
    assert command(*words, "--checkpoint-every", 1, "--resume") == 0 and card_of(out)["steps"] == 5
    capsys.readouterr()
    assert command(*words, "--checkpoint-every", 1, "--out", tmp_path / "b") == 0  # a checkpoint that is not needed
    assert "no space left to write" in capsys.readouterr().out
    monkeypatch.setattr("fastdp.hf.run_log.append", no_space)
    assert "No space left" in refused(capsys, *words, "--out", tmp_path / "c")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(SaveError, match="no space left"):
        write(tmp_path / "file", "half")
    assert not list(tmp_path.glob("file*"))


def test_what_ends_a_run_is_said_in_a_line(tmp_path, words, capsys, monkeypatch):
    def raises(problem):
        def raised(*arguments, **more):
            raise problem

        return raised

    with monkeypatch.context() as patch:
        patch.setattr("fastdp.finetune.prepare.encode", raises(KeyboardInterrupt()))
        assert command(*words) == 130 and "interrupted" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(run.Trainer, "compute_loss", raises(torch.OutOfMemoryError("CUDA out of memory")))
        assert "resume with a smaller --max-physical-batch-size" in refused(capsys, *words)
    monkeypatch.setattr(run.Trainer, "_witness", raises(StepError("not on the disk")))
    assert "fastdp finetune: not on the disk" in refused(capsys, *words, "--out", tmp_path / "other")


def test_new_weights_learn_at_their_rate(words, out):
    assert command(*words, "--lr", 1e-12, "--new-lr", 0.1) == 0
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    before, after = dict(load(words[0]).named_parameters()), dict(load(out / "model").named_parameters())
    moved = {name for name, p in after.items() if (p - before[name]).abs().max() > 1e-6}
    assert moved == {"classifier.weight", "classifier.bias"}


def test_replayed_steps(words, out, capsys, monkeypatch):
    made, found = GraphedStep._begin, []

    def begin(self, batch):
        found.append(len(batch[0]["labels"]))
        return made(self, batch)

    monkeypatch.setattr(GraphedStep, "_begin", begin)
    assert command(*words, "--graphed", "--max-length", 16, "--epochs", 2) == 0, capsys.readouterr().err
    assert len(found) > 5 and card_of(out)["steps"] == 10


# ---------------------------------------------------------------------- the physical batch size


@pytest.fixture
def job(words, monkeypatch):
    monkeypatch.setattr(prepare, "fit", lambda job: batch_size.Fit(8, 1.0, 1, "speed"))
    found = prepare.prepare(options_of(*words)).job
    found.options.max_physical_batch_size = None
    return found


def test_it_leaves_nothing_behind(job):
    state = torch.get_rng_state(), {name: p.clone() for name, p in job.model.state_dict().items()}
    found = batch_size.fit(job)
    assert found.size >= 1 and found.seconds_per_sample > 0 and found.bytes > 0
    assert torch.equal(state[0], torch.get_rng_state()) and all(p.grad is None for p in job.model.parameters())
    assert all(torch.equal(p, state[1][name]) for name, p in job.model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in job.model.modules())


def test_the_size_stays_within_memory_and_any_likely_batch(job, monkeypatch):
    sizes, made = [], type(job).batch
    monkeypatch.setattr(type(job), "batch", lambda self, places: sizes.append(len(places)) or made(self, places))
    assert batch_size.fit(job).limit == "batch" and max(sizes) == batch_size.largest_batch(job) == 25
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 0)
    with pytest.raises(FinetuneError, match="single sample"):
        batch_size.fit(job)


def test_on_a_device_memory_decides(job, monkeypatch):
    """A batch that does not fit is the end of the search."""
    made = type(job).batch

    def batch(self, places):
        if len(places) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(self, places)

    monkeypatch.setattr(type(job), "batch", batch)
    found = batch_size.fit(job)
    assert (found.size, found.limit) == (8, "memory")
