"""One random operation, and how it is drawn again for each sample by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHARED = -1  # in place of a sample: a draw that is one for all samples


class Piece(NamedTuple):
    """A sample's part of a draw: its places along the dimension of samples."""

    sample: int
    places: slice


class Draw:
    """A call of an operation of ATen that draws random numbers.

    number: the key that its draws are made from. All is drawn in float64, so that a model in float64 draws the same
    as in float32.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, number: int, device: torch.device) -> None:
        self.func, self.number, self.device = func, number, device
        names = [argument.name for argument in func._schema.arguments]
        self.given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.positional = names[: len(args)]
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        # what is written to, and what stood there
        self.before = {name: self.given[name].clone() for name in written if isinstance(self.given.get(name), Tensor)}

    def plain(self) -> Any:
        """The call as the program made it."""
        return self._call(self.given, SHARED)

    def targets(self, out: Any) -> list[Tensor]:
        """The tensors that hold what was drawn."""
        if self.before:
            return [self.given[name] for name in self.before]
        return [out] if isinstance(out, Tensor) else [item for item in out if isinstance(item, Tensor)]

    def fill(self, out: Any, dim: int, pieces: list[Piece]) -> bool:
        """Draw each piece anew, by its own sample, into what was drawn. Returns whether all of it could be.

        dim: the dimension of the pieces; -1: one piece is the whole.
        """
        whole = self.targets(out)
        if not whole or dim >= 0 and any(t.dim() <= dim or t.size(dim) != whole[0].size(dim) for t in whole):
            return False
        for piece in pieces:
            places = [_part(t, dim, piece.places) for t in whole]
            if not places[0].numel():
                continue
            try:
                drawn = self._again(whole[0], dim, piece, exact=True)
            except (RuntimeError, TypeError, ValueError):  # not there in float64
                drawn = self._again(whole[0], dim, piece, exact=False)
            if [t.shape for t in drawn] != [t.shape for t in places]:
                return False
            for place, values in zip(places, drawn, strict=True):
                place.copy_(values)
        return True

    def _again(self, whole: Tensor, dim: int, piece: Piece, exact: bool) -> list[Tensor]:
        """The operation on a piece of its tensors."""
        changed: dict[str, Any] = {}
        for name, value in self.given.items():
            if isinstance(value, Tensor):
                value = self.before.get(name, value)
                own = dim - (whole.dim() - value.dim()) if dim >= 0 else -1  # aligned as in broadcasting
                if own >= 0 and value.size(own) == whole.size(dim):
                    value = _part(value, own, piece.places)
                value = value.double() if exact and value.is_floating_point() else value
                changed[name] = value.clone() if name in self.before else value
            elif name == "size" and dim >= 0:
                length = len(range(*piece.places.indices(whole.size(dim))))
                changed[name] = [length if d == dim else size for d, size in enumerate(value)]
            else:
                changed[name] = value
        if exact and "size" in self.given and whole.is_floating_point():
            changed["dtype"] = torch.float64
        found = self._call(changed, piece.sample)
        if self.before:
            return [changed[name] for name in self.before]
        return [found] if isinstance(found, Tensor) else [item for item in found if isinstance(item, Tensor)]

    def _call(self, given: dict[str, Any], sample: int) -> Any:
        # of its own for every draw and sample
        seed = (self.number * 6364136223846793005 + (sample + 2) * 1442695040888963407) % 2**63
        given = dict(given)
        if given.get("generator") is not None:
            given["generator"] = torch.Generator(given["generator"].device).manual_seed(seed)
        args = [given.pop(name) for name in self.positional]
        default = default_generator(self.device)
        with untouched(default):
            default.manual_seed(seed)
            return self.func(*args, **given)


def _part(tensor: Tensor, dim: int, places: slice) -> Tensor:
    return tensor if dim < 0 else tensor[(slice(None),) * dim + (places,)]


@contextlib.contextmanager
def untouched(generator: torch.Generator) -> Iterator[None]:
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on this device take if they are given none."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    number = module.current_device() if device.index is None else device.index
    return module.default_generators[number]
