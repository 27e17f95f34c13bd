"""The privacy card: what is guaranteed about a model, what is not, and how to check the number."""

from __future__ import annotations

import datetime
import html
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..accounting import epsilon_of
from ..utils.formatting import at_most
from .files import NO_CHARACTER, new_file
from .plan import Outcome, Plan

NOT_COVERED = (
    "The choice of hyperparameters (learning rate, epochs, length, which weights): if it was made by looking at runs "
    "on the same data, each of those runs cost privacy of its own.",
    "Loss curves and counts in metrics.csv, journal.jsonl, plots and TensorBoard: they are computed from private "
    "records without noise. Do not give them away with the model.",
    "The number of records, from which delta, batch size and steps follow where they were not given: taken as public.",
    "The data that the pre-trained weights and the tokenizer were made from.",
    "Facts about a person that others' records, or the population, show.",
    "Other releases from the same records, other runs of this command among them: budgets add up.",
    "The random numbers are floating-point Gaussians: attacks on their lowest bits are not addressed.",
)


SEVERAL = (
    "Several records of one person: the guarantee is of one record. Of k records of a person, all of them together are "
    "protected by about k times epsilon, and by a larger delta; --group-by protects persons."
)
SCHEMA = "urn:fastdp:privacy-card:1"  # of privacy_card.schema.json, in this package
WEAK_EPSILON, WEAK_DELTA = 10.0, 0.1  # the latter over the number of records
NO_HASH = (
    "The commitment is no hash of the data, by which a guessed record could be found out: without the key, which its "
    "owner keeps, it looks like random bits. The balance of the labels, the figures of the check and those of the "
    "evaluation are functions of the data, and are left out of this card."
)
_NONE = "Nothing follows for what an attacker can find out. Do not give this model away as a private one."
_COVERED = (
    ". The guarantee covers the weights and the optimizer's moments after every step, so also those in `checkpoints/`, "
    "but not what lies there beside them: the evaluations so far, and the number of records whose gradient was not "
    "finite. Give away `model/` and this card, nothing else of the folder."
)
# Ponomareva et al., How to DP-fy ML, 2023 (arXiv 2303.00654), has three tiers, bounded by 1 and 10
STRENGTH = (
    (1.0, "strong", "at most 1"),
    (10.0, "moderate: no strong promise in the worst case; attacks known today find little", "above 1, to 10"),
    (math.inf, "weak: the promise alone says next to nothing", "above 10"),
)


def guess_of(epsilon: float, delta: float) -> float:
    """Bound on the share of right guesses about membership: (e^epsilon + delta) / (1 + e^epsilon)."""
    less = math.exp(-epsilon)
    return min(1.0, (1 + delta * less) / (1 + less))


def weaknesses(epsilon: float, delta: float, units: int | None, unit: str) -> list[str]:
    """What is weak in a guarantee, each with what would be better. units: records, or persons; None: not known."""
    found = []
    if epsilon > WEAK_EPSILON:
        found.append(
            f"epsilon {at_most(epsilon, 4)} is above {WEAK_EPSILON:g}: it allows that a {unit} is recognised with near "
            "certainty. Aim at 8 or less, at 1 for a strong guarantee"
        )
    if units and delta * units > WEAK_DELTA * (1 + 1e-9):
        found.append(
            f"delta {delta:g} is large for {units:,} {unit}s: publishing each of them in full with this "
            f"probability would reveal {delta * units:.2g} on average. Aim at 1/(10 n) or less"
        )
    return found


@dataclass
class Card:
    """The facts; `markdown` makes a page of them, `as_json` keeps them."""

    model: str
    task: str
    epsilon: float
    target_epsilon: float
    delta: float
    accountant: str
    neighbours: str
    unit: str
    sampling: str
    sample_rate: float
    noise_multiplier: float
    history: list[tuple[float, float, int]]  # (noise multiplier, sample rate, steps), all noised steps
    steps: int
    lost_steps: int
    clipping: str
    max_grad_norm: float
    noise: str
    guaranteed: bool
    repeatable: bool  # by a seed
    status: str
    trained: str
    released: str
    not_covered: list[str]
    warnings: list[str] = field(default_factory=list)
    responsible: str | None = None
    verified: dict[str, Any] | None = None  # what fastdp.verify found before the first step, without its figures
    base_model: dict[str, Any] = field(default_factory=dict)  # revision on the hub, files: {name: SHA-256}
    released_files: dict[str, str] = field(default_factory=dict)  # {name: SHA-256}
    data_commitment: str | None = None  # see `hashes`
    begun: str | None = None  # UTC
    finished: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def guess(self) -> float:
        """Bound on the share of right guesses about membership; 1 where nothing is guaranteed."""
        return guess_of(self.epsilon, self.delta) if self.guaranteed else 1.0

    @property
    def strength(self) -> str:
        """The word for this epsilon; "none" where nothing is guaranteed."""
        if not self.guaranteed:
            return "none"
        return next(word for most, word, _ in STRENGTH if self.epsilon <= most).split(":")[0]

    @property
    def snippet(self) -> str:
        """Python that prints epsilon anew."""
        return (
            "from fastdp.accounting import epsilon_of\n\n"
            "# runs of (noise multiplier, sample rate, steps)\n"
            f"history = {self.history!r}\n"
            f"print(epsilon_of(history, delta={self.delta!r}, accountant={self.accountant!r}))\n"
        )

    def as_json(self) -> str:
        facts = {"schema": SCHEMA, **asdict(self), "strength": self.strength, "guess": self.guess}
        return json.dumps({**facts, "recompute": self.snippet}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def markdown(self) -> str:
        """The page."""
        pair = f"({at_most(self.epsilon, 4)}, {at_most(self.delta, 6)})"
        if self.guaranteed:
            head = (
                f"**{pair}-differential privacy**: {self.neighbours}.\n\n"
                f"In words: someone who knows all the data but one {self.unit}, and sees the model, guesses whether "
                f"that one was trained on rightly with a probability of at most {at_most(100 * self.guess, 6)} % (50 % "
                "is a coin)."
            )
        elif not self.repeatable:  # by an accountant that gives no bound
            head = (
                f"**NO PROVEN BOUND**: about {pair}-differential privacy, {self.neighbours}, by the GDP accountant, "
                f"whose approximation may say too little. The accountant prv gives a bound for the same run.\n\n{_NONE}"
            )
        else:
            head = (
                f"**NO GUARANTEE**: {self.noise}. Without that, the same run would be {pair}-differentially private: "
                f"{self.neighbours}.\n\n{_NONE}"
            )
        rows = {
            "epsilon spent": f"{at_most(self.epsilon, 6)} (budget {self.target_epsilon:g})",
            "delta": at_most(self.delta, 6),
            "accountant": self.accountant.upper() + (
                " (an approximation by the central limit theorem, no upper bound)" if self.accountant == "gdp" else ""
            ),
            "neighbouring data sets": self.neighbours,
            "sampling": self.sampling,
            "sample rate": f"{self.sample_rate:.6g}",
            "noise multiplier": f"{self.noise_multiplier:.6g}",
            "noise": self.noise,
            "steps": f"{self.steps}" + (
                f", and {self.lost_steps} lost in crashes: they are not in the weights, but in epsilon"
                if self.lost_steps else ""
            ),
            "clipping": (
                f"adaptive, from norm {self.max_grad_norm:g} on to the median norm, over all trained weights of a "
                f"{self.unit}; the noisy count that it follows is part of the noise multiplier"
                if self.clipping == "adaptive" else
                f"{self.clipping}, to norm {self.max_grad_norm:g} over all trained weights of a {self.unit}"
            ),
            "trained": self.trained,
            "check before the first step": (
                "not recorded" if self.verified is None else
                f"fastdp.verify on {self.verified['records']} records: exact within {self.verified['tolerance']:g}, "
                "each one's gradient is its own"
            ),
            "run": self.status,
            "begun, finished": f"{self.begun or 'not recorded'}, {self.finished or self.date}",
            "responsible": _plain(self.responsible or "not stated (--responsible)"),
        }  # fmt: skip
        table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        missing = "\n".join(f"- {line}" for line in self.not_covered)
        libraries = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"# Privacy card\n\n`{self.model}`, fine-tuned ({self.task}), {self.date}.\n\n{head}\n\n"
            + "".join(f"> **Warning**: {line}.\n\n" for line in self.warnings) +
            f"| | |\n| --- | --- |\n{table}\n\n{self._legend()}\n\n## Released\n\n{self.released}\n\n"
            f"{self._hashes()}\n\n## Not covered\n\n{missing}\n\n"
            f"## To compute epsilon anew\n\n```python\n{self.snippet}```\n\n## Made with\n\n{libraries}\n"
        )  # fmt: skip

    def _legend(self) -> str:
        """How strong an epsilon is."""
        here = next(place for place, (most, _, _) in enumerate(STRENGTH) if self.epsilon <= most)
        bounds = ("73.2 %", "73.1 to 99.996 %", "more than 99.995 %")
        rows = "\n".join(
            f"| {span}{' (this model)' if place == here and self.guaranteed else ''} | {word} | {bounds[place]} |"
            for place, (_, word, span) in enumerate(STRENGTH)
        )
        return (
            "## How strong an epsilon is\n\n| epsilon | | right guesses, at most |\n| --- | --- | --- |\n"
            f"{rows}\n\nThe tiers are those of Ponomareva et al. (2023), for one {self.unit} added or removed. The "
            "last column is the bound above at a negligible delta; real attacks know less than it assumes."
        )

    def _hashes(self) -> str:
        """SHA-256 of the weights, and the commitment to the data."""
        out = ["## Files, by SHA-256", "", "| file | SHA-256 |", "| --- | --- |"]
        out += [f"| model/{name} | `{value}` |" for name, value in self.released_files.items()]
        out += [f"| {name} of the pre-trained model | `{value}` |" for name, value in
                self.base_model.get("files", {}).items()]  # fmt: skip
        if self.base_model.get("revision"):
            out.append(f"| revision of the pre-trained model on the hub | `{self.base_model['revision']}` |")
        if self.data_commitment:
            out.append(f"| commitment to the training data (HMAC-SHA256, secret key) | `{self.data_commitment}` |")
            out += ["", NO_HASH]
        return "\n".join(out)


def _plain(text: str) -> str:
    """A line in a cell of a table: no mark-up."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def make_card(*, model: str, task: str, plan: Plan, outcome: Outcome, target: float, trained: str, group: str | None,
              evaluated: str, labels: str, adapters: bool, units: int | None = None, replaced: bool = False,
              **more: Any) -> Card:  # fmt: skip
    """The card of a run. group: the column of persons; evaluated: "", "split" (rows of DATA) or "file";
    labels: "" (lm), "data" (read off it) or "given"; units: records (persons) that were trained on;
    replaced: layers that mixed samples; more: of Card."""
    count = outcome.steps + outcome.lost_steps
    history = [(plan.noise_multiplier, plan.sample_rate, count)] if count else []
    unit = "person" if group else "record"
    neighbours = (
        f"one person (all records of one value of {group!r}, at most {plan.max_records_per_group} of them in a step) "
        "added or removed" if group else "one record added or removed"
    )  # fmt: skip
    missing = list(NOT_COVERED) + ([] if group else [SEVERAL])
    epsilon = epsilon_of(list(history), plan.delta, plan.accountant)
    if evaluated:
        whose = "Held-out records of DATA" if evaluated == "split" else "The records of --eval"
        missing.insert(1, f"{whose} were not trained on, but the figures computed from them (accuracy, perplexity, "
                          "calibration) are released without noise.")  # fmt: skip
    if labels == "data":
        missing.insert(1, "The set of labels was read off the data and stands in config.json: give --labels where "
                          "their names are not public.")  # fmt: skip
    secret = "drawn by ChaCha20 from a secret key of the operating system, deleted when the run ended"
    guaranteed = plan.seed is None and plan.accountant != "gdp"
    why = "--seed makes its noise repeatable" if plan.seed is not None else "GDP's epsilon is too small by some"
    nothing = [] if guaranteed else [f"nothing is guaranteed about this model: {why}"]
    return Card(
        model=model, task=task, epsilon=epsilon, target_epsilon=target,
        delta=plan.delta, accountant=plan.accountant, neighbours=neighbours, unit=unit,
        sampling=f"Poisson: each {unit} joins a step's batch independently, {plan.expected_batch_size:g} expected",
        sample_rate=plan.sample_rate, noise_multiplier=plan.noise_multiplier, history=history, steps=outcome.steps,
        lost_steps=outcome.lost_steps, clipping=plan.clipping, max_grad_norm=plan.max_grad_norm,
        noise=secret if plan.seed is None else f"noise and sampling were made repeatable by --seed {plan.seed}, and "
        "whoever knows it can take the noise off",
        guaranteed=guaranteed, repeatable=plan.seed is not None,
        status={"finished": "finished", "interrupted": "interrupted before its last step",
        "budget": "ended early, as steps lost in crashes took part of the budget"}[outcome.status], trained=trained,
        released=("The adapters (and the new head) in `model/`" if adapters else "The weights in `model/`")
        + (_COVERED if guaranteed else ". Nothing is guaranteed about them.")
        + (" Layers that mix samples were replaced: load the weights by from_pretrained(), then call "
           "fastdp.make_compatible(model)." if replaced else ""),
        not_covered=missing, warnings=[*nothing, *weaknesses(epsilon, plan.delta, units, unit)], versions=versions(),
        date=datetime.date.today().isoformat(), **more,
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Of Python and the libraries that took part."""
    found = {"python": platform.python_version()}
    for name in ("fastdp", "torch", "numpy", "opacus", "transformers", "tokenizers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name == "fastdp":
                from .. import __version__

                found[name] = __version__
    return found


def write_card(card: Card, folder: Path) -> None:
    """privacy_card.md and privacy_card.json."""
    files: Mapping[str, Any] = {"privacy_card.md": card.markdown(), "privacy_card.json": card.as_json()}
    for name, text in files.items():
        with new_file(folder / name) as file:
            file.write(text.encode(errors=NO_CHARACTER))
