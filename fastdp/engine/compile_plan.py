"""Builds the graph that the user's compiler compiles, from the calls that interpretation has captured.

What is made of parameters alone runs first, as ever. The rest is compiled by the user's backend, its operands given as
constants. Behind each captured call the graph adds nothing but a *probe*: an input of zeros whose gradient is the
gradient of the call's result. So the compiled backward returns the output gradients, and the compiled forward what the
calls save; the same `Captured.record_uses` as in eager mode then records the uses.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import GraphModule, Node

from .compile_watch import Seen, is_state, writes_to


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


class Body:
    """The graph without what is made of parameters alone; parameters come detached, probes behind captured calls.

    early: the nodes to run before it.
    inputs: what it takes, of the graph's placeholders and the early nodes; then the probes.
    outputs: what it returns of the graph's results; then what is to be saved.
    outside: what captured calls save that it takes or returns anyway.
    saved: of each captured call, which of `outside` and of what is to be saved, counted through, are its own.
    """

    def __init__(self, module: GraphModule, seen: Seen) -> None:
        nodes = module.graph.nodes
        self._early = _early(module, seen)
        self.early = [n for n in nodes if n in self._early]
        self.placeholders = [n for n in nodes if n.op == "placeholder"]
        used = {m for n in nodes if self._stays(n) for m in n.all_input_nodes}
        self.inputs = [n for n in nodes if n in used and not self._stays(n)]
        output = next(n for n in nodes if n.op == "output")
        self.result, returned = output.args[0], output.all_input_nodes
        self.outputs = [n for n in returned if self._stays(n)]
        wanted = dict.fromkeys(save for captured in seen.captured.values() for save in captured.saved)
        self.outside = [n for n, cast in wanted if cast is None and (n in returned or not self._stays(n))]
        self.saved: list[list[int]] = []
        self.module = self._build(module, seen)

    def _build(self, module: GraphModule, seen: Seen) -> GraphModule:
        if torch.__version__ < "2.13" and any(is_state(n) and "autocast" in n.name for n in module.graph.nodes):
            raise NotCompilable("autocast within a graph, which torch before 2.13 does not compile anew")
        graph = torch.fx.Graph()
        env: dict[Node, Node] = {node: graph.placeholder(f"in_{node.name}") for node in self.inputs}
        probes = {node: graph.placeholder(f"probe_{node.name}") for node in seen.captured}
        places: dict[Any, int] = {(node, None): k for k, node in enumerate(self.outside)}
        saved: list[Node] = []

        def save(key: Any, value: Node) -> None:
            places[key] = len(self.outside) + len(saved)
            saved.append(graph.call_method("detach", (value,)))

        for node in module.graph.nodes:
            if node.op == "output" or not self._stays(node):
                continue
            captured = seen.captured.get(node)
            if captured is None:
                env[node] = graph.node_copy(node, lambda n: env[n])
                continue
            own: list[Any] = list(captured.saved)
            for source, cast in captured.saved:
                if (source, cast) not in places:
                    value = env[source] if cast is None else graph.call_method("to", (env[source], cast))
                    save((source, cast), value)
            out = graph.node_copy(node, lambda n: env[n])
            if captured.call.with_made is not None:
                out.target, parts = captured.call.with_made, out
                out = graph.call_function(operator.getitem, (parts, 0))
                for k in (1, 2):
                    save((node, k), graph.call_function(operator.getitem, (parts, k)))
                    own.append((node, k))
            self.saved.append([places[key] for key in own])
            env[node] = graph.call_function(probed, (out, probes[node]))
        graph.output((*[env[n] for n in self.outputs], *saved))
        built = GraphModule(module, graph)
        built.train(module.training)
        return built

    def _stays(self, node: Node) -> bool:
        """Whether the node is of the body."""
        return node.op != "placeholder" and (node not in self._early or is_state(node))


def _early(module: GraphModule, seen: Seen) -> set[Node]:
    """The nodes to run before the body: what is made of parameters alone, and the constants that it needs."""
    early: set[Node] = set()

    def add(node: Node) -> None:
        if node in early or node.op == "placeholder":
            return
        if node in seen.captured or node in seen.data:
            raise NotCompilable(f"{node.target}: a function of parameters needs data")
        early.add(node)
        for below in node.all_input_nodes:
            add(below)

    for node in seen.derived:
        add(node)
    if early:
        early |= {n for n in module.graph.nodes if is_state(n)}
    written = {target for n in module.graph.nodes if (target := writes_to(n)) is not None}
    if written & early:
        raise NotCompilable("writes into what is made of parameters or constants")
    return early
