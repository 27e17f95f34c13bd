"""Whether the planner takes the fastest route: every route measured on a grid of shapes, beside what it predicts.

    python -m benchmarks.planner [--device cuda] [--dtype bfloat16] [--rounds 5] [--seconds 300] [--out FILE.csv]

The routes of a use (norms and clipped sum): gram + sum, direct + sum, materialise (per-sample gradients, their norms
and weighted sum). Each case runs them interleaved, and medians are compared: `loss` is the measured time of the route
that the planner chooses over that of the best, less one. A route predicted to take over two seconds or 2 GiB is left
out, and the case with it if none is left to choose from. Memory limits are not applied: this is about time.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastdp import ops
from fastdp.grad_sample import cost_model
from fastdp.grad_sample.cost_model import Shape
from fastdp.grad_sample.planner import Planner
from fastdp.utils.progress_bar import Bar

from .timing import Row, append, interleaved, require_kernels, show, versions

COLUMNS = ("family", "batch", "t", "i", "o", "chosen", "best", "loss", "gram_ms", "direct_ms", "materialise_ms",
           "gram_predicted", "direct_predicted", "materialise_predicted")  # fmt: skip
SAVED = (*COLUMNS, "dtype", "device", "threads", "torch", "triton", "fastdp", "commit", "date")
LIMIT_SECONDS, LIMIT_BYTES, NEAR = 2.0, 2**31, 0.15
CASE_SECONDS = 1.0  # slow cases are repeated less often
POSITIONS = {"cpu": (1, 8, 64, 197, 512), "cuda": (1, 8, 64, 197, 512, 2048)}
WIDTHS = ((8, 768), (768, 8), (64, 64), (256, 256), (768, 768), (768, 3072), (384, 8192))
CHANNELS = ((3, 32), (32, 32), (64, 64), (64, 128), (128, 128), (256, 256))
SIDES, KERNELS = (32, 16, 8, 4), (3, 1)
Run = Callable[[], object]


def linear(shape: Shape, make: Callable[..., Tensor]) -> dict[str, Run]:
    """Every route of a matrix product."""
    a, g, c = make(shape.batch, shape.t, shape.i), make(shape.batch, shape.t, shape.o), make(shape.batch).float()
    return {
        "gram": lambda: (ops.linear_norm_sq(a, g, "gram", dtype=torch.float64), ops.linear_clipped_sum(a, g, c)),
        "direct": lambda: (ops.linear_norm_sq(a, g, "direct", dtype=torch.float64), ops.linear_clipped_sum(a, g, c)),
        "materialise": lambda: cost_model.weighted(ops.linear_per_sample(a, g), c),
    }


def convolution(shape: Shape, side: int, kernel: int, make: Callable[..., Tensor]) -> dict[str, Run]:
    """Every route of a convolution with `kernel` x `kernel` weights on `side` x `side` images."""
    b, channels = shape.batch, shape.i // kernel**2
    x, g, c = make(b, channels, side, side), make(b, shape.o, side, side), make(b).float()
    size = (kernel, 1, kernel // 2)
    kept = dict(dtype=torch.float64)
    return {
        "gram": lambda: (ops.conv_norm_sq(x, g, *size, method="gram", **kept), ops.conv_clipped_sum(x, g, c, *size)),
        "direct": lambda: (
            ops.conv_norm_sq(x, g, *size, method="direct", **kept),
            ops.conv_clipped_sum(x, g, c, *size),
        ),
        "materialise": lambda: cost_model.weighted(ops.conv_per_sample(x, g, *size), c),
    }


def cases(kind: str) -> Iterator[tuple[Shape, Callable[[Callable[..., Tensor]], dict[str, Run]]]]:
    """The grid: (shape, what makes its routes)."""
    for b in (2, 8, 32):
        for t in POSITIONS[kind]:
            for i, o in WIDTHS:
                shape = Shape("linear", b, t, i, o)
                yield shape, lambda make, s=shape: linear(s, make)
    for kernel in KERNELS:
        for b in (4, 32):
            for side in SIDES:
                for i, o in CHANNELS:
                    shape = Shape("conv", b, side * side, i * kernel**2, o)
                    yield shape, lambda make, s=shape, n=side, k=kernel: convolution(s, n, k, make)


def one_position(shape: Shape) -> bool:
    """Where gram and direct are one and the same shortcut, |a|^2 |g|^2: measured once, as gram."""
    return shape.family == "linear" and shape.t == 1


def routes_to_try(shape: Shape, known: cost_model.Constants) -> dict[str, float]:
    """The routes that are small enough to be measured, and their predicted seconds."""
    found = {}
    for route in ("gram", "materialise") if one_position(shape) else ("gram", "direct", "materialise"):
        predicted = cost_model.seconds(route, shape, known)
        stored = shape.gradient_bytes() if route == "materialise" else 0
        if predicted < LIMIT_SECONDS and stored < LIMIT_BYTES:
            found[route] = predicted
    return found


def measure(shape: Shape, routes: dict[str, Run], predicted: dict[str, float], chosen: str, device: torch.device,
            rounds: int) -> Row:  # fmt: skip
    """One row: measured and predicted times, the planner's choice and the best route."""
    runs = {route: routes[route] for route in predicted}
    once = sum(interleaved(runs, device, 1, warm=1).values())
    times = interleaved(runs, device, max(1, min(rounds, int(CASE_SECONDS / once))), warm=0)
    best = min(times, key=times.__getitem__)
    row: Row = {"family": shape.family, "batch": shape.batch, "t": shape.t, "i": shape.i, "o": shape.o,
                "chosen": chosen, "best": best, "loss": f"{times[chosen] / times[best] - 1:.3f}"}  # fmt: skip
    row |= {f"{route}_ms": f"{1e3 * value:.4f}" for route, value in times.items()}
    return row | {f"{route}_predicted": f"{1e3 * value:.4f}" for route, value in predicted.items()}


def summary(rows: list[Row], limit: float = NEAR) -> str:
    """Share of cases near the best route, and how far predictions are off."""
    lines = []
    for family in ("linear", "conv", ""):
        mine = [row for row in rows if family in ("", row["family"])]
        if not mine:
            continue
        losses = [float(str(row["loss"])) for row in mine]
        near = sum(loss <= limit for loss in losses)
        name = family or "all"
        lines.append(f"{name:7} {near} of {len(mine)} cases ({100 * near / len(mine):.1f} %) within "
                     f"{100 * limit:.0f} % of the best; mean loss {100 * statistics.mean(losses):.1f} %, "
                     f"worst {100 * max(losses):.0f} %")  # fmt: skip
    for route in ("gram", "direct", "materialise"):
        off = [
            abs(float(str(row[f"{route}_predicted"])) / float(str(row[f"{route}_ms"])) - 1)
            for row in rows
            if f"{route}_ms" in row
        ]
        if off:
            nine = sorted(off)[int(0.9 * (len(off) - 1))]
            lines.append(f"{route:12} prediction off by {100 * statistics.median(off):.0f} % (median), "
                         f"{100 * nine:.0f} % (nine of ten at most)")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=600, help="stop after this time, with what is measured by then"
    )
    parser.add_argument("--seed", type=int, default=0, help="order of the cases")
    parser.add_argument("--family", default="", help="only linear, or conv")
    parser.add_argument("--worst", type=int, default=15, help="how many of the worst cases are printed")
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    require_kernels(device)
    facts = versions(device) | {"dtype": options.dtype}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # calibrated afresh
        begin = time.perf_counter()
        known = cost_model.constants(device, dtype != torch.float32)
        told = f"calibration: {time.perf_counter() - begin:.2f} s"
        print(told + (" (not measured: default constants)" if known in cost_model.DEFAULTS.values() else ""))
        rows = _rows(device, dtype, options, facts)
    rows.sort(key=lambda row: -float(str(row["loss"])))
    show(rows[: options.worst], COLUMNS, left=1)
    print(summary(rows))


def _rows(device: torch.device, dtype: torch.dtype, options: argparse.Namespace, facts: Row) -> list[Row]:
    """All rows, kept in the file one by one: a run cut short keeps what it has."""
    planner, short = Planner(), dtype != torch.float32
    known = cost_model.constants(device, short)
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    begin, rows = time.perf_counter(), []
    grid = [case for case in cases(device.type) if options.family in case[0].family]
    random.Random(options.seed).shuffle(grid)  # a run cut short has seen all kinds
    bar = Bar(len(grid))
    for number, (shape, routes) in enumerate(grid):
        bar.at(number, shape.family)
        if time.perf_counter() - begin > options.seconds:
            print(f"stopped after {number} of {len(grid)} cases", file=sys.stderr)
            break
        predicted = routes_to_try(shape, known)
        if len(predicted) < 2:
            continue
        chosen = planner.fastest(shape, device, short)[0]
        chosen = "gram" if chosen == "direct" and one_position(shape) else chosen
        if chosen not in predicted:
            continue
        try:
            rows.append(measure(shape, routes(make), predicted, chosen, device, options.rounds))
        except Exception as problem:  # noqa: BLE001  (the other cases are still to be measured)
            print(f"{shape}: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
            continue
        if options.out:
            append(options.out, [rows[-1] | facts], SAVED)
    bar.clear()
    return rows


if __name__ == "__main__":
    main()
