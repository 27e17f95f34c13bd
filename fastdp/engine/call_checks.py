"""Checks of a call's arguments before it is made, and results that must not receive a gradient."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..batch_axis.aliasing import look, shares
from ..batch_axis.calls import Call
from ..batch_axis.inputs import refuse_ragged
from ..batch_axis.layout import Layout, tag, tag_of
from ..batch_axis.operator_table import MOVING_IN_PLACE, function_name
from ..batch_axis.python_reads import EscapedValues, PythonReads
from ..batch_axis.tensor_notes import was_filled
from ..errors import BatchLayoutError, FastDPError, SampleMixingError, UncapturedUseError
from ..grad_sample.forward_pass import ForwardPass
from ..grad_sample.parameter_links import link_of
from ..utils.pytree import map_tensors, tensors_in

_NODES = 64  # of autograd's graph, at most, in which an unseen function's parameters are looked for
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class PassView(ForwardPass, Protocol):
    """The parts of a pass (`fastdp.engine.capture.Pass`) that are read here."""

    tracked: dict[int, str]
    exposed: EscapedValues
    reads: PythonReads
    unseen: str  # what took data out of sight, if something did

    def note_use(self, parameter: Tensor, where: str) -> None:
        """Remember the last place of a parameter's use, for messages."""


def roles_of(forward_pass: PassView, call: Call) -> tuple[list[Tensor], bool]:
    """The parameters among a call's tensors, and whether others carry samples; these have layouts from here on."""
    parameters, has_data = [], False
    for tensor in call.tensors:
        if id(tensor) in forward_pass.tracked and tensor.requires_grad and not was_filled():
            parameters.append(tensor)
        elif tensor.is_nested:
            refuse_ragged(tensor, f"an argument of {forward_pass.place(call.name)}")
        elif call.batch > 1 and _look_at(forward_pass, tensor, call) is not None:
            has_data = True
        elif forward_pass.is_parameter(tensor):
            parameters.append(tensor)
        elif forward_pass.is_data(tensor):
            has_data = True
            if tag_of(tensor, call.batch) is None:
                _refuse_unseen_use(forward_pass, tensor, call)
                _settle(forward_pass, tensor)
                call.forget()
    return parameters, has_data


def _refuse_unseen_use(forward_pass: PassView, tensor: Tensor, call: Call) -> None:
    """Raises UncapturedUseError for what a torch.autograd.Function, which is not seen, has made of parameters and of no
    captured data: by a straight-through estimator of weights, say."""
    found, waiting = list[str](), [tensor.grad_fn]
    if not isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction):
        return
    for node in waiting:  # which grows
        for before, _ in getattr(node, "next_functions", ()):
            leaf = getattr(before, "variable", None)
            if before is None:
                continue
            if leaf is None and len(waiting) < _NODES:
                waiting.append(before)
            elif id(leaf) in forward_pass.tracked:
                found.append(forward_pass.tracked[id(leaf)])
            else:
                return
    if found:
        name = tensor.grad_fn.name().removesuffix("Backward")  # type: ignore[union-attr]
        raise UncapturedUseError(
            f"{forward_pass.place(call.name)} takes what {name} made of parameter '{found[0]}', out of fastdp's sight "
            f"(a torch.autograd.Function). Make it seen, before the model runs: fastdp.register_rule({name})(None)"
        )


def _settle(forward_pass: PassView, tensor: Tensor) -> None:
    """Give data of unseen origin the layout that its shape tells, or the note that none is known."""
    layout = forward_pass.infer_layout(tensor)
    if layout is None and forward_pass.unseen:
        layout = Layout(forward_pass.batch, mixed=forward_pass.unseen)
    if layout is not None:
        tag(tensor, layout)


def _look_at(forward_pass: PassView, tensor: Tensor, call: Call) -> Layout | None:
    """The layout of a tensor as its memory has it, where that says other than its tag (`batch_axis.aliasing.look`)."""
    if id(tensor) not in forward_pass.tracked and link_of(tensor) is None:
        layout = tag_of(tensor, call.batch)
        if layout is None:
            forward_pass.exposed.meet(tensor)
        found = look(tensor, layout or tag_of(tensor, call.batch), call.batch)
        if found is not layout:
            call.forget()  # of other views of this memory, too
        elif found is not None:
            call.knows(tensor, found)
        return found
    if was_filled() and shares(tensor):
        raise UncapturedUseError(
            f"{forward_pass.place(call.name)} takes parameter {forward_pass.names_of([tensor])}, whose "
            "memory data was written to (a start from the first batch?): a parameter must not tell of samples without "
            "noise. To go on, give it other memory with its numbers of before: p.data = before.clone()."
        )
    return None


def look_beneath(forward_pass: PassView, func: Any, args: Any, kwargs: Any) -> None:
    """A call inside a transform of torch.func, which hides whose rows it combines: note what it takes."""
    for tensor in tensors_in((args, kwargs)):
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if not tensor.requires_grad:
            if tensor.is_floating_point() and forward_pass.batch > 1 and tag_of(tensor, forward_pass.batch) is not None:
                forward_pass.reads.note(
                    f"{forward_pass.place(function_name(func))} runs inside torch.func or torch.vmap on data that "
                    "needs no gradient, out of sight: what it makes there of several samples would pass for constants",
                    None,
                )
        elif forward_pass.is_parameter(tensor):
            forward_pass.note_use(tensor, f"{forward_pass.place(function_name(func))}, inside torch.func or torch.vmap")
        elif forward_pass.is_data(tensor) and not forward_pass.unseen:
            forward_pass.unseen = (
                f"{forward_pass.place(function_name(func))} runs inside torch.func or torch.vmap, out of sight"
            )


LEFT_OUT = (
    "Leave out the forward and backward of such a batch (if len(x): ...). If a poisson_loader drew it, step() is then "
    "a step of noise alone, and must be called; else leave step() out, too."
)
IN_PARTS = (
    "All ranks must run a model in parts: make batches so large that none is empty, or train by DPTrainer, which lets "
    "them run a record that counts for nothing. After an error here, start all processes again."
)


def of_no_samples(
    forward_pass: PassView, dispatch: Any, func: Any, args: Any, kwargs: Any, remedy: str = LEFT_OUT
) -> Any:
    """A call in the forward of an empty batch, which many models cannot make (`x.view(len(x), 8, -1)`)."""
    try:
        return dispatch(func, args, kwargs)
    except FastDPError:
        raise
    except (RuntimeError, ValueError, IndexError) as problem:
        raise BatchLayoutError(
            f"{forward_pass.place(function_name(func))} cannot take an empty batch ({problem}), which Poisson sampling "
            f"draws now and then. {remedy}"
        ) from problem


def refuse_numbers_of_data(forward_pass: PassView, call: Call, parameters: list[Tensor]) -> None:
    """Raises UncapturedUseError where a parameter is given the numbers of data."""
    if call.func == _SET_DATA:
        raise UncapturedUseError(
            f"{forward_pass.place('.data = ...')} gives parameter {forward_pass.names_of(parameters)} the numbers of "
            "data: its gradient would be of other numbers. Compute with the data itself."
        )


def unmoved(call: Call) -> Call | None:
    """Before a change of shape in place: the call that would return the same anew, of the tensor as it was."""
    if call.name not in MOVING_IN_PLACE:
        return None
    args, kwargs = call.given
    with torch.no_grad():
        as_it_was = args[0].detach()
    as_it_was.__dict__.update(args[0].__dict__)
    return Call(getattr(torch.Tensor, call.name[:-1]), (as_it_was, *args[1:]), kwargs, call.batch, call.path)


class Poison(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor, problem: SampleMixingError) -> Tensor:
        ctx.problem = problem
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SampleMixingError(str(ctx.problem))


def poisoned(forward_pass: PassView, call: Call, problem: SampleMixingError) -> Any:
    """A result of mixed samples may be looked at (CLIP's logits); a gradient through it is refused."""
    args, kwargs = map_tensors(call.given, lambda t: t.detach() if forward_pass.is_parameter(t) else t)
    out = call.func(*args, **kwargs)
    mixed = Layout(forward_pass.batch, mixed=problem.mixed)

    def poison(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor = Poison.apply(tensor, forward_pass.token, problem)  # type: ignore[no-untyped-call]
        tag(tensor, mixed)
        return tensor

    return map_tensors(out, poison)
