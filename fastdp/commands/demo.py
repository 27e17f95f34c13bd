"""The demo: scikit-learn's digits, trained privately to a stated epsilon.

It downloads nothing. It prints one table (accuracy, epsilon, calibration, and the step time of ordinary training,
fastdp and Opacus) and writes a reliability diagram and the loss curves as PNG.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..accounting import noise_multiplier_for
from ..calibration import Calibration, calibration, reliability_diagram
from ..optim.optimizers import DPAdamW
from ..sampling import poisson_loader
from ..utils.extras import install_command
from ..utils.progress_bar import Bar
from ..verification.verify import verify
from .parsing import aligned

EPSILON, DELTA, EPOCHS, BATCH, LR, R = 3.0, 1e-4, 40, 128, 5e-3, 1.0


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 8x8 images of handwritten digits: 1,437 to train on, 360 to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(f"the demo needs scikit-learn and matplotlib: {install_command('demo')}") from None
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return x[train], y[train], x[test], y[test]


def network() -> nn.Module:
    """A small convolutional network with GroupNorm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 10),
    )  # fmt: skip


def train_privately(x: Tensor, y: Tensor) -> tuple[nn.Module, list[float], float, float]:
    """Train to EPSILON at DELTA; returns the model, losses by step, the epsilon spent and the noise multiplier."""
    model = network()
    print(verify(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x[:8], y[:8])))
    loader = poisson_loader(torch.utils.data.TensorDataset(x, y), expected_batch_size=BATCH)
    steps = EPOCHS * loader.steps_per_epoch
    sigma = noise_multiplier_for(target_epsilon=EPSILON, delta=DELTA, sample_rate=loader.sample_rate, steps=steps)
    optimizer = DPAdamW(model, lr=LR, noise_multiplier=sigma, max_grad_norm=R, clipping="automatic")
    losses = train(model, optimizer, loader, steps, f"private, noise {sigma:.2f}")
    spent = optimizer.epsilon(DELTA)
    optimizer.detach()
    return model, losses, spent, sigma


def train_ordinarily(x: Tensor, y: Tensor) -> tuple[nn.Module, list[float]]:
    """The same without privacy."""
    model = network()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return model, train(model, optimizer, loader, EPOCHS * len(loader), "non-private")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, steps: int, text: str) -> list[float]:
    """EPOCHS passes; the losses by step."""
    bar, losses = Bar(steps), list[float]()
    for _ in range(EPOCHS):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            bar.at(len(losses), text)
    return losses


def step_times(x: Tensor, y: Tensor, rounds: int = 30) -> dict[str, float]:
    """Medians of interleaved steps, in milliseconds, batch BATCH; Opacus if it is installed."""
    x, y = x[:BATCH], y[:BATCH]
    private: dict[str, Any] = {"max_grad_norm": R, "noise_multiplier": 1.0, "expected_batch_size": BATCH}
    plain, ours = network(), network()
    pairs: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {
        "non-private": (plain, torch.optim.AdamW(plain.parameters(), lr=LR)),
        "fastdp": (ours, DPAdamW(ours, lr=LR, **private)),
    }
    with contextlib.suppress(ImportError):
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        theirs = GradSampleModule(network())
        pairs["Opacus hooks"] = theirs, DPOptimizer(torch.optim.AdamW(theirs.parameters(), lr=LR), **private)
    times: dict[str, list[float]] = {name: [] for name in pairs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus's backward hooks
        for _ in range(rounds + 3):
            for name, (model, optimizer) in pairs.items():
                start = time.perf_counter()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[3:]) for name, values in times.items()}


def write_losses(curves: dict[str, list[float]], path: Path) -> None:
    """Training loss by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for (name, losses), colour in zip(curves.items(), ("#bb5566", "#4477aa"), strict=False):
        axes.plot(losses, label=name, color=colour, lw=1.2)
    axes.set(xlabel="step", ylabel="training loss (mean of the batch)", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def table(results: dict[str, Calibration], spent: float, times: dict[str, float]) -> str:
    """The demo's one table."""
    head = ("", "accuracy", "epsilon", "NLL", "ECE", "step")
    rows = []
    for name in dict.fromkeys([*results, *times]):
        found, ms = results.get(name), times.get(name)
        rows.append((
            name,
            f"{100 * found.accuracy:.1f} %" if found else "",
            {"fastdp": f"{spent:.2f}", "non-private": "inf"}.get(name, ""),
            f"{found.nll:.3f}" if found else "",
            f"{100 * found.ece:.1f} %" if found else "",
            f"{ms:.2f} ms ({ms / times['non-private']:.2f}x)" if ms else "",
        ))  # fmt: skip
    return aligned([head, *rows])


def main(out: Path) -> None:
    """Run the demo; PNGs go to the folder `out`."""
    x, y, x_test, y_test = digits()
    out.mkdir(parents=True, exist_ok=True)
    model, private_losses, spent, sigma = train_privately(x, y)
    ordinary, losses = train_ordinarily(x, y)
    results = {}
    with torch.no_grad():
        for name, trained in (("non-private", ordinary.eval()), ("fastdp", model.eval())):
            results[name] = calibration(trained(x_test), y_test)
    times = step_times(x, y)
    print(f"\ndigits: 1,437 to train on, 360 to test; {EPOCHS} epochs, batch {BATCH}, noise multiplier {sigma:.2f}")
    print(table(results, spent, times))
    print(
        f"fastdp: ({spent:.2f}, {DELTA:g})-differentially private, PRV accountant, Poisson sampling, add or remove one"
    )
    write_losses({"fastdp": private_losses, "non-private": losses}, out / "loss.png")
    reliability_diagram(results, out / "reliability.png")
    print(f"wrote {out / 'reliability.png'} and {out / 'loss.png'}")
