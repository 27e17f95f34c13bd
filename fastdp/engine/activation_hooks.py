"""Gradient hooks on activations, on modules and on nodes of the graph: they may look, and must not change gradients.

A hook is a function of the user's that autograd calls with the gradients of the whole batch, and what it returns takes
their place: `h.register_hook(lambda g: g / g.norm())` makes every sample's gradient depend on all samples. So every
hook is wrapped, and one that changes what it is given is refused, if the backward goes through the engine's model. To
scale or mask a gradient is for the forward, where capture sees it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..batch_axis.aliasing import shares
from ..batch_axis.operator_table import REACHING_GRAPH, is_in_place
from ..errors import SampleMixingError, StepError, UncapturedUseError
from ..grad_sample.captured_call import Native
from ..utils.autograd_graph import graph_nodes
from ..utils.pytree import tensors_in

_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]
_SETTING = Tensor._backward_hooks.__set__  # type: ignore[union-attr]
_MODES = frozenset((__name__, "fastdp.engine.loss_tracking", "fastdp.engine.capture", "torch.overrides"))
# What the first two hook is wrapped by module; checkpoints of torch 2.9 only ask whether there is a node.
_TORCHS_OWN = frozenset(("torch.utils.hooks", "torch.nn.modules.module", "torch.utils.checkpoint"))

UNGUARDED = (
    "the forward took nodes of the graph (grad_fn), which may have hooks that change gradients, and fastdp did not see "
    "the backward begin, so it could not check these hooks. Call loss.backward() in the thread of the forward, or "
    "leave out the hooks on nodes (Tensor.register_hook is checked)."
)


class Owner:
    """Stands for an engine, which it does not keep alive. running: whether a backward has reached its model.

    nodes: whether a node of the graph of data was handed out; guarded: whether the hooks on nodes are looked at.
    changed: what to raise if the backward reaches the model, as a hook has changed a gradient on the way there.
    """

    def __init__(self, running: Callable[[], bool]) -> None:
        self._running = weakref.WeakMethod(running)
        self.nodes = self.guarded = False
        self.changed: SampleMixingError | None = None

    def __deepcopy__(self, memo: Any) -> Owner:
        return self

    def running(self) -> bool:
        """Whether a backward has reached the model."""
        running = self._running()
        return running is not None and running()

    def begins(self, first: bool) -> None:
        """A forward begins. first: that no backward is to go through another one."""
        self.nodes = self.nodes and not first
        self.guarded, self.changed = False, None


class _Looking(TorchFunctionMode):
    """On while a hook runs: it must not write to memory that holds data, nor hook what the backward has yet to reach.

    place: of the hook, for messages.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if is_in_place(name) and isinstance(args[0], Tensor) and shares(args[0]):
            raise StepError(
                f"{self.place} writes to data of the batch ({name}), from which gradients are computed yet."
            )
        out = func(*args, **(kwargs or {}))
        if func in REACHING_GRAPH and out is not None:
            raise StepError(f"{self.place} takes nodes of the graph, or hooks tensors. Add hooks before the backward.")
        return out


class LookingHook:
    """A hook of the user's. what: it hooks, for messages; path: of the module in whose forward, '' for the loss."""

    def __init__(self, hook: Callable[..., Any], owners: Sequence[Owner], path: str, what: str) -> None:
        self.hook, self.owners, self.path, self.what = hook, owners, path, what
        if hasattr(hook, "__torch_unserializable__"):
            self.__torch_unserializable__ = hook.__torch_unserializable__

    def __reduce__(self) -> Any:
        return (_plain, (self.hook,))  # copies and pickles of what is hooked have the user's own

    def __call__(self, *given: Any) -> Any:
        grads = tensors_in(given)
        before = [(grad, grad.detach().clone()) for grad in grads]
        with _Looking(f"{_place(self.path)}: a hook on the gradient of {self.what}"):
            out = self.hook(*given)
        replaced = next((g for g in given if isinstance(g, Tensor | tuple)), ())
        changed = out is not None and list(map(id, tensors_in(out))) != list(map(id, tensors_in(replaced)))
        if not changed and all(_equal(grad, old) for grad, old in before):
            return None
        name = getattr(self.hook, "__qualname__", type(self.hook).__qualname__)
        problem = SampleMixingError(
            f"{_place(self.path)}: a hook on the gradient of {self.what} ({name}) changes the gradients of the whole "
            "batch, so that what one sample adds may depend on others. Let it only look, and return None. To scale or "
            "mask a gradient, do it in the forward: h = h.detach() + factor * (h - h.detach())",
            "a hook changes gradients",
        )
        if any(owner.running() for owner in self.owners):
            raise problem
        for owner in self.owners:
            owner.changed = problem
        return out


def _plain(hook: Any) -> Any:
    return hook


def _equal(now: Tensor, before: Tensor) -> bool:
    """Whether the numbers are the same: `.data` and numpy write without a new version."""
    return bool(((now == before) | (before != before)).all())


def _place(path: str) -> str:
    return f"module '{path}'" if path else "the loss"


# ------------------------------------------------------------------ in sight of a function mode


def hooked(owner: Any, path: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of `operator_table.REACHING_GRAPH` on a tensor that is no parameter. path: of the module, or ''."""
    if func == _GRAD_FN:
        node = func(*args, **kwargs)
        if isinstance(owner, Owner) and node is not None:
            caller = _caller()
            owner.nodes = owner.nodes or not (caller in _TORCHS_OWN or caller.startswith("fastdp."))
        return node
    if func == _SETTING and len(args) > 1 and not args[1]:
        return func(*args, **kwargs)  # none, as copies begin
    if func == _SETTING:
        raise StepError(f"{_place(path)}: hooks are set in a way that cannot be checked. Use register_hook().")
    hook = args[1] if len(args) > 1 else kwargs["hook"]
    if not isinstance(owner, Owner) or not callable(hook):
        return func(*args, **kwargs)
    what = f"a tensor of shape {tuple(args[0].shape)}"
    return func(args[0], LookingHook(hook, [owner], path, what))


def refuse_node(forward_pass: Any, func: Any, tensor: Tensor) -> bool:
    """Raises UncapturedUseError where a program reaches for the node of a tensor made of parameters: a hook there would
    see sums of clipped gradients, which are then not clipped any more. Returns True otherwise."""
    if func != _GRAD_FN or tensor.is_leaf or _caller("fastdp.") in _TORCHS_OWN:
        return True
    raise UncapturedUseError(
        f"{_place(forward_pass.path)}: grad_fn of a tensor made of {forward_pass.names_of([tensor])} is asked for, and "
        "hooks on it would not see the gradients of samples. Leave it; to mask a weight, multiply it by the mask."
    )


def _caller(passing: str = "\0") -> str:
    """The module whose code asks: the first one above those of modes (and of those whose names begin like this)."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in _MODES and not name.startswith(passing):
            return name
        frame = frame.f_back
    return ""


# ------------------------------------------------------------------ on modules, and on nodes


def wrap_module_hooks(owner: Owner, path: str, frame: Any) -> None:
    """Wrap the backward hooks of the call that runs in `frame` (`nn.Module._call_impl`'s), which has listed them."""
    for name in ("full_backward_hooks", "backward_pre_hooks", "non_full_backward_hooks"):
        hooks = frame.f_locals.get(name)
        if not isinstance(hooks, list):
            raise StepError(
                f"module '{path}' has backward hooks, which torch {torch.__version__} calls in a way that fastdp does "
                "not know. Remove them."
            )
        # (the method, as torch copies what an object holds into an object of its own)
        hooks[:] = [LookingHook(hook, [owner], path, "a module").__call__ for hook in hooks]


def guard_graph(owners: Sequence[Owner], roots: Any) -> None:
    """Before a backward from these: see to it that hooks on nodes only look, if any node was handed out."""
    for owner in owners:
        owner.changed, owner.guarded = None, owner.nodes
    if not any(owner.nodes for owner in owners):
        return
    with torch._C.DisableTorchFunction():
        begin = [tensor.grad_fn for tensor in tensors_in(roots)]
    for node in graph_nodes(begin):
        for register in (node.register_prehook, node.register_hook):
            handle = register(_plain)  # torch tells of a node's hooks only to who adds one
            hooks: Any = handle.hooks_dict_ref()
            handle.remove()
            for number, hook in list(hooks.items()):
                ours = isinstance(getattr(hook, "__self__", hook), LookingHook | Native)
                own = ours or getattr(hook, "__module__", "") == "torch.utils.hooks"
                if not own:
                    hooks[number] = LookingHook(hook, owners, "", "a node of the graph (grad_fn)")
