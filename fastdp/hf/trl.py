"""`DPSFTTrainer` and `DPDPOTrainer`: TRL's trainers with private steps. Needs the extra `trl`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import trl
from torch import Tensor, nn

from ..batch_axis.inputs import mark_rows
from ..errors import StepError
from .argument_table import PACKED, READERS
from .arguments import ArgumentError
from .losses import rows, size_of
from .options import PrivacyArguments
from .preferences import Texts, pair_losses, texts
from .trainer import DPTrainer

PAIRED = ("input_ids", "attention_mask", "completion_mask", "token_type_ids", "mm_token_type_ids")


class _OfTRL(DPTrainer):
    """What both have in common: TRL makes the model, the data and evaluation; steps are DPTrainer's."""

    aux_loss_enabled: bool
    _metrics: dict[str, Any]

    def __init__(self, *positional: Any, privacy: PrivacyArguments | None = None, **named: Any) -> None:
        given = self._named(positional, named)
        self._check_data(given.get("train_dataset"))
        kinds = {kind.__name__ for kind in type(given.get("args")).__mro__}
        if other := next((kind for kind in READERS if kind in kinds - set(self._reads)), None):
            raise ArgumentError(
                f"args is a {other}, which fastdp.hf.{READERS[other]} reads: {type(self).__name__} "
                f"takes a {self._reads[0]}"
            )
        self._check_given(given)
        super().__init__(*positional, privacy=privacy, **named)
        if self.is_fsdp_enabled:
            raise ArgumentError(
                f"fsdp has not been tried with {type(self).__name__}: leave it out (DPTrainer takes it)"
            )
        if self.aux_loss_enabled:
            raise ArgumentError(
                f"{type(self.model).__name__} would be trained with the auxiliary loss of its routers, which balances "
                "experts over the whole batch and so couples samples: set router_aux_loss_coef=0.0"
            )

    def _check_given(self, given: Mapping[str, Any]) -> None:
        """Look at the trainer's arguments before TRL does."""

    def _train(self, *arguments_of: Any) -> Any:
        self._check_data(self.train_dataset)
        return super()._train(*arguments_of)

    def _check_data(self, data: Any) -> None:
        names = getattr(data, "column_names", None) or ()
        if "seq_lengths" in names:
            raise StepError(f"train_dataset is packed (it has a column seq_lengths), which is refused: {PACKED}")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Run the trainer's log. TRL's metrics of training batches are never computed, those of evaluation are."""
        for metrics in self._metrics.values():
            metrics.pop("num_tokens", None)  # TRL counts in its training loss, which does not run
        self._metrics["train"].clear()
        super().log(logs, start_time)

    def _compare(self, batch: Mapping[str, Any], theirs: Callable[[dict[str, Any]], Any], tolerance: float) -> None:
        """Raise StepError unless a sample's loss is what TRL computes of it alone."""
        for number in range(min(4, len(next(v for v in batch.values() if isinstance(v, Tensor))))):
            alone = rows(batch, number, number + 1)
            ours = float(self._losses(self.model, alone).sum())
            with self.compute_loss_context_manager():
                own = float(theirs(alone))
            if not math.isfinite(ours) and not math.isfinite(own):
                raise StepError(
                    f"the loss of one sample alone is {own:g}: nothing can be learnt from it. Look for what overflows "
                    f"in {type(self.model).__name__} (the dtype of the model, its attention with padding)"
                )
            if not abs(ours - own) <= tolerance * (1 + abs(own)):
                raise StepError(
                    f"of one sample alone fastdp's loss is {ours:.6g} and TRL {trl.__version__}'s {own:.6g} "
                    f"(loss_type={self.args.loss_type!r}): it is not a loss that fastdp knows a sample's part of"
                )
        for metrics in self._metrics.values():
            metrics.clear()


class DPSFTTrainer(_OfTRL, trl.SFTTrainer):  # type: ignore[misc]
    """A `trl.SFTTrainer` that trains with differential privacy, as `DPTrainer` does.

    A sample is a record of the dataset (with group_by, all records of a person). Its loss is the mean over its own
    tokens: of its completion, or of its assistant turns, as SFTConfig says. Packing is refused.

    Args:
        privacy: a `PrivacyArguments`. All other arguments are those of SFTTrainer.

    Raises:
        ArgumentError: if a field of SFTConfig is refused. DPTrainer's errors are also possible.
    """

    _reads = ("SFTConfig",)
    _looked_at = ("SFTTrainer",)

    def _find_loss(self, batch: Any, tolerance: float) -> None:
        images, size = batch.get("pixel_values"), size_of(batch)
        if isinstance(images, Tensor) and len(images) != size:
            raise StepError(
                f"{size} records have {len(images)} rows of pixel_values, so that none is known to be a record's own: "
                "DPSFTTrainer takes one image in each record, of which the processor makes one row"
            )
        super()._find_loss(batch, tolerance)
        assert self._head is not None
        if self._head.name != "next token":
            raise StepError(f"{type(self.model).__name__} is no causal language model, but has {self._head.name}")
        if not self.args.label_smoothing_factor:
            self._compare(batch, lambda alone: trl.SFTTrainer.compute_loss(self, self.model, alone), tolerance)


class PairsFirst:
    """TRL's collator for preferences, whose [2 B, T] (the better answers, then the worse) becomes [B, 2, T]."""

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, records: list[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in self.collate(records).items():
            if name in ("ref_chosen_logps", "ref_rejected_logps"):
                found[name] = value
            elif name in PAIRED and len(value) == 2 * len(records):
                found[name] = torch.stack(value.tensor_split(2), 1)
            else:
                raise StepError(
                    f"the collator's {name!r} is not one of a pair's parts that fastdp knows ({', '.join(PAIRED)}): "
                    "DPDPOTrainer takes pairs of texts"
                )
        return found


class DPDPOTrainer(_OfTRL, trl.DPOTrainer):  # type: ignore[misc]
    """A `trl.DPOTrainer` that trains with differential privacy, as `DPTrainer` does.

    A sample is a pair of a chosen and a rejected answer to a prompt (with group_by, all pairs of a person). Its loss is
    its own, by DPOConfig.loss_type; losses that couple pairs are refused.

    Args:
        privacy: a `PrivacyArguments`. All other arguments are those of DPOTrainer.

    Raises:
        ArgumentError: if a field of DPOConfig is refused. DPTrainer's errors are also possible.
    """

    _reads = ("DPOConfig",)
    _looked_at = ("DPOTrainer",)
    ref_model: Any
    precompute_ref_logps: bool

    def __init__(self, *positional: Any, privacy: PrivacyArguments | None = None, **named: Any) -> None:
        super().__init__(*positional, privacy=privacy, **named)
        if self.privacy.fused_loss:
            raise ArgumentError("fused_loss=True is for DPTrainer and DPSFTTrainer: leave it out")
        if self.args.label_smoothing_factor:
            raise ArgumentError("label_smoothing_factor has no meaning for pairs: DPOConfig.label_smoothing has")
        if self.ref_model is not None:
            self.ref_model.eval()  # a constant of each pair alone
        copied = "ref" in getattr(self.model, "peft_config", {})
        for name, parameter in self.model.named_parameters():
            # the reference's adapter is never used with gradients: it would get noise alone
            if copied and ".ref." in name:
                parameter.requires_grad_(False)

    def _check_given(self, given: Mapping[str, Any]) -> None:
        model, precomputed = given.get("model"), getattr(given.get("args"), "precompute_ref_log_probs", False)
        made = isinstance(model, nn.Module) and not getattr(getattr(model, "config", None), "_name_or_path", "")
        adapted = given.get("peft_config") is not None or hasattr(model, "peft_config")
        if made and given.get("ref_model") is None and not adapted and not precomputed:
            raise ArgumentError(
                "there is no reference: TRL would load it anew from where the model came from, and this model was made "
                "in Python. Give ref_model=copy.deepcopy(model)"
            )

    def _samples_first(self, collate: Any) -> Any:
        return PairsFirst(collate)

    def _takes_losses(self) -> bool:
        return type(self).compute_loss is DPDPOTrainer.compute_loss

    def _find_loss(self, batch: Any, tolerance: float) -> None:
        """Compare with TRL's loss, at a reference that is not the model: there, many losses are alike."""
        known = self.precompute_ref_logps
        logp = self._reference(self.model, batch)
        there = logp.reshape(-1, 2) * torch.tensor([[1.1, 0.95]], dtype=logp.dtype, device=logp.device)
        shifted = {**batch, "ref_chosen_logps": there[:, 0], "ref_rejected_logps": there[:, 1]}
        self.precompute_ref_logps = True
        try:
            self._compare(
                shifted, lambda alone: trl.DPOTrainer.compute_loss(self, self.model, _halves(alone)), tolerance
            )
        finally:
            self.precompute_ref_logps = known

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training, return one loss per pair [B]; in evaluation, DPOTrainer's loss."""
        if not self._learning:
            with _flags_of(self.model):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.precompute_ref_logps:
            reference = torch.stack([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]], 1).reshape(-1)
        else:
            reference = self._reference(model, inputs)
        flat = {name: _of_pairs(value) for name, value in _flat(inputs).items()}
        losses = pair_losses(_texts(model, flat), _of_pairs(reference), self.args)
        return (losses, {}) if return_outputs else losses

    def _reference(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Log probabilities of the answers under the reference [2 B].

        They are constants of their own rows, so that the engine need not follow what they are made of.
        """
        with self._referring(model) as other, torch._C.DisableTorchFunction():
            return _texts(other, _flat(inputs)).logp

    def compute_ref_log_probs(self, *positional: Any, **named: Any) -> Any:
        """Run DPOTrainer.compute_ref_log_probs."""
        with _flags_of(self.model):
            return super().compute_ref_log_probs(*positional, **named)

    @contextlib.contextmanager
    def _referring(self, model: nn.Module) -> Iterator[nn.Module]:
        """The reference, without gradients: a model of its own, or this one without its adapter."""
        with torch.no_grad(), _flags_of(self.model):
            if self.ref_model is not None:
                yield self.ref_model
                return
            inner = self.accelerator.unwrap_model(self.model)
            if not hasattr(inner, "peft_config"):
                yield model
                return
            active = inner.active_adapter
            try:
                if "ref" in inner.peft_config:
                    inner.set_adapter("ref")
                    yield model
                else:
                    with inner.disable_adapter():
                        yield model
            finally:
                if "ref" in inner.peft_config:
                    inner.set_adapter(active)


@contextlib.contextmanager
def _flags_of(model: nn.Module) -> Iterator[None]:
    """What requires grad is put back: peft's switches between adapters also turn on what the user has frozen."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def _flat(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """[B, 2, T] as [2 B, T], a pair's rows one after the other."""
    return {name: value.flatten(0, 1) for name, value in batch.items() if name in PAIRED}


def _of_pairs(rows_of_pairs: Tensor) -> Tensor:
    """The same tensor, whose rows are known to be two of each pair."""
    pairs = len(rows_of_pairs) // 2
    return mark_rows(rows_of_pairs, torch.arange(pairs).repeat_interleave(2), pairs)


def _texts(model: nn.Module, flat: Mapping[str, Tensor]) -> Texts:
    seen = {name: value for name, value in flat.items() if name != "completion_mask"}
    return texts(model(**seen)["logits"], flat["input_ids"], flat["completion_mask"])


def _halves(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as TRL's collator makes it."""
    return {k: v.transpose(0, 1).flatten(0, 1) if k in PAIRED else v for k, v in batch.items()}
