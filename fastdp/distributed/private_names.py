"""Non-public torch names that this room uses, and the error if a torch version lacks them.

`tests/distributed/test_private_names.py` says which they are. A torch that has moved one is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ParameterError

FSDP = "torch.distributed.fsdp"
STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
OF_STATE = ("_lazy_init", "_is_root", "_training_state")
OF_GROUP = (
    "fsdp_params", "mesh_info", "unshard", "wait_for_unshard", "reshard", "is_unsharded", "reduce_grads",
    "_training_state", "_all_gather_comm", "modules",
)  # fmt: skip
OF_PARAMETER = (
    "sharded_param", "fsdp_placement", "_orig_size", "is_dtensor", "unsharded_accumulated_grad", "mp_policy",
    "offload_to_cpu",
)  # fmt: skip
OF_MESH = ("shard_process_group", "shard_mesh_size", "shard_mesh_rank")


_SENT = Counter[str]()  # messages from one process to one other, by the name of the group


def count_messages() -> None:
    """From now on `collectives_so_far` counts messages from one process to one other, which NCCL does not."""
    from torch.distributed import ProcessGroup

    for name in ("send", "recv", "recv_anysource"):
        method = getattr(ProcessGroup, name)
        if not hasattr(method, "__wrapped__"):
            setattr(ProcessGroup, name, _counted(method))


def _counted(method: Any) -> Any:
    @functools.wraps(method)
    def count(group: Any, *args: Any, **kwargs: Any) -> Any:
        _SENT[group.group_name] += 1
        return method(group, *args, **kwargs)

    return count


def collectives_so_far(group: Any) -> int | None:
    """How many collectives this process has begun in a process group, by all of its backends, and messages to one
    process; None if this torch, or backend, does not say."""
    try:
        counts = {id(each): int(each._get_sequence_number_for_group()) for each in _backends(group)}
    except (AttributeError, RuntimeError):
        return None
    return sum(counts.values()) + _SENT[group.group_name]


def _backends(group: Any) -> list[Any]:
    try:
        return [group._get_backend(device) for device in group._device_types]
    except (AttributeError, RuntimeError):  # one has not begun: the default one's count
        return [group]


def groups_here(*known: Any) -> dict[str, Any]:
    """All process groups of this process, by a name; a torch that does not say: those that are known."""
    from torch.distributed import distributed_c10d

    found = getattr(getattr(distributed_c10d, "_world", None), "pg_names", None)
    if found is None:
        return {str(number): group for number, group in enumerate(known)}
    return {name: group for group, name in found.items()}


def wrapper_around(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running, if it holds this model.

    A torch that does not say leaves the wrapper unknown: it then raises an error of its own in its second forward, as
    no gradient came for its sums.
    """
    found = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if found is None or not any(module is model for module in found.module.modules()):
        return None
    return found  # type: ignore[no-any-return]


def is_joined(wrapper: DistributedDataParallel | None) -> bool:
    """Whether a process without more batches answers this wrapper's collectives (torch.distributed's Join)."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


def store_of_world() -> Any:
    """The store by which the processes of the default group have met."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def timeout_of(group: Any) -> timedelta | None:
    """How long collectives of a process group wait for others; None if this torch, or backend, does not say."""
    for kind in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta):
            return found
    return None


def lies_here(whole: Any) -> Tensor:
    """The local tensor of a DTensor, out of autograd's sight; a collective that makes it may be on its way."""
    return whole._local_tensor  # type: ignore[no-any-return]


def dispatches_attention() -> bool:
    """Whether attention of DTensors goes by a ring of processes: context parallelism has switched that on."""
    if "torch.distributed.tensor.experimental._attention" not in sys.modules:
        return False  # nobody has
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    handlers = getattr(getattr(kind, "_op_dispatcher", None), "_custom_op_handlers", {})
    return any("scaled_dot_product" in str(operation) for operation in handlers)


# ---------------------------------------------------------------------- fully_shard


def state_of(module: nn.Module) -> Any:
    """What `fully_shard` keeps of a module that it was called on; None of other modules."""
    if FSDP not in sys.modules:
        return None  # nobody has called it
    find = getattr(sys.modules.get(STATE), "_get_module_fsdp_state", None)
    if find is not None:
        return find(module)
    if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
        raise _unknown("fully_shard's state")
    return None


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters that one `fully_shard` gathers together."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if not hasattr(state, "_fsdp_param_group"):  # before torch 2.12
        raise _unknown("fully_shard's groups of parameters")
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def begin(root: Any) -> None:
    """Let fully_shard find its modules, as it does in its first forward."""
    root._lazy_init()


def is_inner(state: Any) -> bool:
    """Whether the module is known to lie within another one that `fully_shard` was called on."""
    return state._is_root is False


def check_names(state: Any, group: Any) -> None:
    """Raises ParameterError if this torch has other names."""
    found = [name for name in OF_STATE if not hasattr(state, name)]
    found += [name for name in OF_GROUP if not hasattr(group, name)]
    found += [name for p in group.fsdp_params[:1] for name in OF_PARAMETER if not hasattr(p, name)]
    found += [name for name in OF_MESH if not hasattr(group.mesh_info, name)]
    if found:
        raise _unknown(f"{found} of fully_shard")


def whole_of(entry: Any) -> Tensor:
    """The whole parameter, as forwards use it; its group was gathered once."""
    return entry._unsharded_param  # type: ignore[no-any-return]


def passing_part(entry: Any) -> Tensor | None:
    """What stands in the module between forward and backward, if it is cut for fewer processes then."""
    return getattr(entry, "_sharded_post_forward_param", None)


def gather(group: Any) -> None:
    """Gather a group's parameters, unless they are there; all processes must."""
    group.unshard()
    group.wait_for_unshard()


def explain_gathers(group: Any, explained: Callable[[BaseException], BaseException]) -> Callable[[], None]:
    """Raise, in place of an error of a group's gathers, what a function makes of it; returns what ends that."""

    def around(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            try:
                return inner(*args, **options)
            except RuntimeError as problem:
                if (found := explained(problem)) is problem:
                    raise
                raise found from problem

        return run

    wrapped = (_GATHERS, "wait_for_unshard")
    for name in wrapped:
        vars(group)[name] = around(getattr(group, name))
    return lambda: [vars(group).pop(name, None) for name in wrapped].clear()


def replicas_of(mesh_info: Any) -> tuple[Any, int]:
    """The process group of those who hold the same part, and their number."""
    group = getattr(mesh_info, "replicate_process_group", None)
    return group, 1 if group is None else int(mesh_info.replicate_mesh_size)


def split_on(entry: Any) -> Any:
    """The mesh over which tensor parallelism had split a parameter before; None if it had not."""
    if not entry.is_dtensor:
        return None
    spec = getattr(entry, "_unsharded_dtensor_spec", None) or getattr(entry, "_tp_spec", None)  # before torch 2.13
    if spec is None:
        raise _unknown("the parameters that were split before fully_shard")
    return spec.mesh


def sharding_group(model: nn.Module) -> Any:
    """The process group over which fully_shard cuts parameters; None of a model that it was not called on."""
    for module in model.modules():
        for group in [] if (state := state_of(module)) is None else groups_of(state):
            return getattr(group.mesh_info, "shard_process_group", None)
    return None


def changes_parts(entry: Any) -> bool:
    """Whether a part is changed before it is sent to others (float8)."""
    return hasattr(entry.sharded_param._local_tensor, "fsdp_pre_all_gather")


def hooks_of(module: nn.Module, state: Any) -> list[tuple[dict[int, Any], int, bool]]:
    """(hooks, number, whether before) of the forward hooks that fully_shard has put on a module."""
    found: list[tuple[dict[int, Any], int, bool]] = []
    for hooks, before in ((module._forward_pre_hooks, True), (module._forward_hooks, False)):
        for number, hook in hooks.items():
            while (inner := getattr(hook, "__wrapped__", None)) is not None and not hasattr(hook, "__self__"):
                hook = inner
            if getattr(hook, "__self__", None) is state:
                found.append((hooks, number, before))  # type: ignore[arg-type]
    return found


class Counted:
    """Gathers as another one does, within a context."""

    def __init__(self, inner: Any, around: Callable[[], Any]) -> None:
        self.inner, self.around = inner, around

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def allocate(self, *args: Any, **options: Any) -> Tensor:
        return self.inner.allocate(*args, **options)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self.around():
            return self.inner(*args, **options)


_GATHERS = "unshard"


@contextlib.contextmanager
def at_rest(states: list[Any]) -> Iterator[None]:
    """Within it the hooks of these modules gather, sum and free nothing, as if the backward that calls them again had
    gathered already. They would gather what is not there: other processes would not, so that raises an error."""
    kind = type(states[0]._training_state) if states else None
    groups = [group for state in states for group in groups_of(state)]
    held = [*states, *groups]
    before = [each._training_state for each in held]
    away = [(vars(group), vars(group).get(_GATHERS)) for group in groups if not group.is_unsharded]
    try:
        for each in held:
            each._training_state = kind.PRE_BACKWARD  # type: ignore[union-attr]
        for own, _ in away:
            own[_GATHERS] = _refuse_to_gather
        yield
    finally:
        for each, was in zip(held, before, strict=True):
            each._training_state = was
        for own, gathers in away:
            own[_GATHERS] = gathers
            if gathers is None:
                del own[_GATHERS]


def _refuse_to_gather(*_: Any, **__: Any) -> None:
    raise ParameterError(
        "a checkpointed forward runs again for the norms, as it makes a tensor of parameters, and reads others that "
        "its module does not hold: give checkpoint() the module that fully_shard was called on, or one around it"
    )


def start_anew(root: nn.Module) -> None:
    """After a forward or backward that failed: free what was gathered, and forget it."""
    state = state_of(root)
    if state is not None and hasattr(state, "_reset_iter_state"):  # since torch 2.12
        state._reset_iter_state()


def _unknown(what: str) -> ParameterError:
    return ParameterError(
        f"torch {torch.__version__} has other names for {what} than fastdp knows: install a torch that fastdp was "
        "tested with (docs/distributed.md), or train with DistributedDataParallel"
    )
