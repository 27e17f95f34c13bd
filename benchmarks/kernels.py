"""Time of every operator against its plain-PyTorch reference and against the machine's roof.

    python -m benchmarks.kernels [--device cuda] [--dtype bfloat16] [--only gram] [--out FILE.csv]

Roofs are measured first: a large matrix product for what is arithmetic, a copy for what moves bytes. `roof` is the
share of it that the operator reaches, by the fewest operations or bytes that the job needs. Each operator's result
is compared with the reference's before it is timed: a wrong one gets no time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdp import ops
from fastdp.ops.registry import forced
from fastdp.utils.progress_bar import Bar

from .timing import Row, append, interleaved, require_kernels, roofs, show, versions

COLUMNS = ("operator", "shape", "dtype", "backend", "ms", "reference_ms", "speedup", "roof", "bound", "error")
SAVED = (*COLUMNS, "device", "threads", "torch", "triton", "fastdp", "commit", "date")
KEY = bytes(range(32))
NOTE = """reference_ms and speedup: against the operator's plain-PyTorch reference; linear_clipped_sum: torch.mm of the
same data without factors; conv_*: torch's weight gradient of the whole batch; noise_: normal_(); steps: named."""


class Case(NamedTuple):
    """One job: what runs, what it must at least do, and what it is compared with (None: the reference)."""

    operator: str
    shape: str
    run: Callable[[], Any]
    flop: float = 0.0
    bytes: float = 0.0
    peer: Callable[[], Any] | None = None


LINEAR = {"cpu": [(8, 128, 768, 768), (8, 128, 768, 3072), (8, 128, 384, 8192), (8, 512, 256, 256), (8, 128, 768, 8)],
          "cuda": [(8, 1024, 4096, 4096), (16, 1024, 768, 3072), (64, 197, 768, 3072), (8, 1024, 768, 50257),
                   (8, 1024, 4096, 8), (8, 512, 1280, 1280), (8, 512, 1280, 5120), (4, 1024, 2048, 8)]}  # fmt: skip
CONV = {"cpu": [(32, 32, 32, 32, 3, 1), (32, 64, 64, 16, 3, 1), (32, 128, 128, 8, 3, 1), (32, 256, 256, 4, 3, 1),
                (32, 3, 32, 32, 3, 1), (32, 64, 128, 16, 1, 1), (32, 128, 128, 16, 3, 128)],
        "cuda": [(64, 64, 64, 56, 3, 1), (64, 128, 128, 28, 3, 1), (64, 256, 256, 14, 3, 1), (64, 512, 512, 7, 3, 1),
                 (64, 256, 512, 28, 1, 1), (64, 384, 384, 14, 7, 384)]}  # fmt: skip
TABLES = {"cpu": [(8, 128, 384, 8192), (8, 128, 768, 30522)], "cuda": [(16, 1024, 768, 50257), (8, 1024, 2048, 32000)]}
NORMS = {"cpu": [(8, 128, 768)], "cuda": [(16, 1024, 768), (8, 1024, 4096)]}
ELEMENTS = {"cpu": 25_000_000, "cuda": 500_000_000}


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """All jobs, built one at a time."""
    torch.manual_seed(0)
    kind, size = device.type, torch.empty((), dtype=dtype).element_size()

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    for b, t, i, o in LINEAR[kind]:
        a, g, c = make(b, t, i), make(b, t, o), torch.rand(b, device=device)
        text, whole, data = f"B={b} T={t} I={i} O={o}", 2.0 * b * t * i * o, 1.0 * b * t * (i + o) * size
        yield Case("linear_norm_sq gram", text, lambda a=a, g=g: ops.linear_norm_sq(a, g, "gram"),
                   1.0 * b * t * t * (i + o), data)  # fmt: skip
        yield Case("linear_norm_sq direct", text, lambda a=a, g=g: ops.linear_norm_sq(a, g, "direct"), whole, data)
        if b * i * o * 4 < 2**33:
            yield Case(
                "linear_per_sample", text, lambda a=a, g=g: ops.linear_per_sample(a, g), whole, data + 4.0 * b * i * o
            )
        yield Case("linear_clipped_sum", text, lambda a=a, g=g, c=c: ops.linear_clipped_sum(a, g, c), whole,
                   data + 4.0 * i * o, lambda a=a, g=g: torch.mm(g.flatten(0, 1).mT, a.flatten(0, 1)))  # fmt: skip
    for b, i, o, side, k, groups in CONV[kind]:
        x, g, c = make(b, i, side, side), make(b, o, side, side), torch.rand(b, device=device)
        options: tuple[Any, ...] = (k, 1, k // 2, 1, groups)
        text = f"B={b} C={i} O={o} {side}x{side} k={k} groups={groups}"
        flop, data = 2.0 * b * side * side * i * k * k * o / groups, 1.0 * (x.numel() + g.numel()) * size
        plain = _weight_gradient(x, g, options)
        yield Case("conv_norm_sq", text, lambda x=x, g=g, q=options: ops.conv_norm_sq(x, g, *q), flop, data, plain)
        yield Case("conv_per_sample", text, lambda x=x, g=g, q=options: ops.conv_per_sample(x, g, *q), flop,
                   data + 4.0 * b * i * o * k * k / groups, plain)  # fmt: skip
        yield Case("conv_clipped_sum", text, lambda x=x, g=g, c=c, q=options: ops.conv_clipped_sum(x, g, c, *q), flop,
                   data, plain)  # fmt: skip
    for b, t, d, v in TABLES[kind]:
        ids, g, c = torch.randint(0, v, (b, t), device=device), make(b, t, d), torch.rand(b, device=device)
        text, data = f"B={b} K={t} d={d} V={v}", 1.0 * b * t * d * size
        yield Case("embedding_norm_sq", text, lambda i=ids, g=g: ops.embedding_norm_sq(i, g), 0.0, data)
        yield Case("embedding_clipped_sum", text, lambda i=ids, g=g, c=c, v=v: ops.embedding_clipped_sum(i, g, c, v),
                   0.0, data + 4.0 * v * d)  # fmt: skip
    for b, t, d in NORMS[kind]:
        x, g = make(b, t, d), make(b, t, d)
        mean, rstd = torch.randn(b, t, device=device), torch.rand(b, t, device=device)
        yield Case("norm_affine_per_sample", f"B={b} T={t} d={d}",
                   lambda x=x, g=g, m=mean, r=rstd: ops.norm_affine_per_sample(x, g, m, r), 0.0,
                   2.0 * b * t * d * size)  # fmt: skip
    yield from _steps(device)


def _weight_gradient(x: Tensor, g: Tensor, options: tuple[Any, ...]) -> Callable[[], Tensor]:
    """torch's own weight gradient of the batch."""
    k, stride, padding, dilation, groups = options
    weight = x.new_empty(g.size(1), x.size(1) // groups, k, k)

    def run() -> Tensor:
        return torch.ops.aten.convolution_backward(g, x, weight, None, [stride] * 2, [padding] * 2, [dilation] * 2,
                                                   False, [0, 0], groups, [False, True, False])[1]  # fmt: skip

    return run


def _steps(device: torch.device) -> Iterator[Case]:
    """Noise, and noise with the optimizer's update, against torch's fused AdamW without noise."""
    n = ELEMENTS[device.type]
    sizes = [n // 2, n // 4, n // 8, n // 16, 1000, 77, n // 32]
    params, sums, first, second = ([torch.randn(s, device=device) * 0.01 for s in sizes] for _ in range(4))
    second = [v.abs_() for v in second]
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]
    total, text = sum(sizes), f"{sum(sizes) / 1e6:.0f}M in {len(sizes)} tensors"
    flat = torch.empty(total, device=device)
    yield Case("noise_", text, lambda: ops.noise_(flat, 1.0, KEY, 1, 0), 0.0, 4.0 * total, lambda: flat.normal_())
    optimizer = torch.optim.AdamW([p.clone().requires_grad_() for p in params], lr=1e-3, fused=True)
    for p, s in zip(optimizer.param_groups[0]["params"], sums, strict=True):
        p.grad = s.clone()

    def noisy(keep: bool) -> None:
        ops.noisy_adamw_step_(params, sums, first, second, offsets, key=KEY, step=1, std=1.0, scale=0.1, lr=1e-3,
                              beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, t=3, keep_grads=keep)  # fmt: skip

    def randn_and_step() -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad.add_(torch.randn_like(p)).mul_(0.1)
        optimizer.step()

    yield Case("noisy_adamw_step_ (peer: AdamW fused)", text, lambda: noisy(False), 0.0, 28.0 * total, optimizer.step)
    yield Case("  .. keeping the gradient", text, lambda: noisy(True), 0.0, 32.0 * total, optimizer.step)
    yield Case("noisy_adamw_step_ (peer: randn, AdamW)", text, lambda: noisy(False), 0.0, 28.0 * total, randn_and_step)


def error(case: Case) -> float:
    """Largest difference from the reference over the largest value; 0 where the operator works in place."""
    found = case.run()
    with forced("reference"):
        truth = case.run()
    pairs = [(found, truth)] if isinstance(found, Tensor) else list(zip(found or (), truth or (), strict=True))
    worst = 0.0
    for a, b in pairs:
        wrong = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        worst = wrong if not wrong <= worst else worst  # NaN too
    return worst


def measure(case: Case, device: torch.device, dtype: torch.dtype, roof: tuple[float, float], rounds: int) -> Row:
    """One row of the table; an operator that fails says so in it."""
    name = case.operator.split()[0]
    served = ops.registry.OPERATORS.get("noisy_adamw_step_" if name == ".." else name)
    row: Row = {"operator": case.operator, "shape": case.shape, "dtype": str(dtype)[6:],
                "backend": served.served_by(device.type).split(" (")[0] if served else "PyTorch"}  # fmt: skip
    try:
        return row | _measured(case, device, dtype, roof, rounds)
    except Exception as problem:  # noqa: BLE001  (the others are still to be measured)
        print(f"{case.operator} failed: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
        return row | {"error": f"failed: {type(problem).__name__}"}


def _measured(case: Case, device: torch.device, dtype: torch.dtype, roof: tuple[float, float], rounds: int) -> Row:
    wrong = 0.0 if case.operator.startswith(("nois", " ")) else error(case)
    row: Row = {"error": f"{wrong:.0e}"}
    if not wrong < (2e-2 if dtype != torch.float32 else 1e-4):
        return row

    def reference() -> None:
        with forced("reference"):
            case.run()

    times = interleaved({"ours": case.run, "peer": case.peer or reference}, device, rounds)
    bound = "arithmetic" if case.flop / roof[0] > case.bytes / roof[1] else "bytes"
    floor = max(case.flop / roof[0], case.bytes / roof[1])
    return row | {
        "ms": f"{1e3 * times['ours']:.3f}", "reference_ms": f"{1e3 * times['peer']:.3f}",
        "speedup": f"{times['peer'] / times['ours']:.2f}", "roof": f"{100 * floor / times['ours']:.0f}%",
        "bound": bound,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    require_kernels(device)
    facts = versions(device)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    roof = roofs(device, dtype)
    print(
        f"roofs: {roof[0] / 1e9:.0f} Gflop/s ({options.dtype} product), {roof[1] / 1e9:.1f} GB/s (copy, read + written)"
    )
    todo = [case for case in cases(device, dtype) if options.only in case.operator]
    rows, bar = [], Bar(len(todo))
    with torch.no_grad():
        for number, case in enumerate(todo, 1):
            rows.append(measure(case, device, dtype, roof, options.rounds) | facts)
            bar.at(number, case.operator)
            append(options.out, rows[-1:], SAVED)  # one by one: a run cut short keeps what it has
    print(NOTE)
    show(rows, COLUMNS)


if __name__ == "__main__":
    main()
