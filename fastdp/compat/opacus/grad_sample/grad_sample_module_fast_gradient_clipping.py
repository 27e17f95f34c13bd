"""grad_sample_mode "ghost": per-sample gradients wait as in the other modes; modules also tell norms and factors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample import grad_sample_module_fast_gradient_clipping as theirs
from torch import Tensor, nn

from ....ops.clip import clip_factors
from . import samples
from .grad_sample_module import GradSampleHooks, GradSampleModule


class GradSampleHooksFastGradientClipping(GradSampleHooks):
    """Attached to a model, whose samples `DPOptimizerFastGradientClipping` clips, whatever the loss was.

    max_grad_norm: the clipping norm of all trainable parameters together; the optimizer's, once there is one.
    use_ghost_clipping: accepted; the engine chooses the way to each norm by time.
    """

    NORM_SAMPLERS: dict[type[nn.Module], Callable[..., Any]] = dict(
        theirs.GradSampleHooksFastGradientClipping.NORM_SAMPLERS
    )

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
    ) -> None:
        self._refuse_overrides()
        self.max_grad_norm, self.use_ghost_clipping = max_grad_norm, use_ghost_clipping
        self._norms: Tensor | None = None
        self._record: weakref.ref[samples.Record] | None = None
        super().__init__(
            m, batch_first=batch_first, loss_reduction=loss_reduction, strict=strict, force_functorch=force_functorch
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_record": None}

    @property
    def trainable_parameters(self) -> list[Tensor]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def _refuse_overrides(self) -> None:
        """Raises NotImplementedError for factors or norms of the user's own, which nothing here asks for."""
        for name in ("get_clipping_coef", "get_norm_sample"):
            known = getattr(GradSampleHooksFastGradientClipping, name)
            if name in self.__dict__ or getattr(type(self), name) is not known:
                raise NotImplementedError(
                    f"{type(self).__name__}.{name} was replaced, and samples are clipped by min(1, max_grad_norm / "
                    "norm) whatever it returns. Use fastdp's own optimizers for another clipping "
                    "(fastdp.DPAdamW(model, clipping=a function of the norms [B])), or set max_grad_norm."
                )

    def _take(self, record: samples.Record) -> None:
        self._refuse_overrides()
        self._record, self._norms = weakref.ref(record), None
        for p in record.parameters:
            if samples.is_processed(samples.peek(p)):  # a step has taken it: Opacus's criterion clears by itself
                p.grad_sample = None  # type: ignore[attr-defined]

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """Norms [B] of the last backward. They are not private: for debugging."""
        record = None if self._record is None else self._record()
        if self._norms is None and record is not None:
            self._norms = record.norms()
        if self._norms is None:
            raise AttributeError("per_sample_gradient_norms is not set: run a forward and a backward first")
        return self._norms

    @per_sample_gradient_norms.setter
    def per_sample_gradient_norms(self, value: Tensor | None) -> None:
        self._norms = value

    def get_norm_sample(self) -> Tensor:
        """Norms [B] of the last backward."""
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> Tensor:
        """Factors [B] that the samples of the last backward are clipped by."""
        return clip_factors(self.get_norm_sample().double().square(), float(self.max_grad_norm))


class GradSampleModuleFastGradientClipping(GradSampleHooksFastGradientClipping, GradSampleModule):
    """The user's module, wrapped; arguments of `GradSampleHooksFastGradientClipping`."""


# ---------------------------------------------------------------------- grad_sample_mode "ghost_tp"


class GradSampleHooksFastGradientClippingTP(GradSampleHooksFastGradientClipping):
    """Refused: raises NotImplementedError."""

    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        raise NotImplementedError(
            "grad_sample_mode 'ghost_tp' is not supported. Use fastdp's own optimizer after torch's parallelize_module "
            "(fastdp.DPAdamW(model, ...), docs/distributed.md), or 'ghost' on whole models; its memory is that of "
            "ordinary training."
        )


class GradSampleModuleFastGradientClippingTP(GradSampleHooksFastGradientClippingTP, AbstractGradSampleModule):  # type: ignore[misc]
    """Refused: raises NotImplementedError."""
