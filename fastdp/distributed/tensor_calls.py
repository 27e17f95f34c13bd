"""Calls with parameters split by tensor parallelism, captured on the local tensors.

`F.linear` of a DTensor and a split weight becomes the same call on the local tensors, which the engine captures as it
captures every call, and the local result becomes a DTensor again. What is captured here is one of three, by the
placements of the data and the parameter, and nothing else is let in:

- the gradient of this process's own part of the parameter (a weight cut by rows or by columns);
- the whole gradient, the same on every process (a copied parameter that meets copied data);
- a part of a copied parameter's gradient, of the tokens that lie here: it is summed over the processes, for each
  sample, before anything is made of it (`Summing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch_axis.calls import bind
from ..batch_axis.layout import tag, tag_of
from ..errors import SampleMixingError, UncapturedUseError
from ..grad_sample.linear import captured_linear
from ..grad_sample.parameter_links import link_of
from ..grad_sample.parameter_use import ParameterUse, Stored
from ..grad_sample.rules import USE_RULES
from .tensor_values import as_whole, local_of


class Split(NamedTuple):
    """A call in the making. leaf: what stands for a parameter on this process."""

    active: Any  # the pass (fastdp.engine.capture.Pass)
    name: str
    mesh: Any  # of the processes that share the parameters, one dimension
    leaf: Callable[[Any], Tensor]

    @property
    def rank(self) -> int:
        return int(self.mesh.get_local_rank())

    @property
    def size(self) -> int:
        return int(self.mesh.size())

    def place(self, tensor: Any, what: str) -> int | None:
        """Along which dimension a tensor is cut over the processes; None if it is copied.

        Raises UncapturedUseError of what is neither.
        """
        found = getattr(tensor, "placements", None)
        if found is None:
            raise self.refusal(
                f"{what} is a plain tensor, and not a DTensor: give its module a style of "
                "torch.distributed.tensor.parallel"
            )
        if tensor.device_mesh != self.mesh or len(found) != 1:
            raise self.refusal(f"{what} lies on another mesh ({tensor.device_mesh})")
        if found[0].is_replicate():
            return None
        if type(found[0]).__name__ == "Shard":
            return int(found[0].dim % max(tensor.dim(), 1))
        raise self.refusal(f"{what} is placed as {found[0]}: redistribute it to Replicate() or Shard() before")

    def refusal(self, why: str) -> UncapturedUseError:
        return UncapturedUseError(
            f"{self.active.place(self.name)} under tensor parallelism: {why}. fastdp knows linear layers, embeddings, "
            "layer and RMS norms as ColwiseParallel, RowwiseParallel and SequenceParallel lay them out "
            "(docs/distributed.md); freeze the parameter, or keep the module whole on every process."
        )

    def local(self, x: Any, *gradient: Any) -> Tensor:
        """What lies here of data, and how its gradient lies. gradient: a placement."""
        if self.active.is_parameter(x) or link_of(x) is not None:
            raise self.refusal("the data is itself made of parameters")
        layout, place = tag_of(x, self.active.batch), self.place(x, "the data")
        if layout is not None and self.active.batch > 1 and layout.alone < 0 and place == layout.dim:
            raise SampleMixingError(
                f"{self.active.place(self.name)}: the samples' own dimension ({layout.dim}) is cut over the processes "
                "of tensor parallelism, each of which must have every sample. Shard another dimension."
            )
        found = local_of(x, gradient)
        if layout is not None:
            tag(found, layout)
        return found

    def result(self, out: Tensor, placement: Any, shape: Any = None) -> Any:
        """The local result as a DTensor, in which the samples lie as in it."""
        layout = tag_of(out, self.active.batch)
        found = as_whole(out, self.mesh, placement, out.shape if shape is None else shape)
        if layout is not None:
            tag(found, layout)
        return found

    def learned(self, *leaves: Tensor | None) -> bool:
        return any(leaf is not None and self.active.is_tracked(leaf) and leaf.requires_grad for leaf in leaves)


class Summing:
    """A pass whose uses are of a part of every sample's gradient: they are summed over the processes of a group, in the
    order of the backward, which is the same on all of them."""

    def __init__(self, forward_pass: Any, group: Any) -> None:
        self._pass, self._group = forward_pass, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pass, name)

    def record(self, use: ParameterUse) -> None:
        rows = use.per_sample(0, use.batch).contiguous()
        with torch.no_grad():
            dist.all_reduce(rows, group=self._group)
        self._pass.record(Stored(use.operand, rows, use.name))


def _linear(call: Split, func: Any, args: Any, kwargs: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard  # imports what takes a second

    x, weight, bias = bind(args, kwargs, "input", "weight", "bias")
    rows, data = call.place(weight, "the weight"), call.place(x, "the data")
    own, own_bias = call.leaf(weight), None if bias is None else call.leaf(bias)
    beside = None if bias is None else call.place(bias, "the bias")
    last = x.dim() - 1
    if rows == 0 and data is None and (bias is None or beside == 0):  # cut by outputs
        out = call.active.traced(F.linear, call.local(x, Partial()), own, own_bias)
        return call.result(out, Shard(out.dim() - 1), (*out.shape[:-1], weight.size(0)))
    if rows == 1 and data == last and beside is None:  # cut by inputs: parts of every output
        a = call.local(x, Shard(last))
        if call.learned(own, own_bias):
            out = captured_linear(call.active, a, own, own_bias, adds_bias=call.rank == 0)
            call.active.count_uses([leaf for leaf in (own, own_bias) if leaf is not None and call.learned(leaf)])
        else:
            out = call.active.traced(F.linear, a, own, own_bias if call.rank == 0 else None)
        return call.result(out, Partial())
    if rows is None and data is None and beside is None:
        return call.result(call.active.traced(F.linear, call.local(x, Replicate()), own, own_bias), Replicate())
    if rows is None and beside is None and data is not None and data != last and not call.learned(own, own_bias):
        out = call.active.traced(F.linear, call.local(x, Shard(data)), own, own_bias)
        return call.result(out, Shard(data), (*x.shape[:-1], weight.size(0)))
    raise call.refusal(
        f"data placed as {x.placements} meets a weight placed as {weight.placements}"
        f"{'' if bias is None else f' and a bias placed as {bias.placements}'}: what lies here of its gradient is not "
        "known to be its own part or the whole"
    )


def _embedding(call: Split, func: Any, args: Any, kwargs: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    ids, table = bind(args, kwargs, "input", "weight")
    rest, named = list(args[2:]), {k: v for k, v in kwargs.items() if k not in ("input", "weight")}
    cut, own = call.place(table, "the table"), call.leaf(table)
    if call.place(ids, "the index") is not None:
        raise call.refusal(f"the index is placed as {ids.placements}: it must be on every process")
    here = call.local(ids, Replicate())
    if cut != 0:
        out = call.active.traced(F.embedding, here, own, *rest, **named)
        if cut is None:
            return call.result(out, Replicate())
        return call.result(out, Shard(out.dim() - 1), (*out.shape[:-1], table.size(1)))
    low = -(-table.size(0) // call.size) * call.rank
    high = low + own.size(0)
    if not own.size(0):
        raise call.refusal("this process has no row of the table: use fewer processes for tensor parallelism")
    padding = rest.pop(0) if rest else named.pop("padding_idx", None)
    padding = None if padding is None else padding % table.size(0)
    padding = padding - low if padding is not None and low <= padding < high else None

    def found(ids: Tensor) -> Tensor:
        """Rows of words that lie on other processes are zero, and so are the gradients that come back for them."""
        elsewhere = (ids < low) | (ids >= high)
        out = F.embedding((ids - low).clamp(0, high - low - 1), own, padding, *rest, **named)
        return out.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    return call.result(call.active.traced(found, here), Partial())


def _along_last(call: Split, func: Any, args: Any, kwargs: Any) -> Any:
    """Copied parameters of the last dimension (a norm's, or its factor alone) with data that is copied, or cut along
    another dimension."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    given = [*args, *kwargs.values()]
    data = [t for t in given if isinstance(t, DTensor) and not isinstance(t, nn.Parameter)]
    if len(data) != 1:
        raise call.refusal("it takes several tensors of data, or none")
    x = data[0]
    place, leaves = call.place(x, "the data"), []
    for t in given:
        if isinstance(t, DTensor) and t is not x:
            leaves.append(call.leaf(t))
            if call.place(t, "a parameter") is not None or t.dim() != 1 or t.size(0) != x.size(-1):
                raise call.refusal(f"a parameter of shape {tuple(t.shape)} is placed as {t.placements}")
    if place == x.dim() - 1:
        raise call.refusal(f"the data is placed as {x.placements}, along the dimension of the parameter")
    here = call.local(x, Replicate() if place is None else Shard(place))
    swap = lambda t: here if t is x else call.leaf(t) if isinstance(t, DTensor) else t
    given_here, named_here = tuple(map(swap, args)), {k: swap(v) for k, v in kwargs.items()}
    if place is None:
        return call.result(call.active.traced(func, *given_here, **named_here), Replicate())
    if not call.learned(*leaves):
        out = call.active.traced(func, *given_here, **named_here)
    else:
        out = USE_RULES[func](Summing(call.active, call.mesh.get_group()), func, given_here, named_here)
        if out is NotImplemented:
            raise call.refusal("its gradient cannot be summed over the processes")
        call.active.count_uses([leaf for leaf in leaves if call.learned(leaf)])
    return call.result(out, Shard(place), x.shape)


_PRODUCTS = [torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__]
CALLS: dict[Any, Callable[[Split, Any, Any, Any], Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    **dict.fromkeys([F.layer_norm, F.rms_norm, *_PRODUCTS], _along_last),
}
