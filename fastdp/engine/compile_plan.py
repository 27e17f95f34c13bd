"""A graph of torch.compile that was interpreted once, compiled for the steps that follow.

What is made of parameters alone runs first, as ever. The rest is compiled by the user's backend, its operands given as
constants. Behind each captured call the graph adds nothing but a *probe*: an input of zeros whose gradient is the
gradient of the call's result. So the compiled backward returns the output gradients, and the compiled forward what the
calls save; the same `Captured.record_uses` as in eager mode then records the uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import GraphModule, Node

from ..layouts.layout import Layout, tag
from .capture import Pass
from .compile_calls import with_statistics
from .compile_watch import CapturedNode, Seen, is_state, writes_to


class NotCompilable(Exception):
    """The graph stays interpreted."""


class _Probe(torch.autograd.Function):
    """The identity in its first argument; both get the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, probe: Tensor) -> Tensor:
        return torch.ops.aten._unsafe_view(value, value.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], grads[0]


def probed(value: Tensor, probe: Tensor) -> Tensor:
    """The value, whose gradient will also be the probe's."""
    return _Probe.apply(value, probe)  # type: ignore[no-untyped-call, no-any-return]


class _Source(torch.autograd.Function):
    """Gives the probes; backward takes the output gradients of all captured calls of a graph."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, run: Run) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(
            torch.zeros((), dtype=node.repeated.dtype, device=node.repeated.device).expand(node.repeated.shape)
            for node in run.plan.captured
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


class Body:
    """The graph without what is made of parameters alone; parameters come detached, probes behind captured calls."""

    def __init__(self, module: GraphModule, seen: Seen) -> None:
        self.early = _early(module, seen)
        self.inputs: list[Node] = []  # of the graph or computed early
        self.outputs: list[Node] = []
        self.kept: dict[tuple[Node, torch.dtype | None], int] = {}  # what is saved -> number of the body's output
        self.statistics: dict[Node, int] = {}  # captured norm -> number of the first of its two statistics
        self.module = self._build(module, seen)

    def _build(self, module: GraphModule, seen: Seen) -> GraphModule:
        if torch.__version__ < "2.13" and any(is_state(n) and "autocast" in n.name for n in module.graph.nodes):
            raise NotCompilable("autocast within a graph, which torch before 2.13 does not compile anew")
        graph = torch.fx.Graph()
        env: dict[Node, Node] = {}
        used = {m for n in module.graph.nodes if self._stays(n) for m in n.all_input_nodes}
        used |= {m for n in seen.captured.values() for m in n.data}
        for node in module.graph.nodes:
            if node in used and not self._stays(node):
                self.inputs.append(node)
                env[node] = graph.placeholder(f"in_{node.name}")
        probes = {node: graph.placeholder(f"probe_{node.name}") for node in seen.captured}
        saved: list[Node] = []
        output = next(n for n in module.graph.nodes if n.op == "output")
        returned = set(output.all_input_nodes)
        for node in module.graph.nodes:
            if node.op == "output" or not self._stays(node):
                continue
            if node not in seen.captured:
                env[node] = graph.node_copy(node, lambda n: env[n])
                continue
            captured = seen.captured[node]
            for k, to in captured.saved:
                source = captured.data[k]
                if (source, to) not in self.kept and (to is not None or source in env and self._stays(source)):
                    if to is None and source in returned:
                        continue  # taken from there
                    self.kept[(source, to)] = len(saved)
                    saved.append(graph.call_method("detach", (self._cast(graph, env[source], to),)))
            function = with_statistics(captured.repeated.template)
            if function is None:
                out = graph.node_copy(node, lambda n: env[n])
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
                parts = graph.call_function(function, args, kwargs)
                out = graph.call_function(_item, (parts, 0))
                self.statistics[node] = len(saved)
                saved += [graph.call_method("detach", (graph.call_function(_item, (parts, k)),)) for k in (1, 2)]
            env[node] = graph.call_function(probed, (out, probes[node]))
        self.outputs = [n for n in output.all_input_nodes if self._stays(n)]
        graph.output((*[env[n] for n in self.outputs], *saved))
        built = GraphModule(module, graph)
        built.train(module.training)
        return built

    def _stays(self, node: Node) -> bool:
        """Whether the node is of the body."""
        if node.op == "placeholder":
            return False
        return node not in self.early or is_state(node)

    def _cast(self, graph: torch.fx.Graph, value: Node, to: torch.dtype | None) -> Node:
        return value if to is None else graph.call_method("to", (value, to))


def _item(parts: tuple[Tensor, ...], number: int) -> Tensor:
    return parts[number]


def _early(module: GraphModule, seen: Seen) -> set[Node]:
    """The nodes to run before the body: what is made of parameters alone, and the constants that it needs."""
    early: set[Node] = set()

    def add(node: Node) -> None:
        if node in early or node.op == "placeholder":
            return
        if node in seen.captured or (node in seen.data and node.op != "get_attr"):
            raise NotCompilable(f"{node.target}: a function of parameters needs data")
        early.add(node)
        for below in node.all_input_nodes:
            if below.op != "placeholder" or below in seen.data:
                _needs(below)
            add(below)

    def _needs(node: Node) -> None:
        if node.op != "placeholder" and (node in seen.captured or node in seen.data):
            raise NotCompilable(f"{node.target}: a function of parameters needs data")

    for node in seen.derived:
        add(node)
    if early:
        early |= {n for n in module.graph.nodes if is_state(n)}
    written = {target for n in module.graph.nodes if (target := writes_to(n)) is not None}
    if written & early:
        raise NotCompilable("writes into what is made of parameters or constants")
    return early


class Plan:
    """What a graph does for inputs of one kind (shapes, layouts, which are parameters)."""

    def __init__(self, module: GraphModule, seen: Seen, body: Body, compiled: Callable[..., Any]) -> None:
        self.graph, self.body, self.compiled = module.graph, body, compiled
        self.module = module
        self.nodes = list(seen.captured)
        self.captured: list[CapturedNode] = list(seen.captured.values())
        self.layouts: dict[Node, Layout | None] = seen.layouts
        self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.early = [n for n in module.graph.nodes if n in body.early]
        self.output = next(n for n in module.graph.nodes if n.op == "output").args[0]
        self.ran = False  # its code was compiled, and worked

    def __call__(self, forward_pass: Pass, inputs: Sequence[Any]) -> Any:
        """The graph's results from its inputs; backward will record the uses."""
        env: dict[Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        if self.early:
            self._run_early(forward_pass, env)
        run = Run(self, forward_pass)
        for captured in self.captured:
            operands = [env[n] for n in captured.operands]
            run.operands.append(operands)
            forward_pass.count_uses(t for t, learns in zip(operands, captured.repeated.learned, strict=True) if learns)
        probes = _Source.apply(forward_pass.token, run)  # type: ignore[no-untyped-call]
        arguments = [_detached(forward_pass, env[n]) for n in self.body.inputs]
        found = self.compiled(*arguments, *probes)
        count = len(self.body.outputs)
        for node, value in zip(self.body.outputs, found[:count], strict=True):
            env[node] = value
            layout = self.layouts.get(node)
            if isinstance(value, Tensor) and layout is not None:
                tag(value, layout)
        run.keep(env, found[count:])
        self.ran = True
        return torch.fx.node.map_arg(self.output, lambda n: env[n])

    def _run_early(self, forward_pass: Pass, env: dict[Node, Any]) -> None:
        """What is made of parameters alone, under the mode, which notes what it is made of."""
        fill = lambda n: env[n]
        with forward_pass.mode:
            for node in self.early:
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
    """One run of a plan, from its forward to its backward."""

    def __init__(self, plan: Plan, forward_pass: Pass) -> None:
        self.plan, self.forward_pass = plan, forward_pass
        self.operands: list[list[Tensor]] = []
        self.where: list[list[int]] = []  # for each captured call, which of the kept tensors it saved
        self.keeper: Tensor | None = None  # a tensor: before torch 2.13 its node alone drops what it saved

    def keep(self, env: dict[Node, Any], found: Sequence[Tensor]) -> None:
        body, kept = self.plan.body, list(found)
        place: dict[Node, int] = {}
        for node, captured in zip(self.plan.nodes, self.plan.captured, strict=True):
            mine = []
            for k, to in captured.saved:
                source = captured.data[k]
                if (source, to) in body.kept:
                    mine.append(body.kept[(source, to)])
                    continue
                if source not in place:
                    place[source] = len(kept)
                    kept.append(env[source].detach())
                mine.append(place[source])
            if node in body.statistics:
                mine += [body.statistics[node], body.statistics[node] + 1]
            self.where.append(mine)
        self.keeper = _Keeper.apply(self.forward_pass.token, *kept)  # type: ignore[no-untyped-call]

    def record(self, grads: Sequence[Tensor | None]) -> None:
        """Backward: the uses of all captured calls, last call first."""
        calls = list(zip(self.plan.captured, self.operands, self.where, grads, strict=True))
        reached = [call for call in calls if call[3] is not None]
        if not reached:
            return
        self.forward_pass.begin_record(reached[-1][0].repeated.path)  # refuses a second backward
        assert self.keeper is not None
        saved = self.keeper.grad_fn.saved_tensors  # type: ignore[union-attr]
        self.keeper = None
        for captured, operands, where, grad in reversed(reached):
            assert grad is not None
            captured.repeated.record(self.forward_pass, operands, [saved[k] for k in where], grad)
