"""The parameters that an engine tracks, with their names and their place among all elements."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ParameterError
from ..ops.registry import native


def _count(parameter: Tensor | None) -> int:
    return 0 if parameter is None or is_lazy(parameter) else parameter.numel()


def _is_fake(parameter: Tensor) -> bool:
    """Whether it was made within FakeTensorMode: compiled kernels would read memory that is not there."""
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(parameter, kind)


def _is_cut(module: nn.Module) -> bool:
    """Whether fully_shard was called on the module."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def owned_by(model: nn.Module) -> set[int]:
    """Ids of the model's parameters and buffers."""
    if not isinstance(module := native(), str):
        return module.owned_by(model)  # type: ignore[no-any-return]
    held = [tensors for m in model.modules() for tensors in (m._parameters, m._buffers) if tensors]
    return {id(tensor) for tensors in held for tensor in tensors.values()}


class OwnTensors:
    """Which tensors are a model's parameters and buffers, now: a large model has thousands of modules to look at."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[int, tuple[dict[str, Any], str]] = {}  # where buffers that were asked for stand
        self._now: set[int] | None = None  # ids of all, once asked for in a forward

    def begin(self) -> None:
        """A forward begins."""
        self._now = None

    def __contains__(self, tensor: Tensor) -> bool:
        buffers, name = self._found.get(id(tensor), ({}, ""))
        if isinstance(tensor, nn.Parameter) or buffers.get(name) is tensor:
            return True
        self._now = owned_by(self._model) if self._now is None else self._now
        if id(tensor) not in self._now:
            return False
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is tensor:
                    self._found[id(tensor)] = module._buffers, name
        return True


def unknown_parameter(model: nn.Module, known: set[tuple[int, str]]) -> tuple[nn.Module, str] | None:
    """The module and name of a trained parameter that is not among these, by the module's id and the name."""
    if not isinstance(module := native(), str):
        return module.unknown_parameter(model, known)  # type: ignore[no-any-return]
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad and (id(owner), name) not in known:
                return owner, name
    return None


class Shards(Protocol):
    """The parameters of a model that lies in parts on several processes: what stands in the model is now the part, now
    the whole parameter, which forwards use (`fastdp.distributed.sharded`)."""

    def whole(self, parameter: Tensor) -> Tensor:
        """What forwards use of what stands in the model: the same object for good. Itself, if it is not sharded."""

    def part(self, whole: Tensor) -> Tensor:
        """What lies on this process, and what an optimizer updates. Itself, if it is not sharded."""

    def drops_stray(self, whole: Tensor) -> bool:
        """Drop the gradients that were taken off the whole parameter; whether there were any."""

    def count(self, whole: Tensor) -> int:
        """Elements of it in all the model, of which forwards here may use a part (tensor parallelism)."""

    @property
    def lowers(self) -> Any:
        """None, or what makes calls that take DTensors: (pass, function, args, kwargs) -> result."""


class Tracked:
    """The chosen parameters of a model, looked up anew at every call: they may be frozen, swapped or sharded since.

    shards: of a sharded model. What is tracked are then the whole parameters.
    """

    def __init__(self, model: nn.Module, params: Iterable[Tensor] | None = None, shards: Shards | None = None) -> None:
        self.model, self._shards = model, shards
        self._slots: list[tuple[nn.Module, str, str]] = []
        self._chosen: set[str] | None = None
        # parameters, whether they are trained, and numbers of elements, of which the next two are
        self._seen: tuple[list[Tensor | None], list[bool], list[int]] | None = None
        self._named: dict[str, Tensor] = {}
        self._offsets: dict[str, int] = {}
        self._known: set[tuple[int, str]] = set()  # (module, name) of every parameter, shared and frozen ones too
        self._looked: bool | None = None  # whether they were looked at while they are steady; None: they are not
        self.holds = True  # between calls: False where a framework is about to free the parameters
        self.choose(params)

    def choose(self, params: Iterable[Tensor] | None = None) -> None:
        """Choose the parameters again (default: all of the model)."""
        slots: list[tuple[nn.Module, str, str]] = []
        seen: dict[int, str] = {}  # by the whole parameter
        known: set[tuple[int, str]] = set()
        for path, module in self.model.named_modules():
            known |= {(id(module), name) for name in module._parameters}
            for name, parameter in module._parameters.items():
                if parameter is not None and (key := id(self.whole(parameter))) not in seen:
                    seen[key] = f"{path}.{name}" if path else name
                    slots.append((module, name, seen[key]))
        selected = None
        if params is not None:
            chosen = [self.whole(p) for p in params]
            foreign = [tuple(p.shape) for p in chosen if id(p) not in seen]
            if foreign:
                raise ParameterError(
                    f"{len(foreign)} parameter(s) of shape {', '.join(map(str, foreign[:3]))} are not the model's. "
                    "Give the optimizer parameters of this very model (and build it after the model is complete)."
                )
            selected = {seen[id(p)] for p in chosen}
        self._slots, self._chosen, self._known = slots, selected, known
        self._seen = None
        parts = [name for name, p in self.named().items() if hasattr(p, "placements")]
        if parts or (self._shards is None and any(map(_is_cut, self.model.modules()))):
            raise ParameterError(
                "the model lies in parts on several processes (DTensors of fully_shard, say), which a private "
                "optimizer gathers; fastdp.verify and PerSampleGradients take the model before fully_shard"
            )
        odd = [name for name, p in self.named().items() if not p.is_floating_point()]
        if odd:
            raise ParameterError(
                f"complex parameters are not supported: {odd[:3]}; hold their real and imaginary parts"
            )
        away = [name for name, p in self.named().items() if (p.is_meta or _is_fake(p)) and not is_lazy(p)]
        if away:
            raise ParameterError(
                f"{away[:3]} are on the meta device, or fake, without values (offloaded by accelerate, perhaps): "
                "trainable parameters must stay on the device that they are used on. Freeze them, or do not offload "
                "them."
            )
        if not self.tensors():
            raise ParameterError("no trainable parameter: set requires_grad=True on what is to be trained")

    def check_complete(self) -> None:
        """Raises ParameterError where the model has got a trainable parameter that the choice did not know."""
        found = unknown_parameter(self.model, self._known)
        if found is not None:
            path = next((path for path, module in self.model.named_modules() if module is found[0]), "")
            raise ParameterError(
                f"'{path}.{found[1]}' was added to the model after the optimizer (or engine) was made, which does "
                "not know it: it would not be trained, and its gradient would not be private. detach() and "
                "make a new optimizer, or freeze the parameter."
            )

    def _present(self) -> list[Tensor | None]:
        """The parameters that stand in the model now, chosen or not."""
        found: list[Tensor | None] = [module._parameters.get(name) for module, name, _ in self._slots]
        return found if self._shards is None else [None if p is None else self.whole(p) for p in found]

    def current(self) -> set[int]:
        """Their ids, and those of their parts."""
        found = [p for p in self._present() if p is not None]
        return set(map(id, found if self._shards is None else (h for p in found for h in self.holders_of(p))))

    # ------------------------------------------------------------------ of a sharded model

    @property
    def is_sharded(self) -> bool:
        """Whether parts of parameters lie on other processes."""
        return self._shards is not None

    def whole(self, parameter: Tensor) -> Tensor:
        """The tracked parameter of what stands in the model, or of what an optimizer updates."""
        return parameter if self._shards is None else self._shards.whole(parameter)

    def part(self, parameter: Tensor) -> Tensor:
        """What an optimizer updates of a tracked parameter."""
        return parameter if self._shards is None else self._shards.part(parameter)

    def holders_of(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """What may have a `.grad` of a tracked parameter."""
        return (parameter,) if self._shards is None else (parameter, self._shards.part(parameter))

    def holders(self) -> list[Tensor]:
        held = self.tensors()
        return held if self._shards is None else [holder for p in held for holder in self.holders_of(p)]

    @property
    def lowers(self) -> Any:
        """What makes the forward's calls that take DTensors; None where there are none."""
        return None if self._shards is None else self._shards.lowers

    def drops_stray(self, parameter: Tensor) -> bool:
        """Drop what was taken off a parameter's `.grad`; whether there was any."""
        return self._shards is not None and self._shards.drops_stray(parameter)

    # ------------------------------------------------------------------ which they are

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Within it no code of the user's runs, so that the model's parameters stay what they are: looked at once."""
        around, self._looked = self._looked, False if self._looked is None else self._looked
        try:
            yield
        finally:
            self._looked = around

    def _look(self) -> None:
        """Find names and offsets, unless the parameters are as they were."""
        if self._looked and self._seen is not None:
            return
        if self._looked is False:
            self._looked = True
        if self._seen is not None and self._shards is None and not isinstance(module := native(), str):
            if module.same_parameters(self._slots, *self._seen, nn.Parameter):
                return
        now = self._present()
        trained = [p is not None and self.part(p).requires_grad for p in now]
        counts = [p.numel() if type(p) is nn.Parameter else _count(p) for p in now]  # (asked for several times a step)
        if (shards := self._shards) is not None:
            counts = [0 if p is None or is_lazy(p) else shards.count(p) for p in now]
        if (
            self._seen is not None
            and (trained, counts) == self._seen[1:]
            and all(map(operator.is_, now, self._seen[0]))
        ):
            return
        named: dict[str, Tensor] = {}
        offsets, total = {}, 0
        seen: set[int] = set()  # tied since: one parameter in two places counts once
        for (_, _, full), parameter, learns, count in zip(self._slots, now, trained, counts, strict=True):
            offsets[full], total = total, total + count
            if parameter is None or not learns or id(parameter) in seen:
                continue
            if self._chosen is None or full in self._chosen:
                named[full] = parameter
                seen.add(id(parameter))
        self._seen, self._named, self._offsets = (now, trained, counts), named, offsets

    def named(self) -> dict[str, Tensor]:
        """The tracked parameters that require grad now, by name."""
        self._look()
        named = dict(self._named)
        if not self.holds:
            self.let_go()
        return named

    def let_go(self) -> None:
        """Hold no parameter until they are asked for."""
        self._seen, self._named = None, {}

    def others(self) -> list[tuple[str, Tensor]]:
        """The parameters that require grad now and are not tracked, with their names."""
        if self._chosen is None or len(self.named()) == len(self._slots):
            return []
        left = zip(self._present(), (full for _, _, full in self._slots), strict=True)
        mine = {id(p) for p in self.tensors()}  # tied since
        return [
            (name, p) for p, name in left
            if name not in self._chosen and p is not None and self.part(p).requires_grad and id(p) not in mine
        ]  # fmt: skip

    def left_out(self, params: Iterable[Tensor]) -> list[str]:
        """The names of those among these parameters of an optimizer that are not tracked, frozen or not."""
        if self._chosen is None:
            return []
        asked, left, mine = {id(p) for p in params}, list[tuple[str, int]](), set[int]()
        for (_, _, full), parameter in zip(self._slots, self._present(), strict=True):
            if parameter is not None and (key := id(self.part(parameter))) in asked:
                left.append((full, key))
                mine.update({key} if full in self._chosen else ())  # tied since, perhaps
        return [full for full, key in left if key not in mine]

    def offsets(self) -> dict[str, int]:
        """Where each parameter begins among all the model's elements, frozen ones counted."""
        self._look()
        if not self.holds:
            self.let_go()
        return dict(self._offsets)

    def tensors(self) -> list[Tensor]:
        return list(self.named().values())
