"""Every Triton kernel compiles for the architectures we name, without a GPU: no arrays spilled, matrix units used."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # `make test-all` runs it

triton = pytest.importorskip("triton")

# Of the cases of `python -m fastdp.kernels.report`, one or two a kernel and choice of tile.
CASES = {
    "bf16": [
        "gram T=1024 I=4096", "direct T=1024 I=4096", "per sample T=1024 I=768 O=8", "sum T=512", "gram T=197",
        "sum T=197", "T=1 ",
        "direct 3x3/2", "gram 16x16", "sum 3x3 depthwise", "per sample 7x7", "norm and bound 1-D", "layer norm",
        "RMS norm's", "group norm C=64 32^2 last",
        "many T=512", "stored", "segments", "tied", "noise", "update", "look-ups", "factors local",
    ],
    "fp32": ["head loss", "gram T=512", "direct T=512", "sum T=197", "direct 3x3/2", "gram 16x16", "tied",
             "per sample 7x7"],
}  # fmt: skip
# ptxas puts a register or four on the stack where that lets one program more run on a multiprocessor.
STACK = 16
MATRIX = {80: ("mma.sync",), 90: ("wgmma.mma_async",), 100: ("tcgen05.mma", "mma.sync")}
# Triton 3.5 ends in a failure of its own over the kernel of segments for sm_100.
ARCHES = [arch for arch in MATRIX if arch < 100 or triton.__version__ >= "3.6"]
GEMM_LIKE = {"gram", "direct", "clipped", "clipped_rows", "conv", "conv_gram", "segment", "cross"}


@pytest.mark.parametrize("dtype", CASES)
def test_kernels_compile(dtype: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "fastdp.kernels.report", "--json", "--arch", *map(str, ARCHES),
               "--dtype", dtype, "--only", *CASES[dtype]]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    expected = GEMM_LIKE | {
        "finish",
        "vector",
        "rows",
        "rstd",
        "channels",
        "add_parts",
        "sizes",
        "square",
        "weighted",
        "segment",
        "depthwise",
        "sides",
        "enlarge",
        "noise",
        "step",
        "lookup_norm",
        "lookup_sum",
        "clip",
    }
    if dtype == "fp32":
        expected = GEMM_LIKE - {"clipped", "segment"} | {"finish", "add_parts", "head_loss", "square", "depthwise"}
    for arch in ARCHES:
        assert {b["kernel"] for b in built if b["arch"] == arch} == expected, arch
    for b in built:
        # around the few lanes that are drawn anew, noise keeps its registers there
        stack = 64 if b["kernel"] in ("noise", "step") else STACK
        assert b["stack"] <= stack and b["local"] == 0, f"spills: {b}"
        assert b["shared"] <= (163 if b["arch"] == 80 else 227) * 1024, b
        if dtype == "bf16" and b["kernel"] in GEMM_LIKE:
            narrow = "O=8" in b["case"] or "depthwise" in b["case"]  # tiles of 16 rows do not fill Hopper's instruction
            assert b["matrix"] in (*MATRIX[b["arch"]], *(("mma.sync",) if narrow else ())), f"no matrix unit: {b}"
        if dtype == "bf16" and "direct 3x3/2" in b["case"] and b["kernel"] == "conv":
            assert b["wide"] >= 12, f"patches are not gathered 16 bytes at a time: {b}"
        if b["kernel"] == "depthwise" and "7x7" in b["case"]:  # 8 taps and g for a step, 8 channels a load
            assert b["wide"] >= 9, f"channels are not loaded 16 bytes at a time: {b}"
        if "many" in b["case"] and b["kernel"] != "finish":  # behind addresses loads stay wide
            assert b["wide"], f"narrow loads: {b}"
        if dtype == "fp32":
            assert not b["matrix"], f"float32 must not be rounded to tf32: {b}"


def test_batches_of_other_sizes_compile_nothing() -> None:
    code = """
import importlib, pkgutil, fastdp.kernels, triton
for name in [found.name for found in pkgutil.iter_modules(fastdp.kernels.__path__)]:
    for kernel in vars(importlib.import_module("fastdp.kernels." + name)).values():
        if isinstance(kernel, triton.runtime.jit.JITFunction) and kernel.__name__.endswith("_kernel"):
            for p in kernel.params:
                if p.name in ("B", "T", "n_o", "n_i", "parts", "share") and not p.do_not_specialize:
                    print(kernel.__name__, p.name)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]
