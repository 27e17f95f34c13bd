"""Is a contender right? Its gradient without noise against autograd on one sample at a time, in float64.

The losses of every third sample are four times as large in the check, and the clipping norm lies in the widest gap
above the median of the true norms: most samples pass and some are clipped, for every clipping function.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .contenders import CONTENDERS, NotApplicable
from .models import Workload
from .steps import CPU, OutOfTime, Place, batch, build, deadline, one_line

TOLERANCE = 1e-3  # Opacus adds 1e-6 to norms before it divides, and its norms are of float32 gradients
COARSE = 0.1  # in 16 bits, whose rounding in forward and backward is 1e-2
SMALLEST = 1e-2  # a parameter's error is relative to its own truth, or to this share of the whole's if that is more
GAMMA = 0.01  # automatic clipping: R / (n + gamma)
Named = dict[str, Tensor]


class Truth(NamedTuple):
    """Clipping norm, the mean gradient of each kind of clipping, and how many of the samples exceed the norm."""

    limit: float
    means: dict[str, Named]
    clipped: int
    samples: int


class Verdict(NamedTuple):
    """status: "ok", "wrong", "raises", "out of time" or "not applicable"; errors are relative, None if not taken."""

    status: str = "ok"
    why: str = "-"
    error: float | None = None
    error_dtype: float | None = None


def weights(b: int) -> list[float]:
    """What the loss of each sample counts in the check."""
    return [4.0 if k % 3 == 2 else 1.0 for k in range(b)]


def size_of_check(work: Workload) -> Workload:
    """The workload itself at `whole` samples, else its small variant."""
    if work.whole:
        return work._replace(batch_size=work.whole)
    return work.small or work


def checked(work: Workload) -> Workload:
    """The workload that is checked, with the losses of the check."""
    chosen = size_of_check(work)

    def losses(out: Tensor, y: Tensor) -> Tensor:
        found = chosen.losses(out, y)
        return found * torch.tensor(weights(len(found)), device=found.device, dtype=found.dtype)

    return chosen._replace(losses=losses)


def limit_between(norms: list[float]) -> float:
    """A clipping norm in the widest gap above the median, so that rounding moves no sample across it."""
    s = sorted(norms)
    if len(s) < 2:
        return 0.7 * s[0]
    k = max(range((len(s) - 1) // 2, len(s) - 1), key=lambda k: s[k + 1] / max(s[k], 1e-300))
    return math.sqrt(s[k] * s[k + 1])


def truth_of(work: Workload, place: Place = CPU, limit: float = 0.0) -> Truth:
    """(1/B) sum_b c_b g_b for every kind of clipping; the float64 model has the weights of the place's type.

    limit: the clipping norm, 0: chosen. "layerwise" clips the parameters of each module by limit / sqrt(modules).
    """
    chosen = size_of_check(work)
    model, (x, y) = copy.deepcopy(build(chosen, place)).double(), batch(chosen, place)
    x = x.double() if x.is_floating_point() else x
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers = {name: name.rpartition(".")[0] or name for name in named}

    def gradient(b: int) -> Named:
        loss = chosen.losses(model(x[b : b + 1]), y[b : b + 1]).sum() * weights(len(y))[b]
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))

    squares = []  # [B] of sums of squares by layer; gradients are taken again below rather than kept
    for b in range(len(y)):
        squares.append(dict.fromkeys(layers.values(), 0.0))
        for name, g in gradient(b).items():
            squares[b][layers[name]] += float(g.square().sum())
    norms = [math.sqrt(sum(s.values())) for s in squares]
    limit = limit or limit_between(norms)
    share = limit / math.sqrt(len(set(layers.values())))
    kinds = ("none", "local", "global", "automatic", "layerwise")
    means = {kind: {name: torch.zeros_like(p.detach()) for name, p in named.items()} for kind in kinds}
    for b, n in enumerate(norms):
        factors = {"none": 1.0, "local": min(1.0, limit / max(n, 1e-300)), "global": float(n <= limit),
                   "automatic": limit / (n + GAMMA)}  # fmt: skip
        for name, g in gradient(b).items():
            own = min(1.0, share / max(math.sqrt(squares[b][layers[name]]), 1e-300))
            for kind in kinds:
                means[kind][name] += g * (factors.get(kind, own) / len(y))
    return Truth(limit, means, sum(n > limit for n in norms), len(norms))


def gradient_of(name: str, work: Workload, place: Place, limit: float) -> Named:
    """The gradient that the contender's optimizer sees at its first step without noise, by parameter.

    Raises whatever the contender does.
    """
    contender, (x, y) = CONTENDERS[name], batch(work, place)
    model = contender.prepare(build(work, place))
    params = {key: p for key, p in model.named_parameters() if p.requires_grad}
    seen: Named = {}

    def read(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for key, p in params.items():
            if p.grad is not None:
                seen[key] = p.grad.detach().clone()
            elif "exp_avg" in optimizer.state.get(p, {}):  # a step that leaves no gradient: Adam's first average of it
                seen[key] = optimizer.state[p]["exp_avg"].double() / (1 - optimizer.param_groups[0]["betas"][0])

    handle = register_optimizer_step_post_hook(read)
    try:
        contender.make(model, work, sigma=0.0, limit=limit)(x, y)
    finally:
        handle.remove()
    return seen


def distance(found: Named, truth: Named, smallest: float = SMALLEST) -> float:
    """Largest relative error of the whole and of each parameter (inf where one is missing)."""
    if set(found) != set(truth):
        return math.inf
    apart = {key: float((found[key].double() - t).square().sum()) for key, t in truth.items()}
    sizes = {key: float(t.square().sum()) for key, t in truth.items()}
    whole = sum(sizes.values())
    each = [apart[key] / max(sizes[key], smallest**2 * whole) for key in truth]
    worst = max([sum(apart.values()) / whole, *each])
    return math.sqrt(worst) if worst == worst else math.inf


def error_of(name: str, work: Workload, place: Place = CPU, truth: Truth | None = None) -> float:
    """Relative error of a contender; raises whatever it does."""
    truth = truth or truth_of(work, place)
    found = gradient_of(name, checked(work), place, truth.limit)
    # in 16 bits small parameters (biases, whose gradients cancel) are mostly rounding
    smallest = SMALLEST if place.dtype == torch.float32 else 1.0
    return distance(found, truth.means[CONTENDERS[name].clipping], smallest)


def judge(names: Iterable[str], work: Workload, place: Place = CPU, limit: float = math.inf) -> dict[str, Verdict]:
    """A verdict on each contender, in float32 and, where another type is timed, in that; limit: seconds for each."""
    exact = truth_of(work, Place(place.device))
    other = truth_of(work, place) if place.dtype != torch.float32 else None
    return {name: verdict(name, work, place, exact, other, limit) for name in names}


def verdict(name: str, work: Workload, place: Place, exact: Truth, other: Truth | None = None,
            limit: float = math.inf) -> Verdict:  # fmt: skip
    """A verdict on one contender; `other` is the truth in the place's type where that is not float32."""
    coarse = None
    try:
        with deadline(limit * CONTENDERS[name].patience):
            error = error_of(name, work, Place(place.device), exact)
            if other is not None:
                coarse = error_of(name, work, place, other)
    except OutOfTime:
        return Verdict("out of time", f"the check took over {limit * CONTENDERS[name].patience:.0f} s")
    except NotApplicable as problem:
        return Verdict("not applicable", one_line(problem))
    except Exception as problem:  # noqa: BLE001  (a peer's failure is a row of the table)
        return Verdict("raises", f"{type(problem).__name__}: {one_line(problem)}")
    if not error < TOLERANCE:
        return Verdict("wrong", f"off by {error:.1e} of the true gradient", error, coarse)
    if coarse is not None and not coarse < COARSE:
        return Verdict("wrong", f"off by {coarse:.1e} of the true gradient in {str(place.dtype)[6:]}", error, coarse)
    return Verdict("ok", "-", error, coarse)
