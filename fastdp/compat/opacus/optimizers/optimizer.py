"""DPOptimizer: clipping of what waits in `p.grad_sample`, noise, and the step of the optimizer inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opacus.optimizers import optimizer as theirs
from torch import Tensor, nn
from torch.optim import Optimizer

from ....distributed.shards import Part
from ....ops.clip import clip_factors
from ....ops.noise import noise_
from ....optim.checkpoint import warn_of_others
from ..grad_sample import samples
from ..grad_sample.grad_sample_module import owners_of
from .noise import StepNoise
from .quantile import Quantile

_mark_as_processed = samples.mark_processed


def _check_processed_flag(obj: Tensor | list[Tensor]) -> None:
    """Raises ValueError where a step has taken this gradient, or one of these."""
    if samples.is_processed(obj):
        raise ValueError(
            "Gradients haven't been cleared since the last optimizer step: used twice they would cost more privacy "
            "than is accounted for. Call optimizer.zero_grad() after every step."
        )


def _generate_noise(std: float, reference: Tensor, generator: Any = None, secure_mode: bool = False) -> Tensor:
    """Noise of this standard deviation, of the reference's shape, device and type."""
    kind = torch.promote_types(reference.dtype, torch.float32)
    noise, source = torch.zeros(reference.shape, dtype=kind, device=reference.device), StepNoise(secure_mode)
    source.begin(generator)
    return noise_(noise, float(std), source.source.key, source.source.step).to(reference.dtype)


class DPOptimizer(theirs.DPOptimizer):  # type: ignore[misc]
    """Any optimizer of torch, made private: `step()` clips, sums, adds noise, and then makes its step.

    Args:
        optimizer: the optimizer inside, over parameters of a GradSampleModule.
        noise_multiplier: standard deviation of the noise on the sum, over max_grad_norm.
        max_grad_norm: the clipping norm.
        expected_batch_size: what the noisy sum is divided by under a mean loss.
        loss_reduction: "mean" or "sum"; under "sum" nothing is divided.
        generator: a torch.Generator that the noise is repeatable with; default: torch's own.
        secure_mode: noise keyed by the operating system; see `StepNoise`.

    `p.summed_grad` is the clipped sum, in float32 or better; `p.grad` after a step what the optimizer inside used.
    Noise is that of the largest clipping norm among the parts of the step, should it change between them. Copies and
    pickles raise NotImplementedError.

    >>> from fastdp.compat.opacus import GradSampleModule
    >>> model = GradSampleModule(nn.Linear(3, 2))
    >>> optimizer = DPOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=5
    ... )
    >>> model(torch.ones(5, 3)).square().sum(1).mean().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: Any = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        warn_of_others(optimizer, "the accountant of PrivacyEngine")
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )
        self._noise: StepNoise | None = None
        self._bound = 0.0  # the largest clipping norm of the sums at hand
        self.quantile: Quantile | None = None  # which moves max_grad_norm

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a copy of a {type(self).__name__} could repeat its noise: copy the module, and make it an optimizer by "
            "make_private; to save one, use its state_dict()"
        )

    # ------------------------------------------------------------------ clipping

    def _entries(self, p: Tensor) -> list[Any]:
        """What waits of each backward, not computed yet: Pending or Tensor. Raises ValueError where nothing does."""
        held = samples.peek(p)
        if isinstance(held, list):
            return held
        return [held] if isinstance(held, samples.Pending) else [self._get_flat_grad_sample(p)]

    @property
    def accumulated_iterations(self) -> int:
        """Backwards since the last zero_grad. Raises ValueError where parameters disagree."""
        counts = {len(self._entries(p)) for p in self.params}
        if len(counts) > 1:
            raise ValueError("Number of accumulated steps is inconsistent across parameters")
        return counts.pop()

    def clip_and_accumulate(self) -> None:
        """Clip the samples that wait, and add their sums to `p.summed_grad`."""
        count, parameters = self.accumulated_iterations, self.params
        entries = [self._entries(p) for p in parameters]
        for each in entries:
            _check_processed_flag(each)
        for number in range(count):
            with samples.outside():
                self._add(self._clipped([(p, each[number]) for p, each in zip(parameters, entries, strict=True)]))
        for each in entries:
            _mark_as_processed(each)

    def _clipped(self, parts: samples.Parts) -> dict[int, Tensor]:
        """The clipped sums of one backward, by id of the parameter."""
        return samples.sums(parts, self._clip_factors(samples.norm_sq(parts)))

    def _clip_factors(self, squares: Tensor) -> Tensor:
        """Factors [B] of samples with these squared norms."""
        bound = float(self.max_grad_norm)
        self._bound = max(bound, self._bound)
        if self.quantile is not None:
            self.quantile.count(squares, bound)
        return clip_factors(squares, bound)

    def _add(self, found: dict[int, Tensor]) -> None:
        for p in self.params:
            total, before = found[id(p)], getattr(p, "summed_grad", None)  # absent where it was frozen at first
            p.summed_grad = total if before is None else before.add_(total)

    # ------------------------------------------------------------------ the step

    def add_noise(self) -> None:
        """`p.grad` = the clipped sum and its noise."""
        multiplier = self.noise_multiplier if self.quantile is None else self.quantile.noise_multiplier()
        self._noise_into_grad(multiplier * self._sensitivity())
        if self.quantile is not None:
            self.quantile.move()

    def _sensitivity(self) -> float:
        """What one sample's contribution to the sums cannot exceed."""
        return max(float(self.max_grad_norm), self._bound)

    def _noise_into_grad(self, std: float) -> None:
        noise = self.begin_noise() if std else None
        for p in self.params:
            total = p.summed_grad
            _check_processed_flag(total)
            noisy = total.detach().clone(memory_format=torch.contiguous_format)
            if noise is not None:
                noise.add_(noisy, float(std), self._place(p))
            p.grad = self._laid(noisy, p)
            _mark_as_processed(total)

    def begin_noise(self) -> StepNoise:
        """The noise of the next step."""
        if self._noise is None or self._noise.secure != self.secure_mode:
            self._noise = StepNoise(self.secure_mode, self._same_key)
        self._noise.begin(self.generator)
        return self._noise

    def _place(self, p: nn.Parameter) -> Part | None:
        """What of a whole parameter this one is; None if it is whole."""
        return None

    def _laid(self, noisy: Tensor, p: nn.Parameter) -> Tensor:
        """The noisy sum, as the parameter lies."""
        return noisy.view_as(p).to(p.dtype)

    def _same_key(self, key: bytes) -> bytes:
        """The key of the noise that all processes draw, of which this one proposes one."""
        return key

    def total(self, what: str, number: float) -> float:
        """The sum of a number of each process. what: its name, for the error if processes differ in what they do."""
        return number

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear `p.grad_sample`; after a step that was no part of one, also `p.summed_grad`; zero `p.grad`."""
        for p in self.params:
            p.grad_sample = None
        if not self._is_last_step_skipped:
            self._drop_sums()
        self.original_optimizer.zero_grad(set_to_none)
        for owner in owners_of(self.params):
            owner.note_grads()

    def _drop_sums(self) -> None:
        self._bound = 0.0
        for p in self.params:
            p.summed_grad = None
        if self.quantile is not None:
            self.quantile.drop()

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool | None:
        """All but the step of the optimizer inside; False where that must not follow (a part of a batch)."""
        if not self.params:
            return True
        self.clip_and_accumulate()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            return False
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        self._is_last_step_skipped = False
        return True
