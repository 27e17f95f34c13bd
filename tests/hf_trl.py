"""TRL's trainers with private steps on tiny models, and the losses of their samples by hand."""

from __future__ import annotations

import pytest
import torch

from .hf_texts import draw, ids, llama, private, tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

from fastdp.hf import DPDPOTrainer, DPSFTTrainer  # noqa: E402

TYPES = {"SFT": trl.SFTConfig, "DPO": trl.DPOConfig}


def config(kind, folder, **options):
    common = dict(output_dir=str(folder), per_device_train_batch_size=4, max_steps=1, learning_rate=0.1, optim="sgd",
                  lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
                  logging_strategy="no", bf16=False, gradient_checkpointing=False)  # fmt: skip
    return TYPES[kind](**{**common, **options})


def prompts(count=8):
    return datasets.Dataset.from_dict(
        {"prompt": draw(count, 1, 5), "completion": [" " + t for t in draw(count, 1, 7, 1)]}
    )


def plain(count=8):
    return datasets.Dataset.from_dict({"text": draw(count, 2, 9)})


def pairs(count=8):
    return datasets.Dataset.from_dict(
        {"prompt": draw(count, 1, 5), "chosen": [" " + t for t in draw(count, 1, 7, 1)],
         "rejected": [" " + t for t in draw(count, 1, 7, 2)]}
    )  # fmt: skip


def sft(folder, model, data, privacy=None, more=None, **options):
    return DPSFTTrainer(
        model=model, args=config("SFT", folder, **options), train_dataset=data, processing_class=tokenizer(),
        privacy=privacy or private(), **(more or {}),
    )  # fmt: skip


def dpo(folder, model, data, privacy=None, more=None, **options):
    more = {"ref_model": llama(1).to(model.dtype)} if more is None else more
    return DPDPOTrainer(
        model=model, args=config("DPO", folder, **options), train_dataset=data, processing_class=tokenizer(),
        privacy=privacy or private(), **more,
    )  # fmt: skip


def logps(model, prompt, answer):
    """Log probabilities of the answer's tokens after a prompt; virtual tokens may stand before it."""
    tokens = torch.tensor([ids(prompt) + ids(answer)])
    scores = model(input_ids=tokens).logits[0, -tokens.shape[1] :].log_softmax(-1)
    first = len(ids(prompt))
    return scores[torch.arange(first - 1, tokens.shape[1] - 1), tokens[0, first:]]


def completion_losses(model, data, weight=lambda logp: 1.0):
    return [
        lambda row=row: -(weight(logp := logps(model, row["prompt"], row["completion"] + "<eos>")) * logp).mean()
        for row in data
    ]


def sigmoid_losses(model, reference, data, beta=0.1):
    def loss(row):
        ratio = [
            (logps(model, row["prompt"], row[side] + "<eos>") - logps(reference, row["prompt"], row[side] + "<eos>"))
            for side in ("chosen", "rejected")
        ]
        return -torch.nn.functional.logsigmoid(beta * (ratio[0].sum() - ratio[1].sum()))

    return [lambda row=row: loss(row) for row in data]


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setenv("CI", "1")  # TRL sends no telemetry there
    datasets.disable_progress_bars()
