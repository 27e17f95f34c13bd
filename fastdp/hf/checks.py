"""What is looked at before the first step: the kind of the head, padding, and `fastdp.verify`, on a few records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError, StepError, VerificationError
from ..utils.random_generators import RandomNumbers
from ..verification.state import evaluating as evaluating
from ..verification.verify import VerifyReport, verify
from .losses import rows, size_of

Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]  # -> a scalar
_ELSEWHERE = "set loss_reduction"
_HERE = "let the loss be one number a sample [B], or their mean (not their sum, and no mean over the batch's tokens)"
VERIFIED_ELEMENTS = 40_000_000  # parameters' elements that are compared, times samples: some GB in float64


def check_rows(batch: Mapping[str, Any], records: int) -> None:
    """Raise StepError if the collator has joined several records into one row."""
    if records > 1 and size_of(batch) == 1:
        raise StepError(
            f"the collator joined {records} records into a batch of one row (DataCollatorWithFlattening and "
            "padding_free do): the loss of that row is all records', so that none has a gradient of its own to clip. "
            "Take a collator that pads, as DataCollatorWithPadding or DataCollatorForLanguageModeling(mlm=False); "
            "pad_to_multiple_of keeps the shapes few"
        )


def check_padding(
    model: nn.Module, loss: Loss, collate: Callable[[list[Any]], Any], prepare: Callable[[Any], Any],
    examples: list[Any], tolerance: float, norm: float = 1.0,
) -> str:  # fmt: skip
    """Whether a sample's gradient is the same collated alone and with others, which may be longer.

    What padding does to a sample no per-sample gradient shows: the rows of one batch are padded alike. Returns what
    could not be checked, or "". Raises StepError where the gradient changes by more than the tolerance, relatively: to
    itself, or, where it is rounding alone (as of two equal answers, one preferred), to a thousandth of the largest one
    and a hundred-thousandth of the clipping norm.
    """
    together = collate(examples)
    if not isinstance(together, Mapping) or _differ(together, collate(examples)):
        return "the collator draws at random, so what padding does to a sample was not checked"
    found = []
    for number, example in enumerate(examples):
        mine = prepare(rows(together, number, number + 1))
        alone = prepare(collate([example]))
        gradient = _gradient(model, loss, alone)
        moved = _size(_gradient(model, loss, mine), gradient) if _differ(mine, alone) else 0.0
        found.append((moved, _size(gradient)))
    finite = [pair for pair in found if all(map(math.isfinite, pair))]  # of others training says more
    least = max([1e-5 * norm, *(1e-3 * size for _, size in finite)])
    for moved, size in finite:
        change = moved / max(size, least)
        if change > tolerance:
            raise StepError(
                f"a sample's gradient depends on how far its batch is padded (it changes by {change:.1%}): the longest "
                "sample of a batch would change what all others contribute. Give the model an attention_mask, or pad "
                "every sample to one length (padding='max_length')."
            )
    return ""


def _gradient(model: nn.Module, loss: Loss, batch: Mapping[str, Any]) -> list[Tensor]:
    """The gradient of the loss, which draws the same numbers each time, should it draw any."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ParameterError("no trainable parameter: set requires_grad=True on what is to be trained")
    before = RandomNumbers({p.device for p in trained}, [])
    try:
        found = torch.autograd.grad(loss(model, batch), trained, allow_unused=True)
    finally:
        before.put_back()
    return [torch.zeros_like(p) if g is None else g for p, g in zip(trained, found, strict=True)]


def _size(one: list[Tensor], other: list[Tensor] | None = None) -> float:
    """The norm of a gradient, or of the difference of two."""
    pairs = zip(one, other or [torch.zeros((), device=p.device) for p in one], strict=True)
    return sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5


def check_model(
    model: nn.Module, loss: Loss, batch: Mapping[str, Any], options: dict[str, Any], tolerance: float | None
) -> VerifyReport:
    """`fastdp.verify` in eval mode; of large models a part of the parameters."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    total = sum(p.numel() for p in trainable)
    samples = max(2, min(4, VERIFIED_ELEMENTS // max(total, 1)))
    chosen: list[nn.Parameter] | None = None
    if samples * total > VERIFIED_ELEMENTS:
        chosen, room = [], VERIFIED_ELEMENTS // samples
        for parameter in sorted(trainable, key=lambda p: p.numel()):
            if parameter.numel() > room and chosen:
                break
            chosen.append(parameter)
            room -= parameter.numel()
    try:
        return verify(model, loss, batch, params=chosen, samples=samples, tolerance=tolerance, **options)
    except VerificationError as problem:
        words = str(problem)  # loss_reduction is an argument that the trainers do not have
        if _ELSEWHERE not in words:
            raise
        raise VerificationError(words.replace(_ELSEWHERE, _HERE)) from None


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two batches hold different tensors."""
    if set(one) != set(other):
        return True
    pairs = [(one[key], other[key]) for key in one]
    return any(
        isinstance(a, Tensor) and (not isinstance(b, Tensor) or a.shape != b.shape or not torch.equal(a, b))
        for a, b in pairs
    )
