"""A Bayesian network sampled by DP-SGD: SGLD, and SGHMC with momentum, against Hamiltonian Monte Carlo.

With a clipping norm that no gradient reaches, DP-SGD samples exp(-U / T), where T follows from noise, learning rate and
batch (fastdp.mechanisms.temperature). This program samples two posteriors, of a logistic regression and of a network
with a hidden layer, on a small data set of cells (benign or not; 10 measurements each, from scikit-learn). It compares
predictions averaged over samples with those of a long chain of Hamiltonian Monte Carlo.

    python examples/bayesian.py [--full] [--seed 0]

prints, for each way, the negative log-likelihood and the expected calibration error on cells that were left out, and
epsilon. All iterates are accounted for, so that averages cost no more than the last one. Epsilon of the posterior
itself (T = 1) is large; a likelihood to the power 1 / T costs less, and the rows with T = 4 show what it is worth.
"""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fastdp
from fastdp.calibration import calibration
from fastdp.mechanisms import check_unclipped, noise_multiplier_for_temperature

DELTA, RECORDS = 1e-3, 200
PRIOR = 1.0  # standard deviation of each weight
RADIUS = 3.0  # of the inputs
WIDTH = 8
EVERY = 3  # steps between samples that are averaged
HEADER = f"{'':12s} {'sampler':14s} {'NLL':>6s} {'ECE':>6s} {'from HMC':>9s} {'epsilon':>8s}"

# Middle and width of each column. They must not be computed from the records, so they stand here, rounded.
MIDDLES = (14, 19, 92, 650, 0.1, 0.1, 0.1, 0.05, 0.18, 0.06)
WIDTHS = (3.5, 4, 24, 350, 0.014, 0.05, 0.08, 0.04, 0.03, 0.007)


class Cells(NamedTuple):
    """Records to train on, and others to predict."""

    x: Tensor
    y: Tensor
    others: Tensor
    labels: Tensor


class Problem(NamedTuple):
    """A network, and a bound of its gradients that is known before the data are."""

    name: str
    model: nn.Module
    bound: float
    leap: float  # step of Hamiltonian Monte Carlo


class Way(NamedTuple):
    """How to sample."""

    name: str
    momentum: float = 0.0
    temperature: float = 1.0


WAYS = (Way("SGLD"), Way("SGHMC", 0.9), Way("SGHMC, T = 4", 0.9, 4.0))


def cells() -> Cells:
    data = load_breast_cancer()
    x = torch.tensor(data.data[:, :10], dtype=torch.float32)
    x = (x - torch.tensor(MIDDLES)) / torch.tensor(WIDTHS)
    x = x / (x.norm(dim=1, keepdim=True) / RADIUS).clamp(min=1)  # each record by itself
    y = torch.tensor(data.target, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, rest = order[:RECORDS], order[RECORDS:]
    return Cells(x[train], y[train], x[rest], y[rest])


def problems() -> list[Problem]:
    """The gradient of a regression is (p - y) (x, 1), so no longer than |(x, 1)|.

    That of the network has the part (p - y) (h, 1) with |h| <= sqrt(WIDTH), and rows of (p - y) v (x, 1), v the upper
    weights: of the prior's length sqrt(WIDTH), with room for half as much again.
    """
    inputs = math.sqrt(RADIUS**2 + 1)
    network = nn.Sequential(nn.Linear(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    above = math.hypot(math.sqrt(WIDTH + 1), 1.5 * math.sqrt(WIDTH) * inputs)
    return [Problem("regression", nn.Linear(10, 1), inputs, 0.1), Problem("network", network, above, 0.06)]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(x)[:, 0], y)


def probability(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)[:, 0].sigmoid().double()


def private(data: Cells, problem: Problem, way: Way, lasts: float, step: float, seed: int) -> tuple[Tensor, float]:
    """Sample by DP-SGD on all records at once: probabilities, averaged over the samples, and epsilon.

    Args:
        lasts: how long the chain is, in the time of Langevin dynamics. A weight that the data say nothing of forgets
            where it began in the time PRIOR^2. Epsilon depends on it, whatever the step is.
        step: h of Langevin dynamics.
    """
    torch.manual_seed(seed)
    model, records = copy.deepcopy(problem.model), len(data.x)
    numbers = dict(lr=step * records, max_grad_norm=problem.bound)
    sigma = noise_multiplier_for_temperature(
        way.temperature, batch_size=records, records=records, momentum=way.momentum, **numbers
    )
    # the prior's share: times T, so that a temperature is one of the likelihood alone
    decay = way.temperature / PRIOR**2 / records
    fastdp.verify(model, lambda m, batch: loss(m, *batch), (data.x, data.y))
    optimizer = fastdp.DPSGD(
        model, noise_multiplier=sigma, momentum=way.momentum, weight_decay=decay, seed=seed,
        expected_batch_size=records, sample_rate=1.0, **numbers,
    )  # fmt: skip
    steps, samples = math.ceil(lasts * (1 - way.momentum) / step), []
    for number in range(steps):
        loss(model, data.x, data.y).backward()
        check_unclipped(optimizer)  # epsilon does not account for whether it raises: the bound is known beforehand
        optimizer.step()
        optimizer.zero_grad()
        if number >= steps // 3 and number % EVERY == 0:
            samples.append(probability(model, data.others))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the noise comes from seed=")
        epsilon = optimizer.epsilon(DELTA)
    optimizer.detach()
    return torch.stack(samples).mean(0), epsilon


def reference(data: Cells, problem: Problem, temperature: float, samples: int, seed: int) -> Tensor:
    """The same probabilities by Hamiltonian Monte Carlo: not private, and without an error of the step."""
    draw = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(problem.model)
    parameters = list(model.parameters())

    def energy(theta: Tensor) -> tuple[float, Tensor]:
        vector_to_parameters(theta, parameters)
        value = loss(model, data.x, data.y) * (len(data.x) / temperature)
        gradient = parameters_to_vector(torch.autograd.grad(value, parameters))
        return float(value.detach() + theta.square().sum() / (2 * PRIOR**2)), gradient + theta / PRIOR**2

    theta = parameters_to_vector(parameters).detach().clone()
    height, gradient = energy(theta)
    found, taken, burn = [], 0, samples // 5
    for number in range(burn + samples):
        speed = torch.randn(theta.shape, generator=draw)
        before = height + float(speed.square().sum()) / 2
        place, slope = theta, gradient
        for _ in range(20):
            speed = speed - problem.leap / 2 * slope
            place = place + problem.leap * speed
            after, slope = energy(place)
            speed = speed - problem.leap / 2 * slope
        fall = before - after - float(speed.square().sum()) / 2
        if float(torch.rand((), generator=draw)) < math.exp(min(0.0, fall)):
            theta, height, gradient = place, after, slope
            taken += 1
        if number >= burn:
            vector_to_parameters(theta, parameters)
            found.append(probability(model, data.others))
    assert taken > 0.5 * (burn + samples), "the step of the reference is too long"
    return torch.stack(found).mean(0)


def row(data: Cells, start: str, found: Tensor, truth: Tensor, epsilon: float = math.inf) -> str:
    """A line of the table. "from HMC" is the mean distance of probabilities."""
    result = calibration(torch.stack([1 - found, found], 1), data.labels.long(), probabilities=True)
    return f"{start} {result.nll:6.3f} {result.ece:6.3f} {float((found - truth).abs().mean()):9.3f} {epsilon:8.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="chains and references ten times as long (minutes)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--seed", type=int, default=0, help="of everything, noise too: for figures that repeat")
    options = parser.parse_args(arguments)
    data, seed = cells(), options.seed
    torch.manual_seed(seed)
    longer = 10 if options.full else 0.05 if options.quick else 1
    lasts, step, samples = 6 * PRIOR**2 * longer, 0.002, max(20, int(300 * longer))
    print(f"{RECORDS} records, {len(data.labels)} to predict; chains of the length {lasts:g}, step {step}")
    print(f"epsilon at delta {DELTA} of all samples of a chain, averaged or not\n{HEADER}")
    for problem in problems():
        truths = {heat: reference(data, problem, heat, samples, seed) for heat in (1.0, 4.0)}
        for heat, truth in truths.items():
            print(row(data, f"{problem.name:12s} {f'HMC, T = {heat:g}':14s}", truth, truth))
        for way in WAYS if options.full or problem.name == "regression" else WAYS[1:]:
            found, spent = private(data, problem, way, lasts, step, seed)
            print(row(data, f"{problem.name:12s} {way.name:14s}", found, truths[way.temperature], spent))


if __name__ == "__main__":
    main()
