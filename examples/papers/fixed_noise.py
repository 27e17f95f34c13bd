"""Fact 4.1 of the convergence paper: in the limit of small learning rates noise does not change convergence.

    python examples/papers/fixed_noise.py [--quick] [--seeds 5] [--plots DIR]

No data is read: a small network learns the outputs of another on 512 random records, full batch, by fastdp's DPSGD
with one clipping and several noise multipliers. Each learning rate eta trains for the same time eta x steps. The
noise in the weights after a time t has the standard deviation sigma R / B sqrt(eta t): it goes to 0 with eta, and so
should the distance of the loss curve from the one without noise. Clipping, which stays, changes the curve at every
eta.

That is a statement about gradient flow. At one eta more noise is worse, and a smaller eta takes more steps, each of
which costs privacy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fastdp
from examples.papers import common
from fastdp.utils.progress_bar import Bar

RECORDS, FEATURES, WIDTH, R = 512, 8, 32, 0.1
TIME, POINTS = 64.0, 16  # of training, and moments at which the loss is kept
RATES = (0.25, 0.0625, 0.015625)
SIGMAS = (0.0, 4.0, 16.0, 64.0)
UNCLIPPED = 1e6


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def task(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The network that learns, records and targets."""
    torch.manual_seed(seed)
    teacher, student, x = network(), network(), torch.randn(RECORDS, FEATURES)
    with torch.no_grad():
        y = teacher(x)
        return student, x, (y - y.mean()) / y.std()


def train(seed: int, rate: float, sigma: float, radius: float) -> Tensor:
    """The loss at POINTS + 1 moments, the same for every learning rate."""
    model, x, y = task(seed)
    steps = round(TIME / rate)
    optimizer = fastdp.DPSGD(model, lr=rate, noise_multiplier=sigma, max_grad_norm=radius, expected_batch_size=RECORDS)
    losses, bar = [], Bar(steps)
    for step in range(steps):
        loss = (model(x) - y).square().mean()
        if step % (steps // POINTS) == 0:
            losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.at(step + 1, f"rate {rate:g}, noise {sigma:g}")
    optimizer.detach()
    with torch.no_grad():
        losses.append(float((model(x) - y).square().mean()))
    return torch.tensor(losses, dtype=torch.float64)


def picture(curves: dict[tuple[float, float], list[Tensor]], path: Path) -> None:
    """A plot for each learning rate, a curve for each noise: mean of the seeds, and the band of one deviation."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(rate for rate, _ in curves))
    figure = Figure(figsize=(3.6 * len(rates), 3.6), layout="constrained")
    plots = figure.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axes, rate in zip(plots, rates, strict=True):
        for colour, (key, found) in zip(("black", "#4477aa", "#228833", "#bb5566"),
                                        ((k, v) for k, v in curves.items() if k[0] == rate), strict=False):  # fmt: skip
            stacked = torch.stack(found)
            mean, std = stacked.mean(0), stacked.std(0, correction=0)
            moments = torch.linspace(0, TIME, POINTS + 1)
            axes.plot(moments, mean, color=colour, label=f"noise {key[1]:g}")
            axes.fill_between(moments, mean - std, mean + std, color=colour, alpha=0.15, lw=0)
        axes.set(xlabel="time: learning rate x steps", title=f"learning rate {rate:g}", yscale="log")
    plots[0].set(ylabel="training loss")
    plots[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> dict[tuple[float, float], list[Tensor]]:
    """Train all, print, write rows; returns the losses by (learning rate, noise), a curve a seed."""
    options = common.parser(__doc__ or "").parse_args(arguments)
    rates = RATES[:2] if options.quick else RATES
    sigmas = (SIGMAS[0], SIGMAS[2]) if options.quick else SIGMAS
    curves: dict[tuple[float, float], list[Tensor]] = {(rate, sigma): [] for rate in rates for sigma in sigmas}
    for seed in common.seeds(options):
        for rate in rates:
            quiet = torch.zeros(0)
            for sigma, radius in (*((sigma, R) for sigma in sigmas), (0.0, UNCLIPPED)):
                start = time.perf_counter()
                found = train(seed, rate, sigma, radius)
                quiet = found if sigma == 0 and radius == R else quiet
                if radius == R:
                    curves[rate, sigma].append(found)
                metrics = {
                    "last loss": float(found[-1]),
                    "largest distance from no noise": float((found - quiet).abs().max() / quiet[0]),
                }
                case = f"eta {rate:g}, " + (f"noise {sigma:g}" if radius == R else "neither noise nor clipping")
                print(f"seed {seed}, {case}: " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()), flush=True)
                common.write(options.out, common.rows(
                    options, "Fact 4.1, fixed noise", case, "quick" if options.quick else "full", seed, metrics,
                    train_records=RECORDS, steps=round(TIME / rate), batch=RECORDS, sigma=sigma, lr=rate, R=radius,
                    clipping="local", style="flat", seconds=time.perf_counter() - start,
                ))  # fmt: skip
    path = common.picture(options, "fixed_noise")
    if path is not None:
        picture(curves, path)
    return curves


if __name__ == "__main__":
    main()
