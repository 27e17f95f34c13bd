"""What a finished run leaves in --out: the model, metrics, plots, the privacy card."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from ..utils.formatting import size
from .card import Card, write_card
from .files import PRIVATE, PUBLIC, UNFINISHED, disk_problems
from .hashes import of_folder
from .models import quiet
from .plots import write_plots
from .progress import Progress

AGAIN = "The trained weights are in its checkpoints: the same command with --resume writes what is missing"


def write_outputs(folder: Path, model: nn.Module, tokenizer: Any, progress: Progress, card: Card, task: str,
                  found: Any, simple: Any = None) -> list[str]:  # fmt: skip
    """Write everything; a line for each thing written. Raises SaveError where the disk refuses."""
    with disk_problems(folder, AGAIN):
        lines = [f"model/            {save_model(folder / 'model', model, tokenizer)}, to give away with the card"]
        card.released_files = of_folder(folder / "model")
        write_card(card, folder)
        lines.append("privacy_card.md   what is guaranteed, what is not, how to check it (and .json)")
        progress.close()
        lines.append(
            "metrics.csv       every step: loss, epsilon, metrics" + " (and tensorboard/)" * bool(progress.board)
        )
        plots = write_plots(folder, progress.rows, task, found, progress.epsilon, simple)
        for name in plots:
            (folder / name).chmod(PRIVATE)  # of private records, without noise
        lines.append(f"{', '.join(plots)}")
    return lines


def save_model(folder: Path, model: nn.Module, tokenizer: Any) -> str:
    """save_pretrained of the model (its adapters, if it has any) and of the tokenizer, whole or not at all."""
    unfinished = folder.with_name(folder.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    made: Any = model
    try:
        with quiet():
            made.save_pretrained(str(unfinished))
            tokenizer.save_pretrained(str(unfinished))
        by_umask(unfinished)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    what = "adapters" if hasattr(made, "peft_config") else "weights"
    beside = "tokenizer" if hasattr(tokenizer, "pad_token_id") else "image processor"
    return f"{what} and {beside}, {size(total)}"


def by_umask(folder: Path) -> None:
    """Give the files the mode that the user's umask says; safetensors makes its own readable by their owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else PUBLIC) & ~mask)
