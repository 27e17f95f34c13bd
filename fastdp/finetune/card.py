"""The privacy card: what is guaranteed about a model, what is not, and how to check the number.

A card is a dict, which privacy_card.schema.json describes; `markdown` makes a page of it.
"""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

from ..accounting import epsilon_by
from ..accounting.card import cell_text, guess_of, recompute, versions
from ..utils.formatting import at_most
from .files import PUBLIC, write
from .plan import Outcome, Plan, weaknesses

NOT_COVERED = (
    "The choice of hyperparameters (learning rate, epochs, length, which weights): if it was made by looking at runs "
    "on the same data, each of those runs cost privacy of its own.",
    "Loss curves and counts in metrics.csv, journal.jsonl, plots and TensorBoard: they are computed from private "
    "records without noise. Do not give them away with the model.",
    "The number of records, from which delta, batch size and steps follow where they were not given: taken as public.",
    "The data that the pre-trained weights and the tokenizer were made from.",
    "Facts about a person that others' records, or the population, show.",
    "Other releases from the same records, other runs of this command among them: budgets add up.",
    "How clipped sums of float32 are rounded, which depends on all records, and the time that steps take.",
)


SEVERAL = (
    "Several records of one person: the guarantee is of one record. Of k records of a person, all of them together are "
    "protected by about k times epsilon, and by a larger delta; --group-by protects persons."
)
SCHEMA = "urn:fastdp:privacy-card:1"  # of privacy_card.schema.json, in this package
_NOTHING = "Nothing follows for what an attacker can find out. Do not give this model away as a private one."
# Ponomareva et al., How to DP-fy ML, 2023 (arXiv 2303.00654), has three tiers, bounded by 1 and 10
STRENGTH = (
    (1.0, "strong", "at most 1"),
    (10.0, "moderate: no strong promise in the worst case; attacks known today find little", "above 1, to 10"),
    (math.inf, "weak: the promise alone says next to nothing", "above 10"),
)


def make_card(
    *, model: str, task: str, plan: Plan, outcome: Outcome, trained: str, group: str | None, evaluated: str,
    labels: str, adapters: bool, units: int | None = None, replaced: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The card of a run. group: the column of persons; evaluated: "", "split" (rows of DATA) or "file"; labels: ""
    (none), "data" (read off it) or "given"; units: records (persons) that were trained on; replaced: layers that mixed
    samples; more: of the card."""
    history, unit = outcome.history, "person" if group else "record"
    epsilon = epsilon_by(list(history), plan.delta, plan.accountant)
    guaranteed = plan.seed is None and plan.accountant != "gdp"
    neighbours = (
        f"one person (all records of one value of {group!r}, at most {plan.max_records_per_group} of them in a step) "
        "added or removed" if group else "one record added or removed"
    )  # fmt: skip
    missing = list(NOT_COVERED) + ([] if group else [SEVERAL])
    if evaluated:
        whose = "Held-out records of DATA" if evaluated == "split" else "The records of --eval"
        missing.insert(1, f"{whose} were not trained on, but the figures computed from them (accuracy, perplexity, "
                          "calibration) are released without noise.")  # fmt: skip
    if labels == "data":
        missing.insert(1, "The set of labels was read off the data and stands in config.json: give --labels where "
                          "their names are not public.")  # fmt: skip
    why = "--seed makes its noise repeatable" if plan.seed is not None else "GDP's epsilon is too small by some"
    nothing = [] if guaranteed else [f"nothing is guaranteed about this model: {why}"]
    released = "The adapters (and the new head) in `model/`" if adapters else "The weights in `model/`"
    released += (
        ". The guarantee covers the weights and the optimizer's moments after every step, so also those in "
        "`checkpoints/`, but not what lies there beside them: the evaluations so far, and the number of records whose "
        "gradient was not finite. Give away `model/` and this card, nothing else of the folder."
        if guaranteed else ". Nothing is guaranteed about them."
    )  # fmt: skip
    if replaced:
        released += (" Layers that mix samples were replaced: load the weights by from_pretrained(), then call "
                     "fastdp.make_compatible(model).")  # fmt: skip
    snippet = recompute(list(history), plan.delta, plan.accountant)
    strength = next(word for most, word, _ in STRENGTH if epsilon <= most).split(":")[0]
    return {
        "schema": SCHEMA, "model": model, "task": task, "epsilon": epsilon, "target_epsilon": plan.target_epsilon,
        "delta": plan.delta, "accountant": plan.accountant, "neighbours": neighbours, "unit": unit,
        "sampling": f"Poisson: each {unit} joins a step's batch independently, {plan.expected_batch_size:g} expected",
        "sample_rate": plan.sample_rate, "noise_multiplier": plan.noise_multiplier, "history": history,
        "steps": outcome.steps, "lost_steps": outcome.lost_steps, "clipping": plan.clipping,
        "max_grad_norm": plan.max_grad_norm,
        "noise": "drawn by ChaCha20 from a secret key of the operating system, deleted when the run ended"
        if plan.seed is None else f"noise and sampling were made repeatable by --seed {plan.seed}, and whoever knows "
        "it can take the noise off",
        "guaranteed": guaranteed, "repeatable": plan.seed is not None,
        "status": {"finished": "finished", "interrupted": "interrupted before its last step",
                   "budget": "ended early, as steps lost in crashes took part of the budget"}[outcome.status],
        "trained": trained, "released": released, "not_covered": missing,
        "warnings": [*nothing, *weaknesses(epsilon, plan.delta, units, unit)], "responsible": None, "verified": None,
        "base_model": {}, "released_files": {}, "data_commitment": None, "begun": None, "finished": None,
        "versions": versions(), "date": datetime.date.today().isoformat(),
        "strength": strength if guaranteed else "none",
        "guess": guess_of(epsilon, plan.delta) if guaranteed else 1.0, "recompute": snippet, **more,
    }  # fmt: skip


def markdown(card: dict[str, Any]) -> str:
    """The page."""
    pair = f"({at_most(card['epsilon'], 4)}, {at_most(card['delta'], 6)})"
    if card["guaranteed"]:
        head = (
            f"**{pair}-differential privacy**: {card['neighbours']}.\n\n"
            f"In words: someone who knows all the data but one {card['unit']}, and sees the model, guesses whether "
            f"that one was trained on rightly with a probability of at most {at_most(100 * card['guess'], 6)} % (50 % "
            "is a coin)."
        )
    elif card["repeatable"]:
        head = (
            f"**NO GUARANTEE**: {card['noise']}. Without that, the same run would be {pair}-differentially private: "
            f"{card['neighbours']}.\n\n{_NOTHING}"
        )
    else:  # by an accountant that gives no bound
        head = (
            f"**NO PROVEN BOUND**: about {pair}-differential privacy, {card['neighbours']}, by the GDP accountant, "
            f"whose approximation may say too little. The accountant prv gives a bound for the same run.\n\n{_NOTHING}"
        )
    table = "\n".join(f"| {name} | {value} |" for name, value in _rows(card).items())
    return (
        f"# Privacy card\n\n`{card['model']}`, fine-tuned ({card['task']}), {card['date']}.\n\n{head}\n\n"
        + "".join(f"> **Warning**: {line}.\n\n" for line in card["warnings"]) +
        f"| | |\n| --- | --- |\n{table}\n\n{_legend(card)}\n\n## Released\n\n{card['released']}\n\n{_hashes(card)}\n\n"
        "## Not covered\n\n" + "\n".join(f"- {line}" for line in card["not_covered"]) +
        f"\n\n## To compute epsilon anew\n\n```python\n{card['recompute']}```\n\n## Made with\n\n"
        + ", ".join(f"{name} {number}" for name, number in card["versions"].items()) + "\n"
    )  # fmt: skip


def _rows(card: dict[str, Any]) -> dict[str, Any]:
    verified, clipping = card["verified"], f"{card['clipping']}, to norm {card['max_grad_norm']:g}"
    if card["clipping"] == "adaptive":
        clipping = (f"adaptive, from norm {card['max_grad_norm']:g} on to the median norm (the noisy count that it "
                    "follows is part of the noise multiplier)")  # fmt: skip
    lost = f", and {card['lost_steps']} lost in crashes: they are not in the weights, but in epsilon"
    approximate = " (an approximation by the central limit theorem, no upper bound)"
    return {
        "epsilon spent": f"{at_most(card['epsilon'], 6)} (budget {card['target_epsilon']:g})",
        "delta": at_most(card["delta"], 6),
        "accountant": card["accountant"].upper() + approximate * (card["accountant"] == "gdp"),
        "neighbouring data sets": card["neighbours"], "sampling": card["sampling"],
        "sample rate": f"{card['sample_rate']:.6g}", "noise multiplier": f"{card['noise_multiplier']:.6g}",
        "noise": card["noise"], "steps": f"{card['steps']}" + lost * bool(card["lost_steps"]),
        "clipping": f"{clipping}, over all trained weights of a {card['unit']}", "trained": card["trained"],
        "check before the first step": "not recorded" if verified is None else
        f"fastdp.verify on {verified['records']} records: exact within {verified['tolerance']:g}, each one's gradient "
        "is its own",
        "run": card["status"],
        "begun, finished": f"{card['begun'] or 'not recorded'}, {card['finished'] or card['date']}",
        "responsible": cell_text(card["responsible"] or "not stated (--responsible)"),
    }  # fmt: skip


def _legend(card: dict[str, Any]) -> str:
    """How strong an epsilon is."""
    here = next(place for place, (most, _, _) in enumerate(STRENGTH) if card["epsilon"] <= most)
    bounds = ("73.2 %", "73.1 to 99.996 %", "more than 99.995 %")
    rows = "\n".join(
        f"| {span}{' (this model)' if place == here and card['guaranteed'] else ''} | {word} | {bounds[place]} |"
        for place, (_, word, span) in enumerate(STRENGTH)
    )
    return (
        "## How strong an epsilon is\n\n| epsilon | | right guesses, at most |\n| --- | --- | --- |\n"
        f"{rows}\n\nThe tiers are those of Ponomareva et al. (2023), for one {card['unit']} added or removed. The "
        "last column is the bound above at a negligible delta; real attacks know less than it assumes."
    )


def _hashes(card: dict[str, Any]) -> str:
    """SHA-256 of the weights, and the commitment to the data."""
    base = card["base_model"]
    out = ["## Files, by SHA-256", "", "| file | SHA-256 |", "| --- | --- |"]
    out += [f"| model/{name} | `{value}` |" for name, value in card["released_files"].items()]
    out += [f"| {name} of the pre-trained model | `{value}` |" for name, value in base.get("files", {}).items()]
    if base.get("revision"):
        out.append(f"| revision of the pre-trained model on the hub | `{base['revision']}` |")
    if card["data_commitment"]:
        out.append(f"| commitment to the training data (HMAC-SHA256, secret key) | `{card['data_commitment']}` |")
        out += [
            "",
            "The commitment is no hash of the data, by which a guessed record could be found out: without the key, "
            "which its owner keeps, it looks like random bits. The balance of the labels, the figures of the check and "
            "those of the evaluation are functions of the data, and are left out of this card.",
        ]
    return "\n".join(out)


def write_card(card: dict[str, Any], folder: Path) -> None:
    """privacy_card.md and privacy_card.json."""
    write(folder / "privacy_card.md", markdown(card), PUBLIC)
    text = json.dumps(card, indent=2, ensure_ascii=False, allow_nan=False)
    write(folder / "privacy_card.json", text + "\n", PUBLIC)
