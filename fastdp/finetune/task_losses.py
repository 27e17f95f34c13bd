"""The loss of each task: one number a record, which no other record changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..losses import IGNORE, causal_lm_loss, classification_loss, token_loss
from ..losses.language_model_head import FusedHead
from .encode import Collate, Encoded, inputs_of, logits_of
from .plan import FinetuneError, Graphed, Losses
from .tasks import one_answer

_REPLAYED = ("classify", "multi-label", "regression", "tokens", "lm")  # whose batches have one width


def losses_of(model: nn.Module, task: str, beta: float, fused: FusedHead | None) -> Losses:
    """losses(model, batch) -> [B]. fused: of a language model whose logits are not stored."""
    logits = logits_of(model)
    own: Any = classification_loss if one_answer(task) else causal_lm_loss if task == "lm" else token_loss

    def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if fused is not None:
            return fused.losses(model, inputs_of(model, batch), batch["labels"])
        if task == "preference":  # -log sigmoid(beta * margin): Rafailov et al. 2023
            return F.softplus(-beta * margins(model, batch, logits))
        found = own(logits(model, batch), batch["labels"], reduction="none")
        return found  # type: ignore[no-any-return]

    return losses


def graphed_of(task: str, data: Encoded, collate: Collate) -> Graphed:
    """What replayed steps of these records need. Raises FinetuneError."""
    if task not in _REPLAYED:
        raise FinetuneError(f"--graphed does not go with --task {task}: leave it out")
    width_of = [collate.width(data.length(i)) for i in range(len(data))]

    def example(batch: dict[str, Tensor], size: int) -> dict[str, Tensor] | None:
        width = batch["input_ids"].size(1)
        longest = [i for i, own in enumerate(width_of) if own == width]
        fitting = [i for i, own in enumerate(width_of) if own <= width]  # short ones too: padded and not
        if len(fitting) < 2 or not longest:
            return None
        count = max(size, 2)
        chosen = [fitting[k * (len(fitting) - 1) // (count - 1)] for k in range(count)]
        return collate([data[i] for i in [longest[-1], *chosen[:-1]]])

    return Graphed(example)


# ---------------------------------------------------------------------- preference


def margins(model: nn.Module, batch: dict[str, Tensor], logits: Any) -> Tensor:
    """[B]: by how much the model has come to prefer the chosen answer, in nats, since it was as the reference says.

    log p(chosen) - log p(rejected), less the same under the reference.
    """
    scores = answer_scores(model, batch, logits)
    return (scores[:, 0] - scores[:, 1]) - (batch["reference"][:, 0] - batch["reference"][:, 1])


def answer_scores(model: nn.Module, batch: dict[str, Tensor], logits: Any) -> Tensor:
    """[B, 2]: log-probabilities of the chosen and of the rejected answer, sums over their tokens."""
    rejected = {"input_ids": batch["rejected_ids"], "attention_mask": batch["rejected_mask"]}
    sides = ((batch, batch["labels"]), (rejected, batch["rejected_labels"]))
    return torch.stack([_log_probability(logits(model, inputs), labels) for inputs, labels in sides], 1)


def _log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORE, reduction="none")
    return -each.sum(1)


def reference_of(model: nn.Module, data: Encoded, collate: Collate, rows: int, device: torch.device) -> Tensor:
    """[N, 2]: `answer_scores` of all records under the model as it is, without dropout."""
    logits, found = logits_of(model), []
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(data), rows):
                batch = collate([data[i] for i in range(start, min(start + rows, len(data)))])
                batch = {name: value.to(device) for name, value in batch.items()}
                found.append(answer_scores(model, batch, logits).float().cpu())
    finally:
        for module in training:
            module.training = True
    return torch.cat(found)
