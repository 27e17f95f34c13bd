"""Gradient hooks on activations: follows what they compute, so that they cannot mix samples.

A hook is a function of the user's that autograd calls with the gradients of the whole batch, and what it returns takes
their place: `h.register_hook(lambda g: g / g.norm())` makes every sample's gradient depend on all samples. A gradient
lies as the tensor lies that it is of. So a hook's calls are followed from there, with the layouts of `fastdp.batch_axis`:
what it does to each sample's rows alone may stay, anything else is refused. A hook that only looks may do as it likes.

Hooks on tensors and on modules are followed. Hooks on nodes of the graph (`grad_fn.register_hook`) take gradients whose
rows are not known: they may only look.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.layout import Layout, tag, tag_of
from ..errors import SampleMixingError, StepError, UncapturedUseError
from ..grad_sample.captured_call import Native
from ..utils.pytree import tensors_in
from .hook_scales import NOT_LINEAR
from .hook_watch import Owner, Watch

_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]
_SETTING = Tensor._backward_hooks.__set__  # type: ignore[union-attr]
_MODES = frozenset(
    (__name__, "fastdp.engine.loss_tracking", "fastdp.engine.capture", "fastdp.engine.hook_watch", "torch.overrides")
)
# What the first two hook is followed by module; checkpoints of torch 2.9 only ask whether there is a node.
_TORCHS_OWN = frozenset(("torch.utils.hooks", "torch.nn.modules.module", "torch.utils.checkpoint"))

UNGUARDED = (
    "the forward took nodes of the graph (grad_fn), which may have hooks that change gradients, and fastdp did not see "
    "the backward begin, so it could not check these hooks. Call loss.backward() in the thread of the forward, or "
    "leave out the hooks on nodes (Tensor.register_hook is followed)."
)


def hooked(owner: Any, batch: int, path: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of `kinds.REACHING_GRAPH` on a tensor that is no parameter. path: of the module where it stands, or ''."""
    tensor = args[0]
    if func == _GRAD_FN:
        node = func(*args, **kwargs)
        if isinstance(owner, Owner) and node is not None:
            caller = _caller()
            owner.nodes = owner.nodes or not (caller in _TORCHS_OWN or caller.startswith("fastdp."))
        return node
    if func == _SETTING and len(args) > 1 and not args[1]:
        return func(*args, **kwargs)  # none, as copies begin
    if func == _SETTING:
        raise StepError(f"{_place(path)}: hooks are set in a way that cannot be followed. Use register_hook().")
    hook = args[1] if len(args) > 1 else kwargs["hook"]
    if not isinstance(owner, Owner) or not callable(hook):
        return func(*args, **kwargs)
    return func(tensor, TensorHook(hook, owner, batch, path, tag_of(tensor, batch)))


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


def _place(path: str) -> str:
    return f"module '{path}'" if path else "the loss"


# --------------------------------------------------------------------------- following a hook


class _Hook:
    """A hook of the user's in our wrapping."""

    what = "a hook on a gradient"

    def __init__(self, hook: Callable[..., Any], owner: Owner, batch: int, path: str) -> None:
        self.hook, self.owner, self.batch, self.path = hook, owner, batch, path
        if hasattr(hook, "__torch_unserializable__"):
            self.__torch_unserializable__ = hook.__torch_unserializable__

    def __reduce__(self) -> Any:
        return (_plain, (self.hook,))  # copies and pickles of what is hooked have the user's own

    def __deepcopy__(self, memo: Any) -> Any:
        return self.hook

    def follow(
        self, given: Sequence[Sequence[Tensor | None]], layouts: Sequence[Sequence[Layout | None]], *before: Any
    ) -> Any:
        """The hook's result, from `before` and the gradients given; these have layouts. It may replace the first."""
        pairs = [
            (tensor, layout)
            for tensors, known in zip(given, layouts, strict=True)
            for tensor, layout in zip(tensors, known, strict=True)
            if isinstance(tensor, Tensor)
        ]
        versions = [tensor._version for tensor, _ in pairs]
        for tensor, layout in pairs:
            tag(tensor, None if layout is None or layout.total else layout)
        watch = Watch(self.owner, self.batch, [tensor for tensor, _ in pairs])
        with watch:
            out = self.hook(*before, *(given[0] if len(given) == 1 and not before else given))
        self._check(watch, pairs, versions, given[0], out)
        return out

    def _check(self, watch: Watch, pairs: Any, versions: list[int], first: Sequence[Tensor | None], out: Any) -> None:
        results = [t for t, _ in pairs]
        given = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple | list) else []
        for old, new in zip(first, given, strict=False):
            results = [new if t is old and isinstance(new, Tensor) else t for t in results]
        for (tensor, layout), version, result in zip(pairs, versions, results, strict=True):
            why = watch.problem(tensor, version, layout, result)
            if why and (layout is not None or self.owner.runs()):
                raise SampleMixingError(self.refusal(tuple(tensor.shape), why), why)

    def refusal(self, shape: tuple[int, ...], why: str) -> str:
        """What to say of a hook that must not do this."""
        name = getattr(self.hook, "__qualname__", type(self.hook).__qualname__)
        hook = f"{_place(self.path)}: {self.what} of shape {shape} ({name})"
        if why == NOT_LINEAR:
            return f"{hook} {why}."
        return (
            f"{hook} makes what one sample adds depend on others: "
            f"{why}. Clipping does not bound that. Let it do the same to each sample's rows by themselves (g * 0.5, "
            "g.clamp(-1, 1), norms within a sample), or only look and return None."
        )


def _plain(hook: Any) -> Any:
    return hook


class TensorHook(_Hook):
    """A hook on a tensor that lies as `layout` says."""

    what = "a hook on the gradient of a tensor"

    def __init__(
        self, hook: Callable[..., Any], owner: Owner, batch: int, path: str, layout: Layout | None = None
    ) -> None:
        super().__init__(hook, owner, batch, path)
        self.layout = layout

    def __call__(self, grad: Tensor) -> Any:
        return self.follow(((grad,),), ((self.layout,),))


# --------------------------------------------------------------------------- hooks on modules


class Around:
    """One call of a module with backward hooks: how its arguments and results lie. depth: its thread, and how deep."""

    def __init__(self, batch: int, depth: tuple[int, int]) -> None:
        self.batch, self.depth = batch, depth
        self.inputs: list[tuple[Any, Layout | None]] = []
        self.outputs: list[tuple[Any, Layout | None]] = []

    def returned(self, args: Any, out: Any) -> None:
        """The module's forward is done."""
        with torch._C.DisableTorchFunction():  # the capture mode is on
            self.inputs = _described(args, self.batch)
            self.outputs = _described(out, self.batch)

    def layouts(self, grads: Sequence[Tensor | None], known: list[tuple[Any, Layout | None]]) -> list[Layout | None]:
        """Of the gradients, as far as they have the shapes of what they are gradients of."""
        found: list[Layout | None] = []
        for number, grad in enumerate(grads):
            shape, layout = known[number] if number < len(known) else (None, None)
            found.append(layout if isinstance(grad, Tensor) and grad.shape == shape else None)
        return found


def _described(values: Any, batch: int) -> list[tuple[Any, Layout | None]]:
    items = values if isinstance(values, tuple) else (values,)
    return [(t.shape, tag_of(t, batch)) if isinstance(t, Tensor) else (None, None) for t in items]


class _ModuleHook(_Hook):
    what = "a backward hook on a module, on a gradient"

    def __init__(self, hook: Callable[..., Any], owner: Owner, batch: int, path: str, around: Around) -> None:
        super().__init__(hook, owner, batch, path)
        self.around = around


class _Full(_ModuleHook):
    def __call__(self, module: Any, grad_input: Any, grad_output: Any) -> Any:
        layouts = [self.around.layouts(grad_input, self.around.inputs), []]
        layouts[1] = self.around.layouts(grad_output, self.around.outputs)
        return self.follow((grad_input, grad_output), layouts, module)


class _Before(_ModuleHook):
    def __call__(self, module: Any, grad_output: Any) -> Any:
        return self.follow((grad_output,), (self.around.layouts(grad_output, self.around.outputs),), module)


def around_module(owner: Owner, batch: int, path: str, frame: Any, depth: tuple[int, int]) -> Around:
    """Wrap the backward hooks of the call that runs in `frame` (`nn.Module._call_impl`'s), which has listed them."""
    around = Around(batch, depth)
    lists = [frame.f_locals.get(n) for n in ("full_backward_hooks", "backward_pre_hooks", "non_full_backward_hooks")]
    if any(not isinstance(hooks, list) for hooks in lists):
        raise StepError(
            f"module '{path}' has backward hooks, which torch {torch.__version__} calls in a way that fastdp does not "
            "know. Remove them."
        )
    for kind, hooks in zip((_Full, _Before), lists, strict=False):
        hooks[:] = [kind(hook, owner, batch, path, around) for hook in hooks]
    # (the method, as torch copies what an object holds into an object of its own)
    lists[2][:] = [NodeHook(hook, owner, batch, path).__call__ for hook in lists[2]]
    return around


# --------------------------------------------------------------------------- hooks on nodes


class NodeHook(_Hook):
    """A hook on a node of the graph, which may only look."""

    what = "a hook on a node of the graph (grad_fn), on a gradient"

    def __call__(self, *given: Any) -> Any:
        grads = [[t for t in tensors_in(g)] for g in given]
        before = [(t, t._version) for group in grads for t in group]
        out = self.hook(*given)
        replaced = [t for t in tensors_in(out)] if out is not None else []
        first = tensors_in(next((g for g in given if isinstance(g, tuple)), ()))
        changed = any(t._version != version for t, version in before)
        if changed or (out is not None and [id(t) for t in replaced] != [id(t) for t in first]):
            shape = tuple(first[0].shape) if first else ()
            why = "changes a gradient in which fastdp cannot find the samples (use Tensor.register_hook)"
            raise SampleMixingError(self.refusal(shape, why), why)
        return out


def guard_graph(owner: Any, roots: Any, batch: int) -> None:
    """Before a backward from these: see to it that hooks on nodes only look, if any node was handed out."""
    if not isinstance(owner, Owner) or not owner.nodes:
        return
    owner.guarded = True
    with torch._C.DisableTorchFunction():
        waiting = [tensor.grad_fn for tensor in tensors_in(roots) if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for register in (node.register_prehook, node.register_hook):
            _guard(register, owner, batch)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _guard(register: Any, owner: Owner, batch: int) -> None:
    handle = register(_looks)  # torch tells of a node's hooks only to who adds one
    hooks = handle.hooks_dict_ref()
    handle.remove()
    for number, hook in list(hooks.items()):
        if not isinstance(hook, NodeHook | Native) and getattr(hook, "__module__", "") != "torch.utils.hooks":
            hooks[number] = NodeHook(hook, owner, batch, "")


def _looks(*_: Any) -> None:
    return None
