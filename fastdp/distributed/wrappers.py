"""Finds the model inside DistributedDataParallel and other wrappers, or refuses the wrapper."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..batch_axis import current_batch
from ..engine.per_sample import PerSampleGradients
from ..errors import ParameterError, StepError
from ..utils.code_location import frames
from . import private_names as names
from .failure_signal import failure_signal_of
from .frameworks import unwrap
from .sharded import REPLICATED, Sharded, is_sharded
from .tensor import TensorParallel
from .tensor_hooks import origins
from .tensor_mesh import split_world, tensor_mesh_of
from .world import HERE, World, is_told, processes, world_of

IGNORED = "_ddp_params_and_buffers_to_ignore"  # which names DistributedDataParallel, when it is made, asks a module for
_EXPERIMENTAL = "torch.distributed.tensor.experimental"
_REPLICATING = "torch.distributed._composable.replicate"
_STAGES = "torch.distributed.pipelining.stage"
_PIPELINE = (
    "the model is a stage of a pipeline (PipelineStage), or has one within it: a backward there has a part of each "
    "sample's gradient, and every norm is too small. Pipeline parallelism is not supported yet: use fully_shard or "
    "tensor parallelism; in one process, call the stages one after another in the forward of one model."
)
_INSTEAD = (
    "Give fastdp a model that is whole on every process (plain, or in DistributedDataParallel), fully_shard it, or "
    "split its layers (parallelize_module)."
)


class Replica:
    """This process's copy of a model, or its parts of one: `module`. The wrapper around it, if there is one, and
    fully_shard sum no gradients meanwhile.

    shards: of a model that `fully_shard` was called on, else None.

    Raises ParameterError if the model is neither a whole copy nor sharded by `fully_shard`.
    """

    def __init__(self, model: nn.Module, world: World, memory_budget: int | None = None) -> None:
        self.wrapper: DistributedDataParallel | None = None
        self.module, self.world = model, world
        self.shards: Sharded | TensorParallel | None = None
        self._late = False  # a framework put the wrapper around the model once the optimizer was made
        unwrap(model)
        if isinstance(model, DistributedDataParallel):
            _check_wrapper(model, world)
            self.wrapper, self.module = model, model.module
        sharded, mesh = is_sharded(self.module), tensor_mesh_of(self.module)
        _check_whole(self.module, world, sharded or mesh is not None)
        if sharded or mesh is not None:
            if self.wrapper is not None:
                raise ParameterError(
                    "fully_shard or tensor parallelism within DistributedDataParallel: leave the wrapper out (fastdp "
                    "sums over copies by itself, by the optimizer's mesh=), or use a mesh of two dimensions (HSDP)"
                )
            if memory_budget is not None and mesh is not None:
                raise ParameterError(
                    "memory_budget= is not supported under tensor parallelism, where all processes would have to run "
                    "the same parts again: leave it out (checkpointing works)"
                )
            parts = Sharded(self.module, world, 1 if mesh is None else mesh.size()) if sharded else None
            self.shards = TensorParallel(self.module, mesh, parts, world) if mesh is not None else parts
            assert self.shards is not None
            world.agree({"making": "a private optimizer of a sharded model", "parts": self.shards.mark()})
            self.shards.open()
        self.alarm = failure_signal_of(world, [] if self.shards is None else self.shards.process_groups())
        self._unwatch: Callable[[], None] | None = None
        self.rule = ""  # by which the step that is made updates, the same on every process
        self._quiet = world.size > 1 and not (self.wrapper or self.shards) and not hasattr(model, IGNORED)
        if self._quiet:  # a wrapper that comes later must not broadcast buffers in a forward that only some ranks make
            setattr(model, IGNORED, [name for name, _ in model.named_buffers()])
        self.claim()

    def _check_dealt(self) -> None:
        """Raises StepError if processes that share layers are handed different samples: before their forwards meet."""
        batch = current_batch.current() if self.world.split is not None else None
        if batch is not None and batch.share != self.world.share:
            raise StepError(
                f"the loader's batches are one of {batch.share[1]} parts of a logical batch, and the optimizer's mesh "
                f"has {self.world.share[1]}: the processes that share the model's layers must have the same samples. "
                "Give fastdp.poisson_loader the mesh of those with samples of their own (mesh=mesh['dp'], of one "
                "dimension, perhaps of size 1)."
            )

    def refused(self, error: BaseException) -> None:
        """A forward or backward raises this error."""
        if self.shards is not None:
            self.shards.failed()
        self.world.refuse(error)

    def raised(self, error: BaseException) -> None:
        """A forward or backward ends by this error, whoever's it is. Others may wait for it, of a model in parts."""
        if self.shards is not None:
            self.shards.failed()
        if self.alarm is not None and self.alarm.groups:
            self.alarm.raised(error)

    def broken(self, error: BaseException) -> None:
        """The same of a backward. What was refused at its end, the others hear at theirs, but for those that share its
        layers: they add up norms there."""
        if self.world.split is not None or not is_told(error, HERE):
            self.raised(error)

    def check_others(self, engine: PerSampleGradients) -> None:
        """Raises ParameterError for parameters that are trained without privacy: over several processes, or parts,
        nothing would sum their gradients."""
        if (self.world.size > 1 or self.shards is not None) and (others := engine.others()):
            raise ParameterError(
                f"{others[:3]} require grad, and the optimizer does not train them: in a world of {self.world.size} "
                "processes nothing would sum their gradients over the processes. Freeze them (requires_grad=False)."
            )

    def check_copies(self) -> None:
        """Raises ParameterError on all processes where some that hold the same parts hold other numbers. All must ask,
        once they have agreed to."""
        if self.shards is not None:
            self.shards.check_copies()

    def changed(self) -> None:
        """A step has updated the parameters."""
        if self.shards is not None:
            self.shards.free()

    def refuse_parts(self, what: str) -> None:
        """Raises StepError if the model is sharded, where this cannot be done."""
        if self.shards is not None:
            raise StepError(
                f"{what} takes a model that is whole on this process, and fully_shard was called on this one, or its "
                "layers are split over processes (tensor parallelism)"
            )

    def claim(self) -> None:
        """Switch off the wrapper's own sums (there is no `.grad` that it could sum) and its broadcasts of buffers."""
        if self.shards is not None:
            if self.alarm is not None and self._unwatch is None:
                self._unwatch = self.alarm.watch(self.module, self.raised)
                self.shards.explain(self.alarm.explained)
            self.shards.claim()
        if self.wrapper is not None:
            self._before = self.wrapper.require_backward_grad_sync, self.wrapper.require_forward_param_sync
            self.wrapper.require_backward_grad_sync = self.wrapper.require_forward_param_sync = False

    def begins(self) -> None:
        """A forward begins, which a backward may follow; through a wrapper that is not known yet, perhaps.

        Raises ParameterError if that wrapper is refused.
        """
        _check_attention(self.world)
        if self.world.size > 1 and f"{_EXPERIMENTAL}._attention" in sys.modules:
            _check_hooks(self.module)  # which may have come since
        _check_stage_runs()
        self._check_dealt()
        if self.shards is not None:
            self.shards.begins()
        elif names.state_of(self.module) is not None:
            raise StepError(
                "fully_shard was called on the model once the private optimizer was made: make the optimizer after it. "
                "(Accelerate may do so in prepare(model, optimizer), if the model itself is called next, and not a "
                "module of it.)"
            )
        self.world.begins()
        found = names.wrapper_around(self.module) if self.world.size > 1 else None
        if found is not None and found is not self.wrapper:
            self.adopt(found)
        elif found is not None and self._late:  # no_sync() of the first forward has switched it on again
            found.require_backward_grad_sync = False
        if names.is_joined(self.wrapper):
            raise ParameterError(
                "the model runs within torch.distributed's Join: a process whose batches have ended would answer "
                "DistributedDataParallel's sums there, and what the others agree on for a private step waits for it in "
                "vain. Leave Join out, and let every process call step() equally often: fastdp.poisson_loader gives "
                "all equally many batches (some empty)."
            )

    def adopt(self, wrapper: DistributedDataParallel) -> None:
        """Take a wrapper that was put around the model later. Raises ParameterError if it is refused."""
        _check_wrapper(wrapper, self.world)
        self._switch_on()
        self.wrapper, self._late = wrapper, True
        self.claim()

    def check(self) -> None:
        """Raises StepError if something has switched the wrapper's sums on again."""
        if self.wrapper is not None and self.wrapper.require_backward_grad_sync:
            raise StepError(
                "DistributedDataParallel's require_backward_grad_sync was switched on (by a framework, perhaps): it "
                "would wait for gradients that never come. fastdp sums clipped gradients itself, within step(); leave "
                "it off. no_sync() is not needed."
            )

    def restore(self) -> None:
        """Let the wrapper, or fully_shard, sum gradients as it did."""
        if self.shards is not None:
            self.shards.restore()
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        if self.alarm is not None:
            self.alarm.close()
        self._switch_on()
        if self._quiet:
            vars(self.module).pop(IGNORED, None)

    def _switch_on(self) -> None:
        if self.wrapper is not None:
            self.wrapper.require_backward_grad_sync, self.wrapper.require_forward_param_sync = self._before


def _check_wrapper(model: DistributedDataParallel, world: World) -> None:
    if model.static_graph:
        raise ParameterError(
            "DistributedDataParallel(static_graph=True) counts gradients that never come, as samples' gradients are "
            "clipped before they are one: leave static_graph=True out"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ParameterError(
            "DistributedDataParallel(mixed_precision=) is not supported: it swaps the parameters' data in forwards. "
            "Use torch.autocast, or a model in bfloat16."
        )
    count = torch.distributed.get_world_size(model.process_group)
    if count != max(world.size, processes()):
        raise ParameterError(
            f"DistributedDataParallel keeps {count} copies equal, and {max(world.size, processes())} processes train "
            "together: give it the group of all processes"
        )


def world_for(model: nn.Module, process_group: Any, mesh: Any) -> World:
    """The processes that train this model together, by the user's group or mesh.

    Raises StepError if they are not all of torch.distributed's.
    """
    tensor_mesh = tensor_mesh_of(model)
    if tensor_mesh is not None:
        return split_world(tensor_mesh, process_group, mesh, names.sharding_group(model))
    found = (getattr(p, "device_mesh", None) for p in model.parameters()) if is_sharded(model) else ()
    return world_of(process_group, mesh, [m for m in found if m is not None])


def _check_whole(model: nn.Module, world: World, sharded: bool) -> None:
    """Refuse by name what holds a part of a model in a way that is not known to be exact."""
    _check_stages(model)
    if world.size == 1 and not sharded:
        return
    old = _types("torch.distributed.fsdp", "FullyShardedDataParallel")
    engine = _types("deepspeed", "DeepSpeedEngine")
    for module in model.modules():
        if isinstance(module, old):
            raise ParameterError(
                "FullyShardedDataParallel (FSDP1) joins parameters into flat ones, whose parts are not known to be of "
                "one layer each: it is not supported. Use torch.distributed.fsdp.fully_shard (FSDP2)."
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise ParameterError(
                "SyncBatchNorm normalizes each sample by the samples of all processes: use a norm of each sample alone "
                "(fastdp.make_compatible puts GroupNorm in its place)"
            )
        if isinstance(module, engine):
            raise ParameterError(f"DeepSpeed averages gradients and steps by itself: it is not supported. {_INSTEAD}")
    _check_hooks(model)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ParameterError(f"'{name}' is partitioned by DeepSpeed's ZeRO: it is not supported. {_INSTEAD}")


def _check_hooks(model: nn.Module) -> None:
    """Raises ParameterError if a module's data is cut along the samples' own length."""
    for module in model.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        places = [where for hook in hooks for where in origins(hook)]
        if any(where.startswith(_REPLICATING) for where in places):
            raise ParameterError(REPLICATED)
        if any(where.startswith(_EXPERIMENTAL) for where in places):
            raise ParameterError(
                "a module works by torch.distributed.tensor.experimental (context parallelism): a process then has a "
                "part of each sample, and every norm is too small. It is not supported yet: give each process whole "
                "samples."
            )


def _check_stages(model: nn.Module) -> None:
    """Raises ParameterError if a pipeline's stage holds parameters of this model: itself, modules of it, or a model
    that was traced into stages. Nothing of a model knows its stages, so all objects are looked at."""
    stages = _types(_STAGES, "_PipelineStageBase")
    own = {id(parameter) for parameter in model.parameters()} if stages else set[int]()
    for found in [each for each in gc.get_objects() if issubclass(type(each), stages)] if stages else []:
        module = getattr(found, "submod", None)
        if isinstance(module, nn.Module) and any(id(parameter) in own for parameter in module.parameters()):
            raise ParameterError(_PIPELINE)


def _check_stage_runs() -> None:
    """Raises ParameterError if it is a pipeline's stage that calls the model, or a module of it."""
    if _STAGES in sys.modules:
        if any(each.f_globals.get("__name__") == _STAGES for each in frames(sys._getframe(1))):
            raise ParameterError(_PIPELINE)


def check_samples(world: World) -> None:
    """Raises StepError if the batch may hold parts of samples, or have met other processes' samples."""
    if world.size == 1:
        return
    if world.communicated():
        raise StepError(
            "a collective of torch.distributed (or a message) ran between the begin of a forward and the end of its "
            "backward (a loss over the samples of all ranks, perhaps, ring attention, a metric, or async_save in a "
            "thread): what samples of other ranks do to this rank's gradients is not bounded by clipping. Communicate "
            "before a forward or after its backward (evaluate under torch.no_grad(); checkpoint by dcp.save), give "
            "each rank whole samples, and use a loss of each sample alone."
        )
    _check_attention(world)


def _check_attention(world: World) -> None:
    if world.size == 1:
        return
    replaced = type(F.scaled_dot_product_attention) is not type(torch._C._nn.scaled_dot_product_attention)
    if replaced or names.dispatches_attention():
        raise StepError(
            "torch.nn.functional.scaled_dot_product_attention, or that of DTensors, was replaced, as context "
            "parallelism does: a process then has a part of each sample, and every norm is too small. Context "
            "parallelism is not supported yet: give each process whole samples."
        )


def _types(module: str, *names: str) -> tuple[Any, ...]:
    """Classes of a module, if something has imported it."""
    found = sys.modules.get(module)
    return tuple(kind for name in names if isinstance(kind := getattr(found, name, None), type))
