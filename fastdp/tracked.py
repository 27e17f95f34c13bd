"""The parameters an engine tracks: which of the model's, under which names, where among all its elements."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from .errors import ParameterError


class Tracked:
    """The chosen parameters of a model, looked up anew at every call: they may be frozen, swapped or sharded since."""

    def __init__(self, model: nn.Module, params: Iterable[Tensor] | None = None) -> None:
        self.model = model
        self._slots: list[tuple[nn.Module, str, str]] = []
        self._chosen: set[str] | None = None
        self.choose(params)

    def choose(self, params: Iterable[Tensor] | None = None) -> None:
        """Choose the parameters again (default: all of the model)."""
        slots: list[tuple[nn.Module, str, str]] = []
        seen: dict[int, str] = {}
        for path, module in self.model.named_modules():
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
        self._slots, self._chosen = slots, selected
        odd = [name for name, p in self.named().items() if not p.is_floating_point()]
        if odd:
            raise ParameterError(
                f"complex parameters are not supported: {odd[:3]}; hold their real and imaginary parts"
            )
        if not self.tensors():
            raise ParameterError("no trainable parameter: set requires_grad=True on what is to be trained")

    def named(self) -> dict[str, Tensor]:
        """The tracked parameters that require grad now, by name."""
        found: dict[str, Tensor] = {}
        for module, name, full in self._slots:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad and (self._chosen is None or full in self._chosen):
                found[full] = parameter
        return found

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
