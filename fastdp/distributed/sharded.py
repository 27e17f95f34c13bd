"""Models sharded by `fully_shard` (FSDP2, HSDP).

What stands in a module is now the part (a DTensor), and now the whole parameter, which is gathered before a forward
or backward and freed after it. The engine captures uses of the whole, which stays the same object for good; the
optimizer updates the part. fully_shard itself sums nothing meanwhile, as no `.grad` exists that it could sum: clipped
sums are cut and added up by `fastdp.distributed.scatter`, in float32 whatever `reduce_dtype` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from . import private_names as names
from .fingerprints import mark, same_on_all
from .fsdp_hooks import quiet
from .shards import Part
from .world import World, processes


class Group:
    """Parameters that are gathered together.

    scatter: the process group of those who hold other parts of them. copies: of those who hold the same ones, or None.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        mesh = handle.mesh_info
        self.scatter, self.ranks = mesh.shard_process_group, int(mesh.shard_mesh_size)
        self.copies, self.copy_count = names.replicas_of(mesh)
        self.rank = int(mesh.shard_mesh_rank)
        self.wholes: list[Tensor] = []

    def gather(self) -> None:
        """All processes of the group must."""
        names.gather(self.handle)

    def free(self) -> None:
        if self.handle.is_unsharded:
            self.handle.reshard()


class Sharded:
    """The parts and wholes of a model's parameters. Making it gathers each group once: all processes must, together.

    split: over how many processes tensor parallelism has split layers before.

    Raises ParameterError where it is not known that the steps would be exact.
    """

    def __init__(self, model: nn.Module, world: World, split: int = 1) -> None:
        self.model, self._world = _root_of(model), world
        self.states: list[Any] = []
        for module in self.model.modules():
            state = names.state_of(module)
            if state is not None and not any(state is known for known in self.states):
                self.states.append(state)
        handles = [handle for state in self.states for handle in names.groups_of(state)]
        _check(self.model, self.states, world, split)
        self.groups = [Group(handle) for handle in handles]
        self._before: list[tuple[Any, bool, Any]] = []
        self._hooks: list[tuple[dict[int, Any], int, Any]] = []
        self._failed = False
        self.leaf_of: Callable[[Tensor], Tensor] = lambda whole: whole  # of tensor parallelism: what lies here of it
        self._passing: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []

    def explain(self, explained: Callable[[BaseException], BaseException]) -> None:
        """Raise, in place of an error of a gather, what a function makes of it."""
        self._undo += [names.explain_gathers(group.handle, explained) for group in self.groups]

    @property
    def are_alike(self) -> bool:
        """Whether there are groups, and all lie on the same processes, in the same way."""
        return len({(id(each.scatter), id(each.copies)) for each in self.groups}) == 1

    def process_groups(self) -> list[Any]:
        """Over which the model lies."""
        return [found for group in self.groups for found in (group.scatter, group.copies)]

    def mark(self) -> str:
        """Of how the parameters are cut, the same on every process."""
        groups = [
            (
                group.ranks,
                group.copy_count,
                [(tuple(e.sharded_param.shape), e.fsdp_placement.dim) for e in group.handle.fsdp_params],
            )
            for group in self.groups
        ]
        return mark(groups)

    def open(self) -> None:
        """Gather each group once, so that its whole parameters exist. Call it once all processes agreed to."""
        names.begin(names.state_of(self.model))
        self._entries: dict[int, Any] = {}  # by the id of the whole, and of the part
        self._places: dict[int, tuple[Group, Part]] = {}  # by the id of the whole
        self._parts: list[tuple[Any, Tensor]] = []  # what stands for each entry's part, held so that its id is its own
        for group in self.groups:
            group.gather()
            for entry in group.handle.fsdp_params:
                whole = self.leaf_of(names.whole_of(entry))
                self._parts.append((entry, entry.sharded_param))
                self._entries[id(whole)] = self._entries[id(entry.sharded_param)] = entry
                dim = entry.fsdp_placement.dim
                self._places[id(whole)] = group, Part(torch.Size(entry._orig_size), dim, group.rank, group.ranks)
                group.wholes.append(whole)
            group.free()
        self.check_copies()

    def check_copies(self) -> None:
        """Raises ParameterError on all processes where some that hold the same parts hold other numbers. All must ask,
        once they have agreed to."""
        differ = 0
        for copies, parts in self._copied().values():
            with self._world.exchanging():
                differ += not same_on_all(copies, parts, parts[0].device)
        if self._world.agree({"looking at": "copies of the model"}, differ):
            raise ParameterError(
                "the copies of the model that HSDP's mesh holds differ in their weights: give all ranks the same "
                "weights before fully_shard (a seed, or one checkpoint)"
            )

    def _copied(self) -> dict[int, tuple[Any, list[Tensor]]]:
        """What lies here and on others, too, by those who hold it."""
        found: dict[int, tuple[Any, list[Tensor]]] = {}
        for group in self.groups:
            if group.copies is not None and group.copy_count > 1:
                own = found.setdefault(id(group.copies), (group.copies, []))[1]
                own += [entry.sharded_param.to_local().detach() for entry in group.handle.fsdp_params]
        return found

    # ------------------------------------------------------------------ parts and wholes

    def whole(self, parameter: Tensor) -> Tensor:
        """See `fastdp.engine.tracked_parameters.Shards`; so `part` and `drops_stray`."""
        entry = self._entries.get(id(parameter)) or self._between(parameter)
        return parameter if entry is None else self.leaf_of(names.whole_of(entry))

    def _between(self, parameter: Tensor) -> Any:
        """The entry of a part that reshard_after_forward=<a number> makes anew in every forward."""
        if not hasattr(parameter, "placements"):
            return None
        entry = self._passing.get(id(parameter))
        if entry is None or names.passing_part(entry) is not parameter:
            self._passing = {id(names.passing_part(entry)): entry for entry in self._entries.values()}
            entry = self._passing.get(id(parameter))
        return entry

    def part(self, whole: Tensor) -> Tensor:
        entry = self._entries.get(id(whole))
        return whole if entry is None else entry.sharded_param  # type: ignore[no-any-return]

    def drops_stray(self, whole: Tensor) -> bool:
        entry = self._entries.get(id(whole))
        if entry is None or entry.unsharded_accumulated_grad is None:
            return False
        entry.unsharded_accumulated_grad = None
        return True

    lowers: Any = None  # see `fastdp.engine.tracked_parameters.Shards`

    def count(self, whole: Tensor) -> int:
        return whole.numel()

    def place(self, whole: Tensor) -> tuple[Group, Part] | None:
        """Whose part of it lies here; None of a parameter that is whole on every process."""
        return self._places.get(id(whole))

    # ------------------------------------------------------------------ fully_shard's own work

    def claim(self) -> None:
        """Let fully_shard sum nothing, and gather out of the engine's sight."""
        for group in self.groups:
            self._before.append((group.handle, group.handle.reduce_grads, group.handle._all_gather_comm))
            group.handle.reduce_grads = False
            group.handle._all_gather_comm = names.Counted(group.handle._all_gather_comm, self._world.uncounted)
        for module in self.model.modules():
            state = names.state_of(module)
            for hooks, number, before in [] if state is None else names.hooks_of(module, state):
                self._hooks.append((hooks, number, hooks[number]))
                hooks[number] = quiet(hooks[number], before)

    def restore(self) -> None:
        """Give fully_shard back what was taken from it."""
        for handle, reduces, gathers in self._before:
            handle.reduce_grads, handle._all_gather_comm = reduces, gathers
        for hooks, number, hook in self._hooks:
            if number in hooks:
                hooks[number] = hook
        for undo in self._undo:
            undo()
        self._before, self._hooks, self._undo = [], [], []

    def free(self) -> None:
        """Free all whole parameters: the next forward gathers the parts that the step has updated."""
        for group in self.groups:
            group.free()

    @contextlib.contextmanager
    def at_hand(self, groups: Sequence[Group]) -> Iterator[None]:
        """Within it these groups' parameters are whole, and no forward or backward gathers or frees any. All processes
        must name the same groups."""
        for group in groups:
            group.gather()
        try:
            with names.at_rest(self.states):
                yield
        finally:
            for group in groups:
                group.free()

    def failed(self) -> None:
        """A forward or backward raised an error: fully_shard's state is of one that never ended."""
        self._failed = True

    def begins(self) -> None:
        """A forward begins. Raises ParameterError if parts were replaced, by load_state_dict(assign=True) perhaps."""
        lost = sum(entry.sharded_param is not part for entry, part in self._parts)
        if lost:
            raise ParameterError(
                f"{lost} parameter(s) of the model were replaced since the optimizer was made, by "
                "load_state_dict(assign=True) perhaps: the optimizer would train what is no longer the model's. Load "
                "without assign=, or detach() the optimizer and make a new one on every rank."
            )
        if self._failed:
            names.start_anew(self.model)
            self._failed = False


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on a module of the model."""
    return any(names.state_of(module) is not None for module in model.modules())


def to_parts(model: nn.Module) -> None:
    """Free what a forward has gathered and left (reshard_after_forward=False): the parts then stand in the modules."""
    for module in model.modules():
        state = names.state_of(module)
        for handle in [] if state is None else names.groups_of(state):
            if handle.is_unsharded:
                handle.reshard()


def _root_of(model: nn.Module) -> nn.Module:
    """The module that fully_shard was called on and that holds all parameters: the model, or one within it, as in a
    LightningModule or what torch.compile puts around a model. The model itself if there is none."""
    if names.state_of(model) is not None:
        return model
    cut = [module for module in model.modules() if names.state_of(module) is not None]
    root = max(cut, key=lambda module: len(list(module.modules())), default=model)
    held = {id(each) for found in (root.modules(), root.parameters()) for each in found}
    return root if all(id(each) in held for each in (*cut, *model.parameters())) else model


REPLICATED = (
    "the model is replicated by torch.distributed's replicate(), which sums gradients that never come: use fully_shard "
    "or DistributedDataParallel"
)


def _check(model: nn.Module, states: Sequence[Any], world: World, split: int) -> None:
    root = names.state_of(model)
    if root is None or names.is_inner(root):
        raise ParameterError(
            "fully_shard was called on modules of the model, and not on the model itself (or the model lies within "
            "another one): the parts would be gathered by blocks that know nothing of each other, at the wrong time "
            "in a backward. Call fully_shard(model), too, and give the optimizer that model, or one around it that has "
            "no other parameters (a LightningModule)."
        )
    count = max(world.size, processes())
    for state, handle in [(each, handle) for each in states for handle in names.groups_of(each)]:
        if not hasattr(handle.mesh_info, "shard_process_group"):
            raise ParameterError(REPLICATED)
        names.check_names(state, handle)
        mesh = handle.mesh_info
        covered = int(mesh.shard_mesh_size) * names.replicas_of(mesh)[1] * split
        if covered != count and processes() > 1 and world.size > 1:
            raise ParameterError(
                f"a mesh of fully_shard holds {covered} of {count} processes: what the others hold is not known. Give "
                "fully_shard a mesh of all processes (one dimension, or two for HSDP), beside tensor parallelism's. "
                "(Lightning's ModelParallelStrategy has one process in its mesh of data_parallel, unless it is given "
                "data_parallel_size= and tensor_parallel_size=.)"
            )
        for entry in handle.fsdp_params:
            name = entry._module_info.param_name if hasattr(entry, "_module_info") else "a parameter"
            if names.changes_parts(entry):
                raise ParameterError(
                    f"the part of '{name}' is changed before it is gathered (fsdp_pre_all_gather, as float8 does): "
                    "the forward would use another weight than the one that is updated. Gather it as it is."
                )
            if entry.offload_to_cpu:
                raise ParameterError("fully_shard with CPUOffloadPolicy is not supported yet: leave offload_policy out")
