"""Layout rules of the functions that the trial of `fastdp.propagate` cannot answer.

They are those that carry sizes in their arguments (view, expand, repeat), move rows (indexing, cat along
the batch), write in place by index, or combine the positions of a dimension and keep its size (softmax).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import SampleMixingError
from .layout import Layout, reshaped, tag
from .propagate import RULES, UNCHECKED, Call, Rule, Tags, _combined, ask, tensors_in

T = torch.Tensor


def _rule(*functions: Any) -> Any:
    def register(rule: Rule) -> Rule:
        for function in functions:
            RULES[function] = rule
        return rule

    return register


def _named(*names: str) -> list[Any]:
    """Every spelling of the functions: torch.f, Tensor.f, F.f."""
    found = [getattr(place, name, None) for name in names for place in (torch, T, F)]
    return [function for function in found if function is not None]


# --------------------------------------------------------------------------- sizes in the arguments


@_rule(*_named("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "_unsafe_view"))
def _reshape(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or call.out.numel() != source.numel():  # view(dtype)
        return ask(call)
    if layout.mixed:
        return [(call.out, layout)]
    if source.numel() == 0:
        return ask(call)
    found = reshaped(layout, source.shape, call.out.shape)
    return [(call.out, found or _combined(call, call.out, "folds samples into another dimension"))]


@_rule(*_named("expand", "expand_as", "broadcast_to"))
def _expand(call: Call) -> Tags:
    layout = call.layout(call.args[0])
    if layout is None:
        return []  # a constant that only takes the shape of data
    return [(call.out, layout._replace(dim=layout.dim + call.out.dim() - call.args[0].dim()))]


@_rule(T.repeat, torch.tile, T.tile)
def _repeat(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return []
    dim = layout.dim + call.out.dim() - source.dim()
    times = call.out.size(dim) // max(source.size(layout.dim), 1)
    if times != 1 and layout.owner is not None:
        return [(call.out, layout._replace(dim=dim, owner=layout.owner.repeat(times)))]
    return [(call.out, layout._replace(dim=dim, outer=layout.outer * times))]


@_rule(torch.repeat_interleave, T.repeat_interleave)
def _repeat_interleave(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    times, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if layout is None or dim is None or dim % source.dim() != layout.dim:
        return ask(call)
    if isinstance(times, Tensor) or layout.owner is not None:
        owner = layout.owners(source.device).repeat_interleave(times)
        return [(call.out, Layout(call.batch, layout.dim, owner=owner, mixed=layout.mixed))]
    return [(call.out, layout._replace(inner=layout.inner * times))]


@_rule(*_named("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))
def _constant(call: Call) -> Tags:
    return [(tensor, None) for tensor in tensors_in(call.out)]


@_rule(*_named("to", "cpu", "cuda", "type", "contiguous", "clone"), T.data.__get__)  # type: ignore[attr-defined]
def _same(call: Call) -> Tags:
    return [(call.out, call.layout(call.args[0]))]


# --------------------------------------------------------------------------- one by one

_ELEMENTWISE = (
    "add sub mul div pow neg abs exp log sqrt rsqrt reciprocal square sin cos tanh sigmoid erf relu relu6 "
    "gelu silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid logsigmoid "
    "tanhshrink dropout clamp clip clamp_min clamp_max where masked_fill maximum minimum eq ne lt le gt "
    "ge logical_and logical_or logical_not isnan isinf floor ceil round sign subtract multiply divide "
    "true_divide rsub add_ sub_ mul_ div_ relu_ tanh_ sigmoid_ exp_ masked_fill_ clamp_ __add__ __radd__ "
    "__sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __iadd__ "
    "__isub__ __imul__ __itruediv__ __and__ __or__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "float half bfloat16 double bool long int"
).split()


@_rule(*_named(*_ELEMENTWISE))
def _elementwise(call: Call) -> Tags:
    """Element by element with broadcasting: samples stay where they lie, counted from the right.

    The trial would say the same; this spares it, whose first call imports half of torch.
    """
    tensors = list(tensors_in(call.out))
    inputs = call.inputs()
    if len(tensors) != 1 or not inputs:
        return ask(call)
    out = tensors[0]
    found = {_aligned(layout, tensor.dim(), out.dim()) for tensor, layout in inputs if layout.owner is None}
    if len({layout.dim for layout in found if not layout.mixed}) > 1:
        return [(out, _combined(call, out, "combines inputs whose samples lie in different dimensions"))]
    if any(layout.mixed or layout.owner is not None for _, layout in inputs) or len(found) != 1:
        return ask(call)
    layout = found.pop()
    return [(out, layout)] if out.size(layout.dim) == layout.rows else ask(call)


def _aligned(layout: Layout, ndim: int, out_ndim: int) -> Layout:
    return layout._replace(dim=layout.dim + out_ndim - ndim)


@_rule(*_named("group_norm"))
def _group_norm(call: Call) -> Tags:
    layout = call.layout(call.args[0])
    if layout is not None and layout.dim != 0:
        return [(call.out, _combined(call, call.out, "takes the batch for channels"))]
    return [(call.out, layout)]


# --------------------------------------------------------------------------- rows by index


@_rule(T.__getitem__)
def _getitem(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None:  # a constant table, indexed by data: the result lies as the index does
        return _take_from_constant(call)
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    index = tuple(torch.tensor(item, device=source.device) if isinstance(item, list) else item for item in index)
    if layout.mixed:
        return [(call.out, layout._replace(dim=0))]
    used, basic = _source_dims(index, source.dim())
    if layout.dim not in used:
        return ask(call) if basic else _index_elsewhere(call, layout, used)
    entry = used[layout.dim]
    if isinstance(entry, slice) and entry == slice(None):
        return ask(call) if basic else _index_elsewhere(call, layout, used)
    if isinstance(entry, slice) and basic:
        owner = layout.owners(source.device)[entry]
        return [(call.out, _by_owner(call, _kept_position(index, source.dim(), layout.dim), owner, layout))]
    if isinstance(entry, int):
        return [(call.out, _combined(call, call.out, "picks one sample out of the batch"))]
    leading = source.dim() if any(item is Ellipsis for item in index) else 1 + max(used)
    return _index_owner_map(call, layout, index, leading)


def _source_dims(index: tuple[Any, ...], ndim: int) -> tuple[dict[int, Any], bool]:
    """Which source dimension each entry of an index speaks of, and whether there is no tensor among them."""
    width = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
        for item in index
        if item is not None and item is not Ellipsis
    )
    used: dict[int, Any] = {}
    dim = 0
    for item in index:
        if item is None:
            continue
        if item is Ellipsis:
            dim += ndim - width
            continue
        for _ in range(item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1):
            used[dim] = item
            dim += 1
    basic = not any(isinstance(item, Tensor | list) for item in index)
    return used, basic


def _kept_position(index: tuple[Any, ...], ndim: int, dim: int) -> int:
    """Position of source dimension `dim` after basic indexing."""
    position, source = 0, 0
    width = sum(item is not None and item is not Ellipsis for item in index)
    for item in index:
        if item is None:
            position += 1
        elif item is Ellipsis:
            position, source = position + ndim - width, source + ndim - width
        elif source == dim:
            return position
        else:
            position, source = position + isinstance(item, slice), source + 1
    return position + dim - source


def _index_elsewhere(call: Call, layout: Layout, used: dict[int, Any]) -> Tags:
    """Tensor indices, but not along the batch: the same positions for every sample."""
    index = [item for item in used.values() if isinstance(item, Tensor | list)]
    if any(call.layout(item) is not None for item in index if isinstance(item, Tensor)):
        return [(call.out, _combined(call, call.out, "indexes all samples by one sample's data"))]
    if any(isinstance(item, Tensor) and item.dtype == torch.bool for item in index):
        first = min(dim for dim, item in used.items() if isinstance(item, Tensor | list))
        if layout.dim < first:
            return [(call.out, layout)]
    return ask(call)


def _index_owner_map(call: Call, layout: Layout, index: tuple[Any, ...], leading: int) -> Tags:
    """Index a map of sample numbers in the same way, and read off who owns the result's rows."""
    source = call.args[0]
    owners = layout.owners(source.device)
    view = [1] * leading
    view[layout.dim] = owners.numel()
    owner_map = owners.view(view).expand(source.shape[:leading])
    result = owner_map[index]
    return [(call.out, _one_dimension(call, result, layout))]


def _one_dimension(call: Call, owner_map: Tensor, layout: Layout) -> Layout | None:
    """The layout whose owners depend on one dimension of the map only."""
    for dim in range(owner_map.dim()):
        rows = owner_map.movedim(dim, 0).reshape(owner_map.size(dim), -1)
        if rows.numel() == 0 or bool((rows == rows[:, :1]).all()):
            return _by_owner(call, dim, rows[:, 0] if rows.numel() else rows.new_zeros(rows.size(0)), layout)
    return _combined(call, call.out, "gathers rows of different samples")


def _by_owner(call: Call, dim: int, owner: Tensor, layout: Layout) -> Layout:
    each = max(owner.numel() // call.batch, 1)
    if owner.numel() == call.batch * each:
        if torch.equal(owner, torch.arange(call.batch, device=owner.device).repeat_interleave(each)):
            return Layout(call.batch, dim, 1, each, mixed=layout.mixed)
    return Layout(call.batch, dim, owner=owner, mixed=layout.mixed)


def _take_from_constant(call: Call) -> Tags:
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if len(index) == 1 and isinstance(index[0], Tensor) and index[0].dtype != torch.bool:
        return [(call.out, call.layout(index[0]))]
    return ask(call)


@_rule(torch.as_strided, T.as_strided)
def _as_strided(call: Call) -> Tags:
    """Windows over memory: the same strides over a map of sample numbers."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or layout.mixed:
        return [(call.out, layout)]
    view = [1] * source.dim()
    view[layout.dim] = layout.rows
    offset = call.out.storage_offset() - source.storage_offset()
    span = max(_extent(source), offset + _extent(call.out))
    memory = torch.full((span,), -1, device=source.device)
    memory.as_strided(source.shape, source.stride()).copy_(layout.owners(source.device).view(view))
    if offset < 0:
        return [(call.out, _combined(call, call.out, "takes windows of memory outside of its input"))]
    owner_map = memory.as_strided(call.out.shape, call.out.stride(), offset)
    return [(call.out, _one_dimension(call, owner_map, layout))]


def _extent(tensor: Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@_rule(torch.index_select, T.index_select)
def _index_select(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    if layout is None:
        return ask(call)
    if dim % source.dim() != layout.dim:
        if call.layout(index) is not None:
            return [(call.out, _combined(call, call.out, "indexes all samples by one sample's data"))]
        return [(call.out, layout)]
    return [(call.out, _by_owner(call, layout.dim, layout.owners(source.device)[index], layout))]


@_rule(torch.gather, T.gather, torch.take_along_dim, T.take_along_dim)
def _gather(call: Call) -> Tags:
    along = call.name == "take_along_dim"
    source, dim = call.args[0], call.argument(2 if along else 1, "dim")
    index = call.argument(1, "indices") if along else call.argument(2, "index")
    layout = call.layout(source) or call.layout(index)
    if dim is None or layout is None or dim % source.dim() == layout.dim:
        return [(call.out, _combined(call, call.out, "gathers along the batch"))]
    return [(call.out, layout)]


@_rule(*_named("masked_select", "nonzero", "unique", "argwhere", "bincount"))
def _rows_by_value(call: Call) -> Tags:
    return [(tensor, _combined(call, tensor, "keeps rows by value")) for tensor in tensors_in(call.out)]


@_rule(T.__setitem__)
def _setitem(call: Call) -> Tags:
    target, index, value = call.args
    layout, source = call.layout(target), call.layout(value)
    if source is None:
        return [(target, layout)]
    if source.mixed or (layout is not None and layout.mixed):
        return [(target, Layout(call.batch, mixed=source.mixed or layout.mixed))]  # type: ignore[union-attr]
    if layout is None or not _written_by_itself(call, layout, source, index):
        return _new_target(call, target, layout, source, index)
    return [(target, layout._replace(mixed=layout.mixed or source.mixed))]


@_rule(*_named("index_put", "index_put_"))
def _index_put(call: Call) -> Tags:
    """target.index_put(indices, value): as target[indices] = value."""
    target, index, value = (call.argument(i, n) for i, n in enumerate(("input", "indices", "values")))
    if call.argument(3, "accumulate", False):
        return ask(call)
    same = Call(T.__setitem__, (target, tuple(index), value), {}, None, call.batch, call.path)
    return [(call.out, layout) for _, layout in _setitem(same)]


def _new_target(call: Call, target: Tensor, layout: Layout | None, source: Layout, index: Any) -> Tags:
    """A constant becomes data by what is written into it: along the only dimension that fits."""
    if layout is None:
        guesses = [
            Layout(call.batch, dim, 1, size // call.batch)
            for dim, size in enumerate(target.shape)
            if size and size % call.batch == 0
        ]
        fitting = [guess for guess in guesses if _written_by_itself(call, guess, source, index)]
        if len(fitting) == 1:
            return [(target, fitting[0])]
    return [(target, Layout(call.batch, mixed=call.mixed("writes rows of one sample into another's")))]


def _written_by_itself(call: Call, layout: Layout, source: Layout, index: Any) -> bool:
    """Whether target[index] = value writes every sample's rows into its own rows."""
    target, value = call.args[0], call.args[2]
    view = [1] * target.dim()
    view[layout.dim] = layout.rows
    written = layout.owners(target.device).view(view).expand(target.shape)[index]
    view = [1] * value.dim()
    view[source.dim] = source.rows
    return bool((written == source.owners(target.device).view(view)).all())


@_rule(*_named("index_add", "index_add_", "index_copy", "index_copy_"))
def _index_add(call: Call) -> Tags:
    target, dim, index, source = (call.argument(i, n) for i, n in enumerate(("input", "dim", "index", "source")))
    layout, rows = call.layout(target), call.layout(source)
    dim = dim % target.dim()
    if rows is None:
        return [(call.out, layout)]
    if dim != rows.dim and (layout is None or layout == rows) and call.layout(index) is None and not rows.mixed:
        return [(call.out, rows)]
    if layout is None and target.size(dim) % call.batch == 0:
        layout = Layout(call.batch, dim, 1, target.size(dim) // call.batch)
    if layout is not None and layout.dim == dim == rows.dim:
        if torch.equal(layout.owners(target.device)[index], rows.owners(target.device)):
            return [(call.out, layout._replace(mixed=layout.mixed or rows.mixed))]
    return [(call.out, _combined(call, call.out, "adds rows of one sample to another's"))]


# --------------------------------------------------------------------------- along the batch


@_rule(torch.cat, torch.concat, torch.concatenate)
def _cat(call: Call) -> Tags:
    tensors, dim = call.args[0], call.argument(1, "dim", 0)
    layouts = [call.layout(tensor) for tensor in tensors]
    known = [layout for layout in layouts if layout is not None]
    if not known or dim % call.out.dim() != known[0].dim:
        return ask(call)
    if len(known) < len(layouts) or len({layout.dim for layout in known}) > 1:
        return [(call.out, _combined(call, call.out, "joins constants to the batch"))]
    mixed = next((layout.mixed for layout in known if layout.mixed), "")
    owner = torch.cat([layout.owners(tensor.device) for layout, tensor in zip(known, tensors, strict=True)])
    if all(layout.owner is None and layout.outer == 1 and layout.inner == known[0].inner for layout in known):
        return [(call.out, known[0]._replace(outer=len(known), mixed=mixed))]
    return [(call.out, Layout(call.batch, known[0].dim, owner=owner, mixed=mixed))]


@_rule(*_named("chunk", "split", "split_with_sizes", "tensor_split", "unbind"), T.__iter__)
def _split(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim = call.argument(1 if call.name == "unbind" else 2, "dim", 0) if call.name != "__iter__" else 0
    if layout is None or layout.mixed or dim % source.dim() != layout.dim:
        return ask(call)
    tags: Tags = []
    start, owners = 0, layout.owners(source.device)
    for part in tensors_in(call.out):
        if part.dim() < source.dim():
            tags.append((part, _combined(call, part, "picks one sample out of the batch")))
            continue
        stop = start + part.size(layout.dim)
        tags.append((part, _by_owner(call, layout.dim, owners[start:stop], layout)))
        start = stop
    return tags


@_rule(*_named("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod", "all", "any", "argmax", "argmin"))
def _reduce(call: Call) -> Tags:
    """Over some dimensions; over the batch's the samples are combined."""
    source, layout = call.args[0], call.layout(call.args[0])
    dims = call.argument(1, "dim")
    if layout is None or layout.mixed or not isinstance(call.out, Tensor) or len(call.args) > 3:
        return ask(call)
    if isinstance(dims, bool) or dims is None or (isinstance(dims, tuple | list) and not dims):
        return [(call.out, _combined(call, call.out, "combines the samples of the batch"))]
    over = {dim % source.dim() for dim in (dims if isinstance(dims, tuple | list) else (dims,))}
    if layout.dim in over:
        return [(call.out, _combined(call, call.out, "combines the samples of the batch"))]
    kept = call.out.dim() == source.dim()
    return [(call.out, layout if kept else layout._replace(dim=layout.dim - sum(d < layout.dim for d in over)))]


def _along(position: int, name: str, *functions: Any) -> None:
    """Functions that combine the positions of dimension `name` and keep its size."""

    def rule(call: Call) -> Tags:
        source, layout = call.args[0], call.layout(call.args[0])
        dims = call.argument(position, name, -1 if name == "dim" else None)
        dims = range(source.dim()) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
        if layout is not None and layout.dim in [dim % source.dim() for dim in dims if source.dim()]:
            why = "works along the batch dimension"
            return [(tensor, _combined(call, tensor, why)) for tensor in tensors_in(call.out)]
        if layout is not None and isinstance(call.out, Tensor) and call.out.shape == source.shape:
            return [(call.out, layout)]
        return ask(call)

    _rule(*functions)(rule)


_along(1, "dim", *_named("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin"))
_along(1, "dim", *_named("logcumsumexp", "sort", "argsort", "cumsum_", "cumprod_"))


@_rule(*_named("flip", "roll"))
def _moved(call: Call) -> Tags:
    """Rows in another order: apply the same to the sample numbers."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or layout.mixed:
        return [(call.out, layout)]
    owners = layout.owners(source.device)
    if call.name == "flip":
        dims = call.args[1:] if isinstance(call.argument(1, "dims"), int) else call.argument(1, "dims")
        if layout.dim in [dim % source.dim() for dim in dims]:
            return [(call.out, _by_owner(call, layout.dim, owners.flip(0), layout))]
        return [(call.out, layout)]
    shifts, dims = call.argument(1, "shifts"), call.argument(2, "dims")
    if dims is None or dims == ():
        return [(call.out, _combined(call, call.out, "rolls samples into each other"))]
    pairs = zip(*((v,) if isinstance(v, int) else tuple(v) for v in (shifts, dims)), strict=True)
    along = [shift for shift, dim in pairs if dim % source.dim() == layout.dim]
    return [(call.out, _by_owner(call, layout.dim, owners.roll(sum(along)), layout) if along else layout)]


_along(2, "dim", F.normalize)


@_rule(F.scaled_dot_product_attention)
def _attention(call: Call) -> Tags:
    for tensor in tensors_in(call.args[:3]):
        layout = call.layout(tensor)
        if layout is not None and layout.dim >= tensor.dim() - 2:
            return [(call.out, _combined(call, call.out, "attends from one sample to another"))]
    query = call.layout(call.args[0])
    others = {call.layout(tensor) for tensor in tensors_in(call.args[1:3])}
    if query is not None and query.owner is None and others == {query}:
        return [(call.out, query)]
    return ask(call)


@_rule(F.layer_norm, F.rms_norm)
def _layer_norm(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is not None and layout.dim >= source.dim() - len(call.argument(1, "normalized_shape")):
        return [(call.out, _combined(call, call.out, "normalises over the batch"))]
    return [(call.out, layout)]


@_rule(F.batch_norm, F.instance_norm, torch.batch_norm)
def _batch_norm(call: Call) -> Tags:
    if call.name == "batch_norm" and call.argument(5, "training", False):
        raise SampleMixingError(
            f"{call.mixed()} in training mode normalises every sample by the statistics of the whole batch, so "
            "per-sample gradients do not exist. Replace it by nn.GroupNorm, or put the module in eval mode."
        )
    if call.name == "instance_norm" and call.argument(5, "use_input_stats", True):
        if call.argument(1, "running_mean") is not None:
            raise SampleMixingError(
                f"{call.mixed()} keeps running statistics of the data, which would be released without noise. "
                "Use track_running_stats=False, or put the module in eval mode."
            )
    tag(call.out, call.layout(call.args[0]))
    return [(call.out, call.layout(call.args[0]))]


@_rule(*[getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")])  # type: ignore[attr-defined]
def _recurrent(call: Call) -> Tags:
    """Frozen recurrent layers: samples lie in dimension 1 (0 if batch_first), or are packed."""
    source, layout = call.args[0], call.layout(call.args[0])
    tensors = list(tensors_in(call.out))
    if layout is None or layout.mixed:
        return ask(call)
    if isinstance(call.args[3], list | tuple):  # packed: (data, batch_sizes, hx, weights, ...)
        first = layout.owners(source.device)[: int(call.args[1][0])]
        ends = _by_owner(call, 1, first, layout)
        return [(tensors[0], layout), *[(t, ends) for t in tensors[1:]]]
    batch_first = call.args[-1]
    if layout.dim != (0 if batch_first else 1) or source.dim() != 3:
        return [(t, _combined(call, t, "takes the batch for the sequence")) for t in tensors]
    return [(tensors[0], layout), *[(t, layout._replace(dim=1)) for t in tensors[1:]]]


@_rule(torch._VF._pad_packed_sequence, torch._VF._pack_padded_sequence)  # type: ignore[attr-defined]
def _packed(call: Call) -> Tags:
    """Packed rows lie by time: step t holds the first batch_sizes[t] samples of the sorted order."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return []
    if call.name == "_pack_padded_sequence":
        data, sizes = call.out
        owners = layout.owners(source.device)
        rows = torch.cat([owners[: int(size)] for size in sizes])
        return [(data, Layout(call.batch, 0, owner=rows, mixed=layout.mixed))]
    padded = call.out[0]
    batch_first = call.argument(2, "batch_first", False)
    first = layout.owners(source.device)[: int(call.args[1][0])]
    return [(padded, Layout(call.batch, 0 if batch_first else 1, owner=first, mixed=layout.mixed))]


UNCHECKED.update(_named("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"))
UNCHECKED.update(_named("bernoulli", "multinomial", "rand_like", "randn_like", "empty_like", "randint_like", "dropout_"))
UNCHECKED.update(_named(*_ELEMENTWISE))
