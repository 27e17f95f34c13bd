"""grad_sample_mode "ghost": gradients of samples are clipped at the end of every backward and never stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....distributed.wrappers import check_samples
from ....engine.gradients import Gradients
from ....ops.clip import clip_factors
from . import samples
from .clipped import Clipped
from .exact_samplers import WITH_NORMS, layer_norm_sample
from .grad_sample_module import GradSampleHooks
from .gsm_base import AbstractGradSampleModule

OTHER_OPTIMIZER = (
    "the module's parameters lie in parts on the processes (mode 'ghost_fsdp'), which this optimizer does not know of: "
    "its sums and its noise would be of other places. Take FSDPOptimizerFastGradientClipping, as make_private does."
)


class GradSampleHooksFastGradientClipping(GradSampleHooks):
    """Attached to a model; after any loss's `backward()`, `.grad` is the sum of the clipped gradients of its samples.

    max_grad_norm: the clipping norm of all trainable parameters together; the optimizer's, once there is one.
    use_ghost_clipping: accepted; the engine chooses the way to each norm by time.
    on_norms: called with the norms [B] of a backward before its samples are clipped; it may set `max_grad_norm`.
    """

    in_parts = False  # whether the parameters lie in parts on several processes
    NORM_SAMPLERS: dict[type[nn.Module], Callable[..., Any]] = dict.fromkeys(WITH_NORMS, layer_norm_sample)

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
        self.max_grad_norm = max_grad_norm
        self.use_ghost_clipping = use_ghost_clipping
        self.on_norms: Callable[[Tensor], None] | None = None
        self._per_sample_gradient_norms: Tensor | None = None
        self._clipped = Clipped()
        super().__init__(
            m, batch_first=batch_first, loss_reduction=loss_reduction, strict=strict, force_functorch=force_functorch
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_clipped": Clipped()}

    @property
    def trainable_parameters(self) -> list[Tensor]:
        return [p for p in self._module.parameters() if p.requires_grad]

    # ------------------------------------------------------------------ backward

    def _on_backward(self, gradients: Gradients) -> None:
        if not self._counts():
            return
        self._refuse_overrides()
        self._world.check()
        check_samples(self._world)
        if self._clipped.backwards and not self.grad_accumulation_allowed:
            self._refuse_accumulation()
        with samples.outside():
            self._take(gradients)

    def _refuse_overrides(self) -> None:
        """Raises NotImplementedError for factors or norms of the user's own, which nothing here asks for."""
        for name in ("get_clipping_coef", "get_norm_sample"):
            own = name in self.__dict__ or getattr(type(self), name) is not getattr(
                GradSampleHooksFastGradientClipping, name
            )
            if own:
                raise NotImplementedError(
                    f"{type(self).__name__}.{name} was replaced, and samples are clipped by min(1, max_grad_norm / "
                    "norm) whatever it returns. Use fastdp's own optimizers for another clipping "
                    "(fastdp.DPAdamW(model, clipping=a function of the norms [B])), or set max_grad_norm."
                )

    def _take(self, gradients: Gradients) -> None:
        """Clip a backward's samples, and keep their sums."""
        parameters = self._trained()
        norm_sq = gradients.norm_sq(parameters)
        self.take_norms(norm_sq)
        bound = float(self.max_grad_norm)
        self._keep(parameters, gradients.clipped_sum(clip_factors(norm_sq, bound), parameters), bound)

    def take_norms(self, norm_sq: Tensor) -> None:
        """The squared norms [B] of a backward, before its samples are clipped."""
        self.per_sample_gradient_norms = norm_sq.sqrt().float()
        if self.on_norms is not None:
            self.on_norms(self.per_sample_gradient_norms)

    def _keep(self, parameters: list[Tensor], sums: dict[int, Tensor], bound: float) -> None:
        kept = self._clipped
        kept.check(parameters)
        kept.backwards += 1
        kept.bound = max(kept.bound, bound)
        for p in parameters:
            new = sums.get(id(p))
            before = kept.sums.get(id(p))
            if new is None:  # not used: its gradients are zero
                if before is not None:
                    continue
                new = torch.zeros(p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
            kept.sums[id(p)] = new if before is None else before.add_(new)
        for p in parameters:  # once all are written: sums may be views of one memory, with one version
            kept.show(p, self._shown(p, kept.sums[id(p)]))
        self.note_grads()

    def _shown(self, parameter: Tensor, total: Tensor) -> Tensor:
        """What stands in a parameter's `.grad` until the step."""
        return total.detach().to(parameter.dtype)

    def take_clipped(self) -> Clipped:
        """The sums since the last call; they are then not kept here."""
        taken, self._clipped = self._clipped, Clipped()
        return taken

    def backwards(self) -> int:
        """Backwards that no step has taken."""
        return self._clipped.backwards

    def drop_clipped(self) -> None:
        """Forget the sums since the last step."""
        self._clipped = Clipped()

    def set_grad_sample_to_none(self) -> None:
        self.drop_clipped()
        super().set_grad_sample_to_none()

    # ------------------------------------------------------------------ norms

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """Norms [B] of the last backward. They are not private: for debugging."""
        if self._per_sample_gradient_norms is None:
            raise AttributeError("per_sample_gradient_norms is not set: run a forward and a backward first")
        return self._per_sample_gradient_norms

    @per_sample_gradient_norms.setter
    def per_sample_gradient_norms(self, value: Tensor | None) -> None:
        self._per_sample_gradient_norms = value

    def get_norm_sample(self) -> Tensor:
        """Norms [B] of the last backward."""
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> Tensor:
        """Factors [B] that the samples of the last backward were clipped by."""
        return clip_factors(self.get_norm_sample().double().square(), float(self.max_grad_norm))


class GradSampleModuleFastGradientClipping(GradSampleHooksFastGradientClipping, AbstractGradSampleModule):
    """The user's module, wrapped; arguments of `GradSampleHooksFastGradientClipping`."""


# ---------------------------------------------------------------------- grad_sample_mode "ghost_tp"

_NO_TENSOR_PARALLELISM = (
    "grad_sample_mode 'ghost_tp' is not supported. Use fastdp's own optimizer after torch's parallelize_module "
    "(fastdp.DPAdamW(model, ...), docs/distributed.md), or 'ghost' on whole models; its memory is that of ordinary "
    "training."
)


class GradSampleHooksFastGradientClippingTP(GradSampleHooksFastGradientClipping):
    """Refused: raises NotImplementedError."""

    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        raise NotImplementedError(_NO_TENSOR_PARALLELISM)


class GradSampleModuleFastGradientClippingTP(
    GradSampleHooksFastGradientClippingTP, GradSampleModuleFastGradientClipping
):
    """Refused: raises NotImplementedError."""
