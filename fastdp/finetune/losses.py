"""The loss of each task: one number a record, which no other record changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..losses import IGNORE, causal_lm_loss, classification_loss, token_loss
from ..losses.language_model_head import FusedHead
from .encode import accepted, inputs_of
from .tasks import one_answer

Losses = Callable[[nn.Module, Any], Tensor]  # (model, batch) -> [B]: each sample's own loss


def logits_of(model: nn.Module) -> Losses:
    """logits(model, batch), of the inputs that the model takes."""
    takes = accepted(model)

    def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**inputs_of(batch, takes)).logits  # type: ignore[no-any-return]

    return logits


def losses_of(model: nn.Module, task: str, beta: float, fused: FusedHead | None) -> Losses:
    """losses(model, batch) -> [B]. fused: of a language model whose logits are not stored."""
    logits, takes = logits_of(model), accepted(model)
    own: Any = classification_loss if one_answer(task) else causal_lm_loss if task == "lm" else token_loss

    def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if fused is not None:
            return fused.losses(model, inputs_of(batch, takes), batch["labels"])
        if task == "preference":  # -log sigmoid(beta * margin): Rafailov et al. 2023
            return F.softplus(-beta * margins(model, batch, logits))
        return own(logits(model, batch), batch["labels"], reduction="none")  # type: ignore[no-any-return]

    return losses


def margins(model: nn.Module, batch: dict[str, Tensor], logits: Losses) -> Tensor:
    """[B]: by how much the model has come to prefer the chosen answer, in nats, since it was as the reference says:
    log p(chosen) - log p(rejected), less the same under the reference."""
    scores = answer_scores(model, batch, logits) - batch["reference"]
    return scores[:, 0] - scores[:, 1]


def answer_scores(model: nn.Module, batch: dict[str, Tensor], logits: Losses) -> Tensor:
    """[B, 2]: log-probabilities of the chosen and of the rejected answer, sums over their tokens."""
    rejected = {"input_ids": batch["rejected_ids"], "attention_mask": batch["rejected_mask"]}
    sides = ((batch, batch["labels"]), (rejected, batch["rejected_labels"]))
    return torch.stack([_log_probability(logits(model, inputs), labels) for inputs, labels in sides], 1)


def _log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORE, reduction="none")
    return -each.sum(1)


def reference_of(model: nn.Module, data: Any, collate: Any, rows: int, device: torch.device) -> list[list[float]]:
    """N x 2: `answer_scores` of all records under the model as it is. The model is in eval mode."""
    logits, found = logits_of(model), []
    with torch.no_grad():
        for start in range(0, len(data), rows):
            batch = collate([data[i] for i in range(start, min(start + rows, len(data)))])
            batch = {name: value.to(device) for name, value in batch.items()}
            found += answer_scores(model, batch, logits).float().tolist()
    return found
