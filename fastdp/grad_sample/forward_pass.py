"""The interface of the capture pass that rules use; `fastdp.engine.capture.Pass` implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from ..batch_axis.layout import Layout
from .cost_model import Shape
from .parameter_use import ParameterUse, Stored
from .planner import Planner


class ForwardPass(Protocol):
    """One forward of the model, as seen by the rules of uses."""

    batch: int
    token: Tensor  # a scalar that requires grad, so that backward reaches uses whose data does not
    planner: Planner

    @property
    def path(self) -> str:
        """The module in whose forward the call stands."""

    def place(self, name: str) -> str:
        """Function and module, for messages."""

    def names_of(self, tensors: Iterable[Tensor]) -> str:
        """The parameters that these tensors are, or are made of, for messages."""

    def note_applied(self, applied: Any) -> None:
        """A captured call was applied (`captured_call.Applied`)."""

    def begin_record(self, path: str) -> bool:
        """A captured call's backward begins. Returns whether the gradients of parameters are asked for."""

    def regrouped(self, use: ParameterUse) -> ParameterUse:
        """A use by records as one by persons, if records are of persons: to plan its storage by."""

    def record(self, use: ParameterUse) -> None:
        """Keep a use until the end of backward."""

    def is_only_use(self, operand: Tensor) -> bool:
        """Whether the operand is a parameter that no other call used, and whose clipped sum stays whole."""

    def arrived(self, call: Any, given: Any) -> None:
        """Keep the uses of a call that are known by rows of data (`captured_call.Captured.rows`)."""

    def infer_layout(self, tensor: Tensor) -> Layout | None:
        """Layout of data of unseen origin."""

    def is_parameter(self, tensor: Tensor) -> bool:
        """A tracked parameter, or a tensor derived from tracked parameters."""

    def is_data(self, tensor: Tensor) -> bool:
        """Carries samples."""

    def is_tracked(self, tensor: Tensor) -> bool:
        """A tracked parameter itself."""

    def traced(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function made of torch calls with its calls seen."""


def stored_if_planned(forward_pass: ForwardPass, use: ParameterUse, shape: Shape, *data: Tensor) -> ParameterUse:
    """The use, or its per-sample gradients in place of these data, as the planner says.

    The gradient of a batch's only sample takes the place of the clipped sum, too, if no other use adds to that.
    """
    planner = forward_pass.planner
    replaced = planner.adds(*data)
    if shape.batch == 1 and forward_pass.is_only_use(use.operand):
        replaced = max(replaced, shape.gradient_bytes())
    if not planner.materialises(shape, replaced, data[0].device, data[0].dtype.itemsize < 4):
        return use
    return Stored(use.operand, use.per_sample(0, use.batch), use.name, shape)
