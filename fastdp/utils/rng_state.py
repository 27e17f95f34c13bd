"""The states of torch's generators, of the CPU and of any device that has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

States = dict[torch.device, Tensor]
_CPU = torch.device("cpu")


def random_states(*devices: torch.device) -> States:
    """The states of the CPU's generator and of those that these devices have."""
    states = {_CPU: torch.get_rng_state()}
    for device in devices:
        if (module := _drawing(device)) is not None:
            states[device] = module.get_rng_state(*_named(device))
    return states


def set_random_states(states: States) -> None:
    """Set each generator to its state here."""
    for device, state in states.items():
        if device == _CPU:
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, *_named(device))


def same_states(a: States, b: States) -> bool:
    return a.keys() == b.keys() and all(torch.equal(state, b[device]) for device, state in a.items())


def _drawing(device: torch.device) -> Any:
    """The module of a device that has a generator of its own, else None, as for the CPU and meta."""
    module = getattr(torch, device.type, None)
    return module if hasattr(module, "get_rng_state") else None


def _named(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # (there is one, and its functions take none)
