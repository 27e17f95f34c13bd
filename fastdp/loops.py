"""What loops of one's own or of a framework do that would silently change the guarantee, and how it is refused."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch.utils.data import SubsetRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .errors import StepError

_PHYSICAL = (
    "For batches larger than the memory give poisson_loader max_physical_batch_size= and call step() after each batch: "
    "it steps when the logical batch is complete, and no loss is divided. So no accumulation of the framework: "
    "Accelerate's gradient_accumulation_steps and Lightning's accumulate_grad_batches stay 1."
)
UNSTEPPED = (
    "no step() was called since the backward on the loader's batch before this one: gradients of several batches, of "
    f"several logical batches perhaps, would be taken for one. {_PHYSICAL}"
)
EVERY_BATCH = (
    "Train on every batch as it comes: on a small one as on others, and on an empty one by step() alone; to leave out "
    "a sample for what it is, give it a loss of 0. To end after a number of steps, break after step(), or give the "
    "loader steps="
)
SKIPPED = (
    "no step() was called on the loader's batch before this one. Either something fetches batches ahead (a prefetching "
    "wrapper; Lightning, where the loader has no length), so that this is taken for another batch than it is: train on "
    "each batch before the next is fetched, with Lightning through fastdp.lightning. Or the loop passed over a batch: "
    "what is sampled must be stepped on, an empty batch too, as to pass over one for what is in it is no Poisson "
    f"sampling. {EVERY_BATCH}. To begin within a pass use the loader's load_state_dict()."
)
LAST_SKIPPED = (
    "the loader's pass is over, and no step() was called on its last batch: the loop passed over it, or waits for a "
    "batch that does not come (accumulation). What is sampled must be stepped on, as to pass over a batch for what is "
    f"in it is no Poisson sampling. {EVERY_BATCH}."
)
PASSED_OVER = "{n} batch(es) of the poisson_loader were passed over, of which no accountant knows."
LEFT = (
    "{n} time(s) the loop was left with a batch of the poisson_loader in hand that no step() had ended: fine if that "
    "was settled beforehand, and not if it was for what was in the batch, of which no accountant knows."
)
CUT = (
    "{n} time(s) the loop was left within a logical batch, before its last physical batch: what was summed up of it is "
    "lost, and no accountant knows why."
)
UNUSED = (
    "{n} pass(es) over the poisson_loader were made without any step(), with the model in training mode: fine if they "
    "were for another purpose (evaluation: model.eval(), torch.no_grad()), and not if the batches were passed over for "
    "what was in them, of which no accountant knows."
)
BEFORE_CLOSURE = (
    "step(closure) after backwards that no step has taken: they would be added to the closure's, and what accumulates "
    f"so (Lightning's accumulate_grad_batches) divides the losses, which are then clipped as if smaller. {_PHYSICAL}"
)
ADDED = (
    "several backwards before a step(): their clipped sums are added. Divide no loss by their number (a sample's norm "
    "would be that much too small beside max_grad_norm), give the expected_batch_size of them all, and let no sample "
    "be in two of them, where it would count twice. fastdp.poisson_loader(max_physical_batch_size=) does all of it."
)
SCALED = (
    "a GradScaler has scaled the loss: every sample's norm was too large by the scale, so the gradients are dropped. "
    "fp16 with a scaler is not supported: use bfloat16, which needs none (autocast(dtype=torch.bfloat16), "
    "mixed_precision='bf16', precision='bf16-mixed'), or GradScaler(enabled=False)."
)


def check() -> None:
    """Raises StepError where several processes train together."""
    spread = torch.distributed
    if spread.is_available() and spread.is_initialized() and spread.get_world_size() > 1:
        raise StepError(
            f"{spread.get_world_size()} processes train together: each would clip, noise and step on its own, and "
            "their models would drift apart. Data-parallel training is not supported yet: start one process "
            "(accelerate launch --num_processes 1; in Lightning devices=1)."
        )


def refuse_division() -> None:
    """Raises StepError in a step of Accelerate's wrapper, where Accelerate divides losses.

    Its setting is the process's, and outlives the loop that made it: it says nothing of a step that no wrapper calls.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)  # only if the loop has imported it
    count = getattr(state, "_shared_state", {}).get("plugin_kwargs", {}).get("num_steps", 1)
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    if count == 1 or wrapper is None:
        return
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and not isinstance(caller.f_locals.get("self"), wrapper):
        caller = caller.f_back
    if caller is not None:
        raise StepError(
            f"Accelerator(gradient_accumulation_steps={count}) divides every loss by {count}, so every sample's norm "
            f"would be {count} times too small beside max_grad_norm. {_PHYSICAL}"
        )


_IN_VAIN: Counter[tuple[float, int]] = Counter()  # how often there was no DataLoader at such a rate and batch
_OFTEN = 3  # looking takes 20 ms: programs that make hundreds of optimizers (fastdp.audit) do not wait for that


def check_rate(rate: float | None, batch: int, expected: float | None) -> None:
    """Warns where a sample rate that was given is far below what the first batch shows.

    Args: batch: samples of this backward; expected: the expected batch size that was given with the rate. Records
    can be counted where an ordinary DataLoader is being iterated: of several, the one with the most is believed.
    """
    if rate is None:
        return
    seen = ""
    if expected is not None and batch > 2 * expected + 10:  # more than chance makes of it
        seen = f"expected_batch_size={expected:g} was given with it, and the first batch has {batch} samples"
    elif _IN_VAIN[rate, batch] < _OFTEN and (records := _records(rate, batch)) and rate < batch / records / 2:
        seen = (
            f"the first batch has {batch} of the {records} records of its DataLoader, a rate of {batch / records:.3g}"
        )
    if seen:
        warnings.warn(
            f"sample_rate={rate:g} is far below what is sampled: {seen}. epsilon grows with the rate, and what is said "
            "of it would be too small: give batch / records, or train with fastdp.poisson_loader, which tells it.",
            stacklevel=2,
        )


def _records(rate: float, batch: int) -> int:
    """Records of the largest data set whose DataLoader has handed out a batch and is not done, 0 if there is none."""
    found = 0
    kinds = [_BaseDataLoaderIter, *_BaseDataLoaderIter.__subclasses__()]
    iterators = [item for item in gc.get_referrers(*kinds) if isinstance(item, _BaseDataLoaderIter)]
    if not iterators:
        _IN_VAIN[rate, batch] += 1
    for iterator in iterators:
        if not getattr(iterator, "_num_yielded", 0):
            continue
        source: Any = getattr(getattr(iterator, "_index_sampler", None), "sampler", None)
        if not isinstance(source, SubsetRandomSampler):
            source = getattr(iterator, "_dataset", None)
        try:
            count = len(source)
        except (TypeError, NotImplementedError):
            return 0  # a stream, whose records cannot be counted
        found = max(found, count if getattr(iterator, "_auto_collation", True) else count * batch)
    return found
