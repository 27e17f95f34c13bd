"""The optimizers of whole models in a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ....distributed.fingerprints import mark, mark_of_parameters
from ....distributed.reduce import Reduction
from ....distributed.world import World, world_of
from ..grad_sample import samples
from ..grad_sample.grad_sample_module import owners_of
from .optimizer import DPOptimizer
from .optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from .perlayeroptimizer import DPPerLayerOptimizer


class DistributedDPOptimizer(DPOptimizer):
    """DPOptimizer in a process group: the sums of all processes, and one noise for them.

    Clipped sums are added up in float32 before the noise, whose key is that of process 0, so every process adds the
    same noise to the same sums. (Opacus adds noise on process 0, and then sums.) `expected_batch_size` is that of one
    process, as in Opacus. Raises ValueError outside of a process group, StepError if processes differ in what they do.
    """

    _world: World | None = None
    _made = 0  # steps

    def __init__(self, optimizer: Optimizer, **kwargs: Any) -> None:
        self.world_size = torch.distributed.get_world_size()
        self.rank = torch.distributed.get_rank()
        super().__init__(optimizer, **kwargs)
        self._processes()

    def _processes(self) -> World:
        """Those that train together, who hear of what this process's forwards and backwards refuse."""
        self._world = self._world or world_of()
        for owner in owners_of(self.params):
            owner.share(self._world)
        return self._world

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool | None:
        with self._processes().deciding():
            return super().pre_step(closure)

    def add_noise(self) -> None:
        """The sums of all processes into `p.summed_grad`; then noise, which is the same on all."""
        self._sum_over_processes()
        super().add_noise()
        self._made += 1

    def _sum_over_processes(self) -> None:
        world, held = self._processes(), [(p, p.summed_grad) for p in self.params]
        if world.size == 1 or any(samples.is_processed(total) for _, total in held):  # the noise of these is refused
            return
        reduction = Reduction([total.contiguous() for _, total in held])
        self._agree(world, held)
        for (p, _), total in zip(held, world.sums(reduction), strict=True):
            p.summed_grad = total

    def _agree(self, world: World, held: list[tuple[nn.Parameter, Any]]) -> None:
        """All processes are about to make the same step. held: parameters, and the sums of this process."""
        world.agree({
            "step": self._made, "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self._sensitivity(), "loss_reduction": self.loss_reduction,
            "expected_batch_size": self.expected_batch_size, "backwards": self.accumulated_iterations,
            "trained parameters": mark([(tuple(p.shape), str(p.dtype)) for p, _ in held]),
            "weights": mark_of_parameters(nn.ParameterList(self.params)) if self._made == 0 else "",
        })  # fmt: skip

    def total(self, what: str, number: float) -> float:
        """The sum of a number of each process. what: its name, for the error if processes differ in what they do."""
        return float(sum(self._processes().everywhere(what, number)))

    def _same_key(self, key: bytes) -> bytes:
        return self._processes().from_first(key)

    def scale_grad(self) -> None:
        """As DPOptimizer's; the expected batch is that of all processes."""
        if self.loss_reduction == "mean":
            for p in self.params:
                p.grad /= self.expected_batch_size * self.world_size * self.accumulated_iterations

    def reduce_gradients(self) -> None:
        """Nothing: sums are added up before the noise."""


class DistributedDPOptimizerFastGradientClipping(DistributedDPOptimizer, DPOptimizerFastGradientClipping):
    """As DPOptimizerFastGradientClipping; errors of `DistributedDPOptimizer`."""


class SimpleDistributedPerLayerOptimizer(DPPerLayerOptimizer, DistributedDPOptimizer):
    """DPPerLayerOptimizer in a process group; errors of `DistributedDPOptimizer`."""


class DistributedPerLayerOptimizer(SimpleDistributedPerLayerOptimizer):
    """The same: Opacus clips within its data-parallel hooks here, which fastdp does not have."""
