"""The states of the generators that a step draws random numbers of."""

from __future__ import annotations

import torch
from torch import Tensor

States = tuple[Tensor, ...]


def random_states(device: torch.device) -> States:
    """The states of torch's generators: the CPU's, and the device's own."""
    own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *own


def set_random_states(device: torch.device, states: States) -> None:
    """As they were."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def same_states(a: States, b: States) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
