"""What a finished run leaves in --out: the model, plots, the privacy card, and a commitment to the data."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..calibration import reliability_diagram
from ..utils.formatting import size
from .card import write_card
from .files import PRIVATE, disk_problems, new_folder, write
from .plan import Job
from .tasks import headline

AGAIN = "The trained weights are in its checkpoints: the same command with --resume writes what is missing"
COMMITMENT = "data_commitment.json"
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def write_outputs(job: Job, tokenizer: Any, card: dict[str, Any], files: Mapping[str, str],
                  rows: Sequence[Mapping[str, float]]) -> list[str]:  # fmt: skip
    """Write everything; a line for each thing written. files: of the data. Raises SaveError where the disk refuses."""
    out, model = job.options.out, job.model
    owner: Any = model
    with disk_problems(out, AGAIN):
        with new_folder(out / "model") as folder:
            owner.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))
        paths = sorted(path for path in (out / "model").rglob("*") if path.is_file())
        card["released_files"] = {path.relative_to(out / "model").as_posix(): of_file(path) for path in paths}
        card["data_commitment"] = commit(out, files)
        write_card(card, out)
        plots = write_plots(out, rows, job)
    what = "adapters" if hasattr(model, "peft_config") else "weights"
    return [
        f"model/             {what} and tokenizer or image processor, {size(sum(p.stat().st_size for p in paths))}, to "
        "give away with the card",
        "privacy_card.md    what is guaranteed, what is not, how to check it (and .json)",
        f"{', '.join(['metrics.csv', *plots])}  every step: loss, epsilon, metrics",
        "plan.txt           what was said above, and the route of every use of a weight",
        f"{COMMITMENT}  the key of the card's commitment to the data: keep it secret",
    ]  # fmt: skip


def write_plots(folder: Path, rows: Sequence[Mapping[str, float]], job: Job) -> list[str]:
    """training.png and, for a classifier that was evaluated, reliability.png; their names."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    figure, budget = headline(job.options.task), job.plan.target_epsilon
    titles = {"loss": "training loss (NOT private)", "epsilon": f"epsilon spent, of {budget:g}",
              figure: f"{figure} of held-out records"}  # fmt: skip
    panels = Figure(figsize=(12.6, 3.4), layout="constrained").subplots(1, 3)
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot([step for step, _ in points], [value for _, value in points], color="#4477aa", marker=".")
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="step")
    panels[1].axhline(budget, color="#bb5566", ls="--", lw=1)
    simple, found = getattr(job.evaluate, "simple", None), getattr(job.evaluate, "last", None)
    if simple is not None:
        panels[2].axhline(simple.value, color="#bb5566", ls="--", lw=1, label=simple.words)
        panels[2].legend(fontsize=7, frameon=False)
    panels[0].figure.savefig(folder / "training.png", dpi=120)
    names = ["training.png"]
    if found is not None:
        reliability_diagram({"held-out records": found}, folder / "reliability.png")
        names.append("reliability.png")
    for name in names:
        (folder / name).chmod(PRIVATE)  # of private records, without noise
    return names


# ---------------------------------------------------------------------- hashes, of weights and of the data


def of_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def of_weights(model: str) -> dict[str, str]:
    """{name: SHA-256} of the weights and the config.json of a folder or a file; nothing of a name on the hub."""
    place = Path(model).expanduser()
    paths = [place] if place.is_file() else sorted(place.glob("*"))
    return {path.name: of_file(path) for path in paths if path.suffix in _WEIGHTS or path.name == "config.json"}


def of_data(data: Path) -> dict[str, str]:
    """{name: SHA-256} of the file, or of all files of the folder, that is trained on."""
    paths = [data] if data.is_file() else sorted(path for path in data.rglob("*") if path.is_file())
    return {path.relative_to(data.parent).as_posix(): of_file(path) for path in paths}


def commit(folder: Path, files: Mapping[str, str]) -> str:
    """A commitment to the data: HMAC-SHA256 of {name: SHA-256} under a random key that stays with the owner.

    Differential privacy is about someone who has all of a data set but one record. A hash of the data would tell him
    whether a record that he guesses is in it: he hashes both. Without the key, the commitment looks like random bits;
    with it, the owner can prove later what the model was trained on. A run that is taken up again keeps its key. Raises
    SaveError.
    """
    path = folder / COMMITMENT
    try:
        kept = json.loads(path.read_text())
        key = bytes.fromhex(kept["key"]) if kept["files"] == files else secrets.token_bytes(32)
    except (OSError, ValueError, KeyError, TypeError):  # none yet
        key = secrets.token_bytes(32)
    found = hmac.new(key, json.dumps(dict(files), sort_keys=True).encode(), "sha256").hexdigest()
    about = {
        "keep": "secret: with this key, the commitment in the card can be compared with data",
        "key": key.hex(), "files": dict(files), "commitment": found,
    }  # fmt: skip
    write(path, json.dumps(about, indent=2) + "\n")
    return found
