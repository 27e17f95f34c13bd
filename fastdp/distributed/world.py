"""The processes of a run and the few messages that private training exchanges between them.

Every exchange begins with `agree`: each process says whether it refuses, and a digest of what it is about to do.
Nothing is summed before all have said the same. A process that refuses says so at once, wherever it is (`refuse`), and
does not wait; the others hear of it at their next `agree`. So whoever comes to an exchange, comes to an `agree`.

These messages go through a process group of their own, by gloo, so nothing else can come between them. Sums go through
the user's group.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from ..errors import FastDPError, StepError
from .private_names import collectives_so_far, count_messages, groups_here, timeout_of
from .reduce import Reduction

TEXT = 2048  # bytes of what a process says in words
_CONTROL: list[tuple[Any, Any]] = []  # the default group, and the group of messages that was made beside it


_TOLD = "_fastdp_all_processes_know"  # on errors
HERE = "by this process"
AnyError = TypeVar("AnyError", bound=BaseException)


def processes() -> int:
    """How many processes torch.distributed knows of; 1 where it was not begun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class World:
    """One process, which trains alone. What it sends goes nowhere."""

    rank, size = 0, 1
    share = (0, 1)  # which part of the samples this process has, of how many: those of a tensor-parallel model share it
    split: Any = None  # the process group of those who share this process's samples, and a model's layers

    @property
    def speaks(self) -> bool:
        """Whether this process counts its samples: the first of those who share them does."""
        return self.split is None or dist.get_rank(self.split) == 0

    def check(self) -> None:
        """Raises StepError where other processes have joined since."""
        if processes() > self.size:
            raise StepError(
                f"{processes()} processes train together, and this optimizer was made in a process of its own, before "
                "torch.distributed.init_process_group: each would clip, noise and step on its own, and their models "
                "would drift apart. Make the optimizer after it, on every rank."
            )

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """What raises an error within is refused by all processes."""
        yield

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this process raises an error."""

    def agree(self, said: Mapping[str, object], records: int = 0) -> int:
        """Wait until every process has said the same.

        Args:
            said: what must be equal, by name.
            records: a number of this process.

        Returns:
            The sum of `records` over the processes.

        Raises:
            FastDPError: the error of a process that refused, or StepError if they say different things, or one is gone.
        """
        return records

    def from_first(self, secret: bytes) -> bytes:
        """The bytes that the first process gives here, which are as many on every process. Call it after an `agree`."""
        return secret

    def everywhere(self, what: str, value: Any) -> list[Any]:
        """What each process gives here, in their order. what: a name, which must be the same on all."""
        return [value]

    def told(self, what: str, value: Any) -> Any:
        """What the first process gives here."""
        return self.everywhere(what, value if self.rank == 0 else None)[0]

    def sums(self, reduction: Reduction, group: Any = None) -> list[Tensor]:
        """The sums over the processes (of a group of them), which have agreed. Raises StepError if one is gone."""
        raise NotImplementedError

    def any_of(self, flags: Tensor) -> Tensor:
        """The largest number at each place over the processes, which have agreed: uint8, on the CPU."""
        return flags

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Within it sums are exchanged, once all have agreed. Raises StepError if a process is gone."""
        yield

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within it the model's own parts are exchanged, and nothing of samples: `communicated` does not count it."""
        yield

    def begins(self) -> None:
        """A forward begins, which a backward may follow."""

    def communicated(self) -> bool:
        """Whether this process has exchanged anything with others since the first `begins`, or the last answer."""
        return False


class Ranks(World):
    """All processes of torch.distributed, each with whole samples and a copy of the model.

    group: the process group of the sums. It must hold all processes, but for those with whom this one shares a model's
    layers, and the samples: `split`.
    """

    def __init__(self, group: Any = None, split: Any = None) -> None:
        self.group, self.split = dist.group.WORLD if group is None else group, split
        if split is None:
            self.share = self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        else:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.share = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._of = dist.group.WORLD
        self._control = _control()
        count_messages()
        self._over = ""  # why this optimizer makes no more steps
        self._sent: list[Any] = []  # messages that nobody may have heard yet
        self.heard: Callable[[], None] = lambda: None  # told of an error that all raise, or most
        self.explained: Callable[[BaseException], BaseException] = lambda problem: problem  # what ended an exchange
        self._begun: dict[str, int] | None = None
        self._own: dict[str, int] = {}  # collectives that were not counted, by group

    def check(self) -> None:
        if self._over:
            raise StepError(f"training has stopped on all ranks: {self._over}. Make a new optimizer on every rank.")
        if not dist.is_initialized() or self._of is not dist.group.WORLD:
            raise StepError("the process group in which this optimizer was made is gone: make a new optimizer")

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    def refuse(self, error: BaseException) -> None:
        if self._over or vars(error).get(_TOLD):  # an error may pass several objects of this class on its way
            return
        vars(error)[_TOLD] = HERE
        self._over = f"rank {self.rank} raised {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the group is gone, and the others hear that
            for message in (_words(1, 0, ""), _letters(f"{type(error).__name__}: {error}")):
                heard = [torch.empty_like(message) for _ in range(self.size)]
                work = dist.all_gather(heard, message, group=self._control, async_op=True)
                self._sent.append((work, heard, message))

    def messages(self) -> int | None:
        """How many messages there were, which after an `agree` is the same on all processes."""
        return collectives_so_far(self._control)

    def heard_by_all(self, patience: float) -> None:
        """Wait until the others have heard that this process refuses, so many seconds at most."""
        end = time.monotonic() + patience
        while time.monotonic() < end and not all(work.is_completed() for work, *_ in self._sent):
            time.sleep(0.005)

    def agree(self, said: Mapping[str, object], records: int = 0) -> int:
        self.check()
        text = "\n".join(f"{name}: {value}" for name, value in said.items())
        heard = [found.tolist() for found in self._gather(_words(0, records, text))]
        if any(refused for refused, *_ in heard):
            self._raise_for(heard, self._gather(_letters("")))
        if any(found[2:] != heard[0][2:] for found in heard):
            self._raise_difference([_text(found) for found in self._gather(_letters(text))])
        return sum(found[1] for found in heard)

    def _gather(self, message: Tensor) -> list[Tensor]:
        heard = [torch.empty_like(message) for _ in range(self.size)]
        try:
            dist.all_gather(heard, message, group=self._control)
        except RuntimeError as problem:
            raise self._gone(problem) from problem
        return heard

    def _gone(self, problem: BaseException) -> BaseException:
        if isinstance(found := self.explained(problem), FastDPError):
            return found
        self.heard()
        self._over = f"a process is gone, or did not answer in time ({str(problem)[:200]})"
        return told(
            StepError(
                f"{self._over}. Nothing of this step was released here, and the ledger is as it was. Start all "
                "processes again, from a checkpoint: with a fresh key of the noise, which every new optimizer draws."
            )
        )

    def _raise_for(self, heard: list[list[int]], texts: list[Tensor]) -> None:
        """Raise the error of the first process that refused."""
        self.heard()
        number = next(rank for rank, (refused, *_) in enumerate(heard) if refused)
        kind, _, text = _text(texts[number]).partition(": ")
        self._over = f"rank {number} raised {kind}: {text}"
        known = getattr(errors, kind, None)
        known = known if isinstance(known, type) and issubclass(known, FastDPError) else StepError
        raise told(known(f"rank {number} refused, so no rank makes a step ({kind}): {text}"))

    def _raise_difference(self, texts: list[str]) -> None:
        """Say which process says something else than the first, and what."""
        self.heard()
        first = texts[0].split("\n")
        found = [
            f"rank {rank} has '{other}', rank 0 has '{mine}'"
            for rank, text in enumerate(texts)
            for other, mine in zip(text.split("\n"), first, strict=False)
            if other != mine
        ]
        self._over = "the ranks do not do the same: " + "; ".join(found[:4] or ["in all"])
        raise told(
            StepError(
                f"{self._over}. Every rank must make the same model, optimizer and loader, by equal arguments, and "
                "call step() equally often. Nothing of this step was released."
            )
        )

    def from_first(self, secret: bytes) -> bytes:
        box = torch.tensor(list(secret), dtype=torch.uint8)
        try:
            dist.broadcast(box, group=self._control, group_src=0)
        except RuntimeError as problem:
            raise self._gone(problem) from problem
        return bytes(box.tolist())

    def everywhere(self, what: str, value: Any) -> list[Any]:
        self.agree({"exchange": what})
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self._control)
        except RuntimeError as problem:
            raise self._gone(problem) from problem
        return found

    def sums(self, reduction: Reduction, group: Any = None) -> list[Tensor]:
        with self.exchanging():
            return reduction.run(self.group if group is None else group)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        with self.uncounted():
            try:
                yield
            except RuntimeError as problem:
                raise self._gone(problem) from problem

    def any_of(self, flags: Tensor) -> Tensor:
        try:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._control)
        except RuntimeError as problem:
            raise self._gone(problem) from problem
        return flags

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        before = self._collectives()
        try:
            yield
        finally:  # where one lies within another, the inner one's are counted once
            for name, now in self._collectives().items():
                self._own[name] = self._own.get(name, 0) + now - before.get(name, now)

    def begins(self) -> None:
        if self._begun is None:
            self._begun = self._collectives()

    def communicated(self) -> bool:
        before, self._begun = self._begun, None
        now = {} if before is None else self._collectives()
        return before is not None and any(count != before.get(name, 0) for name, count in now.items())

    def _collectives(self) -> dict[str, int]:
        """By group. Those of the model's parts and of sums left out, and all of a group that shares a model's layers,
        or carries these messages."""
        counts = {
            name: collectives_so_far(group)
            for name, group in groups_here(self._of, self.group).items()
            if group is not self._control and not self._shares_layers(group)
        }
        return {name: count - self._own.get(name, 0) for name, count in counts.items() if count is not None}

    def _shares_layers(self, group: Any) -> bool:
        """Of meshes that are equal torch may take any: another group of the same processes is that one, too."""
        if self.split is None or group is self.split or group is self._of or group is self.group:
            return group is self.split
        return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(self.split)


def world_of(process_group: Any = None, mesh: Any = None, sharded_on: Sequence[Any] = ()) -> World:
    """The processes that train together: all of torch.distributed, by this process group or one-dimensional mesh.

    sharded_on: the meshes on which the model's parameters are sharded, along all of their dimensions.

    Raises StepError if the group leaves processes out.
    """
    if process_group is not None and mesh is not None:
        raise ValueError("give either process_group= or mesh=")
    if mesh is not None and mesh not in sharded_on:
        if mesh.ndim != 1:
            raise StepError(
                f"the mesh has {mesh.ndim} dimensions ({mesh.mesh_dim_names}): fastdp trains data-parallel, along one. "
                "Sharded, tensor-parallel, context-parallel and pipelined models are not supported yet. Start as many "
                "processes as there are copies of the model."
            )
        process_group = mesh.get_group()
    if processes() == 1:
        return World()
    count = dist.get_world_size() if process_group is None else dist.get_world_size(process_group)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER or count != processes():
        raise StepError(
            f"the process group (or mesh) holds {count} of {processes()} processes. What the others hold is not known: "
            "parts of the same model or of the same samples would make every norm too small. fastdp trains over all "
            "processes of a world: start a world (torchrun) of its own for each training."
        )
    return Ranks(process_group)


def dealing_world(process_group: Any = None, mesh: Any = None) -> World:
    """The processes over which a loader deals its samples. mesh: of one dimension; processes beside it get the same
    samples as those in it, as the optimizer of a model whose layers are split over them asks for."""
    if process_group is not None or mesh is None or mesh.ndim != 1 or mesh.size() == processes():
        return world_of(process_group, mesh)
    world = Ranks()
    world.share = int(mesh.get_local_rank()), int(mesh.size())
    return world


def refuse_several(world: World, what: str, instead: str) -> None:
    """Raises StepError if several processes train together, where this cannot be done, with what to do instead."""
    if world.size > 1:
        raise StepError(f"{what} works in one process, and {world.size} train together: {instead}")


def told(error: AnyError) -> AnyError:
    """The error, of which all processes know."""
    vars(error)[_TOLD] = "by another"
    return error


def is_told(error: BaseException, by: str = "by another") -> bool:
    """Whether all processes know of an error: this one has heard of it from others, or else has told them."""
    return vars(error).get(_TOLD) == by


def _control() -> Any:
    """The group of messages of this world, which is made once; all processes must come here."""
    world = dist.group.WORLD
    if not _CONTROL or _CONTROL[0][0] is not world:
        _CONTROL[:] = [(world, dist.new_group(backend="gloo", timeout=timeout_of(world)))]
    return _CONTROL[0][1]


def _words(refused: int, records: int, text: str) -> Tensor:
    """[refused, records, digest of the text as four numbers], int64."""
    return torch.tensor([refused, records, *struct.unpack("<4q", hashlib.sha256(text.encode()).digest())])


def _letters(text: str) -> Tensor:
    """A text as `TEXT` bytes, cut to them."""
    data = text.encode()[:TEXT]
    return torch.tensor(list(data.ljust(TEXT, b"\0")), dtype=torch.uint8)


def _text(letters: Tensor) -> str:
    return bytes(letters.tolist()).rstrip(b"\0").decode(errors="replace")
