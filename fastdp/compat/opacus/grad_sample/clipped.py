"""Sums of clipped gradients until a step takes them, and whether something has written to them meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import StepError

_LOOKS = 4096
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Clipped:
    """Of the backwards that no step has taken."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}  # by id of the parameter, float32 or better
        self.bound = 0.0  # the largest clipping norm among them
        self.backwards = 0
        self._shown: dict[int, tuple[Tensor, int, Tensor]] = {}  # what stands in .grad, its version, and its bits

    def show(self, parameter: Tensor, grad: Tensor) -> None:
        """Let this stand in `.grad`. All sums must have been written."""
        parameter.grad = grad
        self._shown[id(parameter)] = (grad, _version(grad), _bits(grad))

    def check(self, parameters: Sequence[Any]) -> None:
        """Raises StepError if what stands in `.grad` of one of these is neither what was put there nor None."""
        by_device: dict[torch.device, list[tuple[Any, Tensor]]] = {}
        for p in parameters:
            if id(p) not in self._shown or p.grad is None:
                continue
            shown, version, bits = self._shown[id(p)]
            if p.grad is not shown or _version(shown) != version:
                _refuse(p)
            by_device.setdefault(bits.device, []).append((p, _bits(shown) != bits))
        for found in by_device.values():  # one look at each device
            for (p, _), differs in zip(found, torch.stack([each for _, each in found]).tolist(), strict=True):
                if differs:
                    _refuse(p)


def _refuse(parameter: Tensor) -> None:
    raise StepError(
        f"`.grad` of a parameter of shape {tuple(parameter.shape)} was written to between backward and step, where it "
        "is the sum of clipped gradients: what is written there has no bound. Change gradients after the noise, in "
        "optimizer.register_step_pre_hook."
    )


def _version(grad: Any) -> int:
    return int(grad._version) + int(getattr(grad, "_local_tensor", grad)._version)


def _bits(grad: Any) -> Tensor:
    """The sum of the bits of a gradient's numbers, of large ones of `_LOOKS` places: `.data`, and torch._foreach_ of
    DTensors, write to all of them past every version. A look at every number would cost a step of a small batch a
    sixth of its time."""
    flat = getattr(grad, "_local_tensor", grad).detach().reshape(-1)
    return flat.view(_WORDS[flat.element_size()])[:: flat.numel() // _LOOKS + 1].sum(dtype=torch.int64)
