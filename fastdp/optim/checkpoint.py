"""What a private optimizer's checkpoint holds of its run: history, clipping, and the noise's position under a seed."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..accounting import History
from ..accounting.runs import finite, run_of, whole
from ..accounting.used_draws import UsedDraws
from ..errors import StepError
from ..ops.noise_reference import STREAM
from ..utils.code_location import frames
from . import moment_checks
from .private_step import PrivateStep

_OTHER_MOMENT = (
    "noise_state() is of noised step {noise}, state_dict() of step {state}: noise that was drawn for other sums would "
    "be drawn again. Save both at the same moment, or leave load_noise_state out."
)
_OTHER_STREAM = (
    "this is of a version of fastdp that drew other normals by the same key. {remedy}: the run goes on with a new key, "
    "and correlated noise begins anew."
)
_QUANTILE = "quantile"  # of adaptive clipping: its settings; where it is now is the clipping norm


def state_of(privacy: PrivateStep) -> dict[str, Any]:
    """History, clipping and, under a seed, the noise's position. The secret key of the noise is not saved."""
    clipping = privacy.clipping
    return {
        "history": [tuple(run) for run in privacy.ledger.history],
        "noise_step": privacy.noise.step,
        "seed": privacy.noise.seed,
        "stream": STREAM,
        "noise_multiplier": privacy.noise_multiplier,
        "clipping": clipping.clipping if isinstance(clipping.clipping, str) else None,
        "style": clipping.style if isinstance(clipping.style, str) else None,
        "max_grad_norm": clipping.max_grad_norm,
        "gamma": clipping.gamma,
        "dropped": privacy.nonfinite_samples,
        "grouped": privacy.unit.grouped,
        **({"lost": [tuple(run) for run in privacy.ledger.lost]} if privacy.ledger.lost else {}),
        "makers": privacy.ledger.makers,
        **({"by_seed": True} if privacy.ledger.by_seed else {}),
        **({"plan": privacy.ledger.budget.plan} if privacy.ledger.budget else {}),
        **({"draws": privacy.ledger.draws.state()} if privacy.ledger.draws else {}),
        **({} if privacy.mechanism is None else {"mechanism": privacy.mechanism.state()}),
        **({} if privacy.quantile is None else {_QUANTILE: privacy.quantile.state()}),
        **({"missed": missed} if (missed := privacy.missed.state_dict()) else {}),
    }


def load(optimizer: Any, privacy: PrivateStep, base: type, torchs: Callable[[Any], None], given: Any) -> None:
    """Load a `state_dict()`: all of it, or nothing where that raises.

    Args:
        base: the class of the optimizer without privacy.
        torchs: torch's `load_state_dict`. It calls the hooks, of which one may give another state.
        given: what to load.
    """
    held = optimizer.state, optimizer.param_groups  # torch puts new ones in their place
    take_ups: list[Callable[[], None]] = []
    taken = False

    def before(_: Any, found: Any) -> None:
        moment_checks.check_moments(base, held[1], found)
        carried = record_in(found)
        if carried is None and isinstance(given, dict) and given.get("param_groups"):
            carried = record_in(given)  # a hook has dropped it
        if carried is None:
            _warn(UNKNOWN)
        else:
            take_ups.append(read(privacy, carried))

    def after(_: Any) -> None:
        nonlocal taken
        moment_checks.check_groups(optimizer.param_groups, held[1], optimizer.defaults)
        drop_record(optimizer.param_groups)
        if take_ups and privacy.busy:
            _warn(
                "a state was loaded between backward and step: the gradients at hand are dropped, and no step was made "
                "of them. Load before the backward, or after the step."
            )
        for take_up in take_ups:
            take_up()
        taken = True

    hooks = [
        optimizer.register_load_state_dict_pre_hook(before),  # the last
        optimizer.register_load_state_dict_post_hook(after, prepend=True),  # others see all that was loaded
    ]
    try:
        torchs(given)
        if not taken:  # a class that loads without hooks
            before(optimizer, given)
            after(optimizer)
    except BaseException:
        if not taken:
            optimizer.state, optimizer.param_groups = held
        raise
    finally:
        for hook in hooks:
            hook.remove()


def read(privacy: PrivateStep, state: dict[str, Any]) -> Callable[[], None]:
    """Read a state; the result takes it up, and cannot fail. Custom functions and groups stay those of this optimizer.

    Raises StepError if it is none. Warns of steps that it does not hold.
    """
    try:
        history, lost = ([run_of(*run) for run in runs] for runs in (state["history"], state.get("lost", ())))
        noise_multiplier, dropped = finite(state["noise_multiplier"]), whole(state["dropped"])
        seeded = state["seed"] == privacy.noise.seed is not None
        saved_at = whole(state["noise_step"])
        step = saved_at if seeded else privacy.noise.step
        kind, style, norm, gamma = (state[k] for k in ("clipping", "style", "max_grad_norm", "gamma"))
        clipping, grouped = privacy.clipping, state.get("grouped")
        if not (grouped is None or isinstance(grouped, bool)):
            raise ValueError(f"grouped is {grouped!r}")
        if isinstance(clipping.style, str):
            clipping = clipping.changed(privacy.engine.named_parameters(), kind, float(norm), style, float(gamma))
        said, of_ledger = privacy.ledger.read(history, lost, state.get("makers"))
        draws = UsedDraws(state.get("draws"))
        by_seed = bool(state.get("by_seed") or (history and state["seed"] is not None))
        take_ups = [of_ledger, privacy.missed.read(state.get("missed", {})), _of_mechanism(privacy, state)]
        take_ups.append(_of_quantile(privacy, state))
        budget = privacy.ledger.budget
        same = budget is None or (
            state["plan"] == budget.plan if "plan" in state else noise_multiplier == budget.kind[0]
        )
        if budget is not None and not same:
            noise_multiplier, text = budget.for_the_rest(draws.accounted([*lost, *history]), noise_multiplier)
            said = [*said, text]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        raise StepError(f"this is no state of a fastdp optimizer, or of another version: {problem!r}") from None
    if privacy.noise.loaded_at == privacy.noise.step != saved_at:
        raise StepError(_OTHER_MOMENT.format(noise=privacy.noise.step, state=saved_at))
    if seeded and privacy.mechanism is not None and state.get("stream") != STREAM:
        raise StepError(_OTHER_STREAM.format(remedy="Make the optimizer with another seed="))
    for text in said:
        _warn(text)

    def take_up() -> None:
        privacy.noise.saved_at = saved_at, step
        privacy.clipping, privacy.noise_multiplier, privacy.noise.step = clipping, noise_multiplier, step
        privacy.set_dropped(dropped)
        privacy.ledger.draws.take_up(draws)
        privacy.ledger.by_seed = privacy.ledger.by_seed or by_seed
        privacy.unit.grouped = grouped
        for each in take_ups:
            each()
        privacy.discard()

    return take_up


def load_noise(privacy: PrivateStep, state: Any) -> None:
    """Load a `noise_state()`. Raises StepError if it is none, or of another moment than the state that was loaded."""
    if not isinstance(state, dict) or not {"key", "step"} <= state.keys():
        raise StepError("this is no noise_state() of a fastdp optimizer")
    if state.get("stream") != STREAM:
        raise StepError(_OTHER_STREAM.format(remedy="Leave load_noise_state out"))
    noise, mechanism = privacy.noise, privacy.mechanism
    if noise.saved_at is not None and noise.saved_at[1] == noise.step and noise.saved_at[0] != state["step"]:
        raise StepError(_OTHER_MOMENT.format(noise=state["step"], state=noise.saved_at[0]))
    if mechanism is not None and (problem := mechanism.problem_of(state["key"], state["step"], True)):
        raise StepError(problem)
    noise.restore(state["key"], state["step"])
    noise.loaded_at, noise.saved_at, noise.handed_out = noise.step, None, True


def spent_in(carried: dict[str, Any] | None) -> History:
    """The steps that `continue_from` takes up."""
    if carried is None:
        return []
    steps = [run_of(*run) for name in ("lost", "history") for run in carried.get(name, ())]
    return UsedDraws(carried.get("draws")).accounted(steps)


def continue_from(privacy: PrivateStep, carried: dict[str, Any] | None) -> None:
    """An ordinary optimizer that had loaded a private one's state becomes private: its steps stay counted.

    The settings are those of now. carried: what was found in its groups.
    """
    if carried is not None:
        now = state_of(privacy)
        past = {name: value for name, value in carried.items() if name not in _SETTINGS}
        read(privacy, {**past, **{name: now[name] for name in _SETTINGS if name in now}})()


def _of_mechanism(privacy: PrivateStep, of_run: dict[str, Any]) -> Callable[[], object]:
    """What takes up a mechanism's own state. Raises StepError if the state was saved under another mechanism."""
    state = of_run.get("mechanism")
    mine = "none (steps noised one by one)" if privacy.mechanism is None else privacy.mechanism.name
    saved = "none (steps noised one by one)" if state is None else state["name"]
    if mine != saved:
        raise StepError(
            f"the state was saved by an optimizer whose mechanism is {saved}, and this one's is {mine}: their steps "
            "are accounted for in different ways. Load the state into an optimizer of its own kind, with the same "
            "settings: those of Banded follow from the number of steps, too."
        )
    return (lambda: None) if state is None else privacy.mechanism.read(state)  # type: ignore[no-any-return]


def _of_quantile(privacy: PrivateStep, of_run: dict[str, Any]) -> Callable[[], object]:
    """What takes up the settings of adaptive clipping. Raises StepError unless both clip so, or neither."""
    state = of_run.get(_QUANTILE)
    if (state is None) != (privacy.quantile is None):
        mine, other = ("fixed", "adaptive") if privacy.quantile is None else ("adaptive", "fixed")
        raise StepError(
            f"the state was saved under a clipping norm that is {other}, and this optimizer's is {mine}: make the "
            f'optimizer {"without" if state is None else "with"} clipping="adaptive" to load it'
        )
    return (lambda: None) if state is None else privacy.quantile.read(state)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- within torch's own part of a checkpoint

RECORD = "fastdp"  # in every group (their order may change): torch.distributed.checkpoint keeps but groups and state
UNKNOWN = "this state was saved by an optimizer without privacy: the accountant's history stays as it is"
_NONE, _STEPS = "none", "optimizer_steps"
_SETTINGS = ("noise_multiplier", "clipping", "style", "max_grad_norm", "gamma", _QUANTILE)
_CHECKPOINT, _LOADER, MAKER = "torch.distributed.checkpoint.state_dict", "_load_optim_state_dict", "_init_optim_state"


def embed_record(found: dict[str, Any]) -> None:
    """Put the state, as text, where torch.distributed.checkpoint keeps it: it may be what loads any state.

    As it loads a whole state it asks for that of now, keeps of it what the loaded one lacks, and loads both. The state
    of now must not pass for what was loaded.
    """
    carried = {**found["fastdp"], _STEPS: _steps(found["state"])}
    text = _NONE if torch_is_at(_LOADER) else json.dumps(carried, default=lambda number: number.item())  # of numpy
    for group in found["param_groups"]:
        group[RECORD] = text


def torch_is_at(function: str) -> bool:
    """Whether this function of torch.distributed.checkpoint is what calls an optimizer's methods."""
    callers = frames(sys._getframe(1) if _CHECKPOINT in sys.modules else None)
    return any((each.f_globals.get("__name__"), each.f_code.co_name) == (_CHECKPOINT, function) for each in callers)


def _warn(text: str) -> None:
    """A warning of the line that has called torch, or fastdp."""
    rooms = (str(each.f_globals.get("__name__")).partition(".")[0] for each in frames(sys._getframe()))
    level = next((level for level, room in enumerate(rooms, 1) if room not in ("fastdp", "torch")), 1)
    warnings.warn(text, stacklevel=level)


def _steps(states: dict[Any, Any]) -> float | None:
    """How many steps the moments are of, of optimizers that count them."""
    counts = [float(each["step"]) for each in states.values() if isinstance(each, dict) and "step" in each]
    return max(counts, default=None)


def record_in(state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """The state that a `state_dict()` holds; None if there is none. Raises StepError if it was lost or is stale."""
    if "fastdp" in state_dict:
        if not isinstance(state_dict["fastdp"], dict):
            raise StepError(f"the record of privacy in this state is {state_dict['fastdp']!r}: the file is damaged")
        return state_dict["fastdp"]
    of_groups, loads = [group.get(RECORD, _NONE) for group in state_dict["param_groups"]], torch_is_at(_LOADER)
    lack = [str(number) for number, text in enumerate(of_groups) if text == _NONE]
    if len(lack) == len(of_groups) and (loads or any(RECORD in group for group in state_dict["param_groups"])):
        raise StepError(
            "torch.distributed.checkpoint gives the optimizer a state without a record of privacy: it was saved by an "
            "optimizer without privacy, or with StateDictOptions(flatten_optimizer_state_dict=True), under which torch "
            "drops the record, or by an earlier fastdp under another strategy. Save and load without that option, go "
            "on with the strategy that saved it, or load the weights alone, and count what was spent before."
        )
    if lack and loads:
        raise StepError(
            "the state was saved with other groups of parameters than this optimizer has: "
            f"torch.distributed.checkpoint found nothing for group {', '.join(lack)} of its {len(of_groups)}. Make the "
            "optimizer with the groups of the saved one (in any order), and load again."
        )
    riders = {str(text) for text in of_groups if text != _NONE}
    if len(riders) > 1:
        raise StepError("the groups of parameters in this state were saved by several optimizers")
    if not riders:
        return None
    try:
        found: dict[str, Any] = dict(json.loads(riders.pop()))
    except (TypeError, ValueError):
        raise StepError("the record of privacy in this state's groups cannot be read: the file is damaged") from None
    recorded, there = found.get(_STEPS), _steps(state_dict["state"])
    if _STEPS in found and recorded != there:
        raise StepError(
            f"the record of privacy in this state was written after {recorded or 0:g} steps of the optimizer, and its "
            f"moments are of {there or 0:g}: an optimizer without privacy went on from it, and handed on the record "
            "that it found. Load the weights alone, and count what all steps have spent. (Or the state was kept in "
            "memory, where it shares its tensors with an optimizer that has stepped since: keep a copy.deepcopy of it.)"
        )
    return found


def warn_of_others(optimizer: Optimizer, whose: str) -> None:
    """Warn of the steps of a private optimizer whose state this one has loaded, and which it is about to lose."""
    carried = record_in({"state": optimizer.state, "param_groups": optimizer.param_groups}) or {}
    if count := sum(run[2] for name in ("history", "lost") for run in carried.get(name, ())):
        _warn(
            f"the optimizer has loaded a private one's state, and {count} noised step(s) of it are not in {whose}: "
            "its epsilon is of the steps from here on. Add the others, or go on with fastdp.privatize."
        )


def drop_record(groups: list[dict[str, Any]]) -> None:
    """The groups were loaded: what rode along has no place in them."""
    for group in groups:
        group.pop(RECORD, None)


# An optimizer without privacy keeps what rode along in a state it loads, and would hand it on after steps of its own.
register_optimizer_step_post_hook(lambda optimizer, *_: drop_record(optimizer.param_groups))
