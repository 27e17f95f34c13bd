"""Where Opacus 1.6.0 is wrong and fastdp.compat.opacus is right: the same lines of code on both.

    python -m tests.compat.compat_faults    prints the table of docs/opacus.md

Each function takes a package and returns a number that must not exceed the limit beside it. Most of them: how far a
step without noise is from the clipped mean that one sample at a time gives, or over the clipping norm 1, relative.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

from .compat_measured import (
    OURS,
    THEIRS,
    Package,
    adaptive_clipping,
    attention_batch_first,
    batch_norm_frozen,
    batch_norm_without_parameters,
    batches_of_an_epoch,
    bf16_norms,
    channels_last,
    circular_padding,
    clip_scheduler,
    column_of_losses,
    expected_batch_size,
    lightning_generator,
    loop_left_early,
    noise_for_epochs,
    one_nan,
    own_criterion,
    recurrent_dropout,
    repeated_ids,
    running_statistics,
    sampling_rate,
    schedule_after_a_checkpoint,
    two_backwards,
    unused_layer,
)


class Fault(NamedTuple):
    function: Callable[[Package], float]
    limit: float
    told: str  # what the number is
    what: str  # of Opacus


EXACT = 1e-5
FAULTS = {
    f.function.__name__: f
    for f in (
        Fault(
            own_criterion,
            EXACT,
            "error of the step",
            'mode "ghost": the user\'s own loss instead of the returned criterion is not clipped',
        ),
        Fault(
            column_of_losses,
            EXACT,
            "error of the step",
            'mode "ghost": per-sample losses of shape [B, 1] meet factors [B]: not clipped',
        ),
        Fault(
            two_backwards, EXACT, "error of the step", 'mode "ghost": a second backward before the step drops the first'
        ),
        Fault(
            unused_layer,
            EXACT,
            "error of the step",
            'mode "ghost": a layer not used in a step counts with its last norm',
        ),
        Fault(
            clip_scheduler, EXACT, "over the bound", 'mode "ghost": clip schedulers change the noise, not the clipping'
        ),
        Fault(
            adaptive_clipping,
            EXACT,
            "over the bound",
            "adaptive clipping (PrivacyEngineAdaptiveClipping) does not clip",
        ),
        Fault(channels_last, EXACT, "error of the step", "convolution of channels_last inputs"),
        Fault(circular_padding, EXACT, "error of the step", "convolution with a padding_mode other than zeros"),
        Fault(repeated_ids, EXACT, "error of the step", "EmbeddingBag with an id twice in a bag"),
        Fault(bf16_norms, EXACT, "over the bound", "norms in bfloat16 under autocast"),
        Fault(one_nan, 0, "share of NaN weights", "one sample with a NaN destroys the model"),
        Fault(
            attention_batch_first, EXACT, "error of the output", "DPMultiheadAttention(batch_first=True) with two heads"
        ),
        Fault(
            recurrent_dropout,
            0,
            "share zeroed",
            "DPLSTM, DPGRU, DPRNN: dropout on the last layer and on the recurrent state",
        ),
        Fault(
            expected_batch_size, EXACT, "|expected batch size - 1|", "49 records, batch size 1: the sum is divided by 0"
        ),
        Fault(batches_of_an_epoch, 0, "batches missing", "UniformWithReplacementSampler at rate 1/93"),
        Fault(sampling_rate, 1e-3, "rate over the accounted", "sampling at rate 1e-6 by float32 numbers"),
        Fault(noise_for_epochs, 0, "steps not covered", "make_private_with_epsilon: noise for 3 epochs of 75 batches"),
        Fault(
            running_statistics,
            0,
            "running mean moved by",
            "ModuleValidator.fix leaves InstanceNorm's running statistics of the data",
        ),
        Fault(
            batch_norm_without_parameters,
            0,
            "trained coupled",
            "BatchNorm(affine=False) passes validation and training",
        ),
        Fault(
            batch_norm_frozen,
            0,
            "trained coupled",
            "a frozen BatchNorm in training mode passes validation and training",
        ),
        Fault(
            loop_left_early,
            0,
            "steps misplaced",
            "BatchMemoryManager: after a loop left early, steps fall at the wrong batches",
        ),
        Fault(
            schedule_after_a_checkpoint,
            EXACT,
            "error of the multiplier",
            "a loaded noise schedule begins again at its first value",
        ),
        Fault(lightning_generator, 0, "generator unused", "DPLightningDataModule ignores its generator"),
    )
}


def number(name: str, package: str) -> float | str:
    """The fault's number, or the exception."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(FAULTS[name].function(Package(package)))
    except Exception as problem:  # noqa: BLE001
        return f"{type(problem).__name__}: {str(problem)[:60]}"


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2g}"


def table() -> str:
    lines = ["| Opacus 1.6.0 | the number | Opacus | fastdp |", "| --- | --- | --- | --- |"]
    for name, fault in FAULTS.items():
        lines.append(f"| {fault.what} | {fault.told} | {shown(number(name, THEIRS))} | {shown(number(name, OURS))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), file=sys.stdout)
