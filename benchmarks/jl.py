"""Norms estimated by random projections (DP-SGD-JL) against exact norms: time, memory, error and epsilon.

    python -m benchmarks.jl [--rounds 5] [--model gpt] [--small]

DP-SGD-JL (Bu et al. 2021, Fast and memory efficient differentially private SGD via JL projections) estimates the norm n
of a sample's gradient by the root mean square of k directional derivatives along random normal directions: n' is n
times sqrt(chi / k), with chi distributed as chi-squared of k degrees of freedom. The sample is clipped by n', so that
its share of the sum is as long as R sqrt(k / chi), not R. A step is k forward derivatives and a weighted backward.

Epsilon: directions do not depend on the data, so that epsilon is no larger than if they were published with each step.
Given them, a step is a Gaussian mechanism of the sensitivity R sqrt(k / chi). Its privacy loss is thus a mixture over
chi, which `epsilon` puts on a grid and composes by Fourier transform. No Renyi divergence of it is finite: 1 / chi is
unbounded, and exp(c / chi) has no mean.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import gammaincinv, ndtr
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastdp

from .memory import fresh_mib, resident_kib
from .models import GPT, ResNet
from .timing import keep_memory

PROJECTIONS = (8, 32, 128)
RATE, STEPS, DELTA = 0.01, 1000, 1e-5
WORKLOADS = {
    "mlp": ("an MLP 784-512-512-10", (128, 784), lambda: nn.Sequential(
        nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))),
    "resnet": ("a ResNet of 3-32-64 channels, 32x32", (8, 3, 32, 32), lambda: ResNet((32, 64))),
    "gpt": ("a GPT of 2 layers, width 128, 64 tokens", (8, 64), lambda: GPT(2, 128, 4, 64, 1000)),
}  # fmt: skip
Step = Callable[[], object]


# ---------------------------------------------------------------------- steps


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One a sample, [B]."""
    out = model(x)
    if out.dim() == 2:
        return nn.functional.cross_entropy(out, y, reduction="none")
    return nn.functional.cross_entropy(out.transpose(1, 2), y, reduction="none").mean(1)


def projected_norms(model: nn.Module, x: Tensor, y: Tensor, projections: int) -> Tensor:
    """Norms [B] estimated by that many forward derivatives along normal directions."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def of(values: dict[str, Tensor]) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(model, values):
            return losses(model, x, y)

    total = torch.zeros(len(x))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the others have no forward derivative
        for _ in range(projections):
            along = {name: torch.randn_like(p) for name, p in parameters.items()}
            total += torch.func.jvp(of, (parameters,), (along,))[1].square()
    return (total / projections).sqrt()


def made(name: str, kind: str) -> Step:
    """A step without noise, of kind "ordinary", "exact" or the number of projections."""
    _, shape, build = WORKLOADS[name]
    torch.manual_seed(0)
    model = build()
    if name == "gpt":
        x = torch.randint(0, 1000, shape)
        y = x.roll(-1, 1)
    else:
        x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])
    if kind == "exact":
        options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": len(x)}
        optimizer: torch.optim.Optimizer = fastdp.DPSGD(model, lr=1e-3, **options)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        factors: Tensor | float = 1.0
        if kind.isdigit():
            factors = (1 / projected_norms(model, x, y, int(kind))).clamp(max=1.0)
        (losses(model, x, y) * factors).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(name: str, kinds: list[str], rounds: int) -> dict[str, float]:
    """CPU time of a step: medians of interleaved rounds, and one measurement of what takes many projections."""
    steps = {kind: made(name, kind) for kind in kinds}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_ in range(-1, rounds):
        for kind, step in steps.items():
            if kind.isdigit() and int(kind) > 8 and round_:
                continue
            begin = time.process_time()
            step()
            if round_ >= 0:
                taken[kind].append(1e3 * (time.process_time() - begin))
    return {kind: statistics.median(values) for kind, values in taken.items()}


def peak_mib(name: str, kind: str) -> float:
    """What three steps in a fresh process add to its peak of memory."""
    return fresh_mib("benchmarks.jl", [name, kind])


def measure(name: str, kind: str) -> float:
    """In the fresh process, where a step of each kind on another model has loaded what it needs."""
    warm = nn.Linear(2, 2)
    projected_norms(warm, torch.randn(2, 2), torch.zeros(2, dtype=torch.long), 1)
    before = resident_kib()
    step = made(name, kind)
    for _ in range(3):
        step()
    return (resident_kib() - before) / 1024


# ---------------------------------------------------------------------- epsilon


def epsilon(
    sigma: float, projections: int | None, rate: float = RATE, steps: int = STEPS, delta: float = DELTA
) -> float:
    """Epsilon of Poisson sampling with noise sigma R, clipped by estimated norms; None: by exact ones."""
    return max(_one_way(sigma, projections, rate, steps, delta, removed) for removed in (True, False))


def sensitivities(projections: int | None, parts: int = 80, least: float = 1e-15) -> tuple[list[float], list[float]]:
    """Values of sqrt(k / chi), each in the middle of its part of the distribution, and their probabilities."""
    if projections is None:
        return [1.0], [1.0]
    ends = np.concatenate([np.logspace(math.log10(least), -2, 3 * parts // 4), np.linspace(0.01, 1, parts // 4)[1:]])
    values = np.sqrt(projections / (2 * gammaincinv(projections / 2, (ends[1:] + ends[:-1]) / 2)))
    return values.tolist(), np.diff(ends).tolist()  # what is below `least` counts as a breach


def _one_way(sigma: float, projections: int | None, rate: float, steps: int, delta: float, removed: bool) -> float:
    size, cell = 2**17, 4e-4
    loss = (np.arange(size) - size // 2) * cell
    edges = np.concatenate([loss - cell / 2, [loss[-1] + cell / 2]])
    mass = np.zeros(size)
    for length, chance in zip(*sensitivities(projections), strict=True):
        mu = length / sigma
        # where the loss log(1 - q + q exp(mu y - mu^2 / 2)) of a draw y is at an edge
        with np.errstate(divide="ignore", invalid="ignore"):
            place = np.log(np.maximum(np.exp(edges if removed else -edges) - (1 - rate), 0) / rate) / mu + mu / 2
        below = (1 - rate) * ndtr(place) + rate * ndtr(place - mu) if removed else ndtr(-place)
        mass += chance * np.diff(below)
    breach = -math.expm1(steps * math.log(min(1.0, mass.sum())))  # losses beyond the grid
    whole = np.fft.rfft(np.fft.ifftshift(mass / mass.sum()))
    composed = np.fft.fftshift(np.fft.irfft(whole**steps, size)).clip(min=0)

    def spent(at: float) -> float:
        over = loss > at
        return float(breach + (composed[over] * -np.expm1(at - loss[over])).sum())

    low, high = 0.0, float(loss[-1])
    if spent(high) > delta:
        return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return high


def sigma_for(target: float, projections: int | None) -> float:
    """The noise multiplier that spends the target."""
    low, high = 0.3, 8.0
    while high - low > 2e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon(middle, projections) > target else (low, middle)
    return high


def main() -> None:
    if "--memory-of" not in sys.argv:
        keep_memory("benchmarks.jl")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=[*WORKLOADS, "none"], help="this model only; none: epsilon only")
    parser.add_argument("--small", action="store_true", help="the first model and k = 8 only, to see that it runs")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(measure(*json.loads(options.memory_of)))
        return
    some = PROJECTIONS[:1] if options.small else PROJECTIONS
    kinds = ["ordinary", "exact", *map(str, some)]
    print("| model | step | CPU time, over ordinary | peak memory, over ordinary |\n| --- | --- | --- | --- |")
    for name in list(WORKLOADS)[: 1 if options.small else None]:
        if options.model not in (None, name):
            continue
        times = milliseconds(name, kinds, options.rounds)
        memory = {kind: peak_mib(name, kind) for kind in kinds}
        for kind in kinds:
            label = f"{kind} projections" if kind.isdigit() else kind
            ratios = f"{times[kind] / times['ordinary']:.2f} | {memory[kind] / memory['ordinary']:.2f}"
            print(f"| {WORKLOADS[name][0]} | {label} | {ratios} |")
    print(f"\nepsilon of {STEPS} steps at rate {RATE} and delta {DELTA}, and the noise that spends 2")
    print("| norms | standard error | epsilon at sigma 1 | sigma at epsilon 2 |\n| --- | --- | --- | --- |")
    for projections in (None, *some):
        label, error = (
            ("exact", "0") if projections is None else (f"k = {projections}", f"{(2 * projections) ** -0.5:.0%}")
        )
        spent = epsilon(1.0, projections)
        said = "over 26" if math.isinf(spent) else f"{spent:.2f}"  # where the grid ends
        print(f"| {label} | {error} | {said} | {sigma_for(2.0, projections):.3f} |", flush=True)


if __name__ == "__main__":
    main()
