"""The privacy card: what is guaranteed about a model, what is not, and how to check the number."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..accounting import epsilon_of
from .checkpoint import new_file
from .job import Outcome, Plan

NOT_COVERED = (
    "The choice of hyperparameters (learning rate, epochs, length, which weights): if it was made by looking at runs "
    "on the same data, each of those runs cost privacy of its own.",
    "Loss curves and counts in metrics.csv, journal.jsonl, plots and TensorBoard: they are computed from private "
    "records without noise. Do not give them away with the model.",
    "The number of records, from which delta, batch size and steps follow where they were not given: taken as public.",
    "The data that the pre-trained weights and the tokenizer were made from.",
    "Facts about a person that others' records, or the population, show.",
    "Other releases from the same records: budgets add up.",
    "The random numbers are floating-point Gaussians: attacks on their lowest bits are not addressed.",
)


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
    nonfinite: int
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def guess(self) -> float:
        """Bound on the share of right guesses about membership: (e^epsilon + delta) / (1 + e^epsilon)."""
        less = math.exp(-self.epsilon)
        return min(1.0, (1 + self.delta * less) / (1 + less))

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
        return json.dumps({**asdict(self), "recompute": self.snippet}, indent=2, ensure_ascii=False) + "\n"

    def markdown(self) -> str:
        """The page."""
        if self.guaranteed:
            head = f"**({self.epsilon:.4g}, {self.delta:g})-differential privacy**: {self.neighbours}."
        elif not self.repeatable:  # by an accountant that gives no bound
            head = (
                f"**NO PROVEN BOUND**: about ({self.epsilon:.4g}, {self.delta:g})-differential privacy, "
                f"{self.neighbours}, by the GDP accountant, whose approximation may say too little."
            )
        else:
            head = (
                f"**NO GUARANTEE**: {self.noise}. Without that, the same run would be ({self.epsilon:.4g}, "
                f"{self.delta:g})-differentially private: {self.neighbours}."
            )
        rows = {
            "epsilon spent": f"{self.epsilon:.6g} (budget {self.target_epsilon:g})",
            "delta": f"{self.delta:g}",
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
            "clipping": f"{self.clipping}, to norm {self.max_grad_norm:g} over all trained weights of a {self.unit}",
            "trained": self.trained,
            "run": self.status,
        }  # fmt: skip
        table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
        missing = "\n".join(f"- {line}" for line in self.not_covered)
        libraries = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"# Privacy card\n\n`{self.model}`, fine-tuned ({self.task}), {self.date}.\n\n{head}\n\n"
            f"In words: someone who knows all the data but one {self.unit}, and sees the model, guesses whether that "
            f"one was trained on rightly with a probability of at most {100 * self.guess:.4g} % (50 % is a coin).\n\n"
            f"| | |\n| --- | --- |\n{table}\n\n## Released\n\n{self.released}\n\n## Not covered\n\n{missing}\n\n"
            f"## To compute epsilon anew\n\n```python\n{self.snippet}```\n\n## Made with\n\n{libraries}\n"
        )


def make_card(*, model: str, task: str, plan: Plan, outcome: Outcome, target: float, trained: str, group: str | None,
              evaluated: str, labels: str, adapters: bool) -> Card:  # fmt: skip
    """The card of a run. group: the column of persons; evaluated: "", "split" (rows of DATA) or "file";
    labels: "" (lm), "data" (read off it) or "given"."""
    count = outcome.steps + outcome.lost_steps
    history = [(plan.noise_multiplier, plan.sample_rate, count)] if count else []
    unit = "person" if group else "record"
    neighbours = (
        f"one person (all records of one value of {group!r}, at most {plan.max_records_per_group} of them in a step) "
        "added or removed" if group else "one record added or removed"
    )  # fmt: skip
    missing = list(NOT_COVERED)
    if evaluated:
        whose = "Held-out records of DATA" if evaluated == "split" else "The records of --eval"
        missing.insert(1, f"{whose} were not trained on, but the figures computed from them (accuracy, perplexity, "
                          "calibration) are released without noise.")  # fmt: skip
    if labels == "data":
        missing.insert(1, "The set of labels was read off the data and stands in config.json: give --labels where "
                          "their names are not public.")  # fmt: skip
    secret = "drawn by ChaCha20 from a secret key of the operating system, deleted when the run ended"
    return Card(
        model=model, task=task, epsilon=epsilon_of(list(history), plan.delta, plan.accountant), target_epsilon=target,
        delta=plan.delta, accountant=plan.accountant, neighbours=neighbours, unit=unit,
        sampling=f"Poisson: each {unit} joins a step's batch independently, {plan.expected_batch_size:g} expected",
        sample_rate=plan.sample_rate, noise_multiplier=plan.noise_multiplier, history=history, steps=outcome.steps,
        lost_steps=outcome.lost_steps, clipping=plan.clipping, max_grad_norm=plan.max_grad_norm,
        noise=secret if plan.seed is None else f"noise and sampling were made repeatable by --seed {plan.seed}, and "
        "whoever knows it can take the noise off",
        guaranteed=plan.seed is None and plan.accountant != "gdp", repeatable=plan.seed is not None,
        status={"finished": "finished", "interrupted": "interrupted before its last step",
        "budget": "ended early, as steps lost in crashes took part of the budget"}[outcome.status], trained=trained,
        released=("The adapters (and the new head) in `model/`" if adapters else "The weights in `model/`")
        + ". The guarantee covers the weights and the optimizer's moments after every step, so also those in "
        "`checkpoints/`, but not what lies there beside them: the evaluations so far, and the number of records whose "
        "gradient was not finite. Give away `model/` and this card, nothing else of the folder.",
        not_covered=missing, nonfinite=outcome.nonfinite, versions=versions(), date=datetime.date.today().isoformat(),
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
            file.write(text.encode())
