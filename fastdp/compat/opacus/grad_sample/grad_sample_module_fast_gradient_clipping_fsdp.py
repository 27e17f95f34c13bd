"""grad_sample_mode "ghost_fsdp": mode "ghost" on a model that `fully_shard` has laid in parts on all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....distributed.fingerprints import mark_of_model
from ....distributed.sharded import Sharded, is_sharded
from ....distributed.shards import Part, placed_like
from ....distributed.tensor_mesh import tensor_mesh_of
from ....distributed.world import World
from ....distributed.wrappers import Replica, world_for
from ....engine.gradients import Gradients
from ....engine.per_sample import PerSampleGradients
from ....errors import StepError
from ....ops.clip import clip_factors
from ....optim.clipped_sums import ShardedSums, Share
from .grad_sample_module_fast_gradient_clipping import (
    OTHER_OPTIMIZER,
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)

_WHOLE = (
    "grad_sample_mode 'ghost_fsdp' takes a model that lies in parts on the processes, and this one is whole: call "
    "FSDP2Wrapper(model) (or torch's fully_shard) first, then make the optimizer of its parameters. For whole models "
    "take grad_sample_mode='ghost'."
)
_SPLIT = (
    "grad_sample_mode 'ghost_fsdp' does not take a model whose layers parallelize_module has split (tensor "
    "parallelism). Use fastdp's own optimizer (fastdp.DPAdamW(model, ...), docs/distributed.md), or fully_shard alone."
)


class _Factors:
    """The norms [B] of a backward to its clip factors, by the module's `on_norms` and `max_grad_norm`."""

    def __init__(self, hooks: GradSampleHooksFastGradientClippingFSDP) -> None:
        self._hooks, self.bound = hooks, float(hooks.max_grad_norm)

    def factors(self, norm_sq: Sequence[Tensor]) -> list[Tensor]:
        self._hooks.take_norms(norm_sq[0])
        self.bound = float(self._hooks.max_grad_norm)
        return [clip_factors(norm_sq[0], self.bound)]


class GradSampleHooksFastGradientClippingFSDP(GradSampleHooksFastGradientClipping):
    """As GradSampleHooksFastGradientClipping. After a backward, `.grad` of each part (a DTensor) is that part of the
    sum of the clipped gradients of all processes' samples.

    All processes must make it together, and call forward and backward equally often (a Poisson sample may be empty).
    Raises ValueError if the model is whole, NotImplementedError if its layers are split (tensor parallelism),
    ParameterError if it is cut in a way that is not known to be exact, and StepError if processes differ.
    """

    in_parts = True
    _replica: Replica | None = None
    _sums: ShardedSums | None = None
    _seen = 0  # backwards

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_replica": None, "_sums": None}

    # ------------------------------------------------------------------ on the module and off it

    def _attach(self) -> None:
        if not is_sharded(self._module):
            raise ValueError(_WHOLE)
        if tensor_mesh_of(self._module) is not None:
            raise NotImplementedError(_SPLIT)
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        if not parameters:
            return
        self._world = world = world_for(self._module, None, None)
        with world.deciding():
            self._replica = replica = Replica(self._module, world)
            try:
                assert isinstance(replica.shards, Sharded)
                self._sums = ShardedSums(replica.shards, world)
                self._engine = PerSampleGradients(
                    replica.module, loss_reduction=self.loss_reduction, batch_first=self.batch_first,
                    on_backward=self._on_backward, shards=replica.shards,
                )  # fmt: skip
                self._engine.watch(replica.begins, replica.refused, replica.broken)
                world.agree({
                    "making": "a module of mode 'ghost_fsdp'", "loss_reduction": self.loss_reduction,
                    "model (its names, shapes and buffers)": mark_of_model(self._module),
                })  # fmt: skip
            except Exception:
                self._detach()
                raise
        self._own(parameters)

    def _detach(self) -> None:
        replica, self._replica, self._sums = self._replica, None, None
        if replica is not None:
            replica.changed()  # what stands in the module are then the parts
        super()._detach()
        if replica is not None:
            replica.restore()

    def share(self, world: World) -> None:
        """Refused: the model's parts say who trains together, and only their own optimizer knows of them."""
        raise StepError(OTHER_OPTIMIZER)

    @property
    def world(self) -> World:
        """The processes that train together."""
        return self._world

    # ------------------------------------------------------------------ backward

    def _on_backward(self, gradients: Gradients) -> None:
        with self._world.deciding():  # of what is no error of fastdp's, too
            super()._on_backward(gradients)

    def _take(self, gradients: Gradients) -> None:
        assert self._engine is not None and self._sums is not None
        named, sums, by_norms = self._engine.named_parameters(), self._sums, _Factors(self)
        members = [list(named.values())]
        sums.begin(gradients, members, {"backward of mode 'ghost_fsdp'": self._seen})
        self._seen += 1
        factors = sums.factors(by_norms, sums.norm_sq(gradients, members))
        [found] = sums.clipped(gradients, members, factors)
        held, _ = sums.held(named, found, dict.fromkeys(named, 0))
        self._keep([self._part(whole) for whole in named.values()], held, by_norms.bound)

    def _part(self, whole: Tensor) -> Tensor:
        assert self._replica is not None and self._replica.shards is not None
        return self._replica.shards.part(whole)

    def _shown(self, parameter: Tensor, total: Tensor) -> Tensor:
        return placed_like(total.detach().to(parameter.dtype), parameter)

    # ------------------------------------------------------------------ what the optimizer asks

    def shares(self, sums: dict[int, Tensor]) -> list[Share]:
        """Over whom sums are still to be added up at a step, by the ids of parts; see `ShardedSums.shares`."""
        assert self._sums is not None
        return self._sums.shares(sums)

    def place(self, part: Tensor) -> Part | None:
        """What of the whole parameter a part is; None if the parameter is whole on every process."""
        assert self._replica is not None and isinstance(self._replica.shards, Sharded)
        found = self._replica.shards.place(self._replica.shards.whole(part))
        return None if found is None else found[1]

    def check_copies(self) -> None:
        """Raises ParameterError on all processes if copies of the model (HSDP) differ. All must ask."""
        if self._replica is not None:
            self._replica.check_copies()

    def changed(self) -> None:
        """A step has updated the parts: the next forward gathers them."""
        if self._replica is not None:
            self._replica.changed()


class GradSampleModuleFastGradientClippingFSDP(
    GradSampleHooksFastGradientClippingFSDP, GradSampleModuleFastGradientClipping
):
    """The user's module, wrapped; arguments of `GradSampleHooksFastGradientClipping`, and errors of
    `GradSampleHooksFastGradientClippingFSDP`."""
