"""Parameters used by the loss after the forward: loss weights, prototypes, a head tied by hand."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..batch_axis.calls import Call
from ..batch_axis.layout import tag_of
from ..errors import FastDPError, UncapturedUseError
from ..grad_sample.parameter_links import adopt, link_of
from .capture import Pass


def takes(forward: Pass, tensor: Tensor) -> bool:
    """Whether a tensor of the loss is a parameter, or made of parameters alone, before the forward perhaps."""
    if not tensor.requires_grad or tensor.is_leaf or link_of(tensor) is not None:
        return forward.is_parameter(tensor)
    return tag_of(tensor, forward.batch) is None and adopt(tensor, forward)


def captured(forward: Pass, call: Call) -> Any:
    """Make a call of the loss that parameters take part in, as if it stood at the forward's end."""
    running = forward.engine.running
    running.active, forward.in_loss = forward, True
    try:
        return _dispatched(forward, call)
    except FastDPError as error:
        forward.backward.forget()
        forward.backward.refused(error)
        raise
    finally:
        running.active = None


def _dispatched(forward: Pass, call: Call) -> Any:
    if any(layout.total for _, layout in call.inputs()):
        names = forward.names_of(tensor for tensor in call.tensors if takes(forward, tensor))
        raise UncapturedUseError(
            f"{call.name}() joins a sum over the samples with {names}. If that weighs or scales the loss, apply it to "
            'each sample\'s own loss (reduction="none"), and take the mean then. A term of the weights alone (L2-SP, '
            "EWC, FedProx) is public: leave it out of the loss, and call its backward() within optimizer.public(), "
            "which adds its gradient without clipping."
        )
    func, (args, kwargs) = call.func, call.given
    return forward.dispatch(func, args, kwargs)
