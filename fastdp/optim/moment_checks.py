"""Checks of a loaded optimizer state that torch does not make: shapes of moments, and settings of parameter groups.

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
_ORDER = (
    "Give the optimizer the parameters and groups of the saved one in the same order, or load by name "
    "(torch.distributed.checkpoint.state_dict)."
)


def check_moments(base: type, groups: Sequence[Mapping[str, Any]], found: Any) -> None:
    """Raise StepError where what a state holds of a parameter is not what an update takes.

    base: the class of the optimizer without privacy. What classes outside of torch keep is theirs to check.
    """
    if not isinstance(found, Mapping) or not isinstance(found.get("state"), Mapping) or not found.get("param_groups"):
        raise StepError("this is no state_dict() of an optimizer: it must hold 'state' and 'param_groups'")
    keys = [[*group.get("params", ())] for group in found["param_groups"]]
    mine = [len(group["params"]) for group in groups]
    if (saved := [len(each) for each in keys]) != mine:
        raise StepError(
            f"the state has {sum(saved)} parameters in {len(saved)} groups of {_some(saved)}, and this optimizer "
            f"{sum(mine)} in {len(mine)} of {_some(mine)}. Make the optimizer with the groups of the saved one, load, "
            "and add others after that (add_param_group)."
        )
    for number, group in enumerate(groups):
        for place, (key, parameter) in enumerate(zip(keys[number], group["params"], strict=True)):
            if key in found["state"]:
                _check(base, f"parameter {place} of group {number}", parameter, found["state"][key])


def _some(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")


def _check(base: type, name: str, parameter: Tensor, held: Any) -> None:
    if not isinstance(held, Mapping):
        raise StepError(f"the state of {name} is {type(held).__name__}, and no dict: the file is damaged")
    if not held or base.__module__.partition(".")[0] != "torch":
        return
    lacks = [need for need in _NEEDED.get(base, ()) if not isinstance(held.get(need), Tensor | float | int)]
    if lacks:
        raise StepError(
            f"the state of {name} has no {', '.join(lacks)}, which {base.__name__} needs: it was saved by another kind "
            "of optimizer, or is damaged. Load it into an optimizer of its own kind."
        )
    if "step" in held and not 0 <= float(held["step"]) < math.inf:
        raise StepError(f"the state of {name} is of {float(held['step']):g} steps: the file is damaged")
    for what in _WHOLE:
        value = held.get(what)
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            raise StepError(
                f"{what} of {name} has the shape {tuple(value.shape)} in this state, and the parameter "
                f"{tuple(parameter.shape)}. {_ORDER}"
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
