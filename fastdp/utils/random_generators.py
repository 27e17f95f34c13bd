"""Saves and restores the states of random generators: torch's, Python's, numpy's, and those that a program keeps."""

from __future__ import annotations

import gc
import random
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from .rng_state import random_states, same_states, set_random_states

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class RandomNumbers:
    """The states of all generators that a program is known to draw from.

    own: generators that the program keeps itself.
    """

    def __init__(self, devices: set[torch.device], own: list[Any]) -> None:
        self.torch = random_states(*devices)
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.own = [(generator, _state(generator)) for generator in own]

    def put_back(self) -> None:
        set_random_states(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        self.put_back_own()

    def put_back_own(self) -> None:
        """Those that the program keeps."""
        for generator, state in self.own:
            _set_state(generator, state)

    def torchs_equal(self, other: RandomNumbers) -> bool:
        """Whether torch's generators stand where the other's did."""
        pairs = zip(self.own, other.own, strict=True)
        return same_states(self.torch, other.torch) and all(
            torch.equal(one, two) for (generator, one), (_, two) in pairs if isinstance(generator, torch.Generator)
        )

    def others_moved(self, before: RandomNumbers) -> list[str]:
        """Names of the generators outside of torch from which numbers were drawn."""
        moved = ["Python's random"] if self.python != before.python else []
        if not _same(self.numpy, before.numpy):
            moved.append("numpy.random")
        for (generator, now), (_, was) in zip(self.own, before.own, strict=True):
            if not isinstance(generator, torch.Generator) and not _same(now, was):
                moved.append(f"a {type(generator).__module__}.{type(generator).__name__}")
        return moved


def living(model: nn.Module) -> list[Any]:
    """All generators of Python's and numpy's that exist (but for those that gc.freeze() hides), and those that a model
    keeps or names."""
    kinds = {random.Random, np.random.Generator, np.random.RandomState}
    found = [each for each in gc.get_objects() if type(each) in kinds]
    return list({id(each): each for each in (*found, *generators_of(model, None))}.values())


def seed_generators(seed: int) -> None:
    """Seed torch's generators, Python's and numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generators_of(model: nn.Module, loss_fn: Any) -> list[Any]:
    """Generators that modules have as attributes, or that the program's functions name: as globals, or around them."""
    values = [value for module in model.modules() for value in module.__dict__.values()]
    functions = [loss_fn, *(type(m).forward for m in model.modules() if not type(m).__module__.startswith("torch."))]
    functions += [value for value in values if isinstance(value, FunctionType | MethodType)]
    seen: set[int] = set()
    for _ in range(3):  # functions that these call, and what is called by those
        found: list[Any] = []
        for function in functions:
            function = function.__func__ if isinstance(function, MethodType) else function
            if isinstance(function, FunctionType) and id(function) not in seen:
                seen.add(id(function))
                found += _named_in(function)
        values += found
        functions = [value for value in found if isinstance(value, FunctionType | MethodType)]
    return list({id(value): value for value in values if isinstance(value, _KINDS)}.values())


def _named_in(function: FunctionType) -> list[Any]:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # of a name that is not bound yet
            continue
    return [*cells, *(function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__)]


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal; numpy's hold arrays."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other))


def devices_of(model: nn.Module) -> set[torch.device]:
    """Where the model's parameters and buffers are."""
    return {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"}


def kept_by(holder: Any) -> list[Any]:
    """Generators that an object has as attributes."""
    keeper = nn.Module()
    keeper.__dict__.update({f"kept {name}": value for name, value in getattr(holder, "__dict__", {}).items()})
    return generators_of(keeper, None)
