"""What a pass of capture looks at in a call's arguments before the call, and results that must not be used."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import SampleMixingError, UncapturedUseError
from ..layouts.calls import function_name
from ..layouts.exposed import Exposed
from ..layouts.held import was_filled
from ..layouts.layout import Layout, tag_of
from ..layouts.memory import look, shares
from ..uses.links import link_of

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Sees(Protocol):
    """The pass (`fastdp.engine.capture.Pass`)."""

    batch: int
    tracked: dict[int, str]
    exposed: Exposed

    def place(self, name: str) -> str:
        """A call's place, for messages."""

    def names_of(self, tensors: Any) -> str:
        """Names of parameters, for messages."""


def look_at(recorder: Sees, tensor: Tensor, func: Any) -> Layout | None:
    """The layout of a tensor as its memory has it, where that says other than its tag (`layouts.memory.look`)."""
    if id(tensor) not in recorder.tracked and link_of(tensor) is None:
        layout = tag_of(tensor, recorder.batch)
        if layout is None:
            recorder.exposed.meet(tensor)
            layout = tag_of(tensor, recorder.batch)
        return look(tensor, layout, recorder.batch)
    if was_filled() and shares(tensor):
        raise UncapturedUseError(
            f"{recorder.place(function_name(func))} takes parameter {recorder.names_of([tensor])}, whose memory data "
            "was written to (a start from the first batch?): a parameter must not tell of samples without noise."
        )
    return None


def refuse_numbers_of_data(recorder: Sees, func: Any, parameters: list[Tensor]) -> None:
    """Raises UncapturedUseError where a parameter is given the numbers of data."""
    if func == _SET_DATA:
        raise UncapturedUseError(
            f"{recorder.place('.data = ...')} gives parameter {recorder.names_of(parameters)} the numbers of data: its "
            "gradient would be of other numbers. Compute with the data itself."
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
