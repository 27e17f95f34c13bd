"""`DPSentenceTransformerTrainer`: sentence-transformers' trainer with private steps, for losses that couple no samples.

Needs the extra `sentences`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from torch import nn

from ..errors import StepError
from .arguments import ArgumentError
from .options import PrivacyArguments
from .trainer import DPTrainer

try:  # versions that embed several columns by one forward, whose rows a sample has at several places
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled as column_by_column
except ImportError:
    column_by_column = contextlib.nullcontext  # type: ignore[assignment]

_NEGATIVES = "the other records of the batch are its negatives"
_MINED = "it mines its triplets among all records of the batch"
_RANKED = "it compares the similarities of all pairs of the batch"
_INSTEAD = (
    "Losses of each record by itself: CosineSimilarityLoss (pairs with a similarity), ContrastiveLoss (pairs with 0 or "
    "1), TripletLoss (a negative in each record), MarginMSELoss, DistillKLDivLoss, EmbedDistillLoss and MSELoss (of a "
    "teacher), and MatryoshkaLoss around these. Put the negatives into the records, drawn at random or from public text"
)
COUPLING = {
    "MultipleNegativesRankingLoss": _NEGATIVES,
    "MultipleNegativesSymmetricRankingLoss": _NEGATIVES,
    "CachedMultipleNegativesRankingLoss": _NEGATIVES,
    "CachedMultipleNegativesSymmetricRankingLoss": _NEGATIVES,
    "GISTEmbedLoss": _NEGATIVES,
    "CachedGISTEmbedLoss": _NEGATIVES,
    "ContrastiveTensionLossInBatchNegatives": _NEGATIVES,
    "MegaBatchMarginLoss": _NEGATIVES,
    "CoSENTLoss": _RANKED,
    "AnglELoss": _RANKED,
    "OnlineContrastiveLoss": "it keeps the batch's hardest pairs only",
    "BatchAllTripletLoss": _MINED,
    "BatchHardTripletLoss": _MINED,
    "BatchHardSoftMarginTripletLoss": _MINED,
    "BatchSemiHardTripletLoss": _MINED,
    "GlobalOrthogonalRegularizationLoss": "it makes the batch's embeddings orthogonal to each other",
}


class DPSentenceTransformerTrainer(DPTrainer, SentenceTransformerTrainer):  # type: ignore[misc]
    """A `sentence_transformers.SentenceTransformerTrainer` that trains with differential privacy, as `DPTrainer` does.

    A sample is a record (a pair or triplet of texts, with its label). The loss must be a mean over records of each
    one's own loss; losses with negatives from the batch are refused by name. The model's card holds nothing of the
    training data: sentence-transformers would print records in it.

    Args:
        privacy: a `PrivacyArguments`. All other arguments are those of SentenceTransformerTrainer.

    Raises:
        StepError: if the loss couples samples, or has parameters of its own. DPTrainer's errors are also possible.
    """

    _reads = ("BaseTrainingArguments",)
    _looked_at = ("SentenceTransformerTrainer", "BaseTrainer")
    loss: Any

    def __init__(self, *positional: Any, privacy: PrivacyArguments | None = None, **named: Any) -> None:
        given = self._named(positional, named)
        if isinstance(given.get("train_dataset"), dict) or isinstance(given.get("loss"), dict):
            raise StepError(
                "several training datasets or losses: a step would take its batch from one of them, which has no "
                "accountant. Join them into one dataset, whose records have the same columns"
            )
        if given.get("model_init") is not None:
            raise StepError("model_init makes a new model for each training: give model=")
        if given.get("loss") is None:
            raise StepError(f"the default loss, CoSENTLoss, couples samples: {COUPLING['CoSENTLoss']}. {_INSTEAD}")
        super().__init__(*positional, privacy=privacy, **named)
        if self.is_fsdp_enabled:
            raise ArgumentError(f"fsdp has not been tried with {type(self).__name__}, only with DPTrainer")
        if self.privacy.fused_loss or self.args.label_smoothing_factor:
            raise ArgumentError("fused_loss and label_smoothing_factor have no meaning for a loss of embeddings")
        if self.privacy.graphed:
            raise ArgumentError("graphed=True needs one loss a sample; those of sentence-transformers are means")
        self._check_loss()

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Nothing: the callback would write records of the training data, and their statistics, into the card."""

    def _train(self, *arguments_of: Any) -> Any:
        self._check_loss()
        return super()._train(*arguments_of)

    def _check_loss(self) -> None:
        name = type(self.loss).__name__
        for part in _parts(self.loss):
            for kind in type(part).__mro__:
                if reason := COUPLING.get(kind.__name__):
                    raise StepError(
                        f"{name} couples samples, so that none has a gradient to clip: {reason}. {_INSTEAD}"
                    )
            reduction = getattr(part, "reduction", "mean")
            if getattr(part, "size_average", None) is False or reduction not in ("mean", "batchmean"):
                raise StepError(f"{name} is no mean over the batch: leave its size_average and reduction as they are")
        known = {id(p) for p in self.model.parameters()}
        own = [n for n, p in self.loss.named_parameters() if id(p) not in known and p.requires_grad]
        if own:
            raise StepError(
                f"{name} has parameters of its own ({', '.join(own)}), which are no part of the model that is made "
                "private: freeze them (requires_grad_(False)), or train a classifier of transformers by DPTrainer"
            )

    def preprocess_dataset(self, dataset: Any = None, dataset_name: str | None = None) -> Any:
        """As sentence-transformers does; evaluation data loses the column of persons, which is no text."""
        if dataset_name == "eval":
            dataset = self._remove_unused_columns(dataset)
        return super().preprocess_dataset(dataset, dataset_name)

    def _takes_losses(self) -> bool:
        return False

    def _find_loss(self, batch: Any, tolerance: float) -> None:
        """The loss is the user's."""

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Every column is a text or the label, but for the one that says whose the record is."""
        group = self.privacy.group_by
        return dataset.remove_columns([group]) if group in getattr(dataset, "column_names", ()) else dataset

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        return data_collator

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean of the records' own losses, which the loss given to the trainer computes."""
        if not self._learning:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with column_by_column():
            loss = SentenceTransformerTrainer.compute_loss(self, model, dict(inputs))  # type: ignore[arg-type]
        for components in self.accum_loss_components.values():
            components.clear()  # of training batches: no log shows them
        return (loss, {}) if return_outputs else loss


def _parts(loss: nn.Module) -> Iterator[nn.Module]:
    """The loss and the losses within it, but not the model."""
    yield loss
    for name, part in loss.named_children():
        if name != "model" and not isinstance(part, nn.Sequential):
            yield from _parts(part)
