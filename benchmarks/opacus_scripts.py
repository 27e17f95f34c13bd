"""What an Opacus script gains by changing its import: one step, ordinary, on Opacus, on fastdp.compat.opacus.

    python -m benchmarks.opacus_scripts [--models gpt resnet] [--rounds 9] [--out DIR]

The loop is the one of Opacus's documentation, the same for both; AdamW as torch makes it by default. Medians of
interleaved steps. That the updates are right is held by tests/compat/test_compat_engine.py.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .models import GPT, ResNet
from .timing import Row, append, interleaved, show, versions

LIBRARIES = {"opacus": "opacus", "fastdp": "fastdp.compat.opacus"}
MODES = ("hooks", "ghost")
COLUMNS = ("model", "contender", "step_ms", "ratio", "rounds")


def problem(name: str) -> tuple[nn.Module, TensorDataset]:
    """A model, and one batch as its data."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(), TensorDataset(torch.randint(0, 8192, (8, 128)), torch.randint(0, 8192, (8, 128)))
    return ResNet(), TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))


def script(name: str, package: str = "", mode: str = "hooks") -> Callable[[], None]:
    """The script's step; package: of the PrivacyEngine, "" for ordinary training."""
    model, data = problem(name)
    loader = DataLoader(data, batch_size=len(data))
    optimizer, criterion = torch.optim.AdamW(model.parameters(), lr=1e-4), nn.CrossEntropyLoss()
    if package:
        engine = importlib.import_module(package).PrivacyEngine()
        made = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False, grad_sample_mode=mode, criterion=criterion,
        )  # fmt: skip
        model, optimizer, loader = made[0], made[1], made[-1]
        criterion = made[2] if len(made) == 4 else criterion
    shaped = bool(package) and mode == "ghost" and name == "gpt"

    def step() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            more = {"shape": out.shape} if shaped else {}
            if out.dim() == 3:
                criterion(out.flatten(0, 1), y.flatten(), **more).backward()
            else:
                criterion(out, y).backward()
            optimizer.step()

    return step


def measure(name: str, rounds: int) -> list[Row]:
    """A row a contender."""
    steps = {"non-private": script(name)}
    for title, package in LIBRARIES.items():
        steps |= {f"{title} {mode}": script(name, package, mode) for mode in MODES}
    found = interleaved(steps, torch.device("cpu"), rounds)
    base = found["non-private"]
    return [
        {"model": name, "contender": title, "step_ms": f"{1e3 * spent:.1f}", "ratio": f"{spent / base:.2f}",
         "rounds": rounds, **versions()}
        for title, spent in found.items()
    ]  # fmt: skip


def main() -> None:
    """Measure, print, and add the rows to opacus_scripts.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet"], choices=["gpt", "resnet"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus's backward hooks, and that its generator is not secure
    rows = [row for name in options.models for row in measure(name, options.rounds)]
    show(rows, COLUMNS)
    append(options.out / "opacus_scripts.csv", rows, [*COLUMNS, *versions()])


if __name__ == "__main__":
    main()
