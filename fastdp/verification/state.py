"""Saves and restores what a run of the program may change: modes, gradients, buffers, attributes, generators."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..batch_axis.inputs import nested_tensors
from ..engine.compile_stance import PLAINLY
from ..graphs.recorder import memory_of, written_by
from ..utils.random_generators import RandomNumbers, devices_of, generators_of

_OF_TORCH = set(nn.Module().__dict__)  # of every module: hooks, parameters, buffers, parts
_CONTAINERS = (list, dict, set, deque)
Contents = list[tuple[Tensor, Tensor]]  # parameters, and what stands in them


class Kept:
    """What stands in the modules now, for every run to begin with the same: buffers, and attributes that are numbers,
    tensors or containers, which a forward may set or write into."""

    def __init__(self, model: nn.Module) -> None:
        places = [(path, place) for path, m in model.named_modules() for place in (m._buffers, m.__dict__)]
        self._kept = [
            (path, place, {key: (place[key], _copied(place[key])) for key in place.keys() - _OF_TORCH})
            for path, place in places
        ]

    def changed(self) -> list[str]:
        """The names of those that are not what they were."""
        found = []
        for path, place, kept in self._kept:
            keys = (place.keys() | kept.keys()) - _OF_TORCH
            names = [key for key in keys if key not in kept or not _same(place.get(key), *kept[key])]
            found += [f"{path}.{key}" if path else key for key in sorted(names)]
        return found

    def put_back(self) -> None:
        for _, place, kept in self._kept:
            for key in place.keys() - _OF_TORCH - kept.keys():
                del place[key]
            for key, (value, content) in kept.items():
                if not _same(place.get(key), value, content):
                    _refill(value, content)
                    place[key] = value


class _Writes(TorchDispatchMode):
    """Within it, a parameter is copied before the first write to its memory."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._at = {memory_of(each): each for each in parameters}
        self.copied: Contents = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if (parameter := self._at.pop(memory_of(tensor), None)) is not None:
                self.copied.append((parameter, parameter.detach().clone()))
        return func(*args, **(kwargs or {}))


class Standing:
    """All that `verify` must leave as it was.

    averages: the frozen parameters that a forward writes (averages of others, mostly), and what stands in them.
    """

    def __init__(self, model: nn.Module, loss_fn: Any, batch: Any) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        leaves = [*model.parameters(), *(t for t in nested_tensors(batch) if t.is_leaf)]
        self._grads = [(t, t.grad) for t in leaves]
        # a forward may write into weights as well: embeddings of bounded norm do
        self._trained = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
        plain = [p for p in model.parameters() if type(p) is nn.Parameter and p.layout is torch.strided]
        self._frozen = [(p, p.detach()) for p in plain if not p.requires_grad]
        self.averages: Contents = []
        self._kept = Kept(model)
        self._random = RandomNumbers(devices_of(model), generators_of(model, loss_fn))

    def look(self, run: Callable[[], object]) -> None:
        """Run once, and see which frozen parameters that writes: copies of all would double a large model."""
        if not self._frozen:
            return
        PLAINLY.begin()  # (within a mode of dispatch torch would refuse to compile, then and later)
        try:
            with contextlib.suppress(Exception), torch.enable_grad(), _Writes([p for p, _ in self._frozen]) as writes:
                run()
        finally:
            PLAINLY.end()
        moved = [(p, before.clone()) for p, before in self._frozen if memory_of(p) != memory_of(before)]
        self.averages = [*writes.copied, *moved]
        self.put_back()

    def clear_grads(self) -> None:
        """So that no backward adds to what stands in `.grad`."""
        for tensor, grad in self._grads:
            if grad is not None:
                tensor.grad = None

    def put_back(self) -> None:
        for module, training in self._modes:
            module.training = training
        self._kept.put_back()
        for parameter, before in self._frozen:
            if memory_of(parameter) != memory_of(before):
                parameter.data = before
        refill([*self._trained, *self.averages])
        for tensor, grad in self._grads:
            if tensor.grad is not grad:
                tensor.grad = grad
        self._random.put_back()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, so that dropout (also of functions) is off; every module's mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def refill(parameters: Contents) -> None:
    """Put back what stood in them."""
    with torch.no_grad():
        for parameter, before in parameters:
            if not _equal(parameter, before):
                parameter.copy_(before)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided:
        return a.shape == b.shape and torch.equal(a.to_dense(), b.to_dense())
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else None


def _same(now: Any, value: Any, content: Any) -> bool:
    """Whether the attribute is still this value, with this content."""
    if now is not value or isinstance(value, Tensor):
        return now is value and _equal(value, content)
    return content is None or _parts(value) == _parts(content)


def _parts(container: Any) -> list[int]:
    """What a container holds, as objects and not as equals."""
    return [id(part) for part in (*container, *(container.values() if isinstance(container, dict) else ()))]


def _refill(value: Any, content: Any) -> None:
    """Put back what was written into a tensor or a container."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            if value.shape == content.shape and not _equal(value, content):
                value.copy_(content)
    elif content is not None:
        value.clear()
        value.extend(content) if isinstance(value, list | deque) else value.update(content)
