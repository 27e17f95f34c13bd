"""A recorded program compiled by Inductor.

Inductor rounds in another way than one call of torch after the other, so what it gives is not equal bit by bit. That
costs no privacy. What a program gives are the losses and, for each use of a parameter, its rows `a` and `g` of each
sample. Norms, factors and clipped sums are taken of these very rows afterwards, by the code of every step: whatever
the rows are, no sample's contribution is larger than the clipping norm. What is needed beside is that the rows of a
sample are made of nothing but this sample and the parameters. That was checked when the step was recorded, of the
calls that Inductor is given; it keeps what depends on what.

So the compiled program only has to compute the same step, within rounding, and this is checked on the batches of the
recordings before it replays any (`StepProgram`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from ..ops.common import exactly
from ..ops.registry import OPERATORS
from .program import Program
from .recorder import Slot

aten = torch.ops.aten
_OPTIONS = {
    "fallback_random": True,  # dropout draws the numbers that it draws in Python
    "emulate_precision_casts": True,  # 16-bit numbers are rounded where Python's are
    "freezing": False,  # parameters change
    "triton.cudagraphs": False,  # what a replay gives must outlive the next
}
_IN_TORCH = {
    "norm_affine_per_sample", "rms_affine_per_sample", "group_affine_per_sample", "linear_per_sample",
}  # fmt: skip


class NotCompiled(Exception):
    """Why Inductor does not take a program; it can be replayed as it is."""


class Compiled:
    """Replays a program as Inductor's code. inputs: an example; shapes and strides are those of every replay.

    Raises NotCompiled.
    """

    def __init__(self, program: Program, inputs: Sequence[Tensor]) -> None:
        if program.counts_rows:
            raise NotCompiled("it picks rows by the numbers of the batch, whose count a compiled program cannot take")
        self.program = program
        # as arguments: parameters are read anew at every replay, and no number of theirs becomes a constant
        self._held = [tensor.detach() for tensor in program.held.values()]
        try:
            graph = _graph_of(program)
            with torch.no_grad(), exactly():  # the recorded calls lie below autograd and autocast
                from torch import _inductor  # imports a compiler: seconds

                compiled = _inductor.compile(graph, [*inputs, *self._held], options=dict(_OPTIONS))
                compiled(*inputs, *self._held)  # the first call finishes what is compiled aside
        except Exception as problem:  # of a compiler: whatever it is, it is a reason not to use it
            words = str(problem).strip().splitlines() or [""]
            raise NotCompiled(f"Inductor fails ({type(problem).__name__}: {words[0][:200]})") from problem
        self._function: Callable[..., Sequence[Tensor]] = compiled

    def run(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """As `Program.run`."""
        found, asked = self.run_apart(inputs)
        return found, self.program.is_same(asked)

    def run_apart(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """As `Program.run_apart`."""
        with torch.no_grad(), exactly():
            found = list(self._function(*inputs, *self._held))
        count = len(self.program.outputs)
        return found[:count], found[count:]


def _graph_of(program: Program) -> fx.GraphModule:
    """The program as a graph of inputs and held tensors, which gives what `Program.run_apart` gives, in a row."""
    graph = fx.Graph()
    numbers = [*range(program.inputs), *program.held]
    nodes = {number: graph.placeholder(f"v{number}") for number in numbers}
    read = {read.operation for read in program.read}
    asked: list[fx.Node] = []

    for place, operation in enumerate(program.operations):
        given = operation.args, operation.kwargs
        args, kwargs = tree_map(lambda leaf: nodes[leaf.number] if isinstance(leaf, Slot) else leaf, given)
        if place in read:  # copied where it stands: memory may be written to behind
            taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, fx.Node)]
            asked += [graph.call_function(aten.clone.default, (node,)) for node in taken]
            continue
        node = graph.call_function(_as_torch(operation.func), tuple(args), kwargs)
        if isinstance(operation.out, Slot):
            nodes.setdefault(operation.out.number, node)
            continue
        for number, leaf in enumerate(operation.out or ()):
            if isinstance(leaf, Slot):
                nodes.setdefault(leaf.number, graph.call_function(operator.getitem, (node, number)))
    graph.output((*[nodes[slot.number] for slot in program.outputs], *asked))
    return fx.GraphModule({}, graph)


def _as_torch(func: Any) -> Callable[..., Any]:
    """What Inductor is given for a call: of the per-sample gradients of norms and of small products the reference,
    plain torch, which it fuses with what stands around: the call of an operator costs more than a small kernel. What
    these give is stored, and norms and sums are both taken of it, so that its rounding is none of theirs."""
    space, _, name = func._schema.name.partition("::")
    return OPERATORS[name].reference if space == "fastdp" and name in _IN_TORCH else func  # type: ignore[no-any-return]
