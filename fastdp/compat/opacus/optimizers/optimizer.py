"""DPOptimizer: clipping of what waits in `p.grad_sample`, noise, and the step of the optimizer inside."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ....distributed.shards import Part
from ....ops.clip import clip_factors
from ....optim.checkpoint import warn_of_others
from ..grad_sample import samples
from ..grad_sample.gsm_base import owners_of
from ..grad_sample.samples import Pending
from .copies import Copied
from .noise import StepNoise
from .sums import norm_sq, sums
from .utils import params

logger = logging.getLogger(__name__)
logger.disabled = True


def _mark_as_processed(obj: Tensor | list[Tensor]) -> None:
    """Note that a step has taken this gradient, or these."""
    samples.mark_processed(obj)


def _check_processed_flag(obj: Tensor | list[Tensor]) -> None:
    """Raises ValueError where a step has taken this gradient, or one of these."""
    if samples.is_processed(obj):
        raise ValueError(
            "Gradients haven't been cleared since the last optimizer step: used twice they would cost more privacy "
            "than is accounted for. Call optimizer.zero_grad() after every step."
        )


def _generate_noise(std: float, reference: Tensor, generator: Any = None, secure_mode: bool = False) -> Tensor:
    """Noise of this standard deviation, of the reference's shape, device and type."""
    kind = torch.float64 if reference.dtype == torch.float64 else torch.float32
    noise = torch.zeros(reference.shape, dtype=kind, device=reference.device)
    if std:
        StepNoise(generator, secure_mode).add_(noise, float(std))
    return noise.to(reference.dtype)


class DPOptimizer(Copied, Optimizer):
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
    Noise is that of the largest clipping norm among the backwards of the step, should it change between them.

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
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"Unexpected value for loss_reduction: {loss_reduction}")
        if loss_reduction == "mean" and expected_batch_size is None:
            raise ValueError("expected_batch_size is needed where loss_reduction is 'mean'")
        warn_of_others(optimizer, "the accountant of PrivacyEngine")
        self.original_optimizer = optimizer
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.loss_reduction = loss_reduction
        self.expected_batch_size = expected_batch_size
        self.step_hook: Callable[[DPOptimizer], None] | None = None
        self.generator = generator
        self.secure_mode = secure_mode
        self._step_skip_queue: list[bool] = []
        self._is_last_step_skipped = False
        self._noise: StepNoise | None = None
        self._bound: float | None = None  # the largest clipping norm of the sums at hand
        for p in self.params:
            p.summed_grad = None  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ the optimizer inside

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return params(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = param_groups

    @property
    def state(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return self.original_optimizer.state  # type: ignore[return-value]

    @state.setter
    def state(self, state: defaultdict[Any, Any]) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also train these parameters."""
        self.original_optimizer.add_param_group(param_group)
        for p in self.params:
            if not hasattr(p, "summed_grad"):
                p.summed_grad = None  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Of the optimizer inside: called at real steps, once `.grad` is private."""
        return self.original_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Of the optimizer inside: called after real steps."""
        return self.original_optimizer.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return repr(self.original_optimizer)

    # ------------------------------------------------------------------ gradients of samples

    def _get_flat_grad_sample(self, p: Tensor) -> Tensor:
        """The per-sample gradients of all backwards since the last zero_grad: [samples, *shape].

        Raises ValueError where there are none.
        """
        entries = [e.tensor() if isinstance(e, Pending) else e for e in self._entries(p)]
        return entries[0] if len(entries) == 1 else torch.cat(entries)

    def _entries(self, p: Tensor) -> list[Any]:
        """What waits of each backward, without a look: Pending or Tensor. Raises ValueError where nothing does."""
        try:
            held = samples.peek(p)
        except AttributeError:
            raise ValueError(
                f"Per sample gradient not found. Are you using GradSampleModule? (a parameter of shape "
                f"{tuple(p.shape)} has no grad_sample)"
            ) from None
        if held is None:
            raise ValueError(
                "Per sample gradient is not initialized. Not updated in backward pass? (step() needs a backward since "
                "zero_grad(), through the module that the parameters belong to, in training mode)"
            )
        if isinstance(held, list):
            return held
        if not isinstance(held, Pending | Tensor):
            raise ValueError(f"Unexpected grad_sample type: {type(held)}")
        return [held]

    @property
    def grad_samples(self) -> list[Tensor]:
        """The per-sample gradients of each parameter. Looking at them makes tensors of them."""
        for p in self.params:
            if isinstance(p.__dict__.get(samples.NAME), Pending | list):
                p.grad_sample  # type: ignore[attr-defined]  # noqa: B018  (what is looked at may be edited)
        return [self._get_flat_grad_sample(p) for p in self.params]

    @property
    def accumulated_iterations(self) -> int:
        """Backwards since the last zero_grad. Raises ValueError where parameters disagree."""
        counts = {len(self._entries(p)) for p in self.params}
        if len(counts) > 1:
            raise ValueError("Number of accumulated steps is inconsistent across parameters")
        return counts.pop()

    # ------------------------------------------------------------------ clipping

    def clip_and_accumulate(self) -> None:
        """Clip the samples that wait, and add their sums to `p.summed_grad`."""
        for parts in self._backwards():
            with samples.outside():
                self._add(sums(parts, self._clip_factors(norm_sq(parts))))
        self._after_clipping(self.max_grad_norm)

    def _clip_factors(self, squares: Tensor) -> Tensor:
        """Factors [B] of samples with these squared norms."""
        return clip_factors(squares, float(self.max_grad_norm))

    def _backwards(self) -> Iterator[list[tuple[nn.Parameter, Any]]]:
        """(parameter, Pending or Tensor) of all parameters, for each backward that waits. Checks first."""
        entries = {id(p): self._entries(p) for p in self.params}
        for each in entries.values():
            _check_processed_flag(each)
        counts = {len(each) for each in entries.values()}
        if len(counts) > 1:  # edited by hand: as one batch each
            entries = {id(p): [self._get_flat_grad_sample(p)] for p in self.params}
            counts = {1}
        for number in range(max(counts, default=0)):
            yield [(p, entries[id(p)][number]) for p in self.params]

    def _add(self, found: dict[int, Tensor]) -> None:
        for p in self.params:
            total = found[id(p)]
            before = getattr(p, "summed_grad", None)  # absent where the parameter was frozen at first
            p.summed_grad = total if before is None else before.add_(total)  # type: ignore[attr-defined]

    def _after_clipping(self, bound: float) -> None:
        self._bound = max(float(bound), self._bound or 0.0)
        for p in self.params:
            _mark_as_processed(samples.peek(p))

    # ------------------------------------------------------------------ the step

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Say, for each step to come, whether it only takes the gradients of a part of its batch."""
        self._step_skip_queue.append(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        if not self._step_skip_queue:
            return False
        return self._step_skip_queue.pop(0) if pop_next else self._step_skip_queue[0]

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """fn(optimizer) is called at every real step, before the optimizer inside makes it: for accountants."""
        self.step_hook = fn

    def add_noise(self) -> None:
        """`p.grad` = the clipped sum and its noise."""
        self._noise_into_grad(self.noise_multiplier * self._sensitivity())

    def _sensitivity(self) -> float:
        """What one sample's contribution to the sums cannot exceed."""
        return max(float(self.max_grad_norm), self._bound or 0.0)

    def _noise_into_grad(self, std: float) -> None:
        std = float(std)
        if std:
            self._next_noise()
        for p in self.params:
            total = p.summed_grad  # type: ignore[attr-defined]
            _check_processed_flag(total)
            noisy = self._copy(p, total)
            if std:
                assert self._noise is not None
                self._noise.add_(noisy, std, self._place(p))
            p.grad = self._laid(noisy, p)
            _mark_as_processed(total)

    def _place(self, p: nn.Parameter) -> Part | None:
        """What of a whole parameter this one is; None if it is whole."""
        return None

    def _laid(self, noisy: Tensor, p: nn.Parameter) -> Tensor:
        """The noisy sum, as the parameter lies."""
        return noisy.view_as(p).to(p.dtype)

    def _copy(self, p: nn.Parameter, total: Tensor) -> Tensor:
        """A contiguous copy of the sum, in `.grad`'s memory where that is of its kind."""
        grad = p.grad
        if grad is None or grad.layout != torch.strided or not grad.is_contiguous() or not _alike(grad, total):
            return total.detach().clone(memory_format=torch.contiguous_format)
        return grad.copy_(total)

    def _next_noise(self) -> StepNoise:
        if self._noise is None or self._noise.secure != self.secure_mode:
            self._noise = StepNoise(self.generator, self.secure_mode, self._same_key)
        else:
            self._noise.again(self.generator)
        return self._noise

    def _same_key(self, key: bytes) -> bytes:
        """The key of the noise that all processes draw, of which this one proposes one."""
        return key

    def scale_grad(self) -> None:
        """Under a mean loss `p.grad` is divided by the expected batch size, for each backward of the step."""
        if self.loss_reduction == "mean":
            assert self.expected_batch_size is not None
            for p in self.params:
                assert p.grad is not None
                p.grad /= self.expected_batch_size * self.accumulated_iterations

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear `p.grad_sample`; after a step that was no part of one, also `p.summed_grad`; zero `p.grad`."""
        for p in self.params:
            p.grad_sample = None  # type: ignore[attr-defined]
        self._clear_sums()
        self.original_optimizer.zero_grad(set_to_none)
        self._note_grads()

    def _clear_sums(self) -> None:
        if not self._is_last_step_skipped:
            self._drop_sums()

    def _drop_sums(self) -> None:
        """Forget `p.summed_grad`."""
        self._bound = None
        for p in self.params:
            p.summed_grad = None  # type: ignore[attr-defined]

    def _note_grads(self) -> None:
        """`.grad` was zeroed, maybe between forward and backward: the engine must not take it for autograd's."""
        for owner in owners_of(self.params):
            owner.note_grads()

    def _take_gradients(self) -> None:
        """Of the physical batch in hand, into the sums of the step."""
        self.clip_and_accumulate()

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool | None:
        """All but the step of the optimizer inside; False where that must not follow (a part of a batch)."""
        if not self.params:
            return True
        self._take_gradients()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            return False
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        self._is_last_step_skipped = False
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a private step; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            found = self.original_optimizer.step()
            return loss if found is None else found
        return loss


def _alike(a: Tensor, b: Tensor) -> bool:
    """Of one type, shape and device, in memory apart."""
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and not same
