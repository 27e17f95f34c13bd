"""Random programs (tests/batch_axis/layouts_programs.py): the private step is exact, or refused.

The loss adds up a function of every element of the output. Right per-sample gradients add up to autograd's gradient,
and a sample's does not change when all the others are replaced: no program that couples samples has such gradients, so
one that does must be refused. Where a program also runs on one sample (no size of the batch is baked in), its gradient
is compared; it may differ only where constants meet the samples by their position.

    python -m tests.batch_axis.test_layouts_fuzz --seconds 300 --first 1000000
"""

from __future__ import annotations

import argparse
import collections
import time
import warnings

import pytest
import torch
from torch import Tensor

import fastdp
from fastdp.errors import FastDPError

from .layouts_programs import NO_PROGRAM, Model, draw

TOLERANCE = 1e-4
Grads = dict[str, Tensor]


def loss_of(model: Model, x: Tensor) -> Tensor:
    return torch.atan(model(x) - 0.3).square().sum()


def by_engine(model: Model, x: Tensor) -> Grads:
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum", batch_size=None)
    try:
        loss_of(model, x.clone()).backward()
        return engine.materialize()
    finally:
        engine.detach()


def by_autograd(model: Model, x: Tensor) -> Grads:
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss_of(model, x.clone()), list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def differ(a: Grads, b: Grads, scale: float) -> bool:
    return any(float((a[name] - b[name]).abs().max()) > TOLERANCE * scale for name in a)


def replaced(x: Tensor, sample: int, seed: int) -> Tensor:
    """The batch with all samples but one replaced."""
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(~seed & 0xFFFFFF), dtype=x.dtype)
    other[sample] = x[sample]
    return other


def couples(model: Model, x: Tensor, scale: float) -> bool:
    """Whether the gradient is no sum of functions of one sample each: second differences by pairs of samples."""
    whole, other = (
        by_autograd(model, x),
        torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype),
    )
    for i in range(len(x)):
        for j in range(i):
            first, second, both = x.clone(), x.clone(), x.clone()
            first[i], second[j], both[i], both[j] = other[i], other[j], other[i], other[j]
            try:
                a, b, c = (by_autograd(model, y) for y in (first, second, both))
            except NO_PROGRAM:
                return True
            if differ({n: whole[n] + c[n] for n in c}, {n: a[n] + b[n] for n in c}, scale):
                return True
    return False


def judge(seed: int) -> tuple[str, str]:
    """What becomes of a program: a verdict, and why."""
    model, x = draw(seed)
    try:
        total = by_autograd(model, x)
    except NO_PROGRAM:
        return "skipped", "no gradient"
    scale = max(float(g.abs().max()) for g in total.values())
    if not 1e-9 < scale < 1e9:
        return "skipped", "no gradient"
    try:
        found = by_engine(model, x)
    except FastDPError as problem:
        return ("refused" if couples(model, x, scale) else "useless", str(problem))
    except Exception as problem:  # noqa: BLE001
        return "crashed", f"{type(problem).__name__}: {problem}"
    if differ({name: rows.sum(0) for name, rows in found.items()}, total, scale):
        return "WRONG", "does not add up"
    verdict = ("exact", "")
    for sample in range(len(x)):
        try:
            other = by_engine(model, replaced(x, sample, seed))
        except (FastDPError, *NO_PROGRAM):
            verdict = ("data", "refused, or no program, for other data")
            continue
        if differ({n: g[sample] for n, g in found.items()}, {n: g[sample] for n, g in other.items()}, scale):
            return "WRONG", f"sample {sample} depends on others"
        try:
            alone = by_autograd(model, x[sample : sample + 1])
        except NO_PROGRAM:
            continue
        if verdict[0] == "exact" and differ({n: g[sample] for n, g in found.items()}, alone, scale):
            verdict = ("by position", "another gradient alone")
    return verdict


@pytest.mark.parametrize("part", range(4))
def test_random_programs_are_exact_or_refused(part: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = {seed: judge(seed) for seed in range(100 * part, 100 * part + 60)}
    wrong = {seed: verdict for seed, verdict in verdicts.items() if verdict[0] in ("WRONG", "crashed")}
    assert not wrong
    kinds = collections.Counter(verdict for verdict, _ in verdicts.values())
    assert kinds["exact"] >= 5 and kinds["refused"] >= 5, kinds


def hunt(seconds: float, first: int) -> None:
    """Judge programs for so long; print what is wrong, and a count of all."""
    warnings.simplefilter("ignore")
    kinds: collections.Counter[str] = collections.Counter()
    useless: collections.Counter[str] = collections.Counter()
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end:
        verdict, why = judge(seed)
        kinds[verdict] += 1
        if verdict in ("WRONG", "crashed"):
            print(verdict, seed, why[:200], flush=True)
        if verdict == "useless":
            useless[why.split("samples: ")[-1].split(". Per-sample")[0][:100] + f" e.g. {seed}"] += 1
        seed += 1
    print(dict(kinds), "last seed", seed - 1)
    reasons: collections.Counter[str] = collections.Counter()
    example = {}
    for text, count in useless.items():
        reason, number = text.rsplit(" e.g. ", 1)
        reasons[reason] += count
        example[reason] = number
    for reason, count in reasons.most_common(40):
        print(f"{count:5d} needlessly: {reason} ({example[reason]})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=10_000)
    options = parser.parse_args()
    hunt(options.seconds, options.first)
