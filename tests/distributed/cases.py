"""What two and three processes run, in one start of each."""

from __future__ import annotations

import functools
from typing import Any

from .models import compare

UNEQUAL = [[5, 0, 2], [3, 4, 0], [0, 6, 1]]


def _unequal(rank: int, world: int, **options: Any) -> Any:
    return compare(rank, world, sizes=[row[:world] for row in UNEQUAL], **options)


def _groups(rank: int, world: int) -> Any:
    from .models import build

    names = [name for name, _ in build().named_parameters()]
    style = [{"params": names[::2], "max_grad_norm": 0.3}, {"params": names[1::2], "max_grad_norm": 0.4}]
    return compare(rank, world, style=style)


EXACT: dict[str, Any] = {
    "ddp": compare,
    "plain model": functools.partial(compare, wrap=lambda model: model),
    "noise": functools.partial(compare, sigma=1.0),
    "unequal and empty": _unequal,
    "unequal, layerwise, noise": functools.partial(_unequal, style="layerwise", sigma=1.0),
    "unequal, budget, checkpointed": functools.partial(_unequal, kind="checkpointed", memory_budget=1),
    "tied": functools.partial(compare, kind="tied"),
    "lora": functools.partial(compare, kind="lora"),
    "frozen": functools.partial(compare, kind="frozen"),
    "checkpointed": functools.partial(compare, kind="checkpointed"),
    "accumulation": functools.partial(compare, accumulate=2),
    "layerwise": functools.partial(compare, style="layerwise"),
    "groups": _groups,
    "global": functools.partial(compare, clipping="global"),
    "automatic": functools.partial(compare, clipping="automatic"),
    "a function": functools.partial(compare, clipping=lambda n: 0.4 / (n + 0.1)),
    "sum": functools.partial(compare, loss_reduction="mean"),
    "a layer that only some ranks use": functools.partial(compare, extra=lambda rank: rank == 0),
}
CASES = dict(EXACT)
