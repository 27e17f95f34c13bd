"""grad_sample_mode "no_op": whoever trains fills `p.grad_sample`."""

from __future__ import annotations

from typing import Any

from torch import nn

from .gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule


class GradSampleHooksNoOp(AbstractGradSampleHooks):
    """Makes the attribute, and computes nothing."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        if not batch_first:
            raise NotImplementedError("grad_sample_mode 'no_op' takes batch_first=True only")
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)

    def remove_hooks(self) -> None:
        pass


class GradSampleModuleNoOp(GradSampleHooksNoOp, AbstractGradSampleModule):
    """The user's module, wrapped."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self._module.forward(x, *args, **kwargs)
