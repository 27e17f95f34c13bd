"""The generic rule for any other function: exact, one vector-Jacobian product per sample.

The forward runs as it is. For the gradients, the function is run again on each sample's slice of the data,
and the result is compared in shape and, once for each kind of call, in value with that of the whole batch,
so that an operation which is not one of each sample alone is an error.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch_axis.calls import Call
from ..batch_axis.layout import Layout, tag, tag_of
from ..batch_axis.operator_table import TAKING_A_PATTERN, function_name, is_in_place
from ..batch_axis.propagate import layouts_of, propagate
from ..errors import BatchLayoutError, FastDPError, StepError, UncapturedUseError
from ..utils.cache import Answers
from ..utils.pytree import map_leaves, map_tensors, signature, tensors_in, tensors_of
from .captured_call import Captured, Context, Nest, applied, autocast_of
from .forward_pass import ForwardPass
from .parameter_links import link_of, mark_derived, set_link
from .parameter_use import Lazy
from .rules import by_sample, refuse_by_position, sample_layout

_CHECKED = Answers()
REGISTER = "register a rule for it: see help(fastdp.register_rule)"


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in the arguments: data number `n`, or operand number `n`."""

    kind: str
    number: int


class Generic(Captured):
    """A call of any function. It knows the tensors of its one application, and is not to be repeated.

    layouts, out_layouts: where the samples lie in each of the data and of the results.
    """

    def __init__(self, forward_pass: ForwardPass, func: Any, args: Any, kwargs: Any, in_place: bool) -> None:
        super().__init__(forward_pass, function_name(func), Layout(forward_pass.batch))
        self.func, self.in_place = func, in_place
        self.autocast = autocast_of(tensors_in((args, kwargs))[0])
        operands: list[Tensor] = []
        self.data: list[Tensor] = []
        self.constants: list[Tensor] = []

        def slot(tensor: Tensor) -> _Slot:
            kind, items = (
                ("operand", operands) if forward_pass.is_parameter(tensor)
                else ("data", self.data) if forward_pass.is_data(tensor)
                else ("constant", self.constants)
            )  # fmt: skip
            items.append(tensor)
            return _Slot(kind, len(items) - 1)

        self.args, self.kwargs = map_tensors((args, kwargs), slot)
        self.layouts = [sample_layout(forward_pass, t, self.name) for t in self.data]
        self.ctx = Context(forward_pass, *operands)
        self.ctx.keep(*self.ctx.values, *self.constants)
        self.out_layouts: list[Layout] = []
        self.cut: tuple[int, ...] = ()  # dimensions along which operands are cut by sample, if they are
        self.nest: Nest | None = None  # the form of a result that is no single tensor

    def kind(self) -> Any:
        """What tells this call from others, but for the batch: which arguments are what, and all that is no tensor.

        Lists compare by their items; an argument that cannot be hashed is told by its text.
        """
        operands = [(t.shape, t.dtype, t.is_contiguous()) for t in self.ctx.values]
        return (tuple(operands), self.autocast, signature((self.args, self.kwargs), _described))

    def parameters(self) -> str:
        """The names of the parameters, for messages."""
        return self.ctx.forward_pass.names_of(self.ctx.operands)

    def filled(
        self, operands: Sequence[Tensor], data: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments, made of these tensors."""
        where = {"operand": operands, "data": data, "constant": constants}
        take = lambda leaf: where[leaf.kind][leaf.number] if isinstance(leaf, _Slot) else leaf
        return map_leaves(self.args, take), map_leaves(self.kwargs, take)

    def apply(self, operands: Sequence[Tensor], data: Sequence[Tensor], constants: Sequence[Tensor]) -> Any:
        """The function of these tensors."""
        args, kwargs = self.filled(operands, data, constants)
        if not self.in_place:
            return self.func(*args, **kwargs)
        target = args[0].clone()
        self.func(target, *args[1:], **kwargs)
        return target

    def run(self, ctx: Context, *data: Tensor) -> Any:
        out = self.apply(ctx.values, data, self.constants)
        if isinstance(out, Tensor):
            return out
        self.nest = Nest(out, ctx.forward_pass.place(self.name))
        return tuple(tensors_of(out))

    def result(self, out: Any) -> Any:
        """What the function returned, with the tensors that capturing it gave."""
        return out if self.nest is None else self.nest.filled(out)

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        for number, operand in enumerate(ctx.operands):
            if operand.is_floating_point() or operand.is_complex():
                compute = self._gradients(number, saved, grads)
                ctx.forward_pass.record(Lazy(operand, self.batch, self.name, compute))

    def _gradients(
        self, number: int, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]
    ) -> Callable[[int, int], Tensor]:
        layouts = self.out_layouts
        data = [by_sample(t, layout) for t, layout in zip(saved, self.layouts, strict=True)]
        gs = [by_sample(g, layout) for g, layout in zip(grads, layouts, strict=True)]
        values = self.ctx.values

        def gradient(g: Sequence[Tensor], xs: Sequence[Tensor], b: int) -> Tensor:
            with torch.enable_grad(), torch.autocast(*self.autocast):
                w = [v.detach().requires_grad_(i == number) for i, v in enumerate(values)]
                outs = self.outputs_of_sample(w, xs, b, [tuple(t.shape) for t in g])
                pairs = [(o, t) for o, t in zip(outs, g, strict=True) if o.requires_grad]
                try:
                    found = torch.autograd.grad(
                        [o for o, _ in pairs], [w[number]], [t for _, t in pairs], allow_unused=True
                    ) if pairs else (None,)  # fmt: skip
                except RuntimeError as problem:
                    raise UncapturedUseError(self._not_alone(problem)) from problem
            return torch.zeros_like(values[number]) if found[0] is None else found[0]

        def compute(low: int, high: int) -> Tensor:
            self.ctx.check_kept(self)
            return torch.stack([gradient([g[b] for g in gs], [x[b] for x in data], b) for b in range(low, high)])

        return compute

    def outputs_of_sample(
        self, operands: Sequence[Tensor], xs: Sequence[Tensor], b: int, shapes: list[tuple[int, ...]]
    ) -> list[Tensor]:
        """The function on sample b alone; rows of the batch are cut out of constants and operands if need be."""
        problem: Exception | None = None
        for dims, cut_operands, cut_constants in self._ways_to_cut():
            try:
                out = self.apply(
                    [self._own(t, b, dims) for t in operands] if cut_operands else operands,
                    xs,
                    [self._own(t, b, dims) for t in self.constants] if cut_constants else self.constants,
                )
            except (RuntimeError, IndexError, ValueError) as error:
                problem = error
                continue
            outs = tensors_of(out)
            if [tuple(t.shape) for t in outs] == shapes:
                self.cut = dims if cut_operands else ()
                return outs
        raise UncapturedUseError(self._not_alone(problem))

    def _not_alone(self, problem: Exception | None) -> str:
        return (
            f"{self.name}() in module '{self.path}' combines the parameter {self.parameters()} with data in a way that "
            f"does not work on one sample alone, so its gradients are unknown{f' ({problem})' if problem else ''}. "
            f"Freeze the parameter, write the operation so that each sample is treated alone, or {REGISTER}."
        )

    def _ways_to_cut(self) -> list[tuple[tuple[int, ...], bool, bool]]:
        """Uncut; cut where the output's samples lie, or first; cut along each other dimension."""
        usual = (self.out_layouts[0].dim, 0)
        largest = max(t.dim() for t in (*self.ctx.values, *self.constants))
        ways = [usual, *[(dim,) for dim in range(largest) if dim not in usual]]
        both = [(dims, *which) for dims in ways for which in ((False, True), (True, False), (True, True))]
        return [((), False, False), *both]

    def _own(self, tensor: Tensor, b: int, dims: tuple[int, ...]) -> Tensor:
        """Rows of sample b of a tensor that was made for this batch, its samples along one of `dims`."""
        dim = self._rows_in(tensor, dims)
        return tensor if dim < 0 else tensor.index_select(dim, self.out_layouts[0].rows_of(b, tensor.device))

    def _rows_in(self, tensor: Tensor, dims: tuple[int, ...]) -> int:
        """The first of these dimensions in which a tensor has as many rows as the result; -1 of none."""
        layout = self.out_layouts[0]
        if layout.owner is not None or layout.mixed or layout.rows <= 1:
            return -1
        return next((dim for dim in dims if tensor.dim() > dim and tensor.size(dim) == layout.rows), -1)

    def remedy(self) -> str:
        """Where the samples of its result cannot be told."""
        return f"Freeze the parameter {self.parameters()}, use a simpler operation, or {REGISTER} (with like=)."

    def check(self, outs: list[Tensor]) -> None:
        """Once for each kind of call: the first sample alone gives the batch's first rows. Each time: operands that are
        cut by sample have the same numbers for all."""
        data = tuple((t.shape, lay[:4]) for t, lay in zip(self.data, self.layouts, strict=True))
        key = (self.func, self.path, self.batch, data, self.kind())
        known = _CHECKED.get(key)
        if known is None:
            self._check(outs)
            _CHECKED[key] = self.cut
        self.cut = _CHECKED[key]
        for operand in self.ctx.operands:
            if (dim := self._rows_in(operand, self.cut)) >= 0:
                layout = self.out_layouts[0]._replace(dim=dim)
                refuse_by_position(self.ctx.forward_pass, operand, layout, operand.dim(), self.name)

    def _check(self, outs: list[Tensor]) -> None:
        with torch.no_grad():
            rows = [by_sample(t, layout) for t, layout in zip(outs, self.out_layouts, strict=True)]
            for b in {0, self.batch - 1}:
                xs = [by_sample(t, layout)[b] for t, layout in zip(self.data, self.layouts, strict=True)]
                alone = self.outputs_of_sample(self.ctx.values, xs, b, [tuple(r[b].shape) for r in rows])
                for one, row in zip(alone, rows, strict=True):
                    if not bool(torch.isfinite(row[b]).all()):
                        continue
                    tolerance = 1e-4 if one.dtype in (torch.float32, torch.float64) else 3e-2
                    close = (
                        tolerance * float(row[b].abs().max()) if row[b].is_floating_point() and row[b].numel() else 0
                    )
                    if not torch.allclose(one, row[b], rtol=tolerance, atol=close, equal_nan=True):
                        raise UncapturedUseError(
                            f"{self.name}() in module '{self.path}' gives another result for a sample alone than for "
                            "the same sample in the batch: it is random, depends on other samples, or takes an input "
                            "with rows of several samples packed (assign them by fastdp.mark_rows). Its parameter "
                            f"{self.parameters()} cannot be trained so; freeze it, change the operation, or, where it "
                            f"is only random, {REGISTER}."
                        )


def _described(value: Any) -> Any:
    """Of a leaf among a call's arguments, for the signature of the call."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (type(value), value)


def capture_generic(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of functions without a rule."""
    name = function_name(func)
    if name in TAKING_A_PATTERN and args:
        out = func(*args, **kwargs)
        if forward_pass.is_parameter(args[0]):
            others, named = map_tensors((args[1:], kwargs), lambda t: t.shape)
            pattern = Call(func, (args[0], *others), named, forward_pass.batch, forward_pass.path, out)
            mark_derived(pattern, forward_pass, [args[0]])
        else:
            propagate(Call(func, args, kwargs, forward_pass.batch, forward_pass.path, out))
        return out
    body = python_body(func)
    if body is not None:  # a composite in Python: see through it
        return forward_pass.traced(body, *args, **kwargs)
    if is_in_place(name):
        return _capture_in_place(forward_pass, func, args, kwargs)
    return capture_whole(forward_pass, func, args, kwargs)


def _capture_in_place(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    before = target.clone()  # keeps the graph of what the target was
    link, layout = link_of(target), tag_of(target, forward_pass.batch)
    if link is not None:
        if target._is_view():
            raise UncapturedUseError(
                f"{forward_pass.place(function_name(func))}: writes data into a view of a tensor made of parameters. "
                "Write into the tensor itself, or use torch.cat or torch.where."
            )
        set_link(before, link._replace(version=before._version))
        set_link(target, None)
        target.detach_()  # what it was lives on in `before`
    elif layout is not None:
        tag(before, layout)
    out = capture_whole(forward_pass, func, (before, *args[1:]), kwargs, in_place=True)
    target.copy_(out)
    tag(target, tag_of(out, forward_pass.batch))
    return target


def capture_whole(
    forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool = False
) -> Any:
    """Capture this very function, without a look into its body."""
    return capture_once(Generic(forward_pass, func, args, kwargs, in_place))


def capture_once(call: Generic) -> Any:
    """The result of such a call, whose samples must be found, and checked."""
    out, forward_pass = applied(call, call.ctx, *call.data), call.ctx.forward_pass
    args, kwargs = call.filled(call.ctx.values, call.data, call.constants)  # layouts do not depend on the operands
    if call.func is torch.Tensor.__setitem__:
        for _, layout in layouts_of(Call(call.func, args, kwargs, forward_pass.batch, forward_pass.path)):
            tag(out, layout)
    else:
        propagate(Call(call.func, args, kwargs, forward_pass.batch, forward_pass.path, out))
    for tensor in tensors_in(out):
        if tag_of(tensor, forward_pass.batch) is None:
            raise BatchLayoutError(
                f"{forward_pass.place(call.name)}: cannot tell which rows of its result of shape {tuple(tensor.shape)} "
                f"belong to which of the {forward_pass.batch} samples. {call.remedy()}"
            )
        call.out_layouts.append(sample_layout(forward_pass, tensor, call.name))
    if forward_pass.batch > 0:
        call.check([*tensors_in(out)])
    call.data = []  # backward gets them from autograd, which frees them, or makes them anew under checkpointing
    return call.result(out)


_CHECK_NAMES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_BODIES = Answers()


def python_body(func: Any) -> Callable[..., Any] | None:
    """The body of a function of torch.nn.functional written in Python, without its override check."""
    if func in _BODIES:
        return _BODIES[func]
    body = None
    if isinstance(func, types.FunctionType) and func.__module__ in ("torch.nn.functional", "torch.functional"):
        if any(name in func.__code__.co_names for name in _CHECK_NAMES):
            scope = dict(func.__globals__)
            scope.update(dict.fromkeys(_CHECK_NAMES, lambda *args: False))
            body = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
            body.__kwdefaults__ = func.__kwdefaults__
    _BODIES[func] = body
    return body


def capture_in_format(
    forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: str
) -> Any:
    """The generic rule on data that is kept in this format. Raises StepError where torch has no such function."""
    try:
        return capture_generic(forward_pass, func, args, kwargs)
    except FastDPError:
        raise
    except (RuntimeError, NotImplementedError) as problem:
        raise StepError(
            f"{forward_pass.place(function_name(func))}: combines parameters with data kept as {kept}, which torch "
            f"cannot do sample by sample ({str(problem).splitlines()[0][:100]}). Keep the data dense (to_dense())."
        ) from problem
