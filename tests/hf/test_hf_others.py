"""Encoder-decoders that generate in evaluation, prompt and prefix tuning, trainers and collators that are refused."""

from __future__ import annotations

import sys

import pytest
import torch

from fastdp.errors import StepError

from ..hf_models import (
    DPTrainer,
    bert,
    error,
    gpt2,
    middle_norm,
    private,
    texts,
    trainer_of,
    transformers,
    truth_of_step,
    weights,
)
from .test_hf_losses import t5

from fastdp.hf import DPSeq2SeqTrainer  # isort: skip

pytestmark = pytest.mark.slow  # `make test-all` runs it


def seq2seq(folder, model, data, privacy, more=None, **options):
    common = dict(output_dir=str(folder), per_device_train_batch_size=4, max_steps=1, learning_rate=0.1, optim="sgd",
                  lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
                  logging_strategy="no")  # fmt: skip
    from ..hf_models import Collate

    return DPSeq2SeqTrainer(
        model=model, args=transformers.Seq2SeqTrainingArguments(**{**common, **options}), train_dataset=data,
        data_collator=Collate(), privacy=privacy, **(more or {}),
    )  # fmt: skip


def test_seq2seq(tmp_path):
    """Exact steps, in the middle of which evaluation generates as the ordinary trainer does."""
    model, records = t5().double(), texts(8, "next")
    norm, before = middle_norm(model, records), weights(model)
    want = truth_of_step(model, records, 8, 0.1, norm)
    seen = []

    def lengths(prediction):
        seen.append(prediction.predictions)
        return {"length": prediction.predictions.shape[1]}

    trainer = seq2seq(
        tmp_path, model, records, private(per_sample_max_grad_norm=norm, sample_rate=1.0),
        {"eval_dataset": records[:4], "compute_metrics": lengths}, eval_strategy="steps", eval_steps=1,
        predict_with_generate=True, generation_max_length=7, generation_num_beams=2,
    )  # fmt: skip
    trainer.train()
    assert error(weights(model), want, before) < 1e-4
    assert len(seen) == 1 and seen[0].dtype.kind == "i" and (seen[0][:, 7:] == 0).all() and seen[0][:, 1:7].any()
    trainer.args.eval_strategy = "no"
    plain = transformers.Seq2SeqTrainer(model=model, args=trainer.args, data_collator=trainer.data_collator)
    generated = plain.predict(records[:4]).predictions
    assert (seen[0] == generated).all() and (trainer.predict(records[:4]).predictions == generated).all()
    assert [entry for entry in trainer.state.log_history if "eval_length" in entry]


PEFT = ("prompt", "prefix", "projected prefix", "encoder", "lstm")


def soft_prompt(kind, peft, task="CAUSAL_LM"):
    common = dict(task_type=task, num_virtual_tokens=3)
    if kind == "prompt":
        return peft.PromptTuningConfig(**common)
    if "prefix" in kind:
        return peft.PrefixTuningConfig(**common, prefix_projection=kind != "prefix", encoder_hidden_size=8)
    shape = "LSTM" if kind == "lstm" else "MLP"
    return peft.PromptEncoderConfig(**common, encoder_hidden_size=8, encoder_reparameterization_type=shape)


@pytest.mark.parametrize("kind", PEFT)
def test_soft_prompts(kind, tmp_path):
    """Virtual tokens before the text, without a loss written by hand."""
    peft = pytest.importorskip("peft")
    model, records = peft.get_peft_model(gpt2(), soft_prompt(kind, peft)).double(), texts(8, "next")
    norm, before = middle_norm(model, records), weights(model)
    want = truth_of_step(model, records, 8, 0.1, norm)
    privacy = private(per_sample_max_grad_norm=norm, sample_rate=1.0, verify=kind != "lstm")
    trainer_of(tmp_path, model, records, privacy, max_steps=1).train()
    assert error(weights(model), want, before) < 1e-5
    changed = {name for name, p in weights(model).items() if not torch.equal(p, before[name])}
    assert changed and all("prompt_encoder" in name for name in changed)


def test_a_collator_that_joins_samples(tmp_path):
    model = gpt2()
    with pytest.raises(StepError, match="joined 4 records into a batch of one row.*no.*gradient of its own"):
        trainer_of(
            tmp_path, model, texts(12, "next"), collate=transformers.DataCollatorWithFlattening(),
            remove_unused_columns=True,
        ).train()  # fmt: skip


class Coupled(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_trainers_that_are_combined(tmp_path):
    with pytest.raises(StepError, match="Coupled has its own compute_loss, which DPTrainer would replace"):
        type("Mine", (DPTrainer, Coupled), {})
    GRPOTrainer = type("GRPOTrainer", (transformers.Trainer,), {})
    with pytest.raises(StepError, match="GRPOTrainer is not made private this way: it samples completions"):
        type("Mine", (GRPOTrainer, DPTrainer), {})

    class Named(transformers.Trainer):
        def __init__(self, *args, note="", **kwargs):
            self.note = note
            super().__init__(*args, **kwargs)

    mine = type("Mine", (DPTrainer, Named), {})
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_grad_norm=0.5)
    with pytest.raises(ValueError, match="max_grad_norm=0.5 is refused"):
        mine(bert(), arguments, privacy=private(), note="x")
    arguments.max_grad_norm = 0.0
    assert mine(bert(), arguments, privacy=private(), note="x").note == "x"
    with pytest.raises(TypeError, match="Mine needs privacy="):
        mine(bert(), arguments)


@pytest.mark.parametrize(
    "name, package, extra",
    [("DPSFTTrainer", "trl", "fastdp.trl."), ("DPDPOTrainer", "trl", "fastdp.trl."),
     ("DPSentenceTransformerTrainer", "sentence_transformers", "fastdp.sentences.")],
)  # fmt: skip
def test_packages_that_are_missing(name, package, extra, monkeypatch):
    import fastdp.hf

    missing = "DPNothing"
    for module in ("fastdp.hf.trl", "fastdp.hf.sentences"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"fastdp.hf.{name} needs .*: pip install .*{package.replace('_', '-')}>="):
        getattr(fastdp.hf, name)
    with pytest.raises(AttributeError, match="no attribute 'DPNothing'"):
        getattr(fastdp.hf, missing)
