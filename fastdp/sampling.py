"""Poisson sampling: every record (or person) joins a batch independently, with the accounted probability.

`poisson_loader` makes the loader; `max_batch_size_for` finds a size to which its batches can be cut. `current` tells a
loop which physical batch is in hand. A framework that fetches batches ahead of the steps (as `fastdp.lightning` and
`fastdp.hf` do) counts its passes with `new_pass`, `wait`, `finish` and `leave`.
"""

from .batch_axis.current_batch import PhysicalBatch, current
from .data.loader import PoissonLoader, PoissonSampler, finish, leave, new_pass, poisson_loader, wait
from .data.truncation import max_batch_size_for, truncation

__all__ = [
    "PhysicalBatch",
    "PoissonLoader",
    "PoissonSampler",
    "current",
    "finish",
    "leave",
    "max_batch_size_for",
    "new_pass",
    "poisson_loader",
    "truncation",
    "wait",
]
