"""Interprets a torch.compile graph under capture and records what each node was.

The nodes of Dynamo's graph are the torch function calls that the engine sees in eager mode. Run one by one under the
capture mode they give what the plain model gives. What was seen says whether the graph may be compiled
(`engine.compile_plan`): only if all layouts follow from shapes, and every use of a parameter is a call that can be
repeated.
"""

from __future__ import annotations

import operator
import re
from typing import Any, NamedTuple

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ..batch_axis.calls import Call
from ..batch_axis.layout import Layout, tag_of
from ..batch_axis.operator_table import TAKING_A_PATTERN, UNCHECKED, VIEWS, spellings
from ..grad_sample.captured_call import Captured, Context
from ..utils.pytree import tensors_in
from .capture import Pass

# where the samples lie in the result follows from where they lie in the arguments, whatever numbers these hold
_BY_ROWS = frozenset(
    spellings(*(
        "mean sum amax amin all any argmax argmin view reshape flatten unflatten view_as reshape_as ravel "
        "expand expand_as broadcast_to repeat tile to cpu cuda type contiguous clone cat concat stack softmax "
        "log_softmax cumsum cumprod sort argsort"
    ).split(), *VIEWS)
)  # fmt: skip
_GATHER = frozenset(spellings("gather"))
_LOSSES = frozenset((F.cross_entropy, F.nll_loss))
_FACTORIES = frozenset((torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.linspace, torch.tensor))
_FIXED_STAYS = VIEWS | frozenset(
    "view reshape expand flatten add sub mul floordiv getitem to le lt ge gt eq ne".split()
)
_STATE = frozenset(("_enter_autocast", "_exit_autocast", "_set_grad_enabled"))
_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor imatmul setitem ilshift irshift".split()
)
_OPERATORS = frozenset(("and_", "or_", "not_", "is_"))  # of the operator module, no writes


class NotRepeatable(Exception):
    """A captured call holds something that may differ from step to step."""


class CapturedNode(NamedTuple):
    """A node that combines parameters with data: the captured call that every step repeats."""

    call: Captured
    operands: tuple[Node | None, ...]
    saved: tuple[tuple[Node, torch.dtype | None], ...]  # which of the data, cast to which type
    shape: torch.Size  # of the result
    dtype: torch.dtype
    device: torch.device


class Seen:
    """What one interpretation of a graph showed."""

    def __init__(self) -> None:
        self.captured: dict[Node, CapturedNode] = {}
        self.derived: set[Node] = set()  # results made of parameters alone
        self.data: set[Node] = set()  # results that carry samples
        self.layouts: dict[Node, Layout | None] = {}  # of what the graph returns
        self.problem = ""  # why the graph cannot be compiled


def is_state(node: Node) -> bool:
    """Whether the node switches autocast or gradients on or off."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _STATE


def writes_to(node: Node) -> Node | None:
    """The node whose value this one changes, if any is known to be."""
    out = node.kwargs.get("out")
    if isinstance(out, Node):
        return out
    if not node.args or not isinstance(node.args[0], Node):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE_OPERATORS or (
        name not in _OPERATORS and name.endswith("_") and not name.endswith("__")
    )
    return node.args[0] if in_place or node.kwargs.get("inplace") is True else None


class Interpretation(torch.fx.Interpreter):
    """Runs a graph's nodes under a pass (whose mode is on) and notes what they are."""

    def __init__(self, module: torch.fx.GraphModule, forward_pass: Pass) -> None:
        super().__init__(module)
        self.forward_pass, self.seen = forward_pass, Seen()
        self._root = forward_pass.path if forward_pass.stack else ""
        self._captures: list[tuple[Tensor, ...]] = []
        self._made: list[tuple[Any, Tensor]] = []  # captured calls' nodes; each lives as long as its result
        self._fixed: dict[int, Any] = {}  # constants made within the graph of numbers alone: equal in every run

    def refuse(self, why: str) -> None:
        self.seen.problem = self.seen.problem or why

    # ------------------------------------------------------------------ of the pass

    def captured(self, data: tuple[Tensor, ...]) -> None:
        self._captures.append(data)

    def asked(self, call: Call) -> None:
        """A call that the memo does not keep: is its layout known all the same?"""
        forward_pass, func, tensors = self.forward_pass, call.func, call.tensors
        if forward_pass.batch <= 1 or (torch.is_grad_enabled() and any(forward_pass.is_parameter(t) for t in tensors)):
            return
        layouts = [call.layout(t) for t in tensors]
        known = [layout for layout in layouts if layout is not None]
        if not known and not any(forward_pass.is_data(t) for t in tensors):
            return
        results = [tag_of(t, forward_pass.batch) for t in call.results()]
        mixed = any(layout.mixed for layout in known) and all(layout is None or layout.mixed for layout in results)
        ordered = all(layout is None or _by_shapes(layout) for layout in (*known, *results))
        unseen = any(forward_pass.is_data(t) and call.layout(t) is None for t in tensors)
        by_rows = (
            func in UNCHECKED or func in _BY_ROWS or self._takes_fixed_rows(func, call.given[0]) or _keeps_rows(call)
        )
        packed = func is F.scaled_dot_product_attention and _packed(tensors[0], layouts[0])
        if packed or any(layout.mixed for layout in known):
            by_rows = False  # unless the results are mixed, a value said that they are not
        if not ordered or unseen or not (mixed or by_rows):
            self.refuse(f"{getattr(func, '__name__', func)}(): the place of the samples may depend on values")

    def _takes_fixed_rows(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a tensor is indexed by numbers, or by constants that are the same in every run."""
        if func is not Tensor.__getitem__:
            return False
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(
            item is None or item is Ellipsis or isinstance(item, int | slice) or id(item) in self._fixed
            for item in items
        )

    def _note_fixed(self, n: Node, value: Any) -> None:
        if writes_to(n) is not None:
            self._fixed.clear()
        name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        made = n.op == "call_function" and n.target in _FACTORIES
        kept = name in _FIXED_STAYS and n.all_input_nodes
        held = [self.env[m] for m in n.all_input_nodes]
        if isinstance(value, Tensor) and (made or kept):
            if all(id(v) in self._fixed or (isinstance(v, int) and not isinstance(v, bool)) for v in held):
                self._fixed[id(value)] = value

    # ------------------------------------------------------------------ of the graph

    def run_node(self, n: Node) -> Any:
        self._captures = []
        path = _path_of(n, self._root)
        if path is not None:
            self.forward_pass.stack.append(path)
        try:
            value = super().run_node(n)
        finally:
            if path is not None:
                self.forward_pass.stack.pop()
        if n.op in ("call_module", "call_function") and not _is_plain(n):
            self.refuse(f"{n.target}: a graph within the graph")
        with torch._C.DisableTorchFunction():  # the mode is on
            if n.op == "output":
                self._note_output(n)
            elif not self.seen.problem and n.op != "get_attr":
                self._note(n, value)
                self._note_fixed(n, value)
        return value

    def _note(self, n: Node, value: Any) -> None:
        forward_pass, seen = self.forward_pass, self.seen
        if any(forward_pass.is_data(t) and not forward_pass.is_parameter(t) for t in tensors_in(value)):
            seen.data.add(n)
        if n.op == "placeholder":
            return
        if n.target in ("item", "tolist"):
            self.refuse(f"{n.target}(): a number that depends on values")
        inputs = [(m, self.env[m]) for m in n.all_input_nodes]
        if self._captures:
            try:
                seen.captured[n] = self._captured_node(inputs, value)
            except NotRepeatable as problem:
                self.refuse(str(problem))
            return
        results = tensors_in(value)
        if any(forward_pass.is_parameter(t) for t in results):
            seen.derived.add(n)
            seen.data.discard(n)
            if any(t.requires_grad and not forward_pass.is_parameter(t) for t in results) or writes_to(n) is not None:
                self.refuse(f"{n.target}: derived in part")
        elif torch.is_grad_enabled() and any(t.requires_grad for t in results):
            named = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
            if named not in TAKING_A_PATTERN and any(
                forward_pass.is_parameter(t) for _, held in inputs for t in tensors_in(held)
            ):
                self.refuse(f"{n.target}: a use of a parameter that was not captured")

    def _captured_node(self, inputs: list[tuple[Node, Any]], value: Any) -> CapturedNode:
        if len(self._captures) != 1 or not isinstance(value, Tensor):
            raise NotRepeatable("several captured calls in one")
        made: Any = value.grad_fn
        if not hasattr(made, "call"):  # x += w is written back into x
            raise NotRepeatable("a captured call whose result was changed")
        self._made.append((made, value))
        call: Captured = made.call
        ctx: Context = made.context
        if ctx.forward_pass is not self.forward_pass:
            raise NotRepeatable(f"{call.name}: a call on one sample of the batch")
        _refuse_unrepeatable(call)
        data = [_node_of(tensor, inputs, "data made within the call") for tensor in self._captures[0]]
        why = f"{call.name}: an operand that is no argument"
        operands = tuple(None if t is None else _node_of(t, inputs, why) for t in ctx.operands)
        for node, held in inputs:
            loose = node in data or node not in operands
            if loose and any(self.forward_pass.is_parameter(t) for t in tensors_in(held)):
                raise NotRepeatable(f"{call.name}: parameters in lists or among the data")
        saved = made.saved_tensors if call.with_made is None else made.saved_tensors[:-2]
        if len(saved) > len(data) or any(s.shape != d.shape for s, d in zip(saved, self._captures[0], strict=False)):
            raise NotRepeatable(f"{call.name}: saves more than its data")
        casts = tuple(
            (node, s.dtype if s.dtype != d.dtype else None)
            for node, s, d in zip(data, saved, self._captures[0], strict=False)
        )
        if not value.dtype.is_floating_point:
            raise NotRepeatable(f"{call.name}: a result of {value.dtype}")
        return CapturedNode(call, operands, casts, value.shape, value.dtype, value.device)

    def _note_output(self, n: Node) -> None:
        if self.forward_pass.unseen:
            self.refuse(self.forward_pass.unseen)
        try:
            for made, _ in self._made:
                made.saved_tensors  # noqa: B018
        except RuntimeError:  # compiled code would write elsewhere, and what was saved would be the new numbers
            self.refuse("data that a captured call saves is written to afterwards")
        for node in n.all_input_nodes:
            value = self.env.get(node)
            self.seen.layouts[node] = tag_of(value, self.forward_pass.batch) if isinstance(value, Tensor) else None
            if not isinstance(value, Tensor) and tensors_in(value):
                self.refuse("the graph returns nested results")


def _node_of(tensor: Tensor, inputs: list[tuple[Node, Any]], missing: str) -> Node:
    for node, value in inputs:
        if value is tensor:
            return node
    raise NotRepeatable(missing)


def _refuse_unrepeatable(call: Captured) -> None:
    """Raises NotRepeatable unless all that the call holds follows from the kind of its arguments."""
    if not call.repeatable:
        raise NotRepeatable(f"{call.name}: no compiled form of this rule")
    if call.layout.owner is not None or call.layout.mixed:
        raise NotRepeatable(f"{call.name}: rows whose order depends on the data")
    for value in vars(call).values():
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        if tensors_in((value, cells)):
            raise NotRepeatable(f"{call.name}: a function that holds tensors")


def _keeps_rows(call: Call) -> bool:
    """Whether these arguments of a function, which others would make depend on values, leave the rows in their place.

    Attention and losses: the samples lie in the dimensions before those that are combined, in masks and classes too.
    """
    known = call.inputs()
    if call.func in _GATHER:
        dim = call.argument(1, "dim")
        return isinstance(dim, int) and all(layout.dim != dim % tensor.dim() for tensor, layout in known)
    if call.func is F.scaled_dot_product_attention:
        places = {layout.dim - tensor.dim() for tensor, layout in known}
        return len(places) == 1 and max(places) < -2
    if call.func in _LOSSES:
        own = [call.argument(0, "input"), call.argument(1, "target")]
        apart = all(layout.dim == 0 and any(tensor is t for t in own) for tensor, layout in known)
        return apart and isinstance(own[0], Tensor) and own[0].dim() > 1
    if call.func is F.embedding:  # ids of the samples, in a table of none
        ids = call.argument(0, "input")
        return len(known) == 1 and known[0][0] is ids
    return False


def _by_shapes(layout: Layout) -> bool:
    """Whether no value had a part in where the samples lie."""
    told = layout.is_row_index or layout.inferred or layout.shifted is not None
    return layout.owner is layout.order is None and layout.alone < 0 and not told


def _packed(query: Tensor, layout: Layout | None) -> bool:
    """Whether attention is along rows of several samples, which a mask must keep apart."""
    return layout is not None and layout.dim >= query.dim() - 2


def _is_plain(n: Node) -> bool:
    return n.op == "call_function" and not isinstance(n.target, torch._ops.HigherOrderOperator)


def has_inner_graph(module: torch.fx.GraphModule) -> bool:
    """Whether a graph holds higher-order operators (checkpointing, custom autograd functions, control flow)."""
    return any(n.op == "call_module" or (n.op == "call_function" and not _is_plain(n)) for n in module.graph.nodes)


_SUBMODULE = re.compile(r"\[['\"]?module['\"]?\]\.?")


def _path_of(n: Node, root: str) -> str | None:
    """The module in whose forward the node stands, for messages; None where torch does not say."""
    try:
        where = list(n.meta["nn_module_stack"].values())[-1][0]
    except (KeyError, IndexError, TypeError):
        return None
    inner = re.sub(r"\._modules\[['\"](\w+)['\"]\]", r".\1", _SUBMODULE.split(str(where))[-1]).strip(".")
    return ".".join(part for part in (root, inner) if part)
