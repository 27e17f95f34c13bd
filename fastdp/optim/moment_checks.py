"""Checks of a loaded optimizer state that torch does not make.

torch finds out at the next step, whose noise is drawn by then, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StepError

_ADAM, _RMSPROP = ("step", "exp_avg", "exp_avg_sq"), ("step", "square_avg")
_NEEDED = {torch.optim.Adam: _ADAM, torch.optim.AdamW: _ADAM, torch.optim.RMSprop: _RMSPROP}
_WHOLE = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "grad_avg")


def check_moments(base: type, groups: Sequence[Mapping[str, Any]], found: Any) -> None:
    """Raise StepError where what a state holds of a parameter is not what an update takes.

    base: the class of the optimizer without privacy. What classes outside of torch keep is theirs to check.
    """
    try:
        keys = [[*group["params"]] for group in found["param_groups"]]
        states = dict(found["state"])
    except (LookupError, TypeError, ValueError):
        raise StepError("this is no state_dict() of an optimizer: it must hold 'state' and 'param_groups'") from None
    if (saved := [len(each) for each in keys]) != (mine := [len(group["params"]) for group in groups]):
        raise StepError(
            f"the state has groups of {saved} parameters, and this optimizer of {mine}. Make the optimizer with the "
            "groups of the saved one, load, and add others after that (add_param_group)."
        )
    if base.__module__.partition(".")[0] != "torch":
        return
    for number, group in enumerate(groups):
        for place, (key, parameter) in enumerate(zip(keys[number], group["params"], strict=True)):
            _check(base, f"parameter {place} of group {number}", parameter, states.get(key, {}))


def _check(base: type, name: str, parameter: Tensor, held: Any) -> None:
    numbers = held if isinstance(held, Mapping) else {"": held}
    lacks = [need for need in _NEEDED.get(base, ()) if not isinstance(numbers.get(need), Tensor | float | int)]
    if numbers and lacks:
        raise StepError(
            f"the state of {name} has no {', '.join(lacks)}, which {base.__name__} needs: it was saved by another kind "
            "of optimizer, or is damaged. Load it into an optimizer of its own kind."
        )
    if "step" in numbers and not 0 <= float(numbers["step"]) < math.inf:
        raise StepError(f"the state of {name} is of {float(numbers['step']):g} steps: the file is damaged")
    for what in _WHOLE:
        value = numbers.get(what)
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            raise StepError(
                f"{what} of {name} has the shape {tuple(value.shape)} in this state, and the parameter "
                f"{tuple(parameter.shape)}. Give the optimizer the parameters and groups of the saved one in the same "
                "order, or load by name (torch.distributed.checkpoint.state_dict)."
            )
        if isinstance(value, Tensor) and _place(value) != _place(parameter):
            raise StepError(
                f"{what} of {name} lies whole, or in other parts than the parameter. Load it by "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which cuts it (for a whole state: "
                "with StateDictOptions(full_state_dict=True))."
            )


def _place(value: Any) -> Any:
    """On which processes which part of a tensor lies; None where all of it is here."""
    mesh = getattr(value, "device_mesh", None)  # one that comes from a file is not equal, only alike
    return None if mesh is None else (mesh.mesh.tolist(), tuple(value.placements))


def check_groups(groups: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], defaults: Any) -> None:
    """Raise StepError where groups that were loaded lack a setting which those before had."""
    for number, (group, was) in enumerate(zip(groups, before, strict=True)):
        if lacks := [name for name in defaults if name in was and name not in group]:
            raise StepError(
                f"this state has no {', '.join(map(repr, lacks[:4]))} for group {number} of the optimizer: it was "
                "saved by another kind of optimizer, or with other groups of parameters. Make the optimizer as the "
                "saved one was made."
            )
