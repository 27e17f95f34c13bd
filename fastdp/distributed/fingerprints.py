"""Digests by which processes compare what they hold: model weights, a few records of a dataset."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ParameterError
from ..ops.common import sum_type
from ..utils.random_generators import RandomNumbers, seed_generators

LOOKS = 5  # records that are compared
CHUNK = 1 << 20  # words that are summed at once


def mark(*values: object) -> str:
    """A short name of these values, which tells nothing of a secret key among them."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def place_of_noise(noise: Any) -> tuple[str, int] | None:
    """What noise is drawn next: a mark of the key, and the number; None of a seed, which draws the same on purpose."""
    return (mark("noise", noise.key), noise.step) if noise.secure else None


def mark_of_model(model: nn.Module) -> str:
    """Of the names, shapes and values of a model's parameters and buffers. Raises ParameterError if one is lazy."""
    return mark(_marks([*model.named_parameters(), *model.named_buffers()]))


def mark_of_shapes(model: nn.Module) -> str:
    """The same of its buffers, and of its parameters the names and shapes alone."""
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return mark(shapes, _marks(list(model.named_buffers())))


def mark_of_parameters(model: nn.Module) -> str:
    """The same of its parameters alone: a forward may have written to buffers."""
    return mark(_marks(list(model.named_parameters())))


def _marks(tensors: list[tuple[str, Tensor]]) -> list[object]:
    found: list[object] = []
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ParameterError(
                f"'{name}' has no shape yet: every process would initialize it for itself. Call the model on a batch, "
                "give all processes the same weights, and make the optimizer then."
            )
        bits = None if _is_cut(tensor) else _bits(tensor)  # a part is another on every process
        found.append((name, tuple(tensor.shape), str(tensor.dtype), bits))
    return found


def _is_cut(tensor: Tensor) -> bool:
    """Whether a part of it lies here."""
    return any(not place.is_replicate() for place in getattr(tensor, "placements", ()))


@torch.no_grad()
def _bits(tensor: Tensor) -> object:
    """Two sums of a tensor's bits, of which one knows their order; on a device without a copy to the host. Of a DTensor
    those of what lies here."""
    tensor = getattr(tensor, "to_local", lambda: tensor)()
    try:
        words = tensor.detach().contiguous().view(-1).view(torch.uint8)
        words = nn.functional.pad(words, (0, -len(words) % 4)).view(torch.int32)
    except (RuntimeError, TypeError, NotImplementedError):  # a type of its own (quantized): its shape must do
        return None
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    order = torch.arange(min(len(words), CHUNK), device=words.device) * 0x9E3779B1 % 0x7FFFFFFF
    for number, part in enumerate(words.split(CHUNK)):  # parts in int64 need twice the memory
        long = part.long()
        total[0] += long.sum() * (2 * number + 1)
        total[1] += (long * order[: len(long)]).sum() * (2 * number + 1)
    return total.tolist()


def mark_of_records(dataset: Any) -> str | None:
    """Of a few records of a dataset; None if they cannot be told, or are not the same when they are read again."""
    size = len(dataset)
    places = sorted({size * part // (LOOKS - 1) for part in range(LOOKS - 1)} | {size - 1})
    try:
        first, again = (_look(dataset, places) for _ in range(2))
    except Exception:  # noqa: BLE001 - of the dataset's own code: the loader's first batch will say it
        return None
    return first if first == again else None


def _look(dataset: Any, places: list[int]) -> str:
    with _same_randomness():
        return mark([_known(dataset[place]) for place in places])


def _known(value: Any) -> Any:
    """What can be compared of a record. Raises TypeError if that is not known of a value."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.layout != torch.strided:
            value = value.coalesce()
            return tuple(value.shape), _known(value.indices()), _known(value.values())
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            return value.shape, [_known(item) for item in np.asarray(value).flat]
        return value.shape, value.dtype.str, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return [(str(key), _known(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_known(item)) for item in value)
    if isinstance(
        value, str | bytes | int | float | complex | None | datetime.date | datetime.time | datetime.timedelta
    ):
        return value
    if callable(bits := getattr(value, "tobytes", None)):  # an image
        return type(value).__name__, getattr(value, "size", None), hashlib.sha256(bits()).hexdigest()
    return type(value).__name__, _known(vars(value))


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    """Augmentations draw the same in every process, and the program's own random numbers stay as they were."""
    before = RandomNumbers(set(), [])
    try:
        seed_generators(0)
        yield
    finally:
        before.put_back()


def same_on_all(group: Any, tensors: Sequence[Tensor], device: torch.device | str) -> bool:
    """Whether all processes of a group hold the same numbers. All of them must ask."""
    values = mark(_marks([(str(number), tensor) for number, tensor in enumerate(tensors)]))
    own = torch.tensor([int(values, 16) >> 1], device=device)
    least, most = own.clone(), own.clone()
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
    return int(least) == int(most)


_PRIMES = (2147483647, 2147483629)


@torch.no_grad()
def projection_of(tensor: Tensor) -> Tensor:
    """The sum of a tensor's elements by fixed weights, and its squared norm, but for rows that are not finite: [2],
    float64, on its device and without a wait."""
    if tensor.numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device=tensor.device)
    rows = tensor.detach().reshape(-1, tensor.size(-1) if tensor.dim() else 1)
    down, across = (torch.arange(1.0, n + 1, dtype=torch.float64, device=rows.device) for n in rows.shape)
    down, across = ((n.square() * _GOLDEN % 1 * math.tau).cos() for n in (down, across))  # no two alike
    sums, norms = (rows @ across.to(rows.dtype)).double(), torch.linalg.vector_norm(rows, dim=1, dtype=sum_type(rows))
    finite = sums.isfinite() & norms.isfinite()
    return torch.stack(
        [torch.where(finite, sums * down, 0).sum(), torch.where(finite, norms.double().square(), 0).sum()]
    )


_GOLDEN = (math.sqrt(5) - 1) / 2


@torch.no_grad()
def lanes_of(tensor: Tensor) -> Tensor:
    """Four numbers in [0, 1), float64, that tell a tensor's bits and sizes, on its device and without a wait."""
    words = tensor.detach().contiguous().view(-1)
    words = (words.to(torch.uint8) if words.dtype == torch.bool else words).view(torch.uint8)
    words = nn.functional.pad(words, (0, -len(words) % 4)).view(torch.int32).long()
    places = (torch.arange(len(words), device=words.device) * 0x9E3779B1 + 1) % 0x7FFFFFFF
    sums = torch.stack([words.sum(), (words * places).sum()]) + sum(
        n * 1_000_003**d for d, n in enumerate(tensor.shape)
    )
    return torch.stack([(sums % prime).double() / prime for prime in _PRIMES]).flatten()
