"""A step of several processes under audit: the tests run on the first one, and all of them make every step.

Every rank gets whole batches and takes its share of each, so that the step is that of their union. What the tests see
are the results of the first rank, once all ranks hold the same parameters; of a loader, what all ranks drew together.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import weakref
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from .trainable import AuditError, Outcome

BY_MODEL = ("run", "trajectory", "run_parts", "predict", "loss_of", "retune", "state", "history")
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
CALLED = ("build", "sample", *BY_MODEL)
END: Call = ("", (), {})


def begin_world() -> int:
    """The number of processes; under torchrun a group of them is made, if the script has not."""
    if not dist.is_available():
        return 1
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    return dist.get_world_size() if dist.is_initialized() else 1


class OverRanks:
    """A Trainable on the first rank, whose calls all ranks make.

    Args:
        trainable: of this rank. It must take its share of a batch by `take_share(rank, ranks)`, as TorchTrainable does.
    """

    def __init__(self, trainable: Any) -> None:
        if not callable(getattr(trainable, "take_share", None)):
            raise AuditError(
                f"{type(trainable).__name__} has no take_share(rank, ranks): in {dist.get_world_size()} processes each "
                "must train on its own part of a batch. fastdp.audit.TorchTrainable has it."
            )
        self._rank, self._ranks, self._inner = dist.get_rank(), dist.get_world_size(), trainable
        self._group = dist.new_group(backend="gloo")
        self._models, self._made, self._gone = dict[int, Any](), 0, list[int]()
        trainable.take_share(self._rank, self._ranks)
        for name in CALLED:
            if callable(getattr(trainable, name, None)):
                setattr(self, name, functools.partial(self._called, name))

    @property
    def is_first(self) -> bool:
        """Whether the tests run here."""
        return self._rank == 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in CALLED:
            raise AttributeError(name)
        return getattr(self.__dict__["_inner"], name)

    def _called(self, name: str, *args: Any, **given: Any) -> Any:
        """A call of the trainable's method; args holds the model, which must live until the call is over."""
        numbered = (args[0].number, *args[1:]) if name in BY_MODEL else args
        return self._do(*self._from_first((name, numbered, given)))

    def _from_first(self, said: Call = END) -> Call:
        """What the first rank calls; models that it has let go of are let go of here, too."""
        box = [(list(self._gone), said)]
        del self._gone[: len(box[0][0])]
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        for number in box[0][0]:
            self._models.pop(number, None)
        return box[0][1]

    def _do(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        found, failure = None, cast(Exception | None, None)
        args = (self._models[args[0]], *args[1:]) if name in BY_MODEL else args
        try:
            found = getattr(self._inner, name)(*args, **given)
        except Exception as error:  # noqa: BLE001 - all ranks hear of it
            failure = error
        problem = failure and f"{type(failure).__name__}: {failure}"
        said: list[Any] = [None] * self._ranks
        dist.all_gather_object(said, (problem, _mark(found), found if name == "sample" else None), group=self._group)
        failed = [(rank, text) for rank, (text, _, _) in enumerate(said) if text is not None]
        if failed:
            raise failure or AuditError(f"rank {failed[0][0]} failed in {name}(): {failed[0][1][:300]}")
        apart = [rank for rank, (_, mark, _) in enumerate(said) if mark != said[0][1]]
        if apart:
            raise AuditError(
                f"after {name}() rank {apart[0]} holds other parameters than rank 0: the ranks do not train one model "
                "(another noise on each, or sums that are not added up)"
            )
        if name == "sample":
            drawn = [[np.asarray(indices, dtype=int) for indices in steps] for _, _, steps in said]
            return [np.concatenate(step) for step in zip(*drawn, strict=True)]
        if name != "build":
            return found
        self._made += 1
        self._models[self._made] = found
        model = Model(self._made)
        if self.is_first:
            weakref.finalize(model, self._gone.append, self._made)
        return model

    def serve(self) -> None:
        """Do what the first rank says, until it ends. An error of this rank is raised there."""
        while (said := self._from_first()) != END:
            with contextlib.suppress(Exception):
                self._do(*said)
        self._leave()

    def end(self) -> None:
        """The other ranks are done."""
        self._from_first()
        self._leave()

    def _leave(self) -> None:
        """Together: a process that ended first would break connections of the others."""
        self._models.clear()
        gc.collect()
        dist.barrier(group=self._group)
        dist.destroy_process_group()


@dataclass(frozen=True, eq=False)
class Model:
    """A model of every rank, by its number."""

    number: int


def _mark(found: Any) -> str:
    """A hash of the parameters in a result, to the last bit; "" for another result."""
    if not isinstance(found, Outcome):
        return ""
    return hashlib.sha256(np.ascontiguousarray(found.parameters, dtype=np.float64).tobytes()).hexdigest()
