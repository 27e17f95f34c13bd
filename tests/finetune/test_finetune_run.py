"""The run of the command: killed and resumed, its two learning rates, persons, replayed steps, batches that fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from fastdp.errors import StepError
from fastdp.finetune import batch_size, prepare, run
from fastdp.finetune.files import SaveError, new_file
from fastdp.finetune.plan import FinetuneError
from fastdp.optim.graphed_step import GraphedStep

from .finetune_models import card_of, classifier, command, options_of, reviews, transformers

pytestmark = pytest.mark.slow  # `make test-all` runs it

STEPS = ("--epochs", 1, "--batch-size", 8, "--epsilon", 8, "--device", "cpu", "--accountant", "gdp",
         "--max-physical-batch-size", 4, "--eval-fraction", 0)  # fmt: skip


@pytest.fixture
def words(tmp_path):
    model, data = classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv", people=30)
    return (model, data, "--task", "classify", *STEPS)


def weights(out):
    found = transformers.AutoModelForSequenceClassification.from_pretrained(out / "model")
    return torch.nn.utils.parameters_to_vector(found.parameters()).detach()


@pytest.mark.parametrize("persons", [(), ("--group-by", "user", "--max-records-per-group", 2)])
def test_killed_and_resumed_it_is_the_run_that_would_have_been(tmp_path, words, persons):
    words = [*words, "--seed", 5, "--epochs", 2, "--checkpoint-every", 3, *persons]
    assert command(*words, "--out", tmp_path / "whole") == 0
    out, steps = tmp_path / "out", card_of(tmp_path / "whole")["steps"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    line = [sys.executable, "-m", "fastdp", "finetune", *map(str, words), "--out", str(out)]
    started = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while started.poll() is None and (
        not (out / "journal.jsonl").exists() or (out / "journal.jsonl").read_text().count('"digest"') < 4
    ):
        time.sleep(0.005)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not (out / "model").exists()
    assert command(*words, "--out", out, "--resume") == 0
    assert torch.equal(weights(out), weights(tmp_path / "whole"))
    card = card_of(out)
    assert card["lost_steps"] == 0 and card["steps"] == steps == sum(n for _, _, n in card["history"])
    assert (out / "journal.jsonl").read_text().count('"digest"') == steps


def test_steps_that_cannot_be_repeated_are_paid_for(tmp_path, words, capsys):
    with pytest.MonkeyPatch.context() as patch:
        step = run.Progress.step

        def crash(self, values):
            step(self, values)
            if values["step"] == 3:
                raise KeyboardInterrupt

        patch.setattr(run.Progress, "step", crash)
        assert command(*words, "--out", tmp_path / "out") == 130
    (tmp_path / "out.secret.key").unlink()
    assert command(*words, "--out", tmp_path / "out", "--resume") == 0
    assert "the run's keys are gone: the run goes on with new keys: 3 step(s)" in capsys.readouterr().out
    card = card_of(tmp_path / "out")
    assert (card["steps"], card["lost_steps"]) == (2, 3) and card["epsilon"] <= 8 and "ended early" in card["status"]
    assert command(*words, "--out", tmp_path / "out", "--resume") == 0  # nothing is left to do
    assert card_of(tmp_path / "out")["history"] == card["history"]


def test_a_full_disk(tmp_path, words, capsys, monkeypatch):
    saved = transformers.Trainer._save_checkpoint

    def full(self, *arguments):
        if self.state.global_step == 2:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
        saved(self, *arguments)

    monkeypatch.setattr(transformers.Trainer, "_save_checkpoint", full)
    assert command(*words, "--out", tmp_path / "out", "--checkpoint-every", 1) == 0  # one that is not needed
    assert "no space left to write" in capsys.readouterr().out
    assert not list((tmp_path / "out" / "checkpoints").glob(".unfinished"))

    def no_line(file, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastdp.hf.run_log.append", no_line)
    assert command(*words, "--out", tmp_path / "other") == 1
    assert "No space left" in capsys.readouterr().err
    with pytest.raises(SaveError, match="no space left"), new_file(tmp_path / "file") as file:
        file.write(b"half")
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.glob("file*"))


def test_new_weights_learn_at_their_rate(tmp_path, words):
    out = tmp_path / "out"
    assert command(*words, "--out", out, "--lr", 1e-12, "--new-lr", 0.1) == 0
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    before, after = dict(load(words[0]).named_parameters()), dict(load(out / "model").named_parameters())
    moved = {name for name, p in after.items() if (p - before[name]).abs().max() > 1e-6}
    assert moved == {"classifier.weight", "classifier.bias"}


def test_replayed_steps(tmp_path, words, capsys, monkeypatch):
    made, found = GraphedStep._begin, []

    def begin(self, batch):
        found.append(len(batch[0]["labels"]))
        return made(self, batch)

    monkeypatch.setattr(GraphedStep, "_begin", begin)
    assert command(*words, "--graphed", "--max-length", 16, "--out", tmp_path / "out") == 0, capsys.readouterr().err
    assert len(found) > 5 and card_of(tmp_path / "out")["steps"] == 5
    assert command(*words, "--group-by", "user", "--graphed", "--out", tmp_path / "two") == 1
    assert "leave one out" in capsys.readouterr().err


def test_out_of_memory_says_what_to_do(tmp_path, words, capsys, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run.Trainer, "compute_loss", full)
    assert command(*words, "--out", tmp_path / "out") == 1
    assert "resume with a smaller --max-physical-batch-size" in capsys.readouterr().err


# ---------------------------------------------------------------------- the physical batch size


@pytest.fixture
def job(tmp_path, words, monkeypatch):
    monkeypatch.setattr(prepare, "fit", lambda job: batch_size.Fit(8, 1.0, 1.0, 1, "speed"))
    return prepare.prepare(options_of(*words[:-4], "--eval-fraction", 0, "--out", tmp_path / "out")).job


def test_it_leaves_nothing_behind(job):
    state = torch.get_rng_state(), {name: p.clone() for name, p in job.model.state_dict().items()}
    found = batch_size.fit(job)
    assert found.size >= 1 and found.seconds_per_sample > 0 and found.bytes > 0
    assert torch.equal(state[0], torch.get_rng_state()) and all(p.grad is None for p in job.model.parameters())
    assert all(torch.equal(p, state[1][name]) for name, p in job.model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in job.model.modules())


def test_the_size_stays_within_memory_and_any_likely_batch(job, monkeypatch):
    monkeypatch.setattr(batch_size, "FASTER", float("inf"))  # a larger batch is always worth it
    sizes = []
    made = type(job).batch
    monkeypatch.setattr(type(job), "batch", lambda self, places: sizes.append(len(places)) or made(self, places))
    job.plan = batch_size.dataclasses.replace(job.plan, max_physical_batch_size=None)
    assert batch_size.fit(job).limit == "batch" and max(sizes) == batch_size.largest_batch(job) == 25
    monkeypatch.setattr(batch_size, "free_memory", lambda device: 0)
    with pytest.raises(FinetuneError, match="single sample"):
        batch_size.fit(job)


def test_on_a_device_memory_decides():
    class Trial:
        device, room, tried = torch.device("cuda"), 45, []

        def fits(self, size):
            self.tried.append(size)
            return size <= 45

        def predicted(self, size):
            return 0

    found, limit = batch_size._search(Trial(), 500, 1e9)
    assert limit == "memory" and 40 <= found <= 45 and max(Trial.tried) == 64
    assert batch_size._search(Trial(), 33, 1e9) == (33, "batch")


def test_an_error_of_the_log_is_one_line(tmp_path, words, capsys, monkeypatch):
    monkeypatch.setattr(run.Trainer, "_witness", lambda *a: (_ for _ in ()).throw(StepError("not on the disk")))
    assert command(*words, "--out", tmp_path / "out") == 1
    assert "fastdp finetune: not on the disk" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "options.json").read_text())["epsilon"] == 8
