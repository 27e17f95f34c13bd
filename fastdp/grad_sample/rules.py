"""The registry of capture rules by torch function, and helpers that rules share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..batch_axis.batch_positions import WHY, by_place, is_random, rows_alike
from ..batch_axis.deferred_checks import doubt
from ..batch_axis.host_values import is_given_away, known
from ..batch_axis.layout import Layout, layout_on, samplewise, tag_of
from ..batch_axis.own_places import same_numbers
from ..errors import BatchLayoutError, SampleMixingError
from ..utils.autograd_graph import graph_nodes
from .forward_pass import ForwardPass
from .parameter_links import link_of

Rule = Callable[["ForwardPass", Any, tuple[Any, ...], dict[str, Any]], Any]
USE_RULES: dict[Any, Rule] = {}


def use_rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions: rule(forward_pass, function, args, kwargs) -> result, or NotImplemented."""

    def register(function: Rule) -> Rule:
        for torch_function in functions:
            USE_RULES[torch_function] = function
        return function

    return register


def sample_layout(forward_pass: ForwardPass, tensor: Tensor, name: str) -> Layout:
    """The layout of data that meets a parameter; refuses what cannot be attributed to samples."""
    return attributed(forward_pass, tensor, tag_of(tensor, forward_pass.batch), name)


def attributed(forward_pass: ForwardPass, tensor: Tensor, layout: Layout | None, name: str) -> Layout:
    """The same of a tensor that this layout is believed of."""
    layout = layout or forward_pass.infer_layout(tensor)
    place = forward_pass.place(name)
    if layout is None:
        leaves = [getattr(node, "variable", None) for node in graph_nodes([tensor.grad_fn])]
        parameters = [leaf for leaf in leaves if leaf is not None and forward_pass.is_tracked(leaf)]
        if parameters:
            why = (
                f"it was made of {forward_pass.names_of(parameters)} outside of the model's forward, where fastdp does "
                "not see it. Make it within the forward (a learned first state: pass None, and expand the parameter "
                "there)."
            )
        elif any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            why = (
                "it was made of trainable parameters outside of the model (an encoder, or a generator). Make them part "
                "of the model, or detach() it. A generator's step through a private discriminator belongs within "
                "optimizer.public()."
            )
        else:
            why = (
                "its origin was not seen (a custom autograd function, perhaps). Say whose its rows are, by "
                "fastdp.mark_rows(x, torch.arange(n), samples=n), or detach() it before the model."
            )
        raise BatchLayoutError(
            f"{place}: cannot tell which rows of an input of shape {tuple(tensor.shape)} belong to which of the "
            f"{forward_pass.batch} samples: {why}"
        )
    if layout.batch > 1 and not layout.mixed and tensor.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        raise BatchLayoutError(
            f"{place}: an input of shape {tuple(tensor.shape)} was believed to hold {layout.rows} rows along "
            f"dimension {layout.dim}: a gap in fastdp's layout rules. Please report the model."
        )
    if layout.mixed:
        raise SampleMixingError(
            f"{place}: its input depends on several samples: {layout.mixed}. Per-sample gradients do not exist "
            "for such a model; remove the operation, or use one that works on each sample alone.",
            layout.mixed,
        )
    if layout.is_row_index and layout.batch > 1:
        raise SampleMixingError(
            f"{place}: uses the positions of rows in the batch, which depend on the other samples, as data. Use "
            "positions within a sample.",
            f"{place} uses positions of rows as data",
        )
    return layout


def made_of_data(forward_pass: ForwardPass, *tensors: Tensor | None) -> bool:
    """Whether one of these is computed from samples and is no parameter: a rule that detaches them does not apply."""
    return any(t is not None and forward_pass.is_data(t) and not forward_pass.is_parameter(t) for t in tensors)


def refuse_contraction(forward_pass: ForwardPass, layout: Layout, dim: int, name: str) -> None:
    """A product that sums over the dimension in which the samples lie."""
    if layout.batch > 1 and layout.dim == dim:
        raise SampleMixingError(
            f"{forward_pass.place(name)}: sums over dimension {dim}, along which the samples lie: each output depends "
            "on all samples. If the input is one sample, make it a batch (x[None]). If the model takes samples along "
            "another dimension, transpose its input, or give batch_first=False."
        )


def refuse_sequence_of_samples(forward_pass: ForwardPass, x: Tensor, dim: int, name: str, does: str) -> None:
    """A function along a sequence, where the samples [.., B, ..] do not lie in the dimension in which it takes them."""
    data = x.dim() == 3 and not forward_pass.is_parameter(x) and forward_pass.is_data(x)
    if forward_pass.batch > 1 and data and sample_layout(forward_pass, x, name).dim != dim:
        raise SampleMixingError(
            f"{forward_pass.place(name)}: {does}, as its input has the samples in the sequence's place. Build the "
            "module with batch_first=True; or, if time comes first in the model's inputs, give batch_first=False to "
            "the optimizer."
        )


def refuse_by_position(forward_pass: ForwardPass, operand: Tensor, layout: Layout, ndim: int, name: str) -> None:
    """A parameter with numbers for each row, beside rows whose order other samples decide."""
    dim = layout.dim - ndim + operand.dim()
    if layout.batch <= 1 or not 0 <= dim < operand.dim() or operand.size(dim) == 1:
        return
    place = forward_pass.place(name)
    if layout.order is None and not _looked_up_alike(operand, dim, layout):
        parameter = forward_pass.is_parameter(operand)
        if layout_on(operand) is None and by_place(operand, dim, layout):
            what = "a parameter" if parameter else "a constant"
            raise SampleMixingError(f"{place}: {what} {WHY}.", f"{place}: {what} {WHY}")
        if parameter and layout.alone < 0 and not is_random(operand):
            why = f"{place}: a parameter {WHY}"
            if not _alike(operand, dim, layout, why):
                raise SampleMixingError(f"{why}.", why)
    if layout.order is not None:
        raise SampleMixingError(
            f"{place}: a parameter meets rows by their position, in an order that depends on other samples. Restore "
            "the order first.",
            f"{place} meets a parameter with rows whose order depends on the data",
        )


def _looked_up_alike(operand: Tensor, dim: int, layout: Layout) -> bool:
    """Whether rows of a parameter were looked up on a device by the same ids for all samples, which are known without
    waiting for it, and neither they nor the rows were written to since (in sight: `is_parameter` refuses it)."""
    link = link_of(operand)
    if link is None or link.kind != "lookup" or link.ids is None or dim >= link.ids.dim():
        return False
    if known(link.ids) is None or is_given_away(operand):
        return False
    return rows_alike(link.ids, dim, layout)


def _alike(operand: Tensor, dim: int, layout: Layout, why: str) -> bool:
    """Whether a parameter, or what is made of it, has the same numbers for all rows of a dimension. What only a device
    knows is not waited for: if they differ, the step is refused for this reason."""
    link = link_of(operand)
    if link is not None and link.kind == "broadcast":
        above = dim - operand.dim() + link.parent.dim()
        return above < 0 or link.parent.size(above) == 1 or _alike(link.parent, above, layout, why)
    if link is not None and link.kind == "lookup" and link.ids is not None and dim < link.ids.dim():
        return rows_alike(link.ids, dim, layout)
    if link is None or link.isometric:  # numbers of its own for each row, also while they happen to be equal
        return operand.stride(dim) == 0
    if operand.device.type == "cpu" or not (operand.numel() and operand.stride(dim)):
        return rows_alike(operand, dim, layout, computed=True)
    doubt(~same_numbers(operand.detach(), dim, layout, computed=True), why, f"{why}.")
    return True


def by_sample(tensor: Tensor, layout: Layout) -> Tensor:
    """`samplewise`, also in a batch of one, where every row belongs to the one sample."""
    return tensor.unsqueeze(0) if layout.batch == 1 else samplewise(tensor, layout)
