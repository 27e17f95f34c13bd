"""The card of a private search: what it costs, what that covers, and how to compute it anew."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..accounting import History
from ..errors import AccountingError, FastDPError
from ..mechanisms.tuning import NegativeBinomialRuns, Runs, tuning_epsilon
from ..utils.append_log import write_whole
from ..utils.formatting import at_most, count

RECORD, BEST = "search.json", "best"


class TuneError(FastDPError):
    """A search cannot begin, or has ended without a result: says why."""


def card_of(
    options: Namespace, runs: Runs, settings: Sequence[dict[str, Any]], histories: Sequence[History]
) -> dict[str, Any]:
    """The facts. Raises TuneError if no epsilon holds."""
    try:
        epsilon = tuning_epsilon(histories, options.delta, runs)
        one = max(tuning_epsilon([h], options.delta, NegativeBinomialRuns(1 + 1e-9, 0)) for h in histories)
        held = None
        if options.score_noise is not None:
            held = tuning_epsilon([[(options.score_noise, 1.0, 1)]], options.delta, runs)
    except AccountingError as problem:
        raise TuneError(str(problem)) from None
    if math.isinf(epsilon):
        raise TuneError("a setting has no noise (noise_multiplier 0), so no epsilon holds for the search")
    return {
        "epsilon": epsilon, "delta": options.delta, "epsilon_of_held_out_records": held,
        "epsilon_of_the_costliest_run_alone": one, "distribution": options.distribution,
        "expected_runs": options.expected_runs, "eta": options.eta if options.distribution != "poisson" else None,
        "held_out": options.held_out, "score_noise": options.score_noise, "what": Path(options.what).name,
        "settings": list(settings),
        "histories": [list(map(list, history)) for history in histories],
    }  # fmt: skip


def write(out: Path, card: dict[str, Any]) -> None:
    """search.json, on the disk when this returns. JSON has no infinite score (of runs that all diverged): null."""
    if not math.isfinite(card.get("score") or 0.0):
        card = {**card, "score": None}
    write_whole(out / RECORD, (json.dumps(card, indent=2, allow_nan=False) + "\n").encode())


def said(card: dict[str, Any]) -> str:
    """What the command says of the search before it begins."""
    shape = "a Poisson distribution" if card["eta"] is None else (
        f"a truncated negative binomial distribution (eta {card['eta']:g})"
    )  # fmt: skip
    one, delta = at_most(card["epsilon_of_the_costliest_run_alone"], 4), at_most(card["delta"], 6)
    lines = [
        f"search    {count(len(card['settings']))} settings; the number of runs is secret, from {shape} of mean "
        f"{card['expected_runs']:g}",
        f"privacy   epsilon {at_most(card['epsilon'], 4)} at delta {delta} for a record that is trained on: of the "
        f"best run and its score together (the costliest run alone: {one}, by RDP)",
    ]
    if card["held_out"] == "public":
        lines.append("held out  public: the records that the score is computed from are NOT protected")
    else:
        lines.append(
            f"held out  private: epsilon {at_most(card['epsilon_of_held_out_records'], 4)} at delta {delta} for a "
            f"record that is held out, by noise of {card['score_noise']:g} on the sum of their scores"
        )
    return "\n".join(lines)


def page(card: dict[str, Any]) -> str:
    """The card for people."""
    runs = (
        f"PoissonRuns({card['expected_runs']!r})" if card["eta"] is None
        else f"NegativeBinomialRuns({card['expected_runs']!r}, {card['eta']!r})"
    )  # fmt: skip
    histories = [[tuple(run) for run in history] for history in card["histories"]]
    result = "No run was drawn, so nothing was released." if card["setting"] is None else (
        f"The best setting is `{json.dumps(card['setting'])}`, with the score {card['score']:.6g}."
    )  # fmt: skip
    held = (
        "- The records that the score was computed from: they were stated to be public."
        if card["held_out"] == "public" else
        "- A record that is both trained on and held out: for it, both epsilons add up."
    )  # fmt: skip
    return (
        f"# Card of a private search\n\n**({at_most(card['epsilon'], 4)}, {at_most(card['delta'], 6)})-differential "
        "privacy** of the search, for one record (or person, where the training was accounted by persons) of the "
        "training data added or removed.\n\n"
        f"{result}\n\n```\n{said(card)}\n```\n\n"
        f"## Covered\n\n- What is in `{BEST}/`, the best setting and its score, all together. An epsilon that stands "
        "within is that of its run alone; this card's counts.\n\n"
        "## Not covered\n\n"
        f"{held}\n"
        "- A score that was computed from the records that were trained on, other than through the private model.\n"
        "- The number of runs and the time that the search took: keep both secret.\n"
        "- Settings that were chosen by looking at the data, other searches, and other runs: budgets add up.\n"
        "- What the training function keeps or sends elsewhere, and what its own account leaves out.\n\n"
        "## To compute epsilon anew\n\n```python\n"
        "from fastdp.mechanisms import NegativeBinomialRuns, PoissonRuns, tuning_epsilon\n\n"
        f"histories = {histories!r}\n"
        f"print(tuning_epsilon(histories, {card['delta']!r}, {runs}))\n```\n"
    )
