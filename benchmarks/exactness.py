"""Is a contender right? Its gradient without noise against autograd on one sample at a time, in float64.

The losses of every third sample are four times as large in the check, and the clipping norm lies in the widest gap
above the median of the true norms: most samples pass and some are clipped, for every clipping function.

Two things that are nobody's error are kept out. Products of float32 are taken as such while a contender is judged, not
of TF32 numbers, which is PyTorch's default for convolutions on a GPU. And samples whose gradient is decided by rounding
are left out: where two numbers of a max-pooling's window tie, or a ReLU's is nearly 0, any other order of a float32 sum
takes the other branch, and one such place moves a gradient by up to 1e-2.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastdp.ops.common import with_ieee_products

from .contenders import CONTENDERS, NotApplicable
from .models import Workload
from .steps import CPU, OutOfTime, Place, batch, build, deadline, one_line

TOLERANCE = 1e-3  # Opacus adds 1e-6 to norms before it divides, and its norms are of float32 gradients
COARSE = 0.1  # in 16 bits, whose rounding in forward and backward is 1e-2;
BEYOND = 1.5  # or so many times what rounding makes of ordinary training's gradient there, if that is more,
USELESS = 0.9  # but never so much that a gradient of zeros would pass
SMALLEST = 1e-2  # a parameter's error is relative to its own truth, or to this share of the whole's if that is more
SHAKEN, MOVED, DRAWS = (
    1e-6,
    1e-4,
    3,
)  # weights moved by float32's rounding, gradients that jump then, and how often tried
HEAVY = 2**40  # added to the targets of samples whose loss counts four times
GAMMA = 0.01  # automatic clipping: R / (n + gamma)
Named = dict[str, Tensor]


class Truth(NamedTuple):
    """The workload as it is checked, clipping norm, the mean gradient of each kind of clipping, and how many of the
    samples exceed the norm."""

    work: Workload
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


def size_of_check(work: Workload) -> Workload:
    """The workload itself at `whole` samples, else its small variant."""
    if work.whole:
        return work._replace(batch_size=work.whole)
    return work.small or work


def weighted(chosen: Workload) -> Workload:
    """The workload with the losses of the check. Targets tell which samples count four times: a step that is recorded
    takes no weights that are not of its batch."""

    def batch(b: int) -> tuple[Tensor, Tensor]:
        x, y = chosen.batch(b)
        y[2::3] += HEAVY
        return x, y

    def losses(out: Tensor, y: Tensor) -> Tensor:
        found = chosen.losses(out, y % HEAVY)
        return found * (1 + 3 * (y.view(len(y), -1)[:, 0] >= HEAVY)).to(found.dtype)

    return chosen._replace(batch=batch, losses=losses)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Products of float32 numbers as such: cuDNN takes TF32 for convolutions and recurrent layers by default."""
    backend = "mkldnn" if device.type == "cpu" else "cuda"
    return with_ieee_products([(backend, operation) for operation in ("matmul", "conv", "rnn")])


def gradient_at(model: nn.Module, work: Workload, x: Tensor, y: Tensor, b: int) -> Named:
    """The gradient of one sample's own loss."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = work.losses(model(x[b : b + 1]), y[b : b + 1]).sum()
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def in_double(work: Workload, place: Place) -> tuple[nn.Module, Tensor, Tensor]:
    """The workload's model of float64, with the weights of the place's type, and its batch."""
    model, (x, y) = copy.deepcopy(build(work, place)).double(), batch(work, place)
    return model, x.double() if x.is_floating_point() else x, y


def undecided(work: Workload, place: Place = CPU) -> list[int]:
    """Samples whose gradient jumps where weights move as little as float32 rounds, to one side or to the other."""
    model, x, y = in_double(work, place)
    true = [gradient_at(model, work, x, y, b) for b in range(len(y))]
    there = [(p, p.detach().clone()) for p in model.parameters()]
    found: set[int] = set()
    for draw in range(2 * DRAWS):
        torch.manual_seed(draw // 2)
        with torch.no_grad():
            for p, old in there:
                p.copy_(old + (-1) ** draw * SHAKEN * old * torch.randn_like(old))
        for b in set(range(len(y))) - found:
            if distance(gradient_at(model, work, x, y, b), true[b]) > MOVED:
                found.add(b)
    return sorted(found)


def decided(work: Workload, place: Place = CPU) -> Workload:
    """What is checked: samples that rounding does not decide, of the small variant where fewer than two are left."""
    chosen = size_of_check(work)
    left_out = undecided(chosen, place)
    if not left_out:
        return chosen
    kept = [b for b in range(chosen.batch_size) if b not in left_out]
    if len(kept) < 2:
        return decided(work.small, place) if work.small and chosen is not work.small else chosen
    return chosen._replace(batch=lambda _: _rows(chosen.batch(chosen.batch_size), kept), batch_size=len(kept))


def _rows(drawn: tuple[Tensor, Tensor], kept: Sequence[int]) -> tuple[Tensor, Tensor]:
    x, y = drawn
    return x[list(kept)], y[list(kept)]


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
    chosen = weighted(decided(work, place))
    model, x, y = in_double(chosen, place)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layers = {name: name.rpartition(".")[0] or name for name in named}

    squares = []  # [B] of sums of squares by layer; gradients are taken again below rather than kept
    for b in range(len(y)):
        squares.append(dict.fromkeys(layers.values(), 0.0))
        for name, g in gradient_at(model, chosen, x, y, b).items():
            squares[b][layers[name]] += float(g.square().sum())
    norms = [math.sqrt(sum(s.values())) for s in squares]
    limit = limit or limit_between(norms)
    share = limit / math.sqrt(len(set(layers.values())))
    kinds = ("none", "local", "global", "automatic", "layerwise")
    means = {kind: {name: torch.zeros_like(p.detach()) for name, p in named.items()} for kind in kinds}
    for b, n in enumerate(norms):
        factors = {"none": 1.0, "local": min(1.0, limit / max(n, 1e-300)), "global": float(n <= limit),
                   "automatic": limit / (n + GAMMA)}  # fmt: skip
        for name, g in gradient_at(model, chosen, x, y, b).items():
            own = min(1.0, share / max(math.sqrt(squares[b][layers[name]]), 1e-300))
            for kind in kinds:
                means[kind][name] += g * (factors.get(kind, own) / len(y))
    return Truth(chosen, limit, means, sum(n > limit for n in norms), len(norms))


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
    with full_precision(place.device):
        found = gradient_of(name, truth.work, place, truth.limit)
    # in 16 bits small parameters (biases, whose gradients cancel) are mostly rounding
    smallest = SMALLEST if place.dtype == torch.float32 else 1.0
    return distance(found, truth.means[CONTENDERS[name].clipping], smallest)


def judge(names: Iterable[str], work: Workload, place: Place = CPU, limit: float = math.inf) -> dict[str, Verdict]:
    """A verdict on each contender, in float32 and, where another type is timed, in that; limit: seconds for each."""
    exact = truth_of(work, Place(place.device))
    other = truth_of(work, place) if place.dtype != torch.float32 else None
    allowed = COARSE
    if other is not None:
        rounding = verdict("non-private", work, place, exact, other, limit, USELESS).error_dtype
        allowed = min(max(COARSE, BEYOND * (rounding or 0.0)), USELESS)
    return {name: verdict(name, work, place, exact, other, limit, allowed) for name in names}


def verdict(name: str, work: Workload, place: Place, exact: Truth, other: Truth | None = None,
            limit: float = math.inf, allowed: float = COARSE) -> Verdict:  # fmt: skip
    """A verdict on one contender; `other` is the truth in the place's type where that is not float32, `allowed` the
    error there."""
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
    if coarse is not None and not coarse < allowed:
        return Verdict("wrong", f"off by {coarse:.1e} of the true gradient in {str(place.dtype)[6:]}", error, coarse)
    return Verdict("ok", "-", error, coarse)
