"""Tiny random models of transformers, records of different lengths, and the truth of a step of theirs."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

from fastdp.hf import DPTrainer, PrivacyArguments  # noqa: E402

VOCABULARY = 40
TINY = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32)  # fmt: skip


def bert(kind="SequenceClassification", seed=0, dropout=0.0, **options):
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        **TINY, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **options
    )
    return getattr(transformers, f"BertFor{kind}")(config)


def gpt2(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )  # fmt: skip
    )


def texts(count=12, labels="class", seed=1):
    """Records of 3 to 9 tokens."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = int(torch.randint(3, 10, (1,), generator=draw))
        ids = torch.randint(1, VOCABULARY, (length,), generator=draw).tolist()
        label = {
            "class": number % 3, "number": number / count, "several": [1.0, 0.0, float(number % 2)],
            "next": ids, "each": [token % 3 for token in ids],
        }.get(labels)  # fmt: skip
        record = {"input_ids": ids, "labels": label, "unused": "text"}
        if labels and labels.startswith("answer"):
            if labels != "answer":
                ids += [1] * (9 - length)
            record.pop("labels")
            record |= {"start_positions": number % length, "end_positions": len(ids) - 1}
        found.append(record)
    return found


class Collate:
    """Pads to the longest; remembers the records of the batches it was asked for."""

    def __init__(self):
        self.seen = []

    def __call__(self, records):
        self.seen.append(records)
        longest = max(len(record["input_ids"]) for record in records)

        def padded(values, fill):
            return torch.tensor([list(row) + [fill] * (longest - len(row)) for row in values])

        batch = {
            "input_ids": padded([r["input_ids"] for r in records], 0),
            "attention_mask": padded([[1] * len(r["input_ids"]) for r in records], 0),
        }
        for name in ("labels", "start_positions", "end_positions"):
            if name in records[0]:
                values = [record[name] for record in records]
                ragged = isinstance(values[0], list) and isinstance(values[0][0], int)
                batch[name] = padded(values, -100) if ragged else torch.tensor(values)
        return batch


def trainer_of(folder, model, data, privacy=None, collate=None, trainer=DPTrainer, more=None, **arguments):
    options = dict(output_dir=str(folder), per_device_train_batch_size=4, max_steps=2, learning_rate=0.1, optim="sgd",
                   lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
                   logging_strategy="no")  # fmt: skip
    privacy = {} if trainer is not DPTrainer else {"privacy": privacy or private()}
    return trainer(
        model=model, args=transformers.TrainingArguments(**{**options, **arguments}), train_dataset=data,
        data_collator=collate or Collate(), **privacy, **(more or {}),
    )  # fmt: skip


def private(**options):
    return PrivacyArguments(**{"noise_multiplier": 0.0, "accountant": "gdp", "verify": False, **options})


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model, records, loss=None):
    """Of every record alone in float64, by the model's own loss: (its norm, {name: gradient})."""
    model = copy.deepcopy(model).double().eval()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for record in records:
        batch = Collate()([record])
        value = model(**batch).loss if loss is None else loss(model, batch)
        found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), found, strict=True)]
        size = torch.stack([g.square().sum() for g in found]).sum().sqrt()
        yield float(size), dict(zip(named, found, strict=True))


def middle_norm(model, records):
    """A clipping norm that half of the records exceed: with all of them clipped, their weights would not show."""
    return sorted(size for size, _ in gradients(model, records))[len(records) // 2]


def truth_of_step(model, records, expected, lr, norm=1.0, loss=None):
    """The weights after one step of SGD at noise 0, each record clipped."""
    found = {name: p.detach().double().clone() for name, p in model.named_parameters() if p.requires_grad}
    for size, grads in gradients(model, records, loss):
        for name, g in grads.items():
            found[name] -= lr / expected * min(1.0, norm / size) * g
    return found


def error(found, truth, before):
    """Of the update, relative."""
    wrong = sum(float((found[n].double() - truth[n]).square().sum()) for n in truth)
    size = sum(float((before[n].double() - truth[n]).square().sum()) for n in truth)
    return (wrong / size) ** 0.5
