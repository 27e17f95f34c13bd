"""Parameters used by one sample at a time, in a loop over the samples.

A call on tensors of one sample (`Layout.alone`) is, to its rule, a call on a batch of one. What it records is that
sample's; before norms are taken, the uses of all samples are put side by side as one use by the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch_axis.calls import Call
from ..batch_axis.layout import Layout, tag, tag_of
from ..batch_axis.row_groups import Groups
from ..batch_axis.sample_loops import owner_of
from ..errors import SampleMixingError
from ..utils.pytree import tensors_in
from .forward_pass import ForwardPass
from .parameter_use import ParameterUse, Regrouped


class OneSample:
    """A pass for a call on one sample of the batch: a batch of one (`fastdp.grad_sample.forward_pass.ForwardPass`)."""

    batch = 1

    def __init__(self, forward_pass: ForwardPass, layout: Layout) -> None:
        self.forward_pass, self.layout, self.sample = forward_pass, layout, layout.alone
        self.planner = forward_pass.planner
        self.is_parameter, self.is_data, self.is_tracked = (
            forward_pass.is_parameter, forward_pass.is_data, forward_pass.is_tracked,
        )  # fmt: skip
        self.place, self.names_of, self.traced = forward_pass.place, forward_pass.names_of, forward_pass.traced
        self.token, self.note_applied = forward_pass.token, forward_pass.note_applied
        self.begin_record, self.arrived = forward_pass.begin_record, forward_pass.arrived

    @property
    def path(self) -> str:
        return self.forward_pass.path

    def infer_layout(self, tensor: Tensor) -> Layout | None:
        return Layout(1)

    def regrouped(self, use: ParameterUse) -> ParameterUse:
        return use  # what is one sample's is one person's

    def is_only_use(self, operand: Tensor) -> bool:
        return False  # the other samples have theirs

    def record(self, use: ParameterUse) -> None:
        self.forward_pass.record(Regrouped(use, Groups(torch.tensor([self.sample]), self.forward_pass.batch)))

    def tag_results(self, call: Call) -> None:
        """The results of the call are the sample's."""
        for tensor in tensors_in((call.out, call.args[:1] if call.in_place else ())):
            if not self.is_parameter(tensor):
                tag(tensor, self.layout)


def one_sample_of(forward_pass: ForwardPass, call: Call) -> OneSample | None:
    """A pass for a call whose data is of one sample; None for other data. Raises where samples meet."""
    layouts = [layout for _, layout in call.inputs()] if call.batch > 1 else []
    if all(layout.alone < 0 for layout in layouts):
        return None
    found = {owner_of(layout) for layout in layouts}
    bad = next((layout.mixed for layout in layouts if layout.mixed), "")
    name, args = call.name, call.args
    if len(found) > 1 or -1 in found or bad or any(layout.is_row_index for layout in layouts):
        why = bad or f"{forward_pass.place(name)} combines rows of different samples with a parameter"
        raise SampleMixingError(
            f"{forward_pass.place(name)}: its input depends on several samples: {why}. Per-sample gradients do not "
            "exist for such a model; remove the operation, or use one that works on each sample alone.",
            why,
        )
    if call.in_place and args and isinstance(args[0], Tensor) and args[0]._is_view():
        whole: Tensor = args[0]._base  # type: ignore[assignment]
        base, part = tag_of(whole, forward_pass.batch), tag_of(args[0], forward_pass.batch)
        if base != part and not (base and part and base.alone == part.alone >= 0):
            why = f"{forward_pass.place(name)} writes into a view of the batch"
            raise SampleMixingError(f"{why}, together with a parameter. Use torch.stack or torch.cat.", why)
    sized = any(layout.size_from_data or layout.order is not None for layout in layouts)
    own = Layout(forward_pass.batch, alone=found.pop(), size_from_data=sized,
                 inferred=any(layout.inferred for layout in layouts))  # fmt: skip
    return OneSample(forward_pass, own)
