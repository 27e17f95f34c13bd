"""Is one private step exactly right? Truth: each sample alone, float64, plain autograd; then clip, sum, divide by B.

Two rules, and a step is exact only if both hold. With u the right update, v the found one, u_p and v_p their parts of a
parameter p, g_b,p the gradient of sample b and c_b its clip factor:

    of each parameter    |v_p - u_p| <= tol * max((1/B) sum_b c_b |g_b,p|, 0.02 |u|)
    of the whole update  |v - (u - m w)| <= tol * |u|  for some m in [0, 5e-6], w = (1/B) sum of c_b g_b where n_b >= R

The first one's measure is the size before samples cancel, for no float32 engine can be exact relative to a sum that
cancels; the second one has no such allowance. The m is a margin by which an engine may lower, on purpose, the factors
of the samples that it clips, so that rounding cannot take them past R (fastdp: 4e-6). A step that misses a rule is
still exact if it misses by no more than 4 times what plain autograd in float32, of one sample at a time or of one
sample's loss out of the batch, misses it by (+ 1e-5): rounding of the model itself.
"""

from __future__ import annotations

import copy
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .coverage_draws import without_chance

Losses = Callable[[nn.Module, Any], Tensor]  # -> one loss a sample, [B]
Built = tuple[nn.Module, dict[str, Any], Losses]
Grads = dict[str, Tensor]

STATUSES = ("exact", "rightly refused", "refused", "WRONG", "crashed", "timeout", "bad case", "not built")
TOLERANCE = 1e-4
MARGIN = 5e-6  # of clip factors
COUPLED, COUPLED_FLOAT32 = 1e-6, 1e-3  # relative; float64 models often hold float32 islands, near 1e-7
RANDOM = 1e-6
OUTSIDE = "outside its documentation"  # begins a note: a case that this engine does not claim to do
ROUGH = 0.05  # an error of plain float32 above which it says nothing
NO_GRADIENT = 1e-12  # below it float64 rounding alone
FLOOR = 0.02  # a parameter's error is relative to its own update, or to this share of the whole one


class Sizes(NamedTuple):
    """Samples in a batch and tokens in a sample."""

    batch: int = 3
    tokens: int = 8
    padded: bool = False  # text of different lengths, with an attention mask; NotBuilt where the model knows none


class Case(NamedTuple):
    """A model to try: build(sizes) gives the same model, batch and losses every time."""

    name: str
    build: Callable[[Sizes], Built]
    tolerance: float = TOLERANCE
    text: bool = False  # whether it may be asked for padded text
    tokens: bool = True  # whether the number of tokens in `sizes` means anything to it
    outside: str = ""  # "package: what of its documentation this model is beyond"


class NotBuilt(Exception):
    """The benchmark could not make this model or inputs for it: says nothing of any engine."""


class NotFinite(NotBuilt):
    """The model's own gradient is zero or not finite."""


@dataclass
class Truth:
    update: Grads  # (1/B) sum_b c_b g_b, c_b = min(1, R / n_b), R = 1
    clipped: Grads  # (1/B) sum of c_b g_b over samples of norm R or more
    scales: dict[str, float]  # (1/B) sum_b c_b |g_b| of each parameter: the update's size, were nothing to cancel
    norms: list[float]
    scale: float  # of the losses, so that the median norm is R = 1
    dtype: str
    coupling: float  # |batch gradient - sum of the samples' own| / the latter
    randomness: float
    notes: list[str] = field(default_factory=list)

    @property
    def coupled(self) -> bool:
        return not self.coupling < (COUPLED if self.dtype == "float64" else COUPLED_FLOAT32)


class Errors(NamedTuple):
    """By the two rules above: of the worst parameter, that parameter, of the whole update."""

    parameter: float
    where: str
    whole: float


# ---------------------------------------------------------------------- batches and models


def take(batch: dict[str, Any], rows: list[int], size: int) -> dict[str, Any]:
    """The batch of these samples; a tensor of size * k rows holds k consecutive ones of each sample."""

    def part(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.size(0) % size == 0:
            each = value.size(0) // size
            picked = torch.cat([value[r * each : (r + 1) * each] for r in rows])
            if value.dim() == 4 and not value.is_contiguous():
                picked = picked.contiguous(memory_format=torch.channels_last)
            return picked
        return [part(item) for item in value] if isinstance(value, list) else value

    return {key: part(value) for key, value in batch.items()}


def as_double(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_double(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_double(item) for item in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@torch.no_grad()
def shake(model: nn.Module) -> nn.Module:
    """Away from zeros, ones and 0.02, so that every parameter has a gradient worth comparing."""
    generator = torch.Generator().manual_seed(11)
    for p in model.parameters():
        if p.is_floating_point() and p.numel():
            fan = p.numel() // p.size(0) if p.dim() > 1 else 25
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * 0.4 / fan**0.5)
    return model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---------------------------------------------------------------------- truth


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradient(model: nn.Module, batch: dict[str, Any], losses: Losses, seed: int = 0) -> Grads:
    """Of the sum of the samples' losses, float64."""
    torch.manual_seed(seed)
    model.zero_grad()
    losses(model, batch).sum().backward()
    found = {
        name: torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double().clone()
        for name, p in trainable(model).items()
    }
    model.zero_grad()
    return found


def size_of(grads: Grads) -> float:
    return sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5


def difference(a: Grads, b: Grads) -> float:
    """Relative to b."""
    return sum(float((a[n].double() - b[n]).square().sum()) for n in b) ** 0.5 / max(size_of(b), 1e-300)


def clipped_mean(rows: list[Grads], factors: list[float]) -> Grads:
    return {n: sum(c * g[n] for c, g in zip(factors, rows, strict=True)) / len(rows) for n in rows[0]}


def from_batch_norm(problem: BaseException) -> bool:
    """Whether it is BatchNorm's complaint of a single value (GroupNorm and InstanceNorm have the same words)."""
    return any(frame.name == "batch_norm" for frame in traceback.extract_tb(problem.__traceback__))


def truth(case: Case, sizes: Sizes) -> Truth:
    notes = []
    try:
        with default_dtype(torch.float64):
            return _truth(case, sizes, torch.float64)
    except NotFinite as problem:  # such as the least float32 added to the least float64
        notes.append(f"no float64: {problem}")
    except NotBuilt:
        raise
    except Exception as problem:  # noqa: BLE001  (whatever a model does that is not meant for float64)
        notes.append(f"no float64: {type(problem).__name__}: {clean(problem, 90)}")
    found = _truth(case, sizes, torch.float32)
    found.notes += notes
    return found


def _truth(case: Case, sizes: Sizes, dtype: torch.dtype) -> Truth:
    with default_dtype(torch.float32):
        model, batch, losses = case.build(sizes)
    if dtype is torch.float64:
        model, batch = copy.deepcopy(model).double(), as_double(batch)
    alone = [take(batch, [i], sizes.batch) for i in range(sizes.batch)]
    try:
        rows = [gradient(model, sample, losses) for sample in alone]
    except ValueError as problem:
        if not from_batch_norm(problem):
            raise
        return Truth({}, {}, {}, [], 1.0, "none", float("inf"), 0.0, ["batch statistics need several samples"])
    norms = [size_of(g) for g in rows]
    if not all(NO_GRADIENT < n < float("inf") for n in norms):
        raise NotFinite(f"gradient norms {[f'{n:.1e}' for n in norms]}")
    random = difference(gradient(model, alone[0], losses, seed=1), rows[0])
    together = gradient(model, batch, losses)
    summed = {n: sum(g[n] for g in rows) for n in rows[0]}
    median = sorted(norms)[(len(norms) - 1) // 2]
    factors = [min(1.0, median / n) / median for n in norms]
    update = clipped_mean(rows, factors)
    scales = {n: sum(c * float(g[n].norm()) for c, g in zip(factors, rows, strict=True)) / len(rows) for n in update}
    kind = str(dtype).removeprefix("torch.")
    clipped = clipped_mean(rows, [c if n >= median else 0.0 for c, n in zip(factors, norms, strict=True)])
    return Truth(update, clipped, scales, norms, 1 / median, kind, difference(together, summed), random)


def plain_error(case: Case, sizes: Sizes, exact: Truth) -> Errors:
    """Errors of plain autograd in float32: what rounding alone does to this model. By each rule the larger one of
    samples alone and of samples out of the batch, whose kernels round otherwise."""
    model, batch, losses = case.build(sizes)
    alone = [gradient(model, take(batch, [i], sizes.batch), losses) for i in range(sizes.batch)]
    together = [gradient(model, batch, lambda m, b, i=i: losses(m, b)[i : i + 1]) for i in range(sizes.batch)]
    found = []
    for rows in (alone, together):
        factors = [min(1.0, 1 / (exact.scale * size_of(g))) * exact.scale for g in rows]
        found.append(errors_of(clipped_mean(rows, factors), exact))
    return max(found, key=lambda e: e.parameter)._replace(whole=max(e.whole for e in found))


# ---------------------------------------------------------------------- judging


def errors_of(found: Grads, exact: Truth) -> Errors:
    floor, worst, where = FLOOR * size_of(exact.update), -1.0, ""
    for name, want in exact.update.items():
        error = float((found[name].double() - want).norm()) / max(exact.scales[name], floor, 1e-300)
        if not error <= worst:  # also NaN
            worst, where = error, name
        if error != error:
            return Errors(float("inf"), name, float("inf"))
    return Errors(worst, where, whole_error(found, exact))


def whole_error(found: Grads, exact: Truth) -> float:
    """|found - (update - m clipped)| / |update|, at the best m within the margin."""
    missing = {n: exact.update[n] - found[n].double() for n in exact.update}
    along = sum(float((missing[n] * part).sum()) for n, part in exact.clipped.items())
    margin = min(max(along / max(size_of(exact.clipped) ** 2, 1e-300), 0.0), MARGIN)
    return size_of({n: d - margin * exact.clipped[n] for n, d in missing.items()}) / max(size_of(exact.update), 1e-300)


Engine = Callable[[nn.Module, dict[str, Any], Losses, float, int], None]  # one step: lr, clipping norm 1, batch B


def one_step(case: Case, sizes: Sizes, exact: Truth, engine: Engine) -> Grads:
    """The engine's update: what one step changed, over its learning rate."""
    model, batch, losses = case.build(sizes)
    before = {name: p.detach().clone() for name, p in trainable(model).items()}
    # a power of two that makes the step larger than the weights: less of it is rounded away
    ratio = max(size_of(before), 1e-3) / max(size_of(exact.update), 1e-3)
    rate = 2.0 ** round(torch.log2(torch.tensor(64 * ratio)).item())
    torch.manual_seed(0)
    engine(model, batch, lambda m, b: losses(m, b) * exact.scale, rate, sizes.batch)
    after = dict(model.named_parameters())
    return {name: (p.double() - after[name].detach().double()) / rate for name, p in before.items()}


def judge(case: Case, sizes: Sizes, engine: Engine, package: str) -> dict[str, Any]:
    """One of STATUSES, with the error or the exception's text."""
    try:
        exact = truth(case, sizes)
    except Exception as problem:  # noqa: BLE001
        return {"status": "not built", "message": f"{type(problem).__name__}: {clean(problem)}"}
    if exact.randomness > RANDOM:
        case = without_chance(case)
        exact = truth(case, sizes)
        exact.notes.append("the same draws for every sample")
    beyond = case.outside.removeprefix(package + ": ")
    notes = exact.notes + ([f"{OUTSIDE} ({beyond})"] if beyond != case.outside else [])
    base = {"truth": exact.dtype, "coupling": exact.coupling, "notes": "; ".join(notes)}
    if exact.randomness > RANDOM:
        return {**base, "status": "bad case", "message": f"random: gradients differ by {exact.randomness:.1e}"}
    try:
        found = one_step(case, sizes, exact, engine)
    except Exception as problem:  # noqa: BLE001
        status = "refused" if deliberate(problem, package) else "crashed"
        status = "rightly refused" if status == "refused" and exact.coupled else status
        message = f"{type(problem).__name__}: {clean(problem)}"
        return {**base, "status": status, "message": message, "where": innermost(problem)}
    if exact.coupled:
        text = f"samples are coupled ({exact.coupling:.1e}) and it gave an answer"
        return {**base, "status": "WRONG", "message": text}
    errors = errors_of(found, exact)
    base |= {"error": errors.parameter, "whole": errors.whole}
    if max(errors.parameter, errors.whole) <= case.tolerance:
        return {**base, "status": "exact"}
    plain = plain_error(case, sizes, exact)
    if plain.parameter > ROUGH or plain.whole > ROUGH:
        return {**base, "status": "bad case", "message": f"float32 errs by {plain.parameter:.1e}, {plain.whole:.1e}"}
    allowed = [max(case.tolerance, 4 * e + 1e-5) for e in (plain.parameter, plain.whole)]
    said = f"plain float32 {plain.parameter:.1e}, {plain.whole:.1e}"
    if errors.parameter <= allowed[0] and errors.whole <= allowed[1]:
        return {**base, "status": "exact", "message": f"within 4 x the errors of {said}"}
    ratio = size_of(found) / size_of(exact.update)
    text = (
        f"{errors.where} off by {errors.parameter:.1e}, the whole update by {errors.whole:.1e} ({said}), "
        f"update {ratio:.4f} of the right one's size"
    )
    return {**base, "status": "WRONG", "message": text}


def deliberate(problem: BaseException, package: str) -> bool:
    """Whether the package raised it on purpose: its own exception class, or a `raise` in its own code."""
    if not str(problem).strip():
        return False
    if type(problem).__module__.split(".")[0] == package:
        return True
    home = sys.modules.get(package)
    last = traceback.extract_tb(problem.__traceback__)[-1]
    inside = home is not None and Path(last.filename).is_relative_to(Path(str(home.__file__)).parent)
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return inside and line.startswith(("raise", "assert"))


def innermost(problem: BaseException) -> str:
    last = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno} {last.name}"


def clean(text: object, limit: int = 300) -> str:
    """On one line, without paths."""
    line = re.sub(r"\s+", " ", re.sub(r"(/[\w.+@-]+){2,}/?", "<path>", str(text))).strip()
    return line if len(line) <= limit else line[: limit - 3] + "..."
