"""What a pass of capture looks at in a call's arguments before the call, and results that must not be used."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import SampleMixingError, UncapturedUseError
from ..layouts.calls import function_name
from ..layouts.exposed import Exposed
from ..layouts.held import was_filled
from ..layouts.layout import Layout, tag, tag_of
from ..layouts.memory import look, shares
from ..layouts.nests import map_tensors, tensors_in
from ..layouts.reads import Reads
from ..uses.links import link_of

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Sees(Protocol):
    """The pass (`fastdp.engine.capture.Pass`)."""

    batch: int
    tracked: dict[int, str]
    exposed: Exposed
    reads: Reads
    unseen: str  # what ran out of sight, if anything did

    def place(self, name: str) -> str:
        """A call's place, for messages."""

    def names_of(self, tensors: Any) -> str:
        """Names of parameters, for messages."""

    def is_parameter(self, tensor: Tensor) -> bool:
        """A tracked parameter, or a tensor derived from tracked parameters."""

    def is_data(self, tensor: Tensor) -> bool:
        """Carries samples."""

    def note_use(self, parameter: Tensor, where: str) -> None:
        """Remember the last place of a parameter's use, for messages."""

    def token_for(self, data: tuple[Tensor, ...]) -> Tensor:
        """What makes a captured call differentiable."""


def look_at(forward_pass: Sees, tensor: Tensor, func: Any) -> Layout | None:
    """The layout of a tensor as its memory has it, where that says other than its tag (`layouts.memory.look`)."""
    if id(tensor) not in forward_pass.tracked and link_of(tensor) is None:
        layout = tag_of(tensor, forward_pass.batch)
        if layout is None:
            forward_pass.exposed.meet(tensor)
            layout = tag_of(tensor, forward_pass.batch)
        return look(tensor, layout, forward_pass.batch)
    if was_filled() and shares(tensor):
        raise UncapturedUseError(
            f"{forward_pass.place(function_name(func))} takes parameter {forward_pass.names_of([tensor])}, whose "
            "memory data was written to (a start from the first batch?): a parameter must not tell of samples without "
            "noise."
        )
    return None


_OUT_OF_SIGHT = (
    "runs inside torch.func or torch.vmap on data that needs no gradient, out of sight: what it makes there of several "
    "samples would pass for constants"
)


def look_beneath(forward_pass: Sees, func: Any, args: Any, kwargs: Any) -> None:
    """A call inside a transform of torch.func, which hides whose rows it combines: note what it takes."""
    for tensor in tensors_in((args, kwargs)):
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if not tensor.requires_grad:
            if tensor.is_floating_point() and forward_pass.batch > 1 and tag_of(tensor, forward_pass.batch) is not None:
                forward_pass.reads.note(f"{forward_pass.place(function_name(func))} {_OUT_OF_SIGHT}", None)
        elif forward_pass.is_parameter(tensor):
            forward_pass.note_use(tensor, f"{forward_pass.place(function_name(func))}, inside torch.func or torch.vmap")
        elif forward_pass.is_data(tensor) and not forward_pass.unseen:
            forward_pass.unseen = (
                f"{forward_pass.place(function_name(func))} runs inside torch.func or torch.vmap, out of sight"
            )


def refuse_numbers_of_data(forward_pass: Sees, func: Any, parameters: list[Tensor]) -> None:
    """Raises UncapturedUseError where a parameter is given the numbers of data."""
    if func == _SET_DATA:
        raise UncapturedUseError(
            f"{forward_pass.place('.data = ...')} gives parameter {forward_pass.names_of(parameters)} the numbers of "
            "data: its gradient would be of other numbers. Compute with the data itself."
        )


_MOVING_IN_PLACE = frozenset("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_".split())


def unmoved(func: Any, args: tuple[Any, ...]) -> tuple[Any, Tensor] | None:
    """For a change of shape in place: the function that returns the same anew, and the tensor as it was."""
    name = function_name(func)
    if name not in _MOVING_IN_PLACE:
        return None
    with torch.no_grad():
        as_it_was = args[0].detach()
    as_it_was.__dict__.update(args[0].__dict__)
    return getattr(torch.Tensor, name[:-1]), as_it_was


class Poison(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor, problem: SampleMixingError) -> Tensor:
        ctx.problem = problem
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SampleMixingError(str(ctx.problem))


def poisoned(
    forward_pass: Sees, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], problem: SampleMixingError
) -> Any:
    """A result of mixed samples may be looked at (CLIP's logits); a gradient through it is refused."""
    detached = map_tensors((args, kwargs), lambda t: t.detach() if forward_pass.is_parameter(t) else t)
    out = func(*detached[0], **detached[1])
    mixed = Layout(forward_pass.batch, mixed=problem.mixed)

    def poison(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor = Poison.apply(tensor, forward_pass.token_for(()), problem)  # type: ignore[no-untyped-call]
        tag(tensor, mixed)
        return tensor

    return map_tensors(out, poison)
