"""What share of a Hopper GPU's peak the kernels of convolutions can reach, by their machine code.

Of the loop with the tensor-core instructions of a kernel compiled for sm_90 (of depthwise ones, which use none, with
the multiply-adds) it was counted what one step of a multiprocessor takes at least, in cycles:

- tensor cores: its operations over 4096 a cycle (989 TFLOP/s over 132 multiprocessors at 1.83 GHz);
- issue: instructions of all warps over 4 a cycle, one a scheduler;
- shared memory: operands that `wgmma` reads, for each 64 rows anew, and what loads write, over 128 bytes a cycle.

The longest of the three is the step. What a branch skips in most steps (a sample's sum goes to the total) comes on top,
once for each time it is taken. Latencies, waves and the L2 cache are left out: rates are bounds on paper, not
measurements.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

TENSOR, ISSUE, SHARED = 4096.0, 4.0, 128.0  # of a multiprocessor and cycle: operations, instructions, bytes
DATA_SHEET = 989e12  # operations a second, dense, 16 bits


class Count(NamedTuple):
    """Instructions of a warp: a step, and beside it where a sum goes to its total."""

    step: int
    flush: int
    warps: int


# As Triton 3.9 compiles them: by kernel, rows and columns of the tile; 64 products a step, loads of 16 bytes
COUNTS: dict[tuple[str, int, int], Count] = {
    ("conv_kernel norm", 128, 128): Count(218, 193, 8),
    ("conv_kernel store", 128, 128): Count(212, 193, 8),
    ("conv_kernel sum", 128, 128): Count(214, 198, 8),
    ("conv_gram_kernel", 128, 128): Count(229, 193, 8),
    ("conv_kernel norm", 64, 128): Count(317, 193, 4),
    ("conv_kernel store", 64, 128): Count(326, 193, 4),
    ("conv_kernel sum", 64, 128): Count(329, 198, 4),
    ("conv_gram_kernel", 64, 64): Count(154, 0, 4),
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
