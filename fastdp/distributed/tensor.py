"""Models whose layers are split over processes by tensor parallelism (parallelize_module).

What stands in a module is a DTensor; what lies here of it, its leaf, is what the engine tracks and captures uses of
(`fastdp.distributed.tensor_calls`), and the optimizer updates the DTensor, whose memory the leaf shares. With
fully_shard around it, the DTensor that stands in the module comes and goes, and the leaf shares the memory of the one
that forwards use.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import nested_tensors
from ..batch_axis.operator_table import ELEMENTWISE, function_name
from ..engine.call_cache import inquires
from ..errors import ParameterError, UncapturedUseError
from ..grad_sample.parameter_links import link_of
from ..utils.pytree import tensors_in
from .fingerprints import lanes_of, mark, projection_of, same_on_all
from .private_names import lies_here
from .sharded import Group, Sharded
from .shards import Part, placed_within
from .tensor_calls import CALLS, Split
from .tensor_hooks import check_plan, out_of_sight

ON_DATA = frozenset(name for name in ELEMENTWISE if not name.endswith("_") or name.endswith("__")) | frozenset(
    "__getitem__ flatten view reshape transpose permute unsqueeze squeeze contiguous to type_as chunk split unbind "
    "swapaxes softmax log_softmax cross_entropy nll_loss mean sum matmul __matmul__ bmm scaled_dot_product_attention "
    "layer_norm rms_norm detach size dim cat stack unflatten view_as_complex view_as_real expand expand_as".split()
)


class TensorParallel:
    """The leaves of a model's split parameters. mesh: of the processes that share them, of one dimension. sharded: what
    fully_shard has made of the model besides, or None.

    See `fastdp.engine.tracked_parameters.Shards` for what an engine asks, and
    `fastdp.distributed.sharded.Sharded` for the rest.
    """

    def __init__(self, model: nn.Module, mesh: Any, sharded: Sharded | None, world: Any) -> None:
        self.model, self.mesh, self.sharded, self._world = model, mesh, sharded, world
        self.group, self.size, self.rank = mesh.get_group(), int(mesh.size()), int(mesh.get_local_rank())
        self.groups: list[Group] = [] if sharded is None else sharded.groups
        self._leaves: dict[int, tuple[Any, Tensor]] = {}  # by the ids of a DTensor and of its leaf: both
        self._undo: list[Callable[[], None]] = []  # what gives styles their hooks back
        self._lanes: list[Tensor] = []  # of what the forwards were given since the last backward
        self._arrived: list[Tensor] = []  # of their outputs to which gradients came since then, and of these
        self._handles: list[Any] = []
        check_plan(model)
        if sharded is not None:
            sharded.leaf_of = self.leaf

    def explain(self, explained: Callable[[BaseException], BaseException]) -> None:
        if self.sharded is not None:
            self.sharded.explain(explained)

    def process_groups(self) -> list[Any]:
        return [self.group, *([] if self.sharded is None else self.sharded.process_groups())]

    # ------------------------------------------------------------------ leaves

    def leaf(self, parameter: Any) -> Tensor:
        """What lies here of a split parameter, as forwards use it: the same object for good. Others as they are."""
        known = self._leaves.get(id(parameter))
        if known is None:
            if not hasattr(parameter, "placements"):
                return parameter  # type: ignore[no-any-return]
            _check_placement(parameter, self.mesh)
            leaf: Tensor = nn.Parameter(lies_here(parameter).detach(), requires_grad=parameter.requires_grad)
            known = self._leaves[id(parameter)] = self._leaves[id(leaf)] = parameter, leaf
        whole, leaf = known
        if leaf.data_ptr() != lies_here(whole).data_ptr():
            leaf.data = lies_here(whole).detach()
        if leaf.requires_grad != whole.requires_grad:
            leaf.requires_grad_(whole.requires_grad)
        return leaf

    def split(self, leaf: Tensor) -> Any:
        """The DTensor of which this is the leaf, as forwards use it; None of a plain parameter."""
        known = self._leaves.get(id(leaf))
        return None if known is None else known[0]

    def whole(self, parameter: Tensor) -> Tensor:
        if id(parameter) in self._leaves:
            return self.leaf(parameter)
        return self.leaf(parameter if self.sharded is None else self.sharded.whole(parameter))

    def part(self, whole: Tensor) -> Tensor:
        if self.sharded is not None:
            return self.sharded.part(whole)
        found = self.split(whole)
        return whole if found is None else found  # type: ignore[no-any-return]

    def drops_stray(self, whole: Tensor) -> bool:
        stray = self.sharded is not None and self.sharded.drops_stray(whole)
        if whole.grad is not None and id(whole) in self._leaves:
            whole.grad, stray = None, True
        return stray

    def count(self, whole: Tensor) -> int:
        found = self.split(whole)
        return whole.numel() if found is None else int(found.numel())

    def is_copied(self, leaf: Tensor) -> bool:
        """Whether all processes of tensor parallelism hold the same of a parameter."""
        found = self.split(leaf)
        return found is None or found.placements[0].is_replicate()

    def place(self, leaf: Tensor) -> Any:
        """What of the whole parameter lies here; None of a plain one, which is whole on every process."""
        inner = None if self.sharded is None else self.sharded.place(leaf)
        part = None if inner is None else inner[1]
        whole = self.split(leaf)
        if whole is None or self.is_copied(leaf):
            part = Part(whole.shape, 0, 0, 1) if part is None and whole is not None else part
            return None if part is None else part.box
        return placed_within(Part(whole.shape, whole.placements[0].dim % whole.dim(), self.rank, self.size), part)

    def check_copies(self) -> None:
        """Raises ParameterError on all processes where some that hold the same parts hold other numbers. All must ask,
        once they have agreed to."""
        leaves = {id(leaf): leaf for p in self.model.parameters() for leaf in [self.whole(p)]}.values()
        held = [(self.group, [self._here(leaf) for leaf in leaves if self.is_copied(leaf)])]
        if self.sharded is not None:
            self.sharded.check_copies()
        elif self._world.size > 1:
            held.append((self._world.group, [leaf for leaf in leaves if not self.is_copied(leaf)]))
        differ = sum(not same_on_all(group, tensors, self.mesh.device_type) for group, tensors in held)
        if self._world.agree({"looking at": "what processes hold of split layers"}, differ):
            raise ParameterError(
                "the copies of a model whose layers are split hold different parts of them, or the parameters that are "
                "whole on each process differ: load the same weights on every copy (every row of mesh['tp']) before "
                "the optimizer is made"
            )

    def _here(self, leaf: Tensor) -> Tensor:
        """What lies here of a parameter, in parts of fully_shard perhaps."""
        part: Any = self.part(leaf)
        return part.to_local().detach() if hasattr(part, "to_local") else part.detach()

    # ------------------------------------------------------------------ what the engine asks in a forward

    def lowers(self, active: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of the forward, if it takes DTensors; else NotImplemented. active: the pass."""
        from torch.distributed.tensor import DTensor  # imports what takes a second

        given = [t for t in tensors_in((args, kwargs)) if isinstance(t, DTensor)]
        if not given:
            return NotImplemented
        name = function_name(func)
        parameters = [t for t in given if isinstance(t, nn.Parameter)]
        call = Split(active, name, self.mesh, self.leaf)
        if not parameters:
            if any(link_of(t) is not None for t in given):
                raise call.refusal("a tensor made of split parameters is used")
            if name in ON_DATA or inquires(func):
                return active.dispatch(func, args, kwargs)
            raise UncapturedUseError(
                f"{active.place(name)} takes a DTensor, and fastdp does not know that samples stay apart there: let "
                "the style of the module before give a local tensor (use_local_output=True)"
            )
        if inquires(func):
            return active.dispatch(func, args, kwargs)
        made = CALLS.get(func)
        if made is None or not torch.is_grad_enabled():
            raise call.refusal(f"parameter {self._names(parameters)} is used by it")
        return made(call, func, args, kwargs)

    def _names(self, parameters: Sequence[Any]) -> str:
        ids = {id(p) for p in parameters} | {id(self.leaf(p)) for p in parameters}
        found = [name for name, p in self.model.named_parameters() if id(p) in ids or id(self.whole(p)) in ids]
        return ", ".join(f"'{name}'" for name in found) or "?"

    # ------------------------------------------------------------------ around a training

    def mark(self) -> str:
        cuts = [(name, str(p.placements)) for name, p in self.model.named_parameters() if hasattr(p, "placements")]
        return mark(cuts, self.size, "" if self.sharded is None else self.sharded.mark())

    def open(self) -> None:
        if self.sharded is not None:
            self.sharded.open()
        for parameter in self.model.parameters():
            self.whole(parameter)

    def claim(self) -> None:
        """Let the hooks of styles work out of the engine's sight, and see what forwards are given."""
        if self.sharded is not None:
            self.sharded.claim()
        self._undo = [undo for module in self.model.modules() for undo in out_of_sight(module)]
        before, after = self.model.register_forward_pre_hook, self.model.register_forward_hook
        self._handles = [before(self._given, with_kwargs=True), after(self._made)]

    def restore(self) -> None:
        if self.sharded is not None:
            self.sharded.restore()
        for undo in self._undo:
            undo()
        for handle in self._handles:
            handle.remove()
        self._undo, self._handles = [], []

    def begins(self) -> None:
        if self.sharded is not None:
            self.sharded.begins()

    def failed(self) -> None:
        if self.sharded is not None:
            self.sharded.failed()

    def free(self) -> None:
        if self.sharded is not None:
            self.sharded.free()

    @contextlib.contextmanager
    def at_hand(self, groups: Sequence[Group]) -> Iterator[None]:
        with contextlib.nullcontext() if self.sharded is None else self.sharded.at_hand(groups):
            yield

    def _given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._lanes += [lanes_of(t) for t in nested_tensors((args, kwargs)) if not hasattr(t, "placements")]

    def _made(self, module: nn.Module, args: Any, out: Any) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            with torch._C.DisableTorchFunction():
                for t in nested_tensors(out):
                    if t.requires_grad and t.is_floating_point() and not hasattr(t, "placements"):
                        t.register_hook(functools.partial(self._arrives, projection_of(t)))

    def _arrives(self, value: Tensor, grad: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self._arrived.append(torch.stack([value, projection_of(grad)]))

    def take_arrived(self) -> Tensor | None:
        """`projection_of` the outputs to which gradients came, and of these gradients: [2, 2]."""
        found, self._arrived = self._arrived, []
        if not found:
            return None
        return torch.stack([n * each.to(found[0].device) for n, each in enumerate(found, 1)]).sum(0)

    def take_lanes(self) -> Tensor | None:
        """Numbers by which processes compare what their forwards were given since the last time, however many these
        were: [4] in [0, 1)."""
        found, self._lanes = self._lanes, []
        if not found:
            return None
        device = next((t.device for t in found if t.device.type == self.mesh.device_type), found[0].device)
        places = torch.arange(1.0, len(found) + 1, dtype=torch.float64, device=device)
        return (torch.stack([t.to(device) for t in found]) * places[:, None]).sum(0) % 1


def _check_placement(parameter: Any, mesh: Any) -> None:
    if parameter.device_mesh != mesh or len(parameter.placements) != 1:
        raise ParameterError(
            f"a parameter of shape {tuple(parameter.shape)} lies on {parameter.device_mesh} as {parameter.placements}, "
            f"and others on {mesh}: fastdp splits layers over one mesh of one dimension (mesh['tp'])"
        )
    kind = parameter.placements[0]
    if not (kind.is_replicate() or type(kind).__name__ == "Shard"):
        raise ParameterError(
            f"a parameter of shape {tuple(parameter.shape)} is placed as {kind}: Shard or Replicate it"
        )
