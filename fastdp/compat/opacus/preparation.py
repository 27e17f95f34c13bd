"""What make_private asks of modules and loaders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from .data_loader import DPDataLoader
from .distributed import DifferentiallyPrivateDistributedDataParallel, check_alone
from .grad_sample import AbstractGradSampleModule


@contextlib.contextmanager
def or_as_it_was(hooks: Any, given: Any) -> Iterator[None]:
    """Where what is within fails, take the hooks off the user's module again (unless he gave them)."""
    try:
        yield
    except Exception:
        if hooks is not given:
            hooks.cleanup()
        raise


def is_distributed(module: Any) -> bool:
    """Whether the module trains in a process group. Raises NotImplementedError where that is not supported."""
    plain = module._module if isinstance(module, AbstractGradSampleModule) else module
    if isinstance(plain, DistributedDataParallel) or hasattr(plain, "set_requires_gradient_sync"):  # or FSDP's
        raise NotImplementedError(
            f"{type(plain).__name__}: data-parallel and sharded training is not supported yet. Give the plain module, "
            "in one process."
        )
    if isinstance(plain, DifferentiallyPrivateDistributedDataParallel):
        check_alone()
        return True
    return False


def sample_rate_of(data_loader: DataLoader[Any]) -> float:
    """The rate that the loader samples at, which is what is accounted for; 1 / len of one that does not sample."""
    return data_loader.sample_rate if isinstance(data_loader, DPDataLoader) else 1 / len(data_loader)


def expected_batch_size_of(data_loader: Any, sample_rate: float) -> int:
    """len(dataset) * rate, rounded down but for the rounding of floating point; at least 1."""
    return max(1, int(len(data_loader.dataset) * sample_rate * (1 + 1e-12)))
