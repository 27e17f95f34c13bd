"""The parameters an engine tracks: which of the model's, under which names, where among all its elements."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ParameterError


def _all_modules(model: nn.Module) -> list[nn.Module]:
    """What model.modules() yields, in another order, several times as fast: it is asked for in every forward."""
    found, stack = {id(model): model}, [model]
    while stack:
        for module in stack.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                stack.append(module)
    return list(found.values())


class Tracked:
    """The chosen parameters of a model, looked up anew at every call: they may be frozen, swapped or sharded since."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor] | None = None) -> None:
        self.model = model
        self._slots: list[tuple[nn.Module, str, str]] = []
        self._chosen: set[str] | None = None
        self._known: set[tuple[int, str]] = set()  # (module, name) of every parameter, shared and frozen ones too
        self.choose(params)

    def choose(self, params: Iterable[Tensor] | None = None) -> None:
        """Choose the parameters again (default: all of the model)."""
        slots: list[tuple[nn.Module, str, str]] = []
        seen: dict[int, str] = {}
        known: set[tuple[int, str]] = set()
        for path, module in self.model.named_modules():
            known |= {(id(module), name) for name in module._parameters}
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen[id(parameter)] = f"{path}.{name}" if path else name
                    slots.append((module, name, seen[id(parameter)]))
        selected = None
        if params is not None:
            chosen = list(params)
            foreign = [tuple(p.shape) for p in chosen if id(p) not in seen]
            if foreign:
                raise ParameterError(
                    f"{len(foreign)} parameter(s) of shape {', '.join(map(str, foreign[:3]))} are not the model's. "
                    "Give the optimizer parameters of this very model (and build it after the model is complete)."
                )
            selected = {seen[id(p)] for p in chosen}
        self._slots, self._chosen, self._known = slots, selected, known
        odd = [name for name, p in self.named().items() if not p.is_floating_point()]
        if odd:
            raise ParameterError(
                f"complex parameters are not supported: {odd[:3]}; hold their real and imaginary parts"
            )
        away = [name for name, p in self.named().items() if p.is_meta and not is_lazy(p)]
        if away:
            raise ParameterError(
                f"{away[:3]} are on the meta device, without values (offloaded by accelerate, perhaps): trainable "
                "parameters must stay on the device that they are used on. Freeze them, or do not offload them."
            )
        if not self.tensors():
            raise ParameterError("no trainable parameter: set requires_grad=True on what is to be trained")

    def check_complete(self) -> None:
        """Raises ParameterError where the model has got a trainable parameter that the choice did not know."""
        for module in _all_modules(self.model):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and (id(module), name) not in self._known:
                    path = next((path for path, m in self.model.named_modules() if m is module), "")
                    raise ParameterError(
                        f"'{path}.{name}' was added to the model after the optimizer (or engine) was made, which does "
                        "not know it: it would not be trained, and its gradient would not be private. detach() and "
                        "make a new optimizer, or freeze the parameter."
                    )

    def current(self) -> set[int]:
        """Ids of all parameters that stand in the model now, chosen or not."""
        found = (module._parameters.get(name) for module, name, _ in self._slots)
        return {id(parameter) for parameter in found if parameter is not None}

    def named(self) -> dict[str, Tensor]:
        """The tracked parameters that require grad now, by name."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()  # tied since: one parameter in two places counts once
        for module, name, full in self._slots:
            parameter = module._parameters.get(name)
            if parameter is None or not parameter.requires_grad or id(parameter) in seen:
                continue
            if self._chosen is None or full in self._chosen:
                found[full] = parameter
                seen.add(id(parameter))
        return found

    def others(self) -> list[tuple[str, Tensor]]:
        """The parameters that require grad now and are not tracked, with their names."""
        if self._chosen is None:
            return []
        left = ((full, module._parameters.get(name)) for module, name, full in self._slots if full not in self._chosen)
        mine = {id(p) for p in self.tensors()}  # tied since
        return [(name, p) for name, p in left if p is not None and p.requires_grad and id(p) not in mine]

    def offsets(self) -> dict[str, int]:
        """Where each parameter begins among all the model's elements, frozen ones counted."""
        found, total = {}, 0
        for module, name, full in self._slots:
            parameter = module._parameters.get(name)
            found[full] = total
            total += 0 if parameter is None else parameter.numel()
        return found

    def tensors(self) -> list[Tensor]:
        return list(self.named().values())
