"""What the privacy card of a run with correlated noise tells: how records take part, the blocks, and a program."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..accounting.card import DELTAS, guess_of, least_true_positives, of_gaussian
from ..accounting.participation import Block, Participation
from .bins import FAILURE
from .correlated_privacy import Composed, composed
from .encoders import Encoder
from .sensitivity import sensitivity

NEIGHBOURS = "one record added or removed, whose places in its batches stay empty without it"
IN_ONE_ORDER = "each record is in the same batch of every {period} steps, in a public order, chosen without a look"
_TAKEN = {
    "fixed order": IN_ONE_ORDER,
    "separated": "a record is in one batch of every {period} steps, and its steps are at least {separation} apart",
    "cyclic Poisson": "a record is in every {period}-th batch with probability {rate:.6g}, drawn anew and in secret",
    "balls in bins": "each record is in the same batch of every {period} steps, drawn once, uniformly and in secret",
}
_FEW = 1 << 13  # samples by which the best delta is found


def facts(
    strategy: Encoder, expression: str, blocks: Iterable[Block], epsilon: float, delta: float, accountant: str
) -> dict[str, Any]:
    """Return them. expression: a program's words for the strategy; the others as of `epsilon_of_blocks`."""
    told = _without_marks([block for block in blocks if block.steps])
    kinds = dict.fromkeys(block.participation._replace(mark="") for block in told)
    right, found, how = guess_of(epsilon, delta), 1.0, accountant
    if epsilon < math.inf:
        right, found, how = _risks(composed(strategy, told), right, accountant)
    return {
        "accountant": how, "neighbours": NEIGHBOURS, "right_guesses": right, "true_positives": found,
        "mechanism": repr(strategy),
        "sampling": "; ".join(f"{kind.kind}: {_TAKEN[kind.kind].format(**kind._asdict())}" for kind in kinds),
        "blocks": [
            {**block._asdict(), "participation": block.participation._asdict(),
             "sensitivity": sensitivity(strategy, block.steps, block.participation, block.first)}
            for block in told
        ],
        "recompute": _recompute(expression, told, delta, accountant),
    }  # fmt: skip


def _risks(run: Composed, right: float, accountant: str) -> tuple[float, float, str]:
    """Bounds on the shares of right guesses (given: that by epsilon) and of members found, and how they are known."""
    if run.grams:
        found = least_true_positives(
            lambda delta: run.epsilon(delta, accountant),
            lambda delta: run.epsilon(delta, accountant, _FEW),
            deltas=[delta for delta in DELTAS if delta >= 1e-4],
            tries=1,
        )
        return right, found, f"Monte Carlo: an upper bound, with a confidence of 1 - {FAILURE:g}"
    if run.sampled:
        quick = "rdp" if accountant == "prv" else accountant
        found = least_true_positives(
            lambda delta: run.epsilon(delta, accountant), lambda delta: run.epsilon(delta, quick)
        )
        return right, found, accountant
    how = "RDP, an upper bound" if accountant == "rdp" else "exact: one Gaussian mechanism"
    return *of_gaussian(math.sqrt(run.plain)), how


def _without_marks(blocks: list[Block]) -> list[Block]:
    """The blocks with numbers in place of names and marks, which are digests of a few records: a card is public."""
    number_of: dict[str, int] = {}

    def renamed(part: Participation) -> Participation:
        if not part.mark:
            return part
        of, _, unknown = part.mark.partition("|")  # the second of records that cannot be told
        numbers = [number_of.setdefault(each, len(number_of) + 1) for each in (of, unknown) if each]
        return part._replace(mark="order " + "|".join(map(str, numbers)))

    return [
        block._replace(name=f"{number}", participation=renamed(block.participation))
        for number, block in enumerate(blocks, 1)
    ]


def _recompute(expression: str, blocks: list[Block], delta: float, accountant: str) -> str:
    """A program that prints epsilon."""
    lines = "".join(f"    {block!r},\n" for block in blocks)
    return (
        f"from fastdp.mechanisms import {expression.partition('(')[0]}, Block, Participation, epsilon_of_blocks\n\n"
        f"strategy = {expression}\nblocks = [\n{lines}]\n"
        f"print(epsilon_of_blocks(strategy, blocks, delta={delta!r}, accountant={accountant!r}))\n"
    )
