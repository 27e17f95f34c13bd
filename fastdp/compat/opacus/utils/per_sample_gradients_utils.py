"""Per-sample gradients compared with one sample at a time. What is plain torch is Opacus's own; what wraps is ours.

`fastdp.verify(model, loss_fn, batch)` says more: it also takes losses and whole batches of any structure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.utils.per_sample_gradients_utils import (
    ModelWithLoss,
    check_torch_version_for_ew_sample,
    clone_module,
    compute_microbatch_grad_sample,
    compute_microbatch_grad_sample_tensor_or_seq,
    get_grad_sample_modes,
    is_batch_empty,
    unpack_packedsequences,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..grad_sample import wrap_model

__all__ = [
    "ModelWithLoss",
    "check_per_sample_gradients_are_correct",
    "check_torch_version_for_ew_sample",
    "clone_module",
    "compute_grad_samples_microbatch_and_opacus",
    "compute_microbatch_grad_sample",
    "compute_microbatch_grad_sample_tensor_or_seq",
    "compute_opacus_grad_sample",
    "get_grad_sample_modes",
    "is_batch_empty",
    "unpack_packedsequences",
]


def compute_opacus_grad_sample(
    x: Any, module: nn.Module, batch_first: bool = True, loss_reduction: str = "mean", grad_sample_mode: str = "hooks"
) -> dict[str, Tensor]:
    """{name: per-sample gradient [B, *shape]} of a copy of the module, under an L1 loss against zeros, by fastdp."""
    torch.manual_seed(0)
    wrapped: Any = wrap_model(
        model=clone_module(module),
        grad_sample_mode=grad_sample_mode,
        batch_first=batch_first,
        loss_reduction=loss_reduction,
    )
    ModelWithLoss(wrapped, loss_reduction)(x).backward()
    return {name: p.grad_sample for name, p in wrapped._module.named_parameters() if p.requires_grad}


def compute_grad_samples_microbatch_and_opacus(
    x: Any,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
    chunk_method: Callable[[Any], Any] = iter,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Per-sample gradients of one sample at a time, and of this engine.

    Args: chunk_method: x -> its samples. Raises RuntimeError for an empty batch, ValueError where the two do not cover
    the same parameters.
    """
    packed = type(x) is PackedSequence
    if not packed and is_batch_empty(x):
        raise RuntimeError("an empty batch has no gradients to compare")
    truth = compute_microbatch_grad_sample(
        unpack_packedsequences(x) if packed else x,
        module,
        batch_first=batch_first,
        loss_reduction=loss_reduction,
        chunk_method=chunk_method,
    )
    found = compute_opacus_grad_sample(x, module, batch_first, loss_reduction, grad_sample_mode)
    if truth.keys() != found.keys():
        raise ValueError(f"parameters of only one of the two: {sorted(truth.keys() ^ found.keys())}")
    return truth, found


def check_per_sample_gradients_are_correct(
    x: Any,
    module: nn.Module,
    *,
    batch_first: bool = True,
    atol: float = 10e-6,
    rtol: float = 10e-5,
    grad_sample_mode: str = "hooks",
) -> bool:
    """Whether per-sample gradients equal those of one sample at a time, under a mean and a sum loss.

    Args: x: a batch, or a PackedSequence. Raises RuntimeError for mode "ew" with batch_first=False, as Opacus does.
    """
    if grad_sample_mode == "ew" and not batch_first:
        raise RuntimeError('grad_sample_mode="ew" needs the batch as the first dimension')
    for reduction in ("sum", "mean"):
        truth, found = compute_grad_samples_microbatch_and_opacus(
            x, module, batch_first, reduction, grad_sample_mode=grad_sample_mode
        )
        for name, want in truth.items():
            if found[name].shape != want.shape or not torch.allclose(want, found[name], rtol, atol):
                return False
    return True
