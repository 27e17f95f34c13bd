"""transformers' own plan of tensor parallelism, of a small Llama that every rank loads from one folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastdp

from .models import single, whole

TINY = dict(vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32)  # fmt: skip


def saved(config: Any) -> str:
    """A folder with a model's weights, which the first rank has written."""
    import transformers

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
    dist.barrier()
    return str(folder[0])


def removed(folder: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def llama(rank: int, world: int) -> tuple[float, float, float, float]:
    """from_pretrained(tp_plan="auto"): the steps of one process."""
    import transformers

    os.environ.update(LOCAL_RANK=str(rank))
    folder = saved(transformers.LlamaConfig(**TINY))
    several = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    one = transformers.AutoModelForCausalLM.from_pretrained(folder)
    removed(folder)
    assert any(hasattr(p, "placements") for p in several.parameters())
    options = dict(lr=1e-2, eps=1e-3, noise_multiplier=1.0, max_grad_norm=0.5, seed=5, sample_rate=0.1,
                   expected_batch_size=3, accountant="rdp")  # fmt: skip
    optimizer = fastdp.DPAdamW(several, **options)
    with single():
        truth = fastdp.DPAdamW(one, **options)
    worst = 0.0
    for step in range(2):
        tokens = torch.randint(0, 37, (3, 8), generator=torch.Generator().manual_seed(step))
        losses(several, tokens).backward()
        optimizer.step()
        with single():
            losses(one, tokens).backward()
            truth.step()
        worst = max(worst, float(((optimizer.norms - truth.norms).abs() / truth.norms).max()))
    error = max(float((whole(p) - q).abs().max()) for p, q in zip(several.parameters(), one.parameters(), strict=True))
    found = worst, error, optimizer.epsilon(1e-5), truth.epsilon(1e-5)
    optimizer.detach(), truth.detach()
    return found


def with_transformers(case: Any) -> Any:
    """The case, where there is a transformers whose plans are DTensors."""

    def run(rank: int, world: int) -> Any:
        try:
            transformers = pytest.importorskip("transformers", minversion="5.24")
        except pytest.skip.Exception:
            return "skipped"
        transformers.utils.logging.disable_progress_bar()
        return case(rank, world)

    return run


EXACT: dict[str, Any] = {"llama": with_transformers(llama)}
CASES = EXACT
