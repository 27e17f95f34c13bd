"""Whether anything was learnt, by the held-out records, and if not, what to try next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..utils.formatting import count
from .figures import Simple
from .plan import Job, unit_of
from .tasks import LOWER, headline

_SHARES = ("accuracy", "reward_accuracy")  # a share of so many records: one standard error is no progress
_FEW = 1000  # records that are too few for most models
_WHOLE = 0.2  # of the parameters: a larger share is worth to be cut


def nothing_learnt(task: str, rows: Sequence[Mapping[str, float]], simple: Simple | None) -> str:
    """A sentence that says so, or "" where something was learnt or cannot be known.

    Compared with an answer that does not look at the record, or, where there is no such answer, with the model before.
    """
    name = headline(task)
    measured = [row[name] for row in rows if name in row]
    if not measured or (simple is None and len(measured) < 2) or (simple is not None and simple.value >= 1):
        return ""  # held-out records that are all alike tell nothing
    last, words = measured[-1], f"before training ({measured[0]:.4g})"
    bar = measured[0]
    if simple is not None:
        share = name in _SHARES
        bar = simple.value + share * math.sqrt(max(simple.value * (1 - simple.value), 0.0) / simple.records)
        words = f"{simple.words} ({simple.value:.3g})"
    learnt = last < bar if name in LOWER else last > bar
    return "" if learnt else f"{name} {last:.4g} of held-out records is no better than {words}"


def advice(problem: str, job: Job, units: int, share: float) -> str:
    """Some lines to say at the end of a run in which nothing was learnt, with two changes that fit it.

    share: of the parameters, that were trained.
    """
    plan, options = job.plan, job.options
    batch, most = plan.expected_batch_size, units // 2
    tries = [
        (batch * 2 <= most, f"--batch-size {min(4 * int(batch), most)}: the noise of a step is shared by more records "
         f"(now {batch:g} of {count(units)})"),
        (plan.clipping == "automatic",
         "--clipping local: with automatic, records that are classified correctly count as much as others"),
        (share > _WHOLE and not options.lora and not options.train_only, "--lora 8: fewer trained parameters take less "
         f"noise (now {100 * share:.3g} % of them are trained)"),
        (options.epsilon < 8, f"--epsilon {min(8.0, 4 * options.epsilon):g}, if that protection suffices: less noise "
         f"(now the noise multiplier is {plan.noise_multiplier:.3g})"),
        (True, f"--lr {3 * plan.lr:.2g}: {count(plan.steps)} steps are few, so that each may be longer"),
        (True, f"--epochs {4 * options.epochs:g}: more steps for the same epsilon; the noise of each grows more slowly "
         "than their number"),
    ]  # fmt: skip
    lines = [f"Nothing was learnt: {problem}.", "Two things to try next:"]
    lines += [f"  {text}" for fits, text in tries if fits][:2]
    if units < _FEW:
        lines.append(f"{count(units)} {unit_of(options)}s are few: more of them help more than any option.")
    lines.append("Another run on the same data spends another budget: the epsilons of all runs add up.")
    return "\n".join(lines)
