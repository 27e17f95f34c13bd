"""Layout rules of look-ups, convolutions, norms, recurrent layers and grids."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import SampleMixingError
from . import tensor_notes
from .calls import Call, Tags, layout_rule
from .propagate import ask

T = torch.Tensor


@layout_rule(F.embedding)
def _embedding(call: Call) -> Tags:
    """Rows of a constant table: a dimension more, behind."""
    layout = call.layout(call.args[0])
    return [(call.out, layout)] if layout is not None and len(call.inputs()) == 1 else ask(call)


@layout_rule(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _conv(call: Call) -> Tags:
    """A kernel for each sample: channels of one picture that are all samples', in groups of one sample each."""
    (picture, kernels), bias = call.args[:2], call.argument(2, "bias")
    x, w = call.layout(picture), call.layout(kernels)
    groups = call.argument(6, "groups", 1)
    layouts = [x, w, *([] if bias is None else [call.layout(bias)])]
    if x is None or w is None or picture.dim() != kernels.dim() or picture.size(0) != 1 or groups % call.batch:
        return ask(call)
    for layout, dim in zip(layouts, (1, 0, 0), strict=False):
        if layout is None or not layout._replace(inner=1, dim=0).plain or layout.dim != dim or layout.batch == 1:
            return ask(call)
    return [(call.out, x._replace(inner=call.out.size(1) // call.batch))]


@layout_rule(F.layer_norm, F.rms_norm)
def _layer_norm(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if call.beside_first():
        return call.all_combined("scales all samples by numbers made of the batch")
    if layout is not None and layout.dim >= source.dim() - len(call.argument(1, "normalized_shape")):
        return call.all_combined("normalises over the batch")
    return [(call.out, layout)]


@layout_rule(F.batch_norm, F.instance_norm, torch.batch_norm, refuses=True)
def _batch_norm(call: Call) -> Tags:
    if call.name == "batch_norm" and call.argument(5, "training", False):
        raise SampleMixingError(
            f"{call.mixed()} in training mode normalises every sample by the statistics of the whole batch, so "
            "per-sample gradients do not exist. fastdp.make_compatible(model) makes it a GroupNorm, or says "
            "that it cannot: put one in its place, or call its eval()."
        )
    if call.name == "instance_norm" and call.argument(5, "use_input_stats", True):
        if call.argument(1, "running_mean") is not None:
            raise SampleMixingError(
                f"{call.mixed()} keeps running statistics of the data, which would be released without noise. "
                "Use track_running_stats=False, or put the module in eval mode."
            )
    if call.beside_first():
        return call.all_combined("normalises all samples by numbers made of the batch")
    if call.name == "instance_norm" and (layout := call.layout(call.args[0])) is not None and layout.dim > 1:
        return call.all_combined("normalises over the batch")
    return [(call.out, call.layout(call.args[0]))]


@layout_rule(*[getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")])  # type: ignore[attr-defined]
def _recurrent(call: Call) -> Tags:
    """Frozen recurrent layers: samples lie in dimension 1 (0 if batch_first), or are packed."""
    source, layout = call.args[0], call.layout(call.args[0])
    tensors = call.results()
    if layout is None or layout.mixed:
        return ask(call)
    packed = isinstance(call.args[3], list | tuple)  # (data, batch_sizes, hx, weights, ...), else (input, hx, ...)
    if layout.dim != (0 if packed or call.args[-1] else 1) or source.dim() != (2 if packed else 3):
        return call.all_combined("takes the batch for the sequence (build it with batch_first=True)")
    rows = torch.arange(int(call.args[1][0]), device=source.device) if packed else None
    ends = layout._replace(dim=1) if rows is None else layout.taken(1, rows)
    for _, state in call.beside_first():
        if state.mixed or state.dim != 1 or not state.same_rows(ends, source.device):
            return call.all_combined("begins with the state of other samples")
    return [(tensors[0], layout), *[(t, ends) for t in tensors[1:]]]


@layout_rule(torch._VF._pad_packed_sequence, torch._VF._pack_padded_sequence)  # type: ignore[attr-defined]
def _packed(call: Call) -> Tags:
    """Packed rows lie by time: step t holds the first batch_sizes[t] samples of the sorted order."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return []
    result, batch_first = call.out[0], call.argument(2, "batch_first", False)
    packs = call.name == "_pack_padded_sequence"
    sizes = [int(size) for size in (call.out[1] if packs else call.args[1])]
    if layout.mixed or layout.dim != (0 if batch_first or not packs else 1):
        return [(result, call.combined("takes the batch for the sequence", layout.mixed))]
    owners = layout.owners(source.device)
    if packs:
        return [(result, layout._replace(dim=0, outer=1, inner=1, owner=torch.cat([owners[:n] for n in sizes])))]
    if not torch.equal(owners, torch.cat([owners[:n] for n in sizes])):
        return [(result, call.combined("takes rows of several samples for one sequence"))]
    result.__dict__[tensor_notes.LONGEST] = 1 if batch_first else 0
    found = layout._replace(dim=0 if batch_first else 1, outer=1, inner=1, owner=owners[: sizes[0]], order=None)
    lengths = found._replace(dim=0, owner=owners[: sizes[0]].to(call.out[1].device))  # each its own sample's
    rows = torch.arange(lengths.rows, device=call.out[1].device)
    return [(result, found), (call.out[1], lengths.taken(0, rows))]


@layout_rule(torch.istft, T.istft)
def _istft(call: Call) -> Tags:
    """Back from frequencies [..., F, T] (it looks at the window's numbers, so no trial can tell its rows)."""
    source, layout = call.args[0], call.layout(call.args[0])
    if call.beside_first() or (layout is not None and layout.dim >= source.dim() - 2 and layout.alone < 0):
        return call.all_combined("sums over the batch")
    return [(call.out, layout)]


@layout_rule(F.affine_grid, torch.affine_grid_generator)
def _affine_grid(call: Call) -> Tags:
    """A grid [N, H, W, 2] for each matrix of theta [N, 2, 3] (the size holds N, so no trial with fewer can be made)."""
    layout = call.layout(call.args[0])
    if layout is None or layout.mixed or layout.dim != 0 or call.beside_first():
        return ask(call)
    return [(call.out, layout)]
