"""A small fine-tuning job, with dropout and records of different lengths, for the tests of its loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fastdp.finetune.job import Job, Plan

RECORDS, STEPS = 48, 12


class Model(nn.Module):
    """Frozen embedding, dropout, a layer and a head that are trained."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.embed.weight.requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids, mask):
        x = self.norm(torch.tanh(self.body(self.drop(self.embed(ids)))))
        x = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(x)


def model_of(seed=0):
    torch.manual_seed(seed)
    return Model()


def records(count=RECORDS):
    generator = np.random.default_rng(5)
    return [(generator.integers(0, 20, generator.integers(2, 9)).tolist(), i % 2) for i in range(count)]


def collate(items):
    longest = max(len(ids) for ids, _ in items)
    ids = torch.zeros(len(items), longest, dtype=torch.long)
    mask = torch.zeros(len(items), longest)
    for row, (tokens, _) in enumerate(items):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1.0
    return {"ids": ids, "mask": mask, "labels": torch.tensor([label for _, label in items])}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"])


def plan_of(**changes):
    known = {"noise_multiplier": 1.0, "sample_rate": 0.25, "expected_batch_size": RECORDS / 4, "steps": STEPS,
             "lr": 0.05, "delta": 1e-3, "warmup_steps": 3, "max_physical_batch_size": 5, "accountant": "gdp",
             "weight_decay": 0.01, "checkpoint_steps": 4, "checkpoint_seconds": None, "seed": 7}  # fmt: skip
    return Plan(**{**known, **changes})


def job_of(folder: Path, model=None, **changes):
    """Options of the job, the rest of the plan."""
    fields = set(Job.__dataclass_fields__)
    options = {name: changes.pop(name) for name in list(changes) if name in fields}
    return Job(model or model_of(), **{"loss": loss, "data": records(), "collate": collate, "plan": plan_of(**changes),
               "folder": folder, "fingerprint": {"data": "a"}, **options})  # fmt: skip


def weights(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
