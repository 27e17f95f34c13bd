"""The optimizer of mode "ghost_fsdp": it updates the parts of parameters that lie on this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ....distributed.reduce import Reduction
from ....distributed.shards import Part, placed_like
from ....distributed.world import World, world_of
from ..grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import GradSampleHooksFastGradientClippingFSDP
from .ddpoptimizer import DistributedDPOptimizerFastGradientClipping


class FSDPOptimizerFastGradientClipping(DistributedDPOptimizerFastGradientClipping):
    """DPOptimizerFastGradientClipping over the parts of a GradSampleModuleFastGradientClippingFSDP's parameters.

    The sums of all processes' samples come with each backward. Noise is that of each element's place in the whole
    parameter: the steps are those of one process on the batches of all. `expected_batch_size` is that of one process,
    as in Opacus. Raises ValueError outside of a process group or if the parameters are of no such module, and StepError
    if processes differ in what they do.
    """

    accumulated_iterations = 1  # type: ignore[assignment]

    def __init__(self, optimizer: Optimizer, **kwargs: Any) -> None:
        super().__init__(optimizer, **kwargs)
        if self.params:
            self._hooks().clip = self._clip_factors  # called within a backward

    def _hooks(self) -> Any:
        owner = self._owner()
        if not isinstance(owner, GradSampleHooksFastGradientClippingFSDP):
            raise ValueError(
                "FSDPOptimizerFastGradientClipping takes the parameters of a model that fully_shard has cut, in a "
                "GradSampleModuleFastGradientClippingFSDP (of fastdp), once that was made: make_private(..., "
                "grad_sample_mode='ghost_fsdp') makes both"
            )
        return owner

    def _processes(self) -> World:
        return self._hooks()._world if self.params else world_of()  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ the step

    def clip_and_accumulate(self) -> None:
        """Add the clipped sums of the backwards since the last call to `p.summed_grad`."""
        hooks = self._hooks()
        if not hooks.backwards:
            raise ValueError("Per sample gradient is not initialized. Not updated in backward pass?")
        self._add(hooks.clipped)
        self.accumulated_iterations = hooks.backwards
        hooks.drop()

    def _clip_factors(self, squares: Tensor) -> Tensor:
        self._drop_used_sums()
        return super()._clip_factors(squares)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the sums that no step has taken; after a step that was no part of one, also `p.summed_grad`."""
        if self.params:
            self._hooks().drop()
        super().zero_grad(set_to_none)

    def _sum_over_processes(self) -> None:
        """Of what other processes hold, too: parameters that fully_shard left out, and copies (HSDP)."""
        world, hooks = self._processes(), self._hooks()
        held = {id(p): p for p in self.params}
        sums: dict[int, Tensor] = {key: p.summed_grad for key, p in held.items()}
        self._agree(world, [(p, sums[key]) for key, p in held.items()])
        if self._made == 0:
            hooks.replica.check_copies()
        if world.size == 1:
            return
        for group, shared in hooks.sums.shares(sums):
            reduction = Reduction([total.contiguous() for total in shared.values()])
            for key, total in zip(shared, world.sums(reduction, group=group), strict=True):
                held[key].summed_grad = total

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        """Raises StepError if some processes would step and others go on with the batch: they would wait in vain."""
        skips = bool(super()._check_skip_next_step(pop_next))
        if pop_next:
            self._processes().agree({"after step": self._made, "a part of a batch": skips})
        return skips

    def pieces(self, count: int) -> int:
        """Into how many physical batches all processes cut a logical batch of which this one needs so many: forwards
        wait for each other."""
        return int(max(self._processes().everywhere("physical batches", count)))

    def _place(self, p: nn.Parameter) -> Part | None:
        shards = self._hooks().replica.shards
        found = shards.place(shards.whole(p))
        return None if found is None else found[1]

    def _laid(self, noisy: Tensor, p: nn.Parameter) -> Tensor:
        return placed_like(noisy.to(p.dtype), p)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        try:
            return super().step(closure)
        finally:
            if self.params and not self._is_last_step_skipped:
                self._hooks().replica.changed()
