"""The backend that torch.compile calls for private training: interpret a graph first, run its plan afterwards."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..layouts.layout import tag_of
from .capture import Pass
from .compile_plan import Body, NotCompilable, Plan
from .compile_watch import Interpretation, has_inner_graph
from .module_hooks import REGION

PLANS = 256  # kinds of inputs whose plans one graph keeps


class InnerGraph(Exception):
    """Raised while torch compiles: the graph holds operators that are graphs of their own."""


class Backend:
    """What torch.compile is given in place of the user's backend, which compiles what this leaves of a graph."""

    def __init__(self, backend: Callable[..., Any], dynamic: bool | None, notes: list[str]) -> None:
        self.backend, self.dynamic, self.notes = backend, dynamic, notes
        self.__name__ = "fastdp"
        self.runners: weakref.WeakSet[GraphRunner] = weakref.WeakSet()

    def __call__(self, module: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        if has_inner_graph(module):
            raise InnerGraph("higher-order operators")
        runner = GraphRunner(module, self)
        self.runners.add(runner)
        return runner

    def note(self, text: str) -> None:
        """Say once why something is slower than it might be."""
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(f"torch.compile under fastdp: {text}; the results are exact, the speed is not that of "
                          "compiled code", stacklevel=2)  # fmt: skip


class GraphRunner:
    """One graph of torch.compile."""

    def __init__(self, module: GraphModule, owner: Backend) -> None:
        self.module, self.owner = module, owner
        self.plans: dict[Any, Plan | None] = {}
        self.reasons: dict[Any, str] = {}  # why a kind of inputs has no plan
        self.paths: dict[str, None] = {}  # of the modules that it ran for
        self._bodies: dict[Any, tuple[Body, Callable[..., Any]]] = {}
        self._symbolic = any(
            isinstance(n.meta.get("example_value"), torch.SymInt) or n.type is torch.SymInt
            for n in module.graph.nodes
            if n.op == "placeholder"
        )

    def __call__(self, *inputs: Any) -> Any:
        forward_pass = REGION.forward_pass
        if forward_pass is None or not torch.is_grad_enabled():
            return self.module(*inputs)
        self.paths[forward_pass.path] = None
        key = _kind(forward_pass, inputs)
        plan = self.plans.get(key)
        if plan is not None:
            if plan.ran:
                return plan(forward_pass, inputs)
            try:
                return plan(forward_pass, inputs)
            except (torch._dynamo.exc.TorchDynamoException, RuntimeError, TypeError) as problem:
                self._without_plan(key, f"a graph could not be compiled ({str(problem).splitlines()[0][:200]})")
        learn = key is not None and key not in self.plans and forward_pass.batch > 0
        with forward_pass.mode:
            run = Interpretation(self.module, forward_pass)
            forward_pass.watcher = run if learn else None
            try:
                out = run.run(*inputs)
            finally:
                forward_pass.watcher = None
        if learn:
            self._learn(key, run)
        return out

    def _learn(self, key: Any, run: Interpretation) -> None:
        if len(self.plans) >= PLANS:
            self.plans.clear()
            self.reasons.clear()
        seen = run.seen
        try:
            if seen.problem:
                raise NotCompilable(seen.problem)
            structure = tuple(
                (n.name, type(c.repeated.template), c.operands, c.data, c.saved, c.repeated.learned)
                for n, c in seen.captured.items()
            ) + tuple(sorted(n.name for n in seen.derived))
            if structure not in self._bodies:
                body = Body(self.module, seen)
                dynamic = True if self._symbolic else self.owner.dynamic
                self._bodies[structure] = (body, compiled(body.module, self.owner.backend, dynamic))
            self.plans[key] = Plan(self.module, seen, *self._bodies[structure])
        except NotCompilable as problem:
            self._without_plan(key, str(problem))

    def _without_plan(self, key: Any, reason: str) -> None:
        self.plans[key], self.reasons[key] = None, reason
        self.owner.note(reason)

    def report(self) -> str:
        """A line for `explain`: where it ran, for how many kinds of inputs by compiled code, and why not for others."""
        first, *others = self.paths
        compiled = sum(plan is not None for plan in self.plans.values())
        where = f"module '{first}'" + (f" and {len(others)} more" if others else "")
        line = f"{where}: compiled for {compiled} kind(s) of inputs"
        if self.reasons:
            line += f", interpreted for {len(self.reasons)} ({'; '.join(dict.fromkeys(self.reasons.values()))})"
        return line


def compiled(module: GraphModule, backend: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    """The module compiled with the user's backend."""
    return torch.compile(module, backend=backend, dynamic=dynamic)


def _kind(forward_pass: Pass, inputs: Sequence[Any]) -> Any:
    """What a plan follows from; None where more may matter."""
    parts: list[Any] = [forward_pass.batch]
    for value in inputs:
        if isinstance(value, Tensor):
            layout = tag_of(value, forward_pass.batch)
            if layout is not None and layout.owner is not None:
                return None
            if forward_pass.is_parameter(value):
                role = 2 if forward_pass.is_tracked(value) else 3
            else:
                role = 1 if forward_pass.is_data(value) else 0
            parts.append((value.shape, value.dtype, value.requires_grad, role, layout))
        elif isinstance(value, int | float | bool | None):
            parts.append((type(value), value))
        else:
            return None
    return tuple(parts)
