"""The torch.compile backend of private training: interprets a graph first, then runs its compiled plan."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..batch_axis.layout import tag, tag_of
from ..grad_sample.captured_call import Context
from ..ops.common import exactly
from .capture import Pass
from .compile_plan import Body, NotCompilable
from .compile_watch import Interpretation, Seen, has_inner_graph
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
        self.plans: dict[Any, Plan | str] = {}  # by kind of inputs; or why there is none
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
        if isinstance(plan, Plan):
            try:
                return plan(forward_pass, inputs)
            except (torch._dynamo.exc.TorchDynamoException, RuntimeError, TypeError) as problem:
                if plan.ran:
                    raise
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
            self._learn(key, run.seen)
        return out

    def _learn(self, key: Any, seen: Seen) -> None:
        if len(self.plans) >= PLANS:
            self.plans.clear()
        try:
            if seen.problem:
                raise NotCompilable(seen.problem)
            self.plans[key] = Plan(self.module, seen, *self._body(seen))
        except NotCompilable as problem:
            self._without_plan(key, str(problem))

    def _body(self, seen: Seen) -> tuple[Body, Callable[..., Any]]:
        """The part of the graph to compile, compiled by the user's backend: the same for batches of all sizes."""
        calls = tuple((n.name, type(c.call), c.operands, c.saved) for n, c in seen.captured.items())
        key = (calls, *sorted(n.name for n in seen.derived))
        if key not in self._bodies:
            body, dynamic = Body(self.module, seen), True if self._symbolic else self.owner.dynamic
            self._bodies[key] = (body, torch.compile(body.module, backend=self.owner.backend, dynamic=dynamic))
        return self._bodies[key]

    def _without_plan(self, key: Any, reason: str) -> None:
        self.plans[key] = reason
        self.owner.note(reason)

    def report(self) -> str:
        """A line for `explain`: where it ran, for how many kinds of inputs by compiled code, and why not for others."""
        first, *others = self.paths
        reasons = [reason for reason in self.plans.values() if isinstance(reason, str)]
        where = f"module '{first}'" + (f" and {len(others)} more" if others else "")
        line = f"{where}: compiled for {len(self.plans) - len(reasons)} kind(s) of inputs"
        if reasons:
            line += f", interpreted for {len(reasons)} ({'; '.join(dict.fromkeys(reasons))})"
        return line


class Plan:
    """What a graph does for inputs of one kind (shapes, layouts, which are parameters)."""

    def __init__(self, module: GraphModule, seen: Seen, body: Body, compiled: Callable[..., Any]) -> None:
        self.module, self.body, self.compiled = module, body, compiled
        self.captured, self.layouts = list(seen.captured.values()), seen.layouts
        self.ran = False  # its code was compiled, and worked

    def __call__(self, forward_pass: Pass, inputs: Sequence[Any]) -> Any:
        """The graph's results from its inputs; backward will record the uses."""
        body = self.body
        env: dict[Node | None, Any] = {None: None, **dict(zip(body.placeholders, inputs, strict=True))}
        if body.early:
            self._run_early(forward_pass, env)
        run = Run(self, forward_pass, [Context(forward_pass, *map(env.get, c.operands)) for c in self.captured])
        for node, ctx in zip(self.captured, run.contexts, strict=True):
            ctx.keep(*(ctx.values if node.call.reads_values else ()))
            forward_pass.count_uses(t for t, learned in zip(ctx.operands, ctx.learned, strict=True) if learned)
        probes = _Source.apply(forward_pass.token, run)  # type: ignore[no-untyped-call]
        arguments = [_detached(forward_pass, env[n]) for n in body.inputs]
        found = self.compiled(*arguments, *probes)
        count = len(body.outputs)
        for node, value in zip(body.outputs, found[:count], strict=True):
            env[node] = value
            layout = self.layouts.get(node)
            if isinstance(value, Tensor) and layout is not None:
                tag(value, layout)
        saved = [env[n].detach() for n in body.outside]
        run.keeper = _Keeper.apply(forward_pass.token, *saved, *found[count:])  # type: ignore[no-untyped-call]
        self.ran = True
        return torch.fx.node.map_arg(body.result, lambda n: env[n])

    def _run_early(self, forward_pass: Pass, env: dict[Node | None, Any]) -> None:
        """What is made of parameters alone, under the mode, which notes what it is made of."""
        fill = lambda n: env[n]
        with forward_pass.mode:
            for node in self.body.early:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), fill)
                if node.op == "get_attr":
                    env[node] = getattr(self.module, str(node.target))
                elif node.op == "call_method":
                    env[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    env[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _detached(forward_pass: Pass, value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and forward_pass.is_parameter(value) else value


class Run:
    """One run of a plan, from its forward to its backward: the state of that step, beside what the plan holds."""

    def __init__(self, plan: Plan, forward_pass: Pass, contexts: list[Context]) -> None:
        self.plan, self.forward_pass, self.contexts = plan, forward_pass, contexts
        self.keeper: Tensor | None = None  # a tensor: before torch 2.13 its node alone drops what it saved

    def record(self, grads: Sequence[Tensor | None]) -> None:
        """Backward: the uses of all captured calls, last call first."""
        calls = zip(self.plan.captured, self.contexts, self.plan.body.saved, grads, strict=True)
        reached = [(node.call, ctx, own, grad) for node, ctx, own, grad in calls if grad is not None]
        if not reached:
            return
        self.forward_pass.begin_record(reached[-1][0].path)  # refuses a second backward
        assert self.keeper is not None
        saved = self.keeper.grad_fn.saved_tensors  # type: ignore[union-attr]
        self.keeper = None
        for call, ctx, own, grad in reversed(reached):
            self.forward_pass.begin_record(call.path)
            ctx.check_kept(call)
            with exactly():
                call.record_uses(ctx, tuple(saved[k] for k in own), (grad,))


class _Source(torch.autograd.Function):
    """Gives the probes; backward takes the output gradients of all captured calls of a graph."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, run: Run) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(
            torch.zeros((), dtype=node.dtype, device=node.device).expand(node.shape) for node in run.plan.captured
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.run.record(grads)
        return None, None


class _Keeper(torch.autograd.Function):
    """Holds what calls saved as autograd holds it: with a look at later writes, under the hooks for saved tensors."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("never in the graph of a loss")


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
