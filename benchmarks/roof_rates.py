"""What share of a Hopper GPU's peak the kernels of convolutions can reach, counted from their machine code.

    python -m benchmarks.roof_rates

No device is needed: Triton compiles a kernel for sm_90, and of the loop with the tensor-core instructions (of depthwise
ones, which use none, with the multiply-adds) is counted what one step of a multiprocessor takes at least, in cycles:

- tensor cores: its operations over 4096 a cycle (989 TFLOP/s over 132 multiprocessors at 1.83 GHz);
- issue: instructions of all warps over 4 a cycle, one a scheduler;
- shared memory: operands that `wgmma` reads, for each 64 rows anew, and what loads write, over 128 bytes a cycle.

The longest of the three is the step. What a branch skips in most steps (a sample's sum goes to the total) is counted
apart, with nothing beside it, once for each time it is taken. Latencies, waves and the L2 cache are left out: rates are
bounds on paper, not measurements.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TENSOR, ISSUE, SHARED = 4096.0, 4.0, 128.0  # of a multiprocessor and cycle: operations, instructions, bytes
DATA_SHEET = 989e12  # operations a second, dense, 16 bits


class Count(NamedTuple):
    """Instructions of a warp: a step, and beside it where a sum goes to its total; bytes of one asynchronous load."""

    step: int
    flush: int
    warps: int
    loads: tuple[int, ...] = ()


# What the command prints (Triton 3.9): by kernel, rows and columns of the tile; 64 products a step, loads of 16 bytes
COUNTS: dict[tuple[str, int, int], Count] = {
    ("conv_kernel norm", 128, 128): Count(218, 193, 8, (16,)),
    ("conv_kernel store", 128, 128): Count(212, 193, 8, (16,)),
    ("conv_kernel sum", 128, 128): Count(214, 198, 8, (16,)),
    ("conv_gram_kernel", 128, 128): Count(229, 193, 8, (16,)),
    ("conv_kernel norm", 64, 128): Count(317, 193, 4, (16,)),
    ("conv_kernel store", 64, 128): Count(326, 193, 4, (16,)),
    ("conv_kernel sum", 64, 128): Count(329, 198, 4, (16,)),
    ("conv_gram_kernel", 64, 64): Count(154, 0, 4, (16,)),
}
DEPTHWISE = {8: 320, 4: 214}  # instructions of a warp by taps of a program: a step of 1024 positions times channels


def cycles(m: int, n: int, k: int, count: Count) -> tuple[float, float]:
    """Of a step and of a flush, at least."""
    tensor = 2.0 * m * n * k / TENSOR
    issue = count.step * count.warps / ISSUE
    rows = max(m // 64, 1)
    shared = (2.0 * k * rows * (64 + n) + 2.0 * k * (m + n)) / SHARED
    return max(tensor, issue, shared), count.flush * count.warps / ISSUE


def rate(kernel: str, given: dict[str, Any]) -> float | None:
    """Operations a second that a launch can reach on paper; None: code like its own was not counted."""
    if kernel == "depthwise_kernel":  # 4 warps: a warp's instruction takes a cycle of the multiprocessor
        taps = given["BLOCK_T"]
        return DATA_SHEET / TENSOR * 2.0 * taps * given["BLOCK_P"] * given["BLOCK_C"] / DEPTHWISE[taps]
    gram = kernel == "conv_gram_kernel"
    m, n, k = (given["BLOCK"], given["BLOCK"], given["BLOCK_N"]) if gram else (
        given["BLOCK_O"], given["BLOCK_N"], given["BLOCK_P"])  # fmt: skip
    known = COUNTS.get((kernel if gram else f"{kernel} {given['MODE']}", m, n))
    if known is None or not given["LAST"] or k != 64:
        return None
    step, flush = cycles(m, n, k, known)
    sums = (given["N"], given["D_O"]) if gram else (given["P"],)
    steps, flushes = (sum(math.ceil(size / part) for size in sums) for part in (k, given["CHUNK"]))
    return DATA_SHEET * 2.0 * m * n * k / TENSOR * steps / (step * steps + flush * flushes)


# ---------------------------------------------------------------------- counting


def machine_code(launch: Any) -> list[tuple[str, str]]:
    """(label or "", instruction) of a launch compiled for sm_90."""
    import triton
    from fastdp.kernels import report
    from triton.backends.compiler import GPUTarget

    done = triton.compile(report.source(launch), target=GPUTarget("cuda", 90, 32), options=launch.options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        text = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout
    found, label = [], ""
    for line in text.splitlines():
        if mark := re.match(r"(\.L_x_\d+):", line):
            label = mark[1]
        elif code := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            found.append((label, code[1].strip()))
            label = ""
    return found


def count(code: list[tuple[str, str]], warps: int) -> Count:
    """Of the first loop with tensor-core instructions. What a branch forward within it skips is the flush."""
    places = {label: place for place, (label, _) in enumerate(code) if label}
    jumps = [(place, places.get(match[1], -1)) for place, (_, text) in enumerate(code)
             if (match := re.search(r"BRA.*`\((\.L_x_\d+)\)", text))]  # fmt: skip
    for end, start in jumps:
        inside = [text for _, text in code[start : end + 1]]
        if 0 <= start < end and any("GMMA" in text or "FFMA" in text for text in inside):
            skipped = {p for place, to in jumps if start < place < to <= end for p in range(place + 1, to)}
            own = (text for place, (_, text) in enumerate(code) if start <= place <= end and place not in skipped)
            loads = [text for text in own if re.search(r"\bLDG(STS)?\b", text)]
            wide = tuple(sorted({16 if ".128" in text else 8 if ".64" in text else 4 for text in loads}))
            return Count(len(inside) - len(skipped), len(skipped), warps, wide)
    raise ValueError("no loop with tensor-core instructions")


def launches() -> Iterator[tuple[tuple[str, int, int], Any]]:
    """3 x 3 convolutions by each kind of tile."""
    from fastdp.kernels import conv, report

    def meta(*shape: int) -> Any:
        import torch

        return report.meta(*shape, dtype=torch.bfloat16 if len(shape) > 1 else torch.float32)

    for channels, side in ((256, 14), (64, 7)):
        x, g, c = meta(8, channels, side, side), meta(8, channels, side, side), meta(8)
        with report.recorded(90) as found:
            conv.conv_norm_sq(x, g, 3, 1, 1, method="direct")
            conv.conv_norm_sq(x, g, 3, 1, 1, method="gram")
            conv.conv_per_sample(x, g, 3, 1, 1)
            conv.conv_clipped_sum(x, g, c, 3, 1, 1)
        for launch in found:
            name, given = launch.kernel.fn.__name__, launch.arguments
            if name == "conv_kernel":
                yield (f"{name} {given['MODE']}", given["BLOCK_O"], given["BLOCK_N"]), launch
            elif name == "conv_gram_kernel":
                yield (name, given["BLOCK"], given["BLOCK"]), launch
    for size, padding, side in ((7, 3, 14), (2, 0, 13)):
        with report.recorded(90) as found:
            conv.conv_per_sample(meta(8, 96, 14, 14), meta(8, 96, side, side), size, 1, padding, 1, 96)
        yield ("depthwise_kernel", found[0].arguments["BLOCK_T"], 1024), found[0]


def main() -> None:
    """Compile, count, and print what `COUNTS` holds, with the share of the data sheet's peak at 196 positions."""
    argparse.ArgumentParser(prog="benchmarks.roof_rates", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()  # fmt: skip
    for (kernel, m, n), launch in launches():
        found = count(machine_code(launch), launch.options["num_warps"])
        text = f"{kernel:<18}{m:>5} x {n:<5}{found!s:<50}"
        if kernel == "depthwise_kernel":
            print(
                f"{text}{found.step} cycles a step, {2 * m * n * DATA_SHEET / TENSOR / found.step / 1e12:.1f} TFLOP/s"
            )
            continue
        step, flush = cycles(m, n, 64, found)
        tensor = 2.0 * m * n * 64 / TENSOR
        share = 4 * tensor / (4 * step + flush)
        print(f"{text}{tensor:>5.0f} cycles of tensor cores, {step:.0f} a step, {flush:.0f} a flush; {share:.0%} of "
              "the data sheet in samples of 4 steps")  # fmt: skip


if __name__ == "__main__":
    main()
