"""The privacy card: what is guaranteed about what a run has released, what is not, and how to compute it again."""

from __future__ import annotations

import html
import json
import math
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from ..errors import AccountingError
from ..utils.formatting import at_most
from . import ACCOUNTANTS, History, epsilon_by

FALSE_POSITIVES = 1e-3  # the share of wrong accusations at which an attacker's right ones are told
DELTAS = tuple(digit * 10.0**power for power in range(-8, 0) for digit in (1.0, 3.0))
NOT_COVERED = (
    "Choices made by looking at runs on the same data (learning rate, epochs, which weights, which of several runs): "
    "each of those runs cost privacy of its own.",
    "Losses, accuracies, norms and other figures that were computed from the records without noise.",
    "The number of records, from which delta, batch size and steps may follow: taken as public.",
    "The data that pre-trained weights and a tokenizer were made from.",
    "What was fitted to the records before training: means and scales, imputed values, chosen features, a vocabulary.",
    "Facts about a person that others' records, or the population, show.",
    "Other releases from the same records: budgets add up.",
    "How clipped sums of float32 are rounded, which depends on all records, and the time that steps take.",
)


class PrivacyCard(NamedTuple):
    """What a run has spent and for what. facts: plain values, by name; `json()` has them all."""

    facts: dict[str, Any]

    def __str__(self) -> str:
        return self.markdown()

    def json(self) -> str:
        """The facts; infinite numbers as null."""
        plain = {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in self.facts.items()}
        return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def markdown(self) -> str:
        """A page in Markdown."""
        facts = self.facts
        warned = "".join(f"> **Warning**: {cell_text(text)}\n\n" for text in facts["warnings"])
        table = "\n".join(f"| {name} | {cell_text(value)} |" for name, value in self._rows())
        missing = "\n".join(f"- {text}" for text in facts["not_covered"])
        return (
            f"# Privacy card\n\n{facts['model']}, {facts['date']}.\n\n**{self.head()}**\n\n{warned}"
            f"| | |\n| --- | --- |\n{table}\n\n## Not covered\n\n{missing}\n\n"
            f"## To compute epsilon again\n\n```python\n{facts['recompute']}```\n"
        )

    def html(self) -> str:
        """A page in HTML, without scripts."""
        facts, text, rows = self.facts, html.escape, self._rows()
        warned = "".join(f"<p><b>Warning</b>: {text(each)}</p>" for each in facts["warnings"])
        table = "".join(f"<tr><th align=left>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
        missing = "".join(f"<li>{text(each)}</li>" for each in facts["not_covered"])
        return (
            f"<!doctype html><meta charset=utf-8><title>Privacy card</title><h1>Privacy card</h1>"
            f"<p>{text(facts['model'])}, {facts['date']}.</p><p><b>{text(self.head())}</b></p>{warned}"
            f"<table>{table}</table><h2>Not covered</h2><ul>{missing}</ul><h2>To compute epsilon again</h2>"
            f"<pre>{text(facts['recompute'])}</pre>\n"
        )

    def save(self, path: str | Path) -> None:
        """Write it to a file whose name ends in .md, .html or .json. Raises ValueError for another one."""
        forms = {".md": self.markdown, ".html": self.html, ".json": self.json}
        path = Path(path)
        if path.suffix not in forms:
            raise ValueError(f"a privacy card is saved as {', '.join(forms)}, not as {path.name!r}")
        path.write_text(forms[path.suffix](), encoding="utf-8")

    def head(self) -> str:
        """The guarantee, in a sentence."""
        facts = self.facts
        if not facts["steps"]:
            return "No step was made, and nothing was released."
        if math.isinf(facts["epsilon"]):
            return "NO PRIVACY: steps were made without noise."
        pair = f"({at_most(facts['epsilon'], 4)}, {at_most(facts['delta'], 6)})-differential privacy"
        if not facts["guaranteed"]:
            return f"NO GUARANTEE, for the reasons below; otherwise {pair}, {facts['neighbours']}."
        return f"{pair}: {facts['neighbours']}{', unless a warning below applies' * bool(facts['warnings'])}."

    def _rows(self) -> list[tuple[str, str]]:
        facts = self.facts
        budget = "" if facts["target_epsilon"] is None else f" (budget {facts['target_epsilon']:g})"
        accountant = facts["accountant"]
        if accountant in ACCOUNTANTS:
            accountant = accountant.upper() + " (an approximation, no upper bound)" * (accountant == "gdp")
        runs = f"runs of (noise multiplier, sample rate, steps): {facts['history']}"
        if "blocks" in facts:
            runs = f"{facts['mechanism']}, in blocks of independent noise: " + "; ".join(map(_block, facts["blocks"]))
        chances = (
            f"who knows all the data but one {facts['unit']} guesses whether that one was trained on rightly with a "
            f"probability of at most {at_most(100 * facts['right_guesses'], 4)} %; who accuses {FALSE_POSITIVES:g} of "
            f"those not trained on finds at most {at_most(100 * facts['true_positives'], 4)} % of the others"
        )
        return [
            ("epsilon", f"{facts['epsilon']:.6g}{budget}"),
            ("delta", at_most(facts["delta"], 6)),
            ("what that means", chances),
            ("unit", f"{facts['unit']}: {facts['neighbours']}"),
            ("accountant", accountant),
            ("sampling", facts["sampling"]),
            ("clipping", facts["clipping"]),
            ("noise", facts["noise"]),
            ("steps", f"{facts['steps']}, as {runs}"),
            ("trained", facts["trained"]),
            ("check of the gradients", facts["verified"] or "fastdp.verify was not run on this model"),
            ("made with", ", ".join(f"{name} {number}" for name, number in facts["versions"].items())),
        ]


def _block(block: dict[str, Any]) -> str:
    sigma, most = block["noise_multiplier"], block["sensitivity"]
    return f"{block['steps']} steps of noise multiplier {sigma:.6g} and sensitivity {most:.6g}"


def cell_text(text: str) -> str:
    """A line in a cell of a Markdown table."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def guess_of(epsilon: float, delta: float) -> float:
    """Bound on the share of right guesses about membership: (e^epsilon + delta) / (1 + e^epsilon)."""
    less = math.exp(-epsilon)
    return min(1.0, (1 + delta * less) / (1 + less))


def true_positives(history: History, accountant: str, false_positives: float = FALSE_POSITIVES) -> float:
    """`least_true_positives` of a history."""
    quick = "rdp" if accountant == "prv" else accountant  # PRV takes a quarter of a second for each
    return least_true_positives(
        lambda delta: epsilon_by(history, delta, accountant), lambda delta: epsilon_by(history, delta, quick),
        false_positives,
    )  # fmt: skip


def least_true_positives(
    epsilon: Callable[[float], float], quick: Callable[[float], float], false_positives: float = FALSE_POSITIVES,
    deltas: Sequence[float] = DELTAS, tries: int = 4,
) -> float:  # fmt: skip
    """Bound on the share of members that an attacker finds at this share of false positives.

    For every delta it is at most e^epsilon(delta) * false_positives + delta: the smallest of some deltas. epsilon is
    asked at `tries` of them, which `quick`, of which only the order counts, finds the best.

    Source: Kairouz et al. 2015 (arXiv 1311.0776), theorem 2.1; the same quantity as riskcal's, from above.
    """

    def bound(delta: float, by: Callable[[float], float]) -> float:
        try:
            return min(1.0, math.exp(min(by(delta), 50.0)) * false_positives + delta)
        except AccountingError:  # GDP has no epsilon at some deltas
            return 1.0

    return min(bound(delta, epsilon) for delta in sorted(deltas, key=lambda delta: bound(delta, quick))[:tries])


def of_gaussian(mu: float, false_positives: float = FALSE_POSITIVES) -> tuple[float, float]:
    """Shares of right guesses, and of members found, for a Gaussian mechanism of sensitivity over noise mu. Both exact.

    Source: Dong et al. 2022 (arXiv 1905.02383), section 2.

    >>> [round(share, 4) for share in of_gaussian(1.0)]
    [0.6915, 0.0183]
    """
    normal = NormalDist()
    return normal.cdf(mu / 2), normal.cdf(normal.inv_cdf(false_positives) + mu)


def recompute(history: History, delta: float, accountant: str) -> str:
    """A program that prints epsilon."""
    return (
        "from fastdp.accounting import epsilon_of\n\n# runs of (noise multiplier, sample rate, steps)\n"
        f"history = {history!r}\nprint(epsilon_of(history, delta={delta!r}, accountant={accountant!r}))\n"
    )


def versions() -> dict[str, str]:
    """Of Python and the libraries that took part."""
    found = {"python": platform.python_version()}
    for name in ("fastdp", "torch", "numpy", "opacus", "transformers", "tokenizers", "datasets", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
