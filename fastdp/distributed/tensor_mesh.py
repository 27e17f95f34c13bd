"""Tells which processes share a model's layers, and which hold samples of their own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ..errors import ParameterError, StepError
from . import private_names as names
from .world import Ranks, World, processes

OTHERS = {
    "cp": "context parallelism", "context": "context parallelism", "pp": "pipeline parallelism",
    "pipeline": "pipeline parallelism", "ep": "expert parallelism", "expert": "expert parallelism",
}  # fmt: skip


def tensor_mesh_of(model: nn.Module) -> Any:
    """The mesh over which a model's layers are split, of one dimension; None if they are not.

    Raises ParameterError where several meshes, or one of several dimensions, have split them.
    """
    found: list[tuple[str, Any]] = []
    states = [state for module in model.modules() if (state := names.state_of(module)) is not None]
    if not states:
        found = [(name, mesh) for name, p in model.named_parameters() if (mesh := _mesh_of(p)) is not None]
    else:
        held = set()
        for entry in [entry for state in states for group in names.groups_of(state) for entry in group.fsdp_params]:
            held.add(id(entry.sharded_param))
            mesh = names.split_on(entry)
            found += [] if mesh is None else [(entry._module_info.param_name, mesh)]
        others = [(name, p) for name, p in model.named_parameters() if id(p) not in held]
        found += [(name, mesh) for name, p in others if (mesh := _mesh_of(p)) is not None]
    for name, mesh in found:
        if mesh.ndim != 1 or mesh != found[0][1]:
            raise ParameterError(
                f"'{name}' is a DTensor on {mesh}: fastdp splits layers over one mesh of one dimension (tensor "
                "parallelism, parallelize_module(model, mesh['tp'], plan)), beside fully_shard's. Expert parallelism "
                "and other plans are not supported yet."
            )
    return found[0][1] if found else None


def _mesh_of(parameter: Any) -> Any:
    return getattr(parameter, "device_mesh", None)


def check_names_of(mesh: Any) -> None:
    """Raises StepError of a mesh with a dimension that is known not to be of samples."""
    for name in (mesh.mesh_dim_names or ()) if mesh is not None else ():
        known = next((what for word, what in OTHERS.items() if name.lower().split("_")[0] == word), None)
        if known is not None and mesh[name].size() > 1:
            raise StepError(
                f"the mesh has a dimension '{name}': {known} is not supported yet, as what a process has of each "
                "sample there is not known. Use dimensions of data ('dp') and tensor parallelism ('tp')."
            )


def split_world(tensor_mesh: Any, process_group: Any, mesh: Any, sharded_by: Any = None) -> World:
    """The processes that train a model whose layers are split.

    tensor_mesh: over which. process_group, mesh: the user's, of those with samples of their own; a mesh may have the
    dimension of tensor parallelism, too. sharded_by: the process group of fully_shard.

    Raises StepError where the two do not make up all processes.
    """
    if process_group is not None and mesh is not None:
        raise ValueError("give either process_group= or mesh=")
    if processes() == 1:
        return World()
    split = tensor_mesh.get_group()
    shared = dist.get_process_group_ranks(split)
    check_names_of(mesh)
    found: list[Any] = [sharded_by] if sharded_by is not None else []
    if process_group is not None:
        found.append(process_group)
    if mesh is not None:
        groups = [mesh.get_group(d) for d in range(mesh.ndim)]
        found += [g for g in groups if dist.get_process_group_ranks(g) != shared and dist.get_world_size(g) > 1]
    if not found:
        found = [_alone()]
    own = dist.get_process_group_ranks(found[0])
    different = any(dist.get_process_group_ranks(group) != own for group in found)
    if sharded_by is not None and len(own) * len(shared) != processes():
        raise StepError(
            f"fully_shard cuts the split layers over {len(own)} processes, and {processes()} train together: beside "
            "tensor parallelism its mesh must have one dimension, of all others (HSDP is not supported there)"
        )
    if different or len(own) * len(shared) != processes() or set(own) & set(shared) != {dist.get_rank()}:
        raise StepError(
            f"layers are split over {len(shared)} of {processes()} processes, and what the others do is not known: "
            "give the optimizer the mesh of those with samples of their own (mesh=mesh['dp'], one dimension), which "
            "with tensor parallelism's must make up all processes."
        )
    return Ranks(found[0], split)


_ALONE: list[tuple[Any, Any]] = []  # the default group, and the group of this process alone


def _alone() -> Any:
    world = dist.group.WORLD
    if not _ALONE or _ALONE[0][0] is not world:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _ALONE[:] = [(world, groups[dist.get_rank()])]
    return _ALONE[0][1]
