"""Whether anything was learnt, by the held-out records, and if not, what to try next."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping

from ..utils.formatting import count
from .figures import Simple
from .plan import Plan
from .tasks import LOWER, headline

_SHARES = ("accuracy", "reward_accuracy")  # a share of so many records: one standard error is no progress
_FEW = 1000  # records that are too few for most models
_WHOLE = 0.2  # of the parameters: a larger share is worth to be cut


def nothing_learnt(task: str, rows: Mapping[int, Mapping[str, float]], simple: Simple | None) -> str:
    """A sentence that says so, or "" where something was learnt or cannot be known.

    Compared with an answer that does not look at the record, or, where there is no such answer, with the model before.
    """
    name = headline(task)
    measured = [step for step in sorted(rows) if name in rows[step]]
    if not measured:
        return ""
    last = rows[measured[-1]][name]
    if simple is not None:
        if simple.value >= 1:  # held-out records that are all alike tell nothing
            return ""
        error = math.sqrt(simple.value * (1 - simple.value) / simple.records) if name in _SHARES else 0.0
        if not last > simple.value + error:
            return f"{name} {last:.3g} of held-out records is no better than {simple.words} ({simple.value:.3g})"
        return ""
    first = rows[measured[0]][name]
    if len(measured) > 1 and not (last < first if name in LOWER else last > first):
        return f"{name} {last:.4g} of held-out records is no better than before training ({first:.4g})"
    return ""


def next_tries(plan: Plan, options: Namespace, units: int, share: float) -> list[str]:
    """Two changes that fit the run, each with its flag and a reason. share: of the parameters, that were trained."""
    batch, most = plan.expected_batch_size, units // 2
    found = []
    if batch * 2 <= most:
        found.append(
            f"--batch-size {min(4 * int(batch), most)}: the noise of a step is shared by more records (now {batch:g} "
            f"of {count(units)})"
        )
    if plan.clipping == "automatic":
        found.append("--clipping local: with automatic, records that are classified correctly count as much as others")
    if share > _WHOLE and not options.lora and not options.train_only:
        found.append(
            f"--lora 8: fewer trained parameters take less noise (now {100 * share:.3g} % of them are trained)"
        )
    if options.epsilon < 8:
        found.append(
            f"--epsilon {min(8.0, 4 * options.epsilon):g}, if that protection suffices: less noise "
            f"(now the noise multiplier is {plan.noise_multiplier:.3g})"
        )
    found.append(f"--lr {3 * plan.lr:.2g}: {count(plan.steps)} steps are few, so that each may be longer")
    found.append(
        f"--epochs {4 * options.epochs:g}: more steps for the same epsilon; the noise of each grows more slowly than "
        "their number"
    )
    return found[:2]


def advice(problem: str, plan: Plan, options: Namespace, units: int, share: float) -> str:
    """Some lines to say at the end of a run in which nothing was learnt."""
    lines = [f"Nothing was learnt: {problem}.", "Two things to try next:"]
    lines += [f"  {line}" for line in next_tries(plan, options, units, share)]
    if units < _FEW:
        unit = "persons" if options.group_by else "records"
        lines.append(f"{count(units)} {unit} are few: more of them help more than any option.")
    lines.append("Another run on the same data spends another budget: the epsilons of all runs add up.")
    return "\n".join(lines)
