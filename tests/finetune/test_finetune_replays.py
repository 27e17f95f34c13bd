"""finetune with replayed steps: the weights of the other way, repetition bit for bit, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastdp.finetune.encode import Collate, widths
from fastdp.finetune.job import FinetuneError, Graphed
from fastdp.finetune.training import run
from fastdp.optim.graphed_step import GraphedStep

from .finetune_models import card_of, classifier, command, reviews
from .finetune_runs import collate, job_of, model_of, records, weights
from .test_finetune_training import crash, resumed, whole

DATA = records()


def padded(items):
    """The batch, padded to 4 or 8 tokens."""
    batch = collate(items)
    missing = (4 if batch["ids"].size(1) <= 4 else 8) - batch["ids"].size(1)
    pad = {name: nn.functional.pad(batch[name], (0, missing)) for name in ("ids", "mask")}
    return {**pad, "labels": batch["labels"]}


def example(batch, size):
    fitting = [item for item in DATA if len(item[0]) <= batch["ids"].size(1)]
    return padded([max(fitting, key=lambda item: len(item[0])), *(fitting * size)[: max(size, 2) - 1]])


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"], reduction="none")


GRAPHED = Graphed(losses, example)


def without_dropout():
    model = model_of()
    model.drop.p = 0.0
    return model


@pytest.fixture
def replays(monkeypatch):
    """The number of samples of each replay."""
    made, found = GraphedStep._begin, []

    def begin(self, batch):
        before = self.replayed
        result = made(self, batch)
        found.extend([len(batch[0]["labels"])] * (self.replayed - before))
        return result

    monkeypatch.setattr(GraphedStep, "_begin", begin)
    return found


def test_the_weights_are_those_of_the_other_way(tmp_path, replays):
    eager = job_of(tmp_path / "eager", without_dropout(), collate=padded)
    run(eager)
    assert not replays
    graphed = job_of(tmp_path / "graphed", without_dropout(), collate=padded, graphed=GRAPHED)
    outcome = run(graphed)
    assert outcome.status == "finished" and len(replays) > 20 and len(set(replays)) > 2
    torch.testing.assert_close(weights(graphed.model), weights(eager.model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [1, 5, 10])
def test_a_resumed_run_is_the_one_that_would_have_been(tmp_path, step):
    options = {"collate": padded, "graphed": GRAPHED}
    crash(tmp_path / "run", step, **options)
    found, outcome, notes = resumed(tmp_path / "run", **options)
    assert outcome.lost_steps == 0 and "lost" not in notes
    assert torch.equal(found, whole(tmp_path / "whole", **options))


def test_with_and_without_a_limit_to_physical_batches(tmp_path, replays):
    options = {"collate": padded, "max_physical_batch_size": None}
    found = whole(tmp_path / "graphed", model=without_dropout(), graphed=GRAPHED, **options)
    assert max(replays) > 8
    expected = whole(tmp_path / "eager", model=without_dropout(), **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_step_that_cannot_be_replayed_is_refused_and_the_run_goes_on_without(tmp_path):
    def by_value(model, batch):
        return losses(model, batch) * (2.0 if float(batch["mask"][0].sum()) > 3 else 1.0)

    with pytest.raises(FinetuneError, match="--graphed: the step of this model cannot be replayed.*without --graphed"):
        run(job_of(tmp_path / "run", collate=padded, graphed=Graphed(by_value, example)))
    found, outcome, _ = resumed(tmp_path / "run", collate=padded)
    assert outcome.status == "finished" and torch.equal(found, whole(tmp_path / "whole", collate=padded))


def test_persons_are_refused(tmp_path):
    with pytest.raises(FinetuneError, match="--graphed replays batches of records, and --group-by"):
        run(job_of(tmp_path / "run", graphed=GRAPHED, group_by=[i // 2 for i in range(len(DATA))]))


def test_few_widths_hold_every_length():
    for most in (1, 7, 8, 9, 30, 64, 100, 128, 1000):
        found = widths(most)
        assert found[-1] == most and len(found) <= 8 and found == sorted(set(found))
    items = [{"input_ids": torch.tensor(row)} for row in ([5, 6, 7], [8])]
    batch = Collate(0, [4, 8])(items)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, -100, -100, -100]]


def test_the_command(tmp_path, replays, capsys):
    model, data = classifier(tmp_path / "bert"), reviews(tmp_path / "reviews.csv")
    words = (model, data, "--task", "classify", "--eval-fraction", 0, "--epochs", 1, "--batch-size", 8, "--epsilon", 8,
             "--accountant", "gdp", "--max-physical-batch-size", 8, "--max-length", 16)  # fmt: skip
    assert command(*words, "--graphed", "--out", tmp_path / "out") == 0, capsys.readouterr().err
    assert replays and card_of(tmp_path / "out")["steps"] == 5
    persons = tmp_path / "persons.csv"
    lines = [f"{i // 2},{'good' if i % 2 else 'bad'} {i},{i % 2}" for i in range(60)]
    persons.write_text("\n".join(["person,text,label", *lines]))
    assert command(model, persons, *words[2:], "--group-by", "person", "--graphed", "--out", tmp_path / "two") == 1
    assert "leave one out" in capsys.readouterr().err
