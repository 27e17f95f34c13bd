"""What a private optimizer's checkpoint holds of its run: history, clipping, and the noise's position under a seed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import StepError
from .ledger import finite, run_of
from .privacy import Privacy


def state_of(privacy: Privacy) -> dict[str, Any]:
    """History, clipping and, under a seed, the noise's position. The secret key of the noise is not saved."""
    clipping = privacy.clipping
    return {
        "history": [tuple(run) for run in privacy.ledger.history],
        "noise_step": privacy.noise.step,
        "seed": privacy.noise.seed,
        "noise_multiplier": privacy.noise_multiplier,
        "clipping": clipping.clipping if isinstance(clipping.clipping, str) else None,
        "style": clipping.style if isinstance(clipping.style, str) else None,
        "max_grad_norm": clipping.max_grad_norm,
        "gamma": clipping.gamma,
        "dropped": privacy.nonfinite_samples,
        "grouped": privacy.unit.grouped,
        **({"lost": [tuple(run) for run in privacy.ledger.lost]} if privacy.ledger.lost else {}),
        "makers": privacy.ledger.makers,
        **({} if privacy.mechanism is None else {"mechanism": privacy.mechanism.state()}),
        **({"missed": missed} if (missed := privacy.missed.state_dict()) else {}),
    }


def load(privacy: Privacy, state: dict[str, Any]) -> None:
    """All or nothing; custom functions and groups stay those of this optimizer."""
    try:
        history, lost = ([run_of(*run) for run in runs] for runs in (state["history"], state.get("lost", ())))
        noise_multiplier, dropped = finite(state["noise_multiplier"]), int(state["dropped"])
        seeded = state["seed"] == privacy.noise.seed is not None
        step = int(state["noise_step"]) if seeded else privacy.noise.step
        kind, style, norm, gamma = (state[k] for k in ("clipping", "style", "max_grad_norm", "gamma"))
        clipping = privacy.clipping
        if isinstance(clipping.style, str):
            clipping = clipping.changed(privacy.engine.named_parameters(), kind, float(norm), style, float(gamma))
        take_up = _of_mechanism(privacy, state.get("mechanism"))
        privacy.missed.load(state.get("missed", {}))  # last of what may raise
    except (KeyError, TypeError, ValueError) as problem:
        raise StepError(f"this is no state of a fastdp optimizer, or of another version: {problem!r}") from None
    privacy.clipping = clipping
    privacy.ledger.load(history, lost, state.get("makers"))
    privacy.noise_multiplier, privacy.noise.step = noise_multiplier, step
    privacy.set_dropped(dropped)
    privacy.unit.grouped = state.get("grouped")
    take_up()
    privacy.discard()


def _of_mechanism(privacy: Privacy, state: dict[str, Any] | None) -> Callable[[], object]:
    """What takes up a mechanism's own state. Raises StepError if the state was saved under another mechanism."""
    mine = "none (steps noised one by one)" if privacy.mechanism is None else privacy.mechanism.name
    saved = "none (steps noised one by one)" if state is None else state["name"]
    if mine != saved:
        raise StepError(
            f"the state was saved by an optimizer whose mechanism is {saved}, and this one's is {mine}: their steps "
            "are accounted for in different ways. Load the state into an optimizer of its own kind."
        )
    return (lambda: None) if state is None else privacy.mechanism.read(state)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- within torch's own part of a checkpoint

RIDER = "fastdp"  # in the first group of parameters: torch.distributed.checkpoint keeps nothing beside groups and state
UNKNOWN = "this state was saved by an optimizer without privacy: the accountant's history stays as it is"
_NONE, _STEPS = "none", "optimizer_steps"
_LOADER = ("torch.distributed.checkpoint.state_dict", "_load_optim_state_dict")


def ride_along(found: dict[str, Any]) -> None:
    """Put the state, as text, where torch.distributed.checkpoint keeps it: it may be what loads any state.

    As it loads a whole state it asks for that of now, keeps of it what the loaded one lacks, and loads both. The state
    of now must not pass for what was loaded.
    """
    carried = {**found["fastdp"], _STEPS: _steps(found["state"])}
    text = json.dumps(carried, default=lambda number: number.item())  # of numpy
    found["param_groups"][0][RIDER] = _NONE if _torch_loads() else text


def _torch_loads() -> bool:
    """Whether torch.distributed.checkpoint is loading an optimizer's state."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and (caller.f_globals.get("__name__"), caller.f_code.co_name) != _LOADER:
        caller = caller.f_back
    return caller is not None


def _steps(states: dict[Any, Any]) -> float | None:
    """How many steps the moments are of, of optimizers that count them."""
    counts = [float(each["step"]) for each in states.values() if isinstance(each, dict) and "step" in each]
    return max(counts, default=None)


def carried_by(state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The state that a `state_dict()` holds; None if there is none. Raises StepError if it was lost or is stale."""
    if "fastdp" in state_dict:
        return state_dict["fastdp"]  # type: ignore[no-any-return]
    riders = {group[RIDER] for group in state_dict["param_groups"] if RIDER in group}
    if _NONE in riders or (not riders and _torch_loads()):
        raise StepError(
            "torch.distributed.checkpoint gives the optimizer a state without a record of privacy: it was saved by an "
            "optimizer without privacy, or with StateDictOptions(flatten_optimizer_state_dict=True), under which torch "
            "drops the record, or by an earlier fastdp under another strategy. Save and load without that option, go "
            "on with the strategy that saved it, or load the weights alone, and count what was spent before."
        )
    if len(riders) > 1:
        raise StepError("the groups of parameters in this state were saved by several optimizers")
    if not riders:
        return None
    found: dict[str, Any] = json.loads(riders.pop())
    recorded, there = found.get(_STEPS), _steps(state_dict["state"])
    if _STEPS in found and recorded != there:
        raise StepError(
            f"the record of privacy in this state was written after {recorded or 0:g} steps of the optimizer, and its "
            f"moments are of {there or 0:g}: an optimizer without privacy went on from it, and handed on the record "
            "that it found. Load the weights alone, and count what all steps have spent."
        )
    return found


def put_off(groups: list[dict[str, Any]]) -> None:
    """The groups were loaded: what rode along has no place in them."""
    for group in groups:
        group.pop(RIDER, None)


def _has_stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    put_off(optimizer.param_groups)


# An optimizer without privacy keeps what rode along in a state it loads, and would hand it on after steps of its own.
register_optimizer_step_post_hook(_has_stepped)
