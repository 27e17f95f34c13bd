"""Checks that a user's saved-tensor hooks return what captured calls saved.

`torch.autograd.graph.saved_tensors_hooks(pack, unpack)` puts functions between what a forward saves and what its
backward reads: to keep it on disk or in another memory, but also to round it, or worse. Numbers made of several samples
there would be in the norms and sums of all of them. Torch's own hooks (checkpointing, offloading) give back what they
took; of what passes through others a fingerprint is kept, and compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import SampleMixingError

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """What to know these tensors by, where hooks that are not torch's are on; else None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or str(getattr(hooks[0], "__module__", "")).startswith("torch."):
        return None
    return [_fingerprint(tensor) for tensor in tensors]


def check_same(tensors: Sequence[Tensor], before: list[Tensor] | None, name: str, path: str) -> None:
    """Raises SampleMixingError where a tensor is not what was saved."""
    if before is None:
        return
    for tensor, known in zip(tensors, before, strict=True):
        now = _fingerprint(tensor)
        if now.device != known.device or not torch.equal(now, known):  # on a device it waits: such hooks do so anyway
            raise SampleMixingError(
                f"{name}() in module '{path}': torch.autograd.graph.saved_tensors_hooks gave back other numbers than "
                "were saved in the forward. fastdp cannot assign them to samples, so their gradients are unknown. "
                "Let the hooks give back what they took; to round what is saved, round it in the forward."
            )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Two sums of a tensor's bits, the second by their places, and its sizes: int64, exact in any order of summing."""
    with torch.no_grad():
        value = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        bits = value.contiguous().flatten().view(_WHOLE[value.element_size()]).long()
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        sums = torch.stack([bits.sum(), (bits * places).sum()])
        return torch.cat([sums, torch.tensor([*tensor.shape, len(str(tensor.dtype))], device=bits.device)])
