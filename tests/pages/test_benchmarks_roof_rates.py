"""Rates of convolutions on paper: by hand, and counts that are those of the code that is compiled here."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.roof_jobs import Part, Roof, tiles_of
from benchmarks.roof_rates import COUNTS, DATA_SHEET, DEPTHWISE, Count, count, cycles, rate

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
from benchmarks.roof_rates import count, launches, machine_code
key, launch = next(found for found in launches() if found[0][0] == "conv_kernel sum")
print(repr(key), *count(machine_code(launch), launch.options["num_warps"])[:3], sep=";")
"""


def test_the_longest_of_three_is_a_step() -> None:
    assert cycles(128, 128, 64, Count(100, 50, 8)) == (640.0, 100.0)  # (2 * 64 * 192 + 64 * 256) * 2 bytes over 128
    assert cycles(128, 128, 64, Count(400, 50, 8)) == (800.0, 100.0)  # issue
    assert cycles(64, 256, 16, Count(10, 0, 4)) == (160.0, 0.0)


def test_rates_by_hand() -> None:
    given = {"MODE": "sum", "BLOCK_O": 128, "BLOCK_N": 128, "BLOCK_P": 64, "LAST": True, "CHUNK": 1024, "P": 130}
    flush = COUNTS["conv_kernel sum", 128, 128].flush * 2
    assert rate("conv_kernel", given) == pytest.approx(DATA_SHEET * 512 * 3 / (640 * 3 + flush))
    assert rate("conv_kernel", given | {"LAST": False}) is None and rate("conv_kernel", given | {"BLOCK_N": 32}) is None
    gram = {"BLOCK": 128, "BLOCK_N": 64, "LAST": True, "CHUNK": 1024, "N": 2304, "D_O": 64}
    flush = COUNTS["conv_gram_kernel", 128, 128].flush * 2
    assert rate("conv_gram_kernel", gram) == pytest.approx(DATA_SHEET * 512 * 37 / (640 * 37 + 4 * flush))
    channels = {"BLOCK_T": 8, "BLOCK_P": 32, "BLOCK_C": 32}
    assert rate("depthwise_kernel", channels) == pytest.approx(2 * 8 * 1024 * DATA_SHEET / 4096 / DEPTHWISE[8])
    device = Roof(flop=100.0, bytes=10.0, launch=0.0)
    assert device.seconds(Part(200.0, rate=50.0)) == 4.0 and device.seconds(Part(200.0, rate=math.inf)) == 2.0


def test_operations_of_tiles_of_convolutions() -> None:
    given = {"P": 70, "BLOCK_P": 64, "BLOCK_O": 128, "BLOCK_N": 64, "share": 5}
    assert tiles_of("conv_kernel", 6, given) == 5 * 2 * 6 * 128 * 64 * 128
    channels = {"P": 70, "SPAN": 64, "BLOCK_T": 8, "BLOCK_P": 32, "BLOCK_C": 32}
    assert tiles_of("depthwise_kernel", 6, channels) == 2 * 6 * 8 * 32 * 64
    given = {"N": 100, "D_O": 40, "BLOCK_N": 64, "BLOCK_O": 64, "BLOCK": 128}
    assert tiles_of("conv_gram_kernel", 3, given) == 2 * 3 * 128 * 128 * (128 + 64)


def test_what_a_branch_skips_is_a_flush() -> None:
    loop = [".L_x_2", "LDGSTS.E.BYPASS.128 [R1]", "HGMMA.64x128x16", "@!P0 BRA `(.L_x_1)", "FADD", "FADD", ".L_x_1",
            "@P3 BRA `(.L_x_2)", "BRA `(.L_x_9)"]  # fmt: skip
    code: list[tuple[str, str]] = []
    label = ""
    for line in loop:
        if line.startswith("."):
            label = line
        else:
            code.append((label, line))
            label = ""
    assert count(code, 8) == Count(4, 2, 8, (16,))
    with pytest.raises(ValueError, match="tensor-core"):
        count(code[3:], 8)


def test_counts_are_those_of_the_code() -> None:
    """Another Triton may order code otherwise; a step that grew by a tenth would make the table a lie."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    step, flush, warps = map(int, done.stdout.strip().split(";")[1:])
    known = COUNTS["conv_kernel sum", 128, 128]
    assert step <= 1.1 * known.step and flush <= 1.1 * known.flush and warps == known.warps
