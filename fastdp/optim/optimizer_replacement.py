"""Puts a new private optimizer in the place of the one that a model has; its history continues that one's.

A cell of a notebook that makes an optimizer is run again, with other settings perhaps. What the first optimizer spent
stays spent: whether the data are the same is not known, so that the second one counts its steps, too. (Whoever knows
better calls detach() first.) The first one refuses to step from then on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..accounting import History
from ..accounting.runs import steps_in
from ..distributed.world import processes
from ..errors import AccountingError, OptimizerReplacedWarning
from .private_step import PrivateStep
from .public_batches import watch

_DELTA = 1e-5  # of the epsilon that is said, where nobody has asked for another


class _Owner(NamedTuple):
    """Whose engine is on a model, and what the optimizer is called."""

    privacy: weakref.ref[PrivateStep]
    name: str


_OWNERS = WeakIdKeyDictionary()  # {model: _Owner}


def made(model: nn.Module, name: str, make: Callable[[], PrivateStep]) -> PrivateStep:
    """What `make` makes for the model, in the place of the optimizer that the model has, if there is one.

    Where `make` raises an error, that one goes on as before. Where it cannot be replaced (several processes, a model in
    parts, a ledger file), it stands in the way, and `make` says so.

    Args:
        model: the model.
        name: the class of the new optimizer.
        make: makes its privacy state.
    """
    former, former_name = _former_of(model)
    if former is None:
        privacy = make()
    else:
        with former.engine.aside():
            privacy = make()
            try:
                carried = _carry(former, privacy)
                warnings.warn(_note(former, former_name, name, carried), OptimizerReplacedWarning, stacklevel=4)
            except BaseException:  # where warnings are errors, the former goes on
                privacy.close()
                raise
        privacy.stepped_on = former.stepped_on  # a second step on one batch is no sample of its own
        former.close(by=name)
    watch(privacy)
    _OWNERS[privacy.engine.model] = _Owner(weakref.ref(privacy), name)
    return privacy


def spent_before(model: nn.Module, target_epsilon: float | None) -> History:
    """The steps of the model's optimizer that would count in that of another one, made now.

    Raises AccountingError for a budget if they cannot be counted.
    """
    former, _ = _former_of(model)
    if former is None or target_epsilon is None or not former.ledger.spent:
        return []
    if former.mechanism is not None:
        raise uncounted(f"with {former.mechanism.name}")
    return former.ledger.draws.accounted(former.ledger.spent)


def uncounted(how: str) -> AccountingError:
    """Steps of two kinds are no one budget's."""
    return AccountingError(
        f"the budget cannot be kept: steps that the model's optimizer has made cannot be counted {how}. Give "
        "noise_multiplier=, and add up both epsilons; or detach() it before, if it had other data"
    )


def _former_of(model: nn.Module) -> tuple[PrivateStep | None, str]:
    """The optimizer of this very model that can be replaced, and its name."""
    owner: Any = _OWNERS.get(model)
    former: PrivateStep | None = None if owner is None else owner.privacy()
    if former is None or former.detached or former.engine.model is not model:
        return None, ""
    in_parts = former.replica.shards is not None or former.deferred_setup is not None
    apart = in_parts or former.world.size > 1 or processes() > 1
    return (None, "") if apart or former.ledger.in_file else (former, owner.name)


def _carry(former: PrivateStep, privacy: PrivateStep) -> bool:
    """The steps of the former are counted; whether that could be."""
    if not former.ledger.spent:
        return True
    if former.mechanism is not None or privacy.mechanism is not None:
        return False  # whether a tree's batches are the same ones in the new run is not known
    privacy.ledger.asked = former.ledger.asked
    _, of_ledger = privacy.ledger.read(former.ledger.history, former.ledger.lost, former.ledger.makers)
    of_ledger()
    privacy.ledger.draws, privacy.ledger.by_seed = former.ledger.draws, former.ledger.by_seed
    privacy.warned.update(former.warned)
    privacy.ledger.write_begun()
    privacy.missed.read(former.missed.state_dict())()
    privacy.rate_check.continue_from(former.rate_check)
    privacy.unit.grouped = former.unit.grouped
    privacy.set_dropped(former.nonfinite_samples)
    return True


def _note(former: PrivateStep, before: str, name: str, carried: bool) -> str:
    steps = steps_in(former.ledger.spent)
    begin = f"this {name} takes the place of the {before} that the model had"
    if not steps:
        return f"{begin}, which had made no step: that one is detached, and refuses to step."
    if carried:
        how = (
            "They stay spent: the history and epsilon() of this one go on from them. If it trains on other data, "
            "detach() the old one before the new one is made"
        )
    else:
        how = (
            "They stay spent, and epsilon() of this one does not count them: load_state_dict(old.state_dict()) hands "
            "them on between optimizers with the same noise; else both epsilons add up, and both deltas"
        )
    return (
        f"{begin}, which has made {steps} noised step(s){_epsilon(former)}. {how}. The old one is detached: it refuses "
        "to step, and its epsilon() and state_dict() work as before. load_state_dict() takes its moments and settings."
    )


def _epsilon(former: PrivateStep) -> str:
    usual = (
        former.ledger.default_delta(former.expected_batch_size, former.sample_rate) if former.ledger.budget else _DELTA
    )
    delta, rate = former.ledger.asked or (usual, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said where epsilon is asked for
        try:
            return f" (epsilon {former.epsilon(delta, rate):.4g} at delta {delta:g})"
        except AccountingError:
            return " (whose sample rate nobody has told)"
