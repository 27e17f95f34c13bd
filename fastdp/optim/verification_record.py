"""Records which models `fastdp.verify` has passed."""

from __future__ import annotations

import warnings
import weakref

from torch import nn

from ..distributed.world import world_of
from ..errors import NotVerifiedWarning

_TOLD: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_VERIFIED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def note_verified(model: nn.Module, looked_at: str) -> None:
    """verify has found nothing wrong with this very module. looked_at: in words, on what and how it looked."""
    _VERIFIED[model] = looked_at


def forget_verified(model: nn.Module) -> None:
    """verify has found a fault: what it said before no longer holds."""
    _VERIFIED.pop(model, None)


def was_verified(model: nn.Module) -> bool:
    """Whether verify ran on this very module in this process and found nothing wrong the last time.

    A copy, a part and a wrapper of a verified model were not verified. Which loss it was verified with is not known
    here, and nothing of what was changed in the model since.
    """
    return model in _VERIFIED


def verified_on(model: nn.Module) -> str:
    """On what verify looked when it found nothing wrong, in words; '' if it never did."""
    return _VERIFIED.get(model, "")


def warn_unverified(model: nn.Module, stacklevel: int = 3) -> None:
    """Say once of a model, in the first of several processes, that verify has never found it right."""
    if model in _TOLD or was_verified(model) or world_of().rank > 0:
        return
    _TOLD.add(model)
    warnings.warn(
        "the model was never verified: fastdp.verify(model, loss_fn, records) compares with one sample at a time, and "
        "finds what the engine cannot see (docs/limits.md). The epsilon holds if it finds nothing.",
        NotVerifiedWarning,
        stacklevel=stacklevel,
    )
