"""Messages and checks for training loops that would silently change the guarantee."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import Tensor

from ..batch_axis.current_batch import PhysicalBatch
from ..distributed.frameworks import accumulates
from ..errors import StepError
from ..ops.checks import capturing
from ..utils.code_location import frames

_PHYSICAL = (
    "For batches larger than the memory give the loader max_physical_batch_size= and call step() after each batch: "
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
    "wrapper; Lightning, if the loader has no length), so that fastdp takes this batch for another one: train on each "
    "batch before the next is fetched, with Lightning through fastdp.lightning. Or the loop skipped a batch: every "
    "sampled batch needs a step, an empty one too, since skipping batches for what is in them is not Poisson sampling. "
    f"{EVERY_BATCH}. To begin within a pass use the loader's load_state_dict()."
)
LAST_SKIPPED = (
    "the loader's pass is over, and no step() was called on its last batch: the loop skipped it, or waits for a batch "
    "that does not come (accumulation). Every sampled batch needs a step, since skipping batches for what is in them "
    f"is not Poisson sampling. {EVERY_BATCH}."
)
PASSED_OVER = "{n} batch(es) of the loader were skipped: epsilon does not account for that."
CHOSEN = (
    "{n} batch(es) of the loader had no step() while others had: they were taken out of the loader before any "
    "was trained on, or another optimizer stepped on them. This is fine if it was settled beforehand (turns by "
    "number), and not if batches were chosen for what was in them: epsilon does not account for that."
)
LEFT = (
    "{n} time(s) the loop was left with a batch of the loader in hand that no step() had ended. This is fine "
    "if it was settled beforehand, and not if it was for what was in the batch: epsilon does not account for that."
)
CUT = (
    "{n} time(s) the loop was left within a logical batch, before its last physical batch: the sums of it are lost, "
    "and epsilon does not account for the reason."
)
UNUSED = (
    "{n} pass(es) over the poisson_loader were made without any step(), with gradients on and the model in the mode in "
    "which it is trained. This is fine if they were for another purpose (evaluation: model.eval(), torch.no_grad()), "
    "and not if the batches were skipped for what was in them: epsilon does not account for that."
)
AGAIN = (
    "a second backward on the same batch of the loader: its samples would contribute twice. Add the losses and call "
    "backward once; after a step, go on with the next batch (the loader's steps= gives more). For an input's gradient "
    "(an attack) take torch.autograd.grad of the loss's sum. One of nothing private (a generator's step, generated "
    "samples) goes into optimizer.public()."
)
REPEATED = (
    "a step was made on a batch that had one before (pass {1}, step {2} of what the poisson_loader draws). Together "
    "they tell more of its records than steps on two samples would: epsilon() counts them as one step with less noise. "
    "Draw each batch once: iterate over the loader itself (each pass draws anew), not over a list of its batches, a "
    "copy or a pickle of it; load its state only together with the optimizer's state that was saved beside it; give "
    "no seed= twice."
)
PERHAPS_REPEATED = (
    "epsilon may not hold: steps were made on all batches that had been taken out of a poisson_loader, and one more "
    "batch of the size of one of them came. A second step on the same sample, with noise of its own, costs more than "
    "epsilon says: iterate over the loader itself, which draws anew in each pass."
)
NO_BACKWARD = (
    "step() without a backward since the last one: call loss.backward() first, without inputs= (which, as "
    "torch.autograd.grad, leaves other gradients out), and zero_grad() after step(), not between"
)
OUTSIDE = (
    "no backward since the last step went through a forward of the model, though parameters have gradients: they were "
    "used outside of it, as F.linear(x, model.weight) in the loss, where fastdp knows no sample's gradient. Use them "
    "in the forward of the model (of a module that holds them, called on the data), and zero_grad()."
)
NO_SIZE = (
    "expected_batch_size is not known: give it to the optimizer (with a mean loss the noisy sum is divided by it), or "
    "train with fastdp.poisson_loader, which tells it"
)
UNGROUPED = (
    "parameters changed since the optimizer was made: {} now require grad but belong to no clipping group. Add them "
    "with add_param_group, or freeze them."
)
DROPPED = "a logical batch was left before its last physical batch: its gradients are dropped, no step was made"
NO_RATE = (
    "the sample rate of this step is not known, and epsilon() will need it: the batch is from no fastdp.poisson_loader "
    "(which tells the rate), and the optimizer was given no sample_rate=. Call epsilon(delta, sample_rate=) with the "
    "probability that a record is in a batch. (The accountants assume Poisson sampling.)"
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
OWN_BATCHES = (
    "the batches come from no fastdp.poisson_loader, in a world of {n} processes: fastdp cannot see whether a record "
    "is on two ranks in one step, where it would count twice. torch's DistributedSampler repeats records unless "
    "drop_last=True. fastdp.poisson_loader gives each rank its part."
)
PERSONS_APART = (
    "group_by() in a world of several processes: a person whose records are on two ranks would be clipped on each, and "
    "count twice. fastdp.poisson_loader(group_by=) keeps each person whole on a rank."
)
SCALED = (
    "a GradScaler has scaled the loss: every sample's norm was too large by the scale, so the gradients are dropped. "
    "fp16 with a scaler is not supported: use bfloat16, which needs none (autocast(dtype=torch.bfloat16), "
    "mixed_precision='bf16', precision='bf16-mixed'), or GradScaler(enabled=False)."
)


def gone(by: str) -> str:
    """What an optimizer says that trains its model no more; by: what has taken its place."""
    if not by:
        return "this optimizer was detached from its model: make a new one to train on"
    return (
        f"this optimizer was replaced, since a {by} was made for the same model: train with that one. To train parts "
        "of a model in different ways give one optimizer groups, by params=."
    )


def check_skipped(batch: PhysicalBatch) -> None:
    """Raises StepError for a batch that was fetched ahead: it would be taken for another, of another logical batch
    perhaps."""
    if batch.skipped:
        raise StepError(SKIPPED)


def check_whole(batch: PhysicalBatch, records: int, people: object) -> None:
    """Raises StepError unless the model was given the batch in hand, of its records (and persons), and nothing else."""
    if records != batch.size or people != batch.people:
        raise StepError(
            f"the loader handed out {batch.size} records, the model was given a batch of {records}"
            f"{'' if records != batch.size else ' of other persons'}. One record must be one row (or augmentations= "
            "or rows_per_sample= of them), and the whole batch must pass at once: the loader cuts large ones into "
            "physical batches itself, by max_physical_batch_size=, with a backward() and step() for each."
        )


def check_share(batch: PhysicalBatch, rank: int, ranks: int) -> None:
    """Raises StepError unless the batch is this process's part of a logical batch, of as many as train together."""
    if batch.share != (rank, ranks):
        raise StepError(
            f"the loader's batches are one of {batch.share[1]} parts of a logical batch, and {ranks} processes train "
            "together: records would count several times, or be left out. Make the loader and the optimizer on every "
            "rank, both after torch.distributed.init_process_group."
        )


def refuse_capture(sums: Iterable[Tensor]) -> None:
    """Raises StepError where a user's graph is captured on the device of a sum."""
    if any(map(capturing, {total.device for total in sums})):
        raise StepError(
            "step() within the capture of a graph (torch.cuda.graph, make_graphed_callables, mode='reduce-overhead'): "
            "every replay would add the same noise, and none would be counted. Capture forward and backward of "
            "ordinary models only; optimizer.graphed replays private steps, with new noise each time."
        )


def refuse_division() -> None:
    """Raises StepError in a step that Lightning or Accelerate's wrapper makes, where it divides losses.

    Accelerate's setting is the process's, and outlives the loop that made it: it says nothing of a step that no wrapper
    calls. Lightning's may change by the epoch, and where an epoch has one batch, nothing is left to wait for a step.
    """
    if (divisor := accumulates()) != 1:
        raise StepError(
            f"Lightning's accumulate_grad_batches (or its GradientAccumulationScheduler) divides every loss by "
            f"{divisor}, so every sample's norm would be {divisor} times too small beside max_grad_norm. {_PHYSICAL}"
        )
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)  # only if the loop has imported it
    count = getattr(state, "_shared_state", {}).get("plugin_kwargs", {}).get("num_steps", 1)
    wrapper = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    if count == 1 or wrapper is None:
        return
    if any(isinstance(each.f_locals.get("self"), wrapper) for each in frames(sys._getframe(1))):
        raise StepError(
            f"Accelerator(gradient_accumulation_steps={count}) divides every loss by {count}, so every sample's norm "
            f"would be {count} times too small beside max_grad_norm. {_PHYSICAL}"
        )
