"""Random draws made sample by sample, so that a sample draws the same alone and among others.

A program that draws random numbers (dropout, drop path, a VAE's or a diffusion loss's noise) has a gradient of one
sample for every outcome of its draws. To compare a batch with one sample at a time, the sample must draw the same in
both. `SampleDraws` sees every random operation beneath autograd. It takes one number of the generator for each,
whatever its shape, as its key; so keys are the same in every run that begins with the same seed, in a forward that
checkpointing computes again too, which puts the generator's state back. The numbers drawn are those of (key, sample).

Which dimension holds the samples is told by comparing shapes: a draw for a batch is as long as those of its samples
alone together. A draw as large alone as in a batch is one for all samples, and so is its outcome.

A draw that is the same whatever the seed (of a generator that the program seeds in each call) is no random number: it
is a constant of the place in the batch, and stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..batch_axis import probing
from ..engine.mode_stack import Dispatching
from ..utils.code_location import FASTDP, TORCH, frames
from .random_operation import SHARED, Draw, Piece, default_generator, untouched

_UNTAGGED = {"random_", "random", "_sample_dirichlet", "binomial"}  # by torch, though they draw
_RATES = ("dropout_p", "dropout", "p")  # arguments that are zero where nothing is drawn
_TRIALS = os.path.abspath(probing.__file__)  # draws numbers of its own, of which none reaches the data
_ALL = (-1, [Piece(SHARED, slice(None))])

Key = tuple[int, str]
Shape = tuple[int, ...]


class SampleDraws(Dispatching, TorchDispatchMode):
    """Replaces what random operations draw by draws made sample by sample.

    minor: whether the rows of a sample that has several in a draw lie as far apart as there are samples (as
    x.repeat(k, 1) puts them), instead of one after the other.
    """

    def __init__(self, model: nn.Module, minor: bool = False) -> None:
        super().__init__()
        self.minor = minor
        self.seen: dict[str, None] = {}  # where draws were made, in words
        self.unjudged: dict[str, None] = {}  # those whose samples could not be told apart
        self.orders: dict[str, None] = {}  # random orders of the samples
        self.constants: dict[str, None] = {}  # draws that are the same after any seed, as they stand in the program
        self.several = False  # whether a sample has several rows in a draw
        self._numbers: set[int] = set()  # taken from the CPU's own generator, in the run so far
        self._names = {id(module): path or type(module).__name__ for path, module in model.named_modules()}
        self._alone: dict[Key, dict[int, Shape]] = {}  # shapes of each sample's own draws
        self._whole: dict[Key, Shape] = {}  # of the batch that was run first
        self._fixed: set[Key] = set()  # draws that are the same after any seed
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # given by the program, and their states
        self._samples: list[int] | None = None

    @contextlib.contextmanager
    def of(self, samples: list[int] | None) -> Iterator[None]:
        """A run of these samples, one after the other; None: the run that only looks which draws are made."""
        self._samples, self._numbers = samples, set()
        self.put_back()
        with self:
            yield

    @contextlib.contextmanager
    def after_another_seed(self) -> Iterator[None]:
        """A second look at what is drawn, for what does not change."""
        first, self._whole = self._whole, {}
        with self.of(None):
            for generator, _ in self._generators.values():
                generator.manual_seed(2**31 - 1)
            yield
        self._fixed = set(first) & set(self._whole)
        self._whole = first

    def drawn(self) -> int:
        """How many draws of the last run took the CPU's own generator; one that is repeated counts once."""
        return len(self._numbers)

    def put_back(self) -> None:
        """Leave the generators that the program gave as they were."""
        for generator, state in self._generators.values():
            generator.set_state(state)

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _draws(func, args, kwargs) or any(isinstance(a, FakeTensor) for a in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        device = next((a.device for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), kwargs.get("device"))
        device = torch.device("cpu") if device is None else torch.device(device)
        if device.type == "meta":
            return func(*args, **kwargs)
        given = kwargs.get("generator")
        stack = list(frames(sys._getframe(1)))
        if any(frame.f_code.co_filename == _TRIALS for frame in stack):
            with untouched(default_generator(device)):
                return func(*args, **kwargs)
        if given is not None and id(given) not in self._generators:
            self._generators[id(given)] = (given, given.get_state())
        source = default_generator(device) if given is None else given
        number = int(torch.randint(2**62, (), generator=source, device=source.device))
        if source is torch.default_generator:
            self._numbers.add(number)
        name = func._schema.name.removeprefix("aten::")
        where = f"{name}(){self._place(stack)}"
        self.seen[where] = None
        return self._draw(Draw(func, args, kwargs, number, device), (number, name), where)

    def _draw(self, draw: Draw, key: Key, where: str) -> Any:
        out = draw.plain()
        targets = draw.targets(out)
        shape = tuple(targets[0].shape) if targets else ()
        if key in self._fixed:
            self.constants[where] = None
            return out
        found = self._pieces(key, shape)
        if found is not None and found[0] >= 0 and key[1] == "randperm":
            self.orders[where] = None  # an order of the samples is of no sample alone: it stays as it was drawn
            return out
        if found is None or not draw.fill(out, *found):
            self.unjudged[where] = None
        return out

    def _pieces(self, key: Key, shape: Shape) -> tuple[int, list[Piece]] | None:
        """The dimension of the samples in a draw (-1: it is one for all), and their places; None: it cannot be told."""
        samples, whole = self._samples, self._whole.get(key)
        if samples is None:
            return _ALL if self._whole.setdefault(key, shape) == shape else None
        if whole is None or len(whole) != len(shape):
            return None
        if len(samples) == 1:
            alone = self._alone.setdefault(key, {})
            if alone.setdefault(samples[0], shape) != shape:
                return None
            dim = _only_difference(whole, shape)
            return _ALL if whole == shape else None if dim is None else (dim, [Piece(samples[0], slice(None))])
        return self._apart(samples, whole, shape, self._alone.get(key, {}))

    def _apart(
        self, samples: list[int], whole: Shape, shape: Shape, alone: dict[int, Shape]
    ) -> tuple[int, list[Piece]] | None:
        """Of a batch of several samples, where each one's own draw has the shape noted in `alone`."""
        shapes = set(alone.values())
        if shapes == {whole}:
            return _ALL if shape == whole else None
        dims = {_only_difference(whole, each) for each in shapes}
        dim = dims.pop() if len(dims) == 1 else None
        if dim is None or shape[:dim] + shape[dim + 1 :] != whole[:dim] + whole[dim + 1 :]:
            return None
        common = next(iter(shapes))[dim] if len(shapes) == 1 else None  # rows of each sample, where all have as many
        rows = [alone[sample][dim] if sample in alone else common for sample in samples]
        lengths = [length for length in rows if length is not None]
        if len(lengths) < len(rows) or sum(lengths) != shape[dim]:
            return None
        self.several = self.several or any(length > 1 for length in lengths)
        if self.minor and common is not None:
            return dim, [Piece(sample, slice(place, None, len(samples))) for place, sample in enumerate(samples)]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        parts = zip(samples, lengths, ends, strict=True)
        return dim, [Piece(sample, slice(end - length, end)) for sample, length, end in parts]

    def _place(self, stack: list[FrameType]) -> str:
        """The innermost module that runs, and the line of the program's own code."""
        inner = next((f for f in stack if f.f_code.co_name == "forward"), None)
        # of one frame alone: looking at a frame's locals keeps them alive
        first = "" if inner is None else (inner.f_code.co_varnames or ("",))[0]
        name = "" if inner is None else self._names.get(id(inner.f_locals.get(first)), "")
        own = next((f for f in stack if not f.f_code.co_filename.startswith((TORCH, FASTDP))), None)
        module = f" in module '{name}'" if name else " outside of the model"
        return module if own is None else f"{module} ({os.path.basename(own.f_code.co_filename)}, line {own.f_lineno})"


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation draws random numbers."""
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded not in func.tags and name not in _UNTAGGED:
        return False
    if "attention" not in name and "_rnn" not in name:
        return True
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    return any(given.get(rate) for rate in _RATES)  # kernels that may draw


def _only_difference(one: Shape, other: Shape) -> int | None:
    """The dimension in which two shapes differ, if it is one."""
    if len(one) != len(other):
        return None
    found = [dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return found[0] if len(found) == 1 else None
