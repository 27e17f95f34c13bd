"""grad_sample_mode "ghost_fsdp": mode "ghost" on a model that `fully_shard` has laid in parts on all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....batch_axis.deferred_checks import settle
from ....distributed.fingerprints import mark_of_model
from ....distributed.sharded import Sharded, is_sharded
from ....distributed.tensor_mesh import tensor_mesh_of
from ....distributed.world import World
from ....distributed.wrappers import Replica, check_samples, world_for
from ....engine.gradients import Gradients
from ....engine.per_sample import PerSampleGradients
from ....errors import StepError
from ....ops.clip import clip_factors
from ....optim.clipped_sums import ShardedSums
from . import samples
from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)

OTHER_OPTIMIZER = (
    "the module's parameters lie in parts on the processes (mode 'ghost_fsdp'), which this optimizer does not know of: "
    "its sums and its noise would be of other places. Take FSDPOptimizerFastGradientClipping, as make_private does."
)
_WHOLE = (
    "grad_sample_mode 'ghost_fsdp' takes a model that lies in parts on the processes, and this one is whole: call "
    "FSDP2Wrapper(model) (or torch's fully_shard) first, then make the optimizer of its parameters. For whole models "
    "take grad_sample_mode='ghost'."
)


class GradSampleHooksFastGradientClippingFSDP(GradSampleHooksFastGradientClipping):
    """As GradSampleHooksFastGradientClipping, but samples are clipped at the end of a backward, whose clipped sum, of
    all processes' samples and this process's parts, waits here for the optimizer.

    All processes must make it together, and call forward and backward equally often (a Poisson sample may be empty).
    Raises ValueError if the model is whole, NotImplementedError if its layers are split (tensor parallelism),
    ParameterError if it is cut in a way that is not known to be exact, and StepError if processes differ.
    """

    replica: Replica | None = None
    sums: ShardedSums | None = None
    clip: Callable[[Tensor], Tensor] | None = None  # squared norms [B] to factors [B]: the optimizer's
    backwards = 0  # that no step has taken
    _seen = 0  # backwards in all

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "replica": None, "sums": None, "clip": None}

    # ------------------------------------------------------------------ on the module and off it

    def _attach(self) -> None:
        if not is_sharded(self._module):
            raise ValueError(_WHOLE)
        if tensor_mesh_of(self._module) is not None:
            raise NotImplementedError(
                "grad_sample_mode 'ghost_fsdp' does not take a model whose layers parallelize_module has split (tensor "
                "parallelism). Use fastdp's own optimizer (fastdp.DPAdamW(model, ...), docs/distributed.md), or "
                "fully_shard alone."
            )
        self.drop()
        self._world = world = world_for(self._module, None, None)
        with world.deciding():
            self.replica = replica = Replica(self._module, world)
            try:
                assert isinstance(replica.shards, Sharded)
                self.sums = ShardedSums(replica.shards, world)
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
                self.disable_hooks()
                raise

    def disable_hooks(self) -> None:
        replica, self.replica, self.sums = self.replica, None, None
        if replica is not None:
            replica.changed()  # what stands in the module are then the parts
        super().disable_hooks()
        if replica is not None:
            replica.restore()

    def share(self, world: World) -> None:
        """Refused: the model's parts say who trains together, and only their own optimizer knows of them."""
        raise StepError(OTHER_OPTIMIZER)

    # ------------------------------------------------------------------ backward

    def _on_backward(self, gradients: Gradients) -> None:
        if self._engine is None or not self._module.training:
            return
        with self._world.deciding():  # of what is no error of fastdp's, too
            self._world.check()
            check_samples(self._world)
            settle(gradients.doubts)
            self._refuse_overrides()
            if self.backwards and not self.grad_accumulation_allowed:
                self._refuse_accumulation()
            with samples.outside():
                self._clip(gradients, self._engine.named_parameters())

    def _clip(self, gradients: Gradients, named: dict[str, Any]) -> None:
        """Add the clipped sum of a backward's samples to what waits."""
        assert self.sums is not None
        members = [list(named.values())]
        self.sums.begin(gradients, members, {"backward of mode 'ghost_fsdp'": self._seen})
        self._seen += 1
        factors = self.sums.factors(self, self.sums.norm_sq(gradients, members))
        found, _ = self.sums.clipped(gradients, members, factors, {})
        held, _ = self.sums.held(named, found, dict.fromkeys(named, 0))
        for key, total in held.items():
            self.clipped[key] = self.clipped[key].add_(total) if key in self.clipped else total
        self.backwards += 1
        self.note_grads()

    def factors(self, norm_sq: Sequence[Tensor]) -> list[Tensor]:
        """The norms of a backward to its clip factors."""
        self.per_sample_gradient_norms = norm_sq[0].sqrt().float()
        clip = self.clip or (lambda squares: clip_factors(squares, float(self.max_grad_norm)))
        return [clip(norm_sq[0])]

    def drop(self) -> None:
        """Forget the sums that no step has taken."""
        self.clipped: dict[int, Tensor] = {}  # by id of the part, float32 or better
        self.backwards = 0

    def set_grad_sample_to_none(self) -> None:
        self.drop()
        super().set_grad_sample_to_none()


class GradSampleModuleFastGradientClippingFSDP(
    GradSampleHooksFastGradientClippingFSDP, GradSampleModuleFastGradientClipping
):
    """The user's module, wrapped; arguments of `GradSampleHooksFastGradientClipping`, and errors of
    `GradSampleHooksFastGradientClippingFSDP`."""
