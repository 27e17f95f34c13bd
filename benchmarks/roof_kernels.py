"""Kernels that the engine starts past its operators (many layers in one launch, norms with their bounds), as jobs.

On a GPU `extension.on_device` gives the engine a module of `fastdp.kernels`. On paper it gives one that runs the same
launchers on tensors without numbers and writes down what they launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fastdp.ops import extension
from fastdp.ops.registry import triton_module

from .roof_jobs import Job, Part, launched, least_of, product_of, size_of, sizes, tensors, triton_parts

Inner = Callable[[Callable[[], Any]], list[Job]]
# what the operator of the same arithmetic is called, by module and function
NAMES = {
    ("linear", "linear_norm_sq_and_bound"): "linear_norm_sq", ("many", "linear_norm_sq"): "linear_norm_sq",
    ("many", "linear_clipped_sum"): "linear_clipped_sum", ("many", "square_sum"): "square_sum",
    ("many", "weighted_sum"): "weighted_sum", ("embedding", "cross_term_and_spread"): "tied_cross_term",
    ("conv", "conv_norm_sq_and_bound"): "conv_norm_sq",
}  # fmt: skip

QUESTIONS = {"wants_last"}  # they launch nothing


class Seen:
    """A module of kernels whose functions write down what they would launch."""

    def __init__(self, name: str, within: Inner, put: Callable[[Job], None]) -> None:
        self._name, self._within, self._put = name, within, put

    def __getattr__(self, function: str) -> Any:
        found = getattr(triton_module(self._name), function)
        if function in QUESTIONS:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            given = (tuple(list(a) if isinstance(a, list) else a for a in args), dict(kwargs))  # lists may be emptied
            results: list[Any] = []
            with launched() as launches:
                inner = self._within(lambda: results.append(found(*args, **kwargs)))
            name = NAMES.get((self._name, function), function)
            self._put(job_of(name, *given, results[0], inner, launches))
            return results[0]

        return call if callable(found) else found


def job_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, inner: Sequence[Job],
           launches: list[Any]) -> Job:  # fmt: skip
    """What such a call is written down as: its floor is that of as many calls of the operator, in one launch."""
    first = args[0]
    layers = list(first) if isinstance(first, list | tuple) else [tuple(t for t in args[:2] if isinstance(t, Tensor))]
    pairs = [layer if isinstance(layer, tuple) else (layer,) for layer in layers]
    moved = float(sum(map(size_of, {id(t): t for t in tensors((args, kwargs, out))}.values())))
    method = [a for a in args if a in ("gram", "direct") and isinstance(a, str)]
    text = sizes(pairs[0][:2])
    if name.startswith("linear_"):
        each = [least_of(name, (*pair, *args[2:]), {}, 0.0) for pair in pairs]
        least = Part(sum(part.flop for part in each), moved, 0, each[0].float32)
        a, g = pairs[0]
        text = f"B={a.size(0)} T={a.size(1) if a.dim() == 3 else 1} I={a.size(-1)} O={g.size(-1)}"
    elif name == "tied_cross_term":  # a logit for each pair of a word looked up and a position
        ids, e, h, g = args
        pairs_of = ids.numel() * h.size(1)
        least = Part(2.0 * pairs_of * h.size(2), moved - size_of(g) + pairs_of * g.element_size(), 0)
    elif (shape := product_of(name, args)) is not None:
        least = least_of(name, args, {}, moved)
        text = "B={} T={} I={} O={}".format(*shape[:4]) + (f" groups={shape[4]}" if shape[4] > 1 else "")
    else:
        least = Part(0.0, moved, 0)
    needed = None if name == "filled_once" else least  # a kernel could read rows as they lie
    text += f" layers={len(pairs)}" if isinstance(first, list | tuple) and len(pairs) > 1 else ""
    parts = tuple(part for job in inner for part in job.parts) + tuple(triton_parts(launches, 0.0))
    return Job(" ".join([f"fastdp.{name}", *method]), text, parts, needed)


@contextmanager
def seen(within: Inner, put: Callable[[Job], None]) -> Iterator[None]:
    """Within it tensors on the meta device are served past the operators as a GPU's are, and `put` is told."""
    before = extension.on_device

    def on_device(name: str, *given: Tensor) -> Any:
        if given[0].device.type != "meta" or not extension.takes(*given):
            return before(name, *given)
        return Seen(name, within, put)

    extension.on_device = on_device  # type: ignore[assignment]
    try:
        yield
    finally:
        extension.on_device = before
