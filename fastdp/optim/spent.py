"""What a run has spent: the doubts that `epsilon` tells of, and the facts of the privacy card."""

from __future__ import annotations

import datetime
import math
import warnings
from typing import Any

from ..accounting.card import NOT_COVERED, PrivacyCard, guess_of, recompute, true_positives, versions
from ..accounting.runs import sampled_at, steps_in
from ..errors import NotVerifiedWarning
from .private_step import PrivateStep
from .verification_record import verified_on, warn_unverified

SEVERAL = (
    "Several records of one person: of k records, all together are protected by about k times epsilon, and by a larger "
    "delta. fastdp.poisson_loader(group_by=) protects persons."
)


def warn_of_doubts(privacy: PrivateStep) -> None:
    """Warn of what may make an epsilon of this run wrong."""
    if privacy.ledger.by_seed or not privacy.noise.secure:
        earlier = "in earlier steps, " if privacy.noise.secure else ""
        warnings.warn(
            f"{earlier}the noise comes from seed=, which is for experiments: whoever knows it can take the noise off. "
            "The epsilon holds for a run without seed=.",
            stacklevel=3,
        )
    elif _batches_by_seed(privacy):
        warnings.warn(
            "the batches come from a loader with seed=, which is for experiments: whoever knows it knows which "
            "records are in them. The epsilon holds for a run without seed=.",
            stacklevel=3,
        )
    warn_unverified(privacy.engine.model, 4)
    privacy.missed.warn()
    privacy.ledger.warn(4)


def card_of(optimizer: Any, privacy: PrivateStep, delta: float | None, sample_rate: float | None) -> PrivacyCard:
    """The card of what an optimizer has released. Arguments and errors are those of its `epsilon`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epsilon = optimizer.epsilon(delta, sample_rate=sample_rate)
    delta, _ = privacy.ledger.asked or (delta, None)
    assert delta is not None
    warned = [str(each.message) for each in caught if not issubclass(each.category, NotVerifiedWarning)]
    history, unit = privacy.ledger.spent, "person" if privacy.unit.grouped else "record"
    if privacy.mechanism is None:
        history = sampled_at(privacy.ledger.draws.accounted(history), sample_rate)
        told = _of_samples(privacy, unit, history, epsilon, delta)
    else:
        told = privacy.mechanism.facts(epsilon, delta, privacy.accountant)
    known_noise = privacy.ledger.by_seed or not privacy.noise.secure
    warned = list(dict.fromkeys([*warned, *privacy.rate_check.told, *privacy.warned.values()]))
    if told["accountant"] == "gdp":
        warned.append("The GDP accountant is an approximation, no upper bound: accountant='prv' gives a bound.")
    grouped = privacy.unit.grouped
    named = privacy.engine.named_parameters()
    count, whole = sum(p.numel() for p in named.values()), sum(p.numel() for p in privacy.engine.model.parameters())
    if not history or epsilon == math.inf:
        told |= {"right_guesses": float(epsilon > 0) or 0.5, "true_positives": float(epsilon > 0) or 1e-3}
    secret = not known_noise and not _batches_by_seed(privacy)
    guaranteed = secret and told["accountant"] != "gdp" and epsilon < math.inf
    return PrivacyCard({
        "model": type(privacy.engine.model).__name__, "date": datetime.date.today().isoformat(),
        "epsilon": epsilon, "delta": delta,
        "target_epsilon": None if privacy.ledger.budget is None else privacy.ledger.budget.target_epsilon,
        "guaranteed": guaranteed, "unit": unit, "clipping": _clipping(privacy),
        "noise": "repeatable, by seed=: whoever knows it can take the noise off" if known_noise else
        "Gaussian, drawn by ChaCha20 from a secret key of the operating system",
        "steps": steps_in(privacy.ledger.spent), "history": [list(run) for run in history],
        "trained": f"{count:,} of {whole:,} parameters",
        "verified": verified_on(privacy.engine.model),
        "warnings": warned, "not_covered": [*NOT_COVERED, *([] if grouped else [SEVERAL])],
        "versions": versions(), **told,
    })  # fmt: skip


def _of_samples(privacy: PrivateStep, unit: str, history: Any, epsilon: float, delta: float) -> dict[str, Any]:
    """What else a card says where batches are Poisson samples; of other mechanisms, their own `facts` tell it."""
    return {
        "accountant": privacy.accountant, "sampling": _sampling(privacy, unit, history),
        "neighbours": f"one {unit}{' (all records of it)' * bool(privacy.unit.grouped)} added or removed",
        "right_guesses": guess_of(epsilon, delta),
        "true_positives": 1.0 if epsilon == math.inf else true_positives(history, privacy.accountant),
        "recompute": recompute(history, delta, privacy.accountant),
    }  # fmt: skip


def _batches_by_seed(privacy: PrivateStep) -> bool:
    return privacy.loader_batch.seeded or privacy.ledger.draws.by_seed


def _sampling(privacy: PrivateStep, unit: str, history: Any) -> str:
    rates = ", ".join(f"{rate:.6g}" for rate in sorted({run[1] for run in history if run[1] is not None}))
    drawn, steps = privacy.ledger.draws.steps, steps_in(privacy.ledger.spent)
    if not steps:
        return "no batch yet"
    if drawn == steps:
        return f"Poisson, by fastdp.poisson_loader: each {unit} joins a batch independently, with probability {rates}"
    return (
        f"taken to be Poisson with probability {rates}, as the script says; of {steps} steps, {drawn} were on batches "
        "of a fastdp.poisson_loader without seed="
    )


def _clipping(privacy: PrivateStep) -> str:
    clipping = privacy.clipping
    kind = clipping.clipping if isinstance(clipping.clipping, str) else "a function of the norms"
    kind = "adaptive" if privacy.quantile is not None else kind
    style = clipping.style if isinstance(clipping.style, str) else f"{len(clipping.groups)} groups"
    return f"{kind}, {style}, sensitivity {clipping.sensitivity:g}"
