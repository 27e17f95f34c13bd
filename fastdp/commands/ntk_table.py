"""Table 1 of the convergence paper, measured: the effect of each way of clipping on the NTK and on the loss.

Random small networks (tanh, three layers, one output) learn random data by gradient descent with a small step, in
float64. A property that the paper guarantees must hold in every network; a property that it does not guarantee should
fail in some. The columns say whether K (see `fastdp.ntk`) is symmetric, positive in quadratic form, and positive in
eigenvalues at every moment examined; whether the loss converges and whether it never rises; and whether it is zero in
the end, of the networks whose loss converges: that is the paper's condition.

Converges is what can be seen in finitely many steps: the loss is at ZERO of its first value, or its logarithm moves by
less than SETTLED in the second half of the steps.

Source: Bu, Wang, Dai, Long (TMLR 2023, arXiv 2106.07830), Table 1.
"""

from __future__ import annotations

import copy
import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..ntk import NTK, Positivity, ntk, positivity
from ..optim.clipping import Clipping
from ..utils.progress_bar import Bar
from .parsing import aligned

COLUMNS = ("symmetric", "positive in quadratic form", "positive in eigenvalues", "loss converges",
           "loss never rises", "zero loss, if it converges")  # fmt: skip
SAMPLES, FEATURES, WIDTH = 8, 3, 16
SMALL, LARGE = 0.1, 1e4  # R over the median norm of the network's per-sample gradients before training
SPREAD = 0.5  # of the logarithms of the sizes of records and targets
RATE = 0.1  # learning rate times the largest eigenvalue of H / samples before training; above 2 it diverges
ZERO = 1e-3  # of the first loss: reached
SETTLED = 0.01  # of the loss's logarithm
MOMENTS = 6  # at which the matrix is looked at


class Row(NamedTuple):
    """A way of clipping; paper: what its Table 1 guarantees, by COLUMNS, or None where it has no such row."""

    name: str
    matrix: str
    clipping: str  # of fastdp.optim.clipping, or "none" or "batch"
    ratio: float
    style: str
    paper: tuple[bool, ...] | None


ALL = (True,) * 6
ROWS = (
    Row("no clipping", "H", "none", 1.0, "flat", ALL),
    Row("batch clipping", "c H", "batch", SMALL, "flat", ALL),
    Row("large R, flat", "H C", "local", LARGE, "flat", ALL),
    Row("large R, layerwise", "sum_r H_r C_r", "local", LARGE, "layerwise", ALL),
    Row("small R, flat", "H C", "local", SMALL, "flat", (False, False, True, False, False, True)),
    Row("small R, layerwise", "sum_r H_r C_r", "local", SMALL, "layerwise", (False,) * 6),
    Row("automatic, flat", "H C", "automatic", SMALL, "flat", None),
    Row("global, R the median", "H C", "global", 1.0, "flat", None),
)


class Result(NamedTuple):
    """Of one row: in how many of the networks each property held, by COLUMNS (the last: at zero, all of which count as
    converged); the median of last loss / first loss."""

    row: Row
    networks: int
    held: tuple[int, ...]
    left: float

    @property
    def of(self) -> tuple[int, ...]:
        """Of how many networks, by COLUMNS: of the last, of those that converged."""
        return (*(self.networks,) * 5, self.held[3])


class Networks(NamedTuple):
    """S networks side by side, each with data of its own: x [S, B, features], y [S, B]; scale [S]: R of ratio 1."""

    template: nn.Module
    weights: dict[str, Tensor]  # [S, *shape]
    x: Tensor
    y: Tensor
    rate: Tensor  # [S]: learning rates
    scale: Tensor


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    ).double()


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """(f - y)^2 / 2 of each sample: [B]."""
    return (outputs[:, 0] - targets).square() / 2


def draw(networks: int, seed: int) -> Networks:
    """Networks and data; a few records and targets are far larger than the others, as clipping is for."""
    models, xs, ys, rates, scales = [], [], [], [], []
    for number in range(networks):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 100_003 + number)
            model = network()
            size = torch.randn(SAMPLES, 2, dtype=torch.float64).mul(SPREAD).exp()
            x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64) * size[:, :1]
            y = torch.randn(SAMPLES, dtype=torch.float64) * size[:, 1]
        kernel = ntk(model, x, y, loss_of)
        rates.append(RATE * SAMPLES / float(torch.linalg.eigvalsh(kernel.matrix)[-1]))
        scales.append(float(kernel.norms(kernel.clipping())[0].median()))
        models.append(dict(model.named_parameters()))
        xs.append(x)
        ys.append(y)
    weights = {name: torch.stack([m[name].detach() for m in models]) for name in models[0]}
    double = torch.float64
    return Networks(
        network(), weights, torch.stack(xs), torch.stack(ys), torch.tensor(rates, dtype=double),
        torch.tensor(scales, dtype=double),
    )  # fmt: skip


class Step(NamedTuple):
    """New weights, and before the step the mean losses [S] and the cosines [S] of -(sum of gradients) and the step:
    gradient flow lowers the loss where it is negative."""

    weights: dict[str, Tensor]
    losses: Tensor
    cosine: Tensor


def descend(nets: Networks, row: Row, weights: dict[str, Tensor], going: Tensor | None = None) -> Step:
    """A step of gradient descent on clipped gradients, of the networks that are still `going` [S] (default: all).

    The learning rate is over the largest factor of a network: the same flow, in steps that its K can stand.
    """
    gradients, losses = per_sample(nets, weights)
    squares: dict[str, Any] = {}
    for name, gradient in gradients.items():
        layer = name.rpartition(".")[0]
        squares[layer] = squares.get(layer, 0) + gradient.flatten(2).square().sum(2)  # [S, B]
    factors = _factors(nets, row, squares, gradients)
    rate = nets.rate / torch.stack(list(factors.values())).amax((0, 2)).clamp(min=1e-6) / SAMPLES
    rate = rate if going is None else rate * going
    new, sums = {}, torch.zeros(3, len(rate), dtype=torch.float64)
    for name, gradient in gradients.items():
        u, each = gradient.sum(1).flatten(1), gradient.flatten(2)
        v = (each * factors[name.rpartition(".")[0]][..., None]).sum(1)
        sums += torch.stack([(u * v).sum(1), (u * u).sum(1), (v * v).sum(1)])
        new[name] = weights[name] - (rate[:, None] * v).view_as(weights[name])
    return Step(new, losses.mean(1), -sums[0] / (sums[1] * sums[2]).sqrt().clamp(min=1e-300))


def per_sample(nets: Networks, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """({name: gradients [S, B, *shape]}, losses [S, B])."""

    def loss(one: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_of(functional_call(nets.template, one, (x[None],)), y[None])[0]

    return vmap(vmap(grad_and_value(loss), (None, 0, 0)))(weights, nets.x, nets.y)


def _factors(nets: Networks, row: Row, squares: dict[str, Tensor], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clip factors of each layer: [S, B]. squares: of its per-sample norms."""
    radius, plain = row.ratio * nets.scale, torch.ones_like(nets.y)
    if row.clipping == "none":
        return dict.fromkeys(squares, plain)
    if row.clipping == "batch":
        whole = torch.stack([g.sum(1).flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        return dict.fromkeys(squares, plain * (radius / whole.clamp(min=1e-300)).clamp(max=1)[:, None])
    rule = Clipping(dict(nets.template.named_parameters()), row.clipping, 1.0, row.style)  # of norms over R
    parts = [part / radius[:, None] ** 2 for part in squares.values()]
    parts = parts if row.style == "layerwise" else [torch.stack(parts).sum(0)]
    found = [c.double().view_as(plain) for c in rule.factors([part.flatten() for part in parts])]
    return dict(zip(squares, found if row.style == "layerwise" else found * len(squares), strict=True))


def kernel_of(nets: Networks, weights: dict[str, Tensor], number: int) -> NTK:
    """The NTK of one of the networks, by the library."""
    model = copy.deepcopy(nets.template)
    model.load_state_dict({name: w[number] for name, w in weights.items()})
    return ntk(model, nets.x[number], nets.y[number], loss_of)


def looked_at(nets: Networks, row: Row, weights: dict[str, Tensor]) -> list[Positivity]:
    """What the matrix of each network is."""
    found = []
    for number in range(len(nets.y)):
        kernel, radius = kernel_of(nets, weights, number), row.ratio * float(nets.scale[number])
        if row.clipping == "none":
            matrix = kernel.matrix
        elif row.clipping == "batch":
            matrix = kernel.batch_clipped(radius)
        else:  # automatic: gamma of norms over R, as in descend
            matrix = kernel.clipped(row.clipping, radius, row.style, gamma=0.01 * radius)
            if row.clipping == "automatic":
                matrix = matrix / radius  # descend clips norms over R to 1
        found.append(positivity(matrix))
    return found


def measure(nets: Networks, row: Row, steps: int, seen: Callable[[int], None] = lambda step: None) -> Result:
    """Train all networks under a way of clipping, each to ZERO of its first loss; look at the matrix MOMENTS times.
    seen: what each step's number is told to."""
    networks = len(nets.y)
    held = torch.ones(6, networks, dtype=torch.bool)
    weights, moments = nets.weights, {round(steps * (k / (MOMENTS - 1)) ** 2) for k in range(MOMENTS)}
    first = before = torch.full((networks,), math.inf, dtype=torch.float64)
    # where the paper guarantees that the loss falls every rise counts; elsewhere those that the kernel predicts, as
    # others come of steps that are too long
    guaranteed = row.paper is not None and row.paper[4]
    late, half = first, steps // 2
    rising, going = torch.zeros(networks, dtype=torch.bool), torch.ones(networks, dtype=torch.bool)
    for step in range(steps + 1):
        new, losses, cosine = descend(nets, row, weights, going)
        first = losses if step == 0 else first
        late = losses if step == half else late
        held[4] &= ~((rising | guaranteed) & (losses > before * (1 + 1e-12)))
        if step in moments:
            for number, found in enumerate(looked_at(nets, row, weights)):
                held[:3, number] &= torch.tensor(found[:3])
        going = going & (losses > ZERO * first)
        weights = {name: torch.where(going.view(-1, *[1] * (w.dim() - 1)), w, weights[name]) for name, w in new.items()}
        before, rising = losses, (cosine > 1e-9) & going
        seen(step)
        if not going.any():
            break
    held[3] = ~going | ((before.log() - late.log()).abs() < SETTLED)
    held[5] = ~going
    return Result(row, networks, tuple(int(n) for n in held.sum(1)), float((before / first).median()))


def table(results: list[Result]) -> str:
    """Networks in which each property held, beside the paper's claim: yes (guaranteed), no (not), - (no such row)."""
    head = ("clipping", "NTK", *COLUMNS, "loss left")
    rows: list[tuple[str, ...]] = [head]
    for result in results:
        row, _, held, left = result
        claims = ["-" if row.paper is None else "yes" if c else "no" for c in row.paper or (None,) * 6]
        cells = (f"{n}/{of} ({c})" for n, of, c in zip(held, result.of, claims, strict=True))
        rows.append((row.name, row.matrix, *cells, f"{left:.1e}"))
    return aligned(rows)


def broken(results: list[Result]) -> list[str]:
    """Guarantees of the paper that did not hold in a network: none, if the paper is right and the steps small."""
    return [
        f"{result.row.name}: {column} in {n} of {of}"
        for result in results
        for column, n, of, claim in zip(COLUMNS, result.held, result.of, result.row.paper or (False,) * 6, strict=True)
        if claim and n < of
    ]


def main(networks: int, steps: int, seed: int, out: Path | None = None) -> list[Result]:
    """Measure and print; rows to a CSV file if asked for."""
    nets = draw(networks, seed)
    bar, results = Bar(len(ROWS) * (steps + 1)), []
    for number, row in enumerate(ROWS):
        seen = bar.part(number * (steps + 1), f"{row.name}, {number + 1} of {len(ROWS)}")
        results.append(measure(nets, row, steps, seen))
    bar.at(bar.total, "done")
    print(f"{networks} networks, {SAMPLES} samples each, {steps} steps; in brackets what the paper guarantees\n")
    print(table(results))
    for line in broken(results):
        print(f"guaranteed by the paper, and not seen: {line}")
    if out is not None:
        with out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("clipping", "matrix", "property", "held", "networks", "paper", "steps", "seed"))
            for result in results:
                row = result.row
                for column, n, of, claim in zip(COLUMNS, result.held, result.of, row.paper or ("",) * 6, strict=True):
                    writer.writerow((row.name, row.matrix, column, n, of, claim, steps, seed))
    return results
