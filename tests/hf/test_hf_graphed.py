"""DPTrainer with graphed=True: the run of the same seed, replayed; and what does not go with it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from fastdp.errors import GraphError, StepError
from fastdp.optim import graphed_shapes

from ..hf_models import Collate, DPTrainer, bert, gpt2, private, texts, trainer_of, weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:noise_seed")]


class Even(Collate):
    """Pads to one of two lengths."""

    def __call__(self, records):
        batch = super().__call__(records)
        length = batch["input_ids"].size(1)
        more = (6 if length <= 6 else 12) - length
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: torch.nn.functional.pad(value, (0, more), value=fill[name]) if value.dim() == 2 else value
            for name, value in batch.items()
        }


def run(tmp_path, model, records, graphed, collate=None, **more):
    options = dict(noise_multiplier=0.5, noise_seed=1, graphed=graphed)
    trainer = trainer_of(tmp_path, model, records, private(**options), collate or Even(), max_steps=12, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return trainer


@pytest.fixture
def kept(monkeypatch):
    """The recorded steps of a trainer, which it drops at its end."""
    found = []
    own = graphed_shapes.GraphedShapes.__init__
    monkeypatch.setattr(
        graphed_shapes.GraphedShapes, "__init__", lambda self, *given: found.append(self) or own(self, *given)
    )
    return found


@pytest.mark.parametrize("make", [lambda: gpt2(), lambda: bert(num_labels=3)], ids=["causal", "classes"])
def test_the_run_is_that_without_it(make, tmp_path, kept):
    labels = "next" if type(make()).__name__.startswith("GPT2") else "class"
    model, records = make(), texts(40, labels)
    plain = run(tmp_path, copy.deepcopy(model), records, False)
    replayed = run(tmp_path, copy.deepcopy(model), records, True)
    assert replayed.history == plain.history and replayed.state.global_step == 12
    (steps,) = kept
    assert steps.replayed > steps.eager > 0 and len(steps._steps) <= 2
    before = weights(model)
    for name, value in weights(plain.model).items():
        moved = (value - before[name]).norm()
        assert (weights(replayed.model)[name] - value).norm() <= 1e-4 * moved + 1e-7, name
    losses = [[row["train_loss"] for row in t.state.log_history if "train_loss" in row] for t in (plain, replayed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_loss_that_is_one_number_is_refused(tmp_path):
    more = {"compute_loss_func": lambda outputs, labels, **kwargs: outputs.logits[:, 0].square().mean(1).mean()}
    trainer = trainer_of(
        tmp_path, gpt2(), texts(8, "next"), private(graphed=True), Even(), max_steps=4, more=more,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    with pytest.raises(GraphError, match="loss of each sample"):
        trainer.train()


def test_what_does_not_go_together_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match="leave group_by and memory_budget out"):
        private(graphed=True, memory_budget=10**9)
    trainer = trainer_of(tmp_path, gpt2(), texts(8, "next"), private(graphed=True), torch_compile=True)
    assert isinstance(trainer, DPTrainer)
    with pytest.raises(StepError, match="leave one of them out"):
        trainer.train()
