"""Compiles the kernels as their launchers would run them, without a GPU: `python -m fastdp.kernels.report`.

Prints registers, spills, shared memory and the matrix instruction for each kernel, type and architecture.
The launchers run on meta tensors while what they launch is written down; Triton then compiles that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from . import clip, clipped, common, conv, embedding, head_loss, linear, lookup, many, noise, norm, rows, segments, step

ARCHITECTURES = {
    80: common.Device(108, 163 * 1024, 80),
    90: common.Device(132, 227 * 1024, 90),
    100: common.Device(148, 227 * 1024, 100),
}
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int64: "i64",
    torch.int32: "i32",
}  # fmt: skip
WIDE = re.compile(r"cp\.async\S* [^;]*, (?:0x10|16)[,;]|ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|bulk\.tensor")
MATRIX = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)[.\w:]*")


class Launch(NamedTuple):
    """One launch: a kernel and what it was given."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


class Build(NamedTuple):
    """What became of it. Spilled registers show as bytes of stack; `local` is memory declared as such; `wide` counts
    loads of 16 bytes."""

    kernel: str
    arch: int
    registers: int
    stack: int
    shared: int
    matrix: str
    local: int
    wide: int


class Case(NamedTuple):
    """A call of a launcher whose launches are compiled."""

    name: str
    dtype: torch.dtype
    call: Callable[[], Any]


@contextlib.contextmanager
def recorded(arch: int) -> Iterator[list[Launch]]:
    """Within it launches are written down instead of run, with the choices made for an architecture."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
        launches.append(Launch(self, arguments | kwargs, options))

    before, limits = JITFunction.run, list(common.ASSUMED)
    JITFunction.run, common.ASSUMED[:] = run, [ARCHITECTURES[arch]]
    try:
        yield launches
    finally:
        JITFunction.run, common.ASSUMED[:] = before, limits


def source(launch: Launch) -> ASTSource:
    """What Triton would compile for a launch: integers of value 1 constant, multiples of 16 marked as such, but for
    those that make no code of their own."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name, special = parameter.name, not parameter.do_not_specialize
        value = launch.arguments[name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and special):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and special:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def build(launch: Launch, arch: int) -> Build:
    """Compile a launch for an architecture and read the cubin's resources."""
    done = triton.compile(source(launch), target=GPUTarget("cuda", arch, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
        found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout))
    matrix = MATRIX.search(done.asm["ptx"])
    registers, stack, local = (int(found[key]) for key in ("REG", "STACK", "LOCAL"))
    name = launch.kernel.fn.__name__.removesuffix("_kernel")
    return Build(name, arch, registers, stack, done.metadata.shared, matrix[1] if matrix else "", local,
                 len(WIDE.findall(done.asm["ptx"])))  # fmt: skip


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without numbers."""
    return torch.empty(shape, dtype=dtype, device="meta")


def linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Matrix products at sizes of language models, of a low-rank adapter, and of no multiple of anything."""
    for t, i, o in ((1024, 4096, 4096), (512, 768, 768), (1024, 768, 8), (197, 50, 300), (197, 768, 3072)):
        a, g, c = meta(8, t, i, dtype=dtype), meta(8, t, o, dtype=dtype), meta(8, dtype=torch.float32)
        name = f"T={t} I={i} O={o}"
        for method in ("gram", "direct"):
            yield Case(f"{method} {name}", dtype, lambda a=a, g=g, m=method: linear.linear_norm_sq(a, g, m))
        tile = linear.direct_tile(a, g)
        yield Case(f"per sample {name}", dtype, lambda a=a, g=g, t=tile: linear.linear_per_sample(a, g, tile=t))
        yield Case(f"sum {name}", dtype, lambda a=a, g=g, c=c: clipped.linear_clipped_sum(a, g, c, parts=2))
    a, g, c = meta(64, 768, dtype=dtype), meta(64, 1000, dtype=dtype), meta(64, dtype=torch.float32)
    yield Case("T=1 norm", dtype, lambda: linear.linear_norm_sq(a, g))
    yield Case("T=1 sum", dtype, lambda: clipped.linear_clipped_sum(a, g, c, parts=1))


def conv_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Convolutions of a ResNet, of a patch embedding, grouped, and over time."""
    half = dtype.itemsize == 2
    shapes: tuple[tuple[str, tuple[int, ...], int, int, int, int, int], ...] = (
        ("3x3 64->64 56^2", (64, 56, 56), 64, 3, 1, 1, 1),
        ("3x3/2 256->512 14^2", (256, 14, 14), 512, 3, 2, 1, 1),
        ("16x16/16 3->768 224^2", (3, 224, 224), 768, 16, 16, 0, 1),
        ("3x3 depthwise 96 28^2", (96, 28, 28), 96, 3, 1, 1, 96),
        ("7x7 depthwise 96 28^2", (96, 28, 28), 96, 7, 1, 3, 96),
        ("1x1/2 256->512 28^2", (256, 28, 28), 512, 1, 2, 0, 1),
        ("1-D 3 80->384 3000", (80, 3000), 384, 3, 1, 1, 1),
    )
    for name, x_shape, outputs, k, stride, padding, groups in shapes:
        spatial = [(size + 2 * padding - k) // stride + 1 for size in x_shape[1:]]
        x, g = meta(8, *x_shape, dtype=dtype), meta(8, outputs, *spatial, dtype=dtype)
        c, rest = meta(8, dtype=torch.float32), (k, stride, padding, 1, groups)
        for method in ("gram", "direct"):
            if math.prod(spatial) <= 256 or method == "direct":
                norm = lambda x=x, g=g, r=rest, m=method: conv.conv_norm_sq(x, g, *r, m)
                yield Case(f"{method} {name}", dtype, norm)
        yield Case(f"per sample {name}", dtype, lambda x=x, g=g, r=rest: conv.conv_per_sample(x, g, *r))
        bound = lambda x=x, g=g, r=rest: conv.conv_norm_sq_and_bound(x, g, *r, "direct", 1e-6, (1e-6, 5e-5))
        yield Case(f"norm and bound {name}", dtype, bound)
        if half:
            yield Case(f"sum {name}", dtype, lambda x=x, g=g, c=c, r=rest: conv.conv_clipped_sum(x, g, c, *r))


def norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Layer, RMS and group norm, the last in both layouts."""
    x, rows = meta(8, 1024, 768, dtype=dtype), meta(8, 1024, dtype=torch.float32)
    yield Case("layer norm T=1024 d=768", dtype, lambda: norm.norm_affine_per_sample(x, x, rows, rows))
    yield Case("RMS norm T=1024 d=768", dtype, lambda: norm.rms_affine_per_sample(x, x, rows))
    yield Case("RMS norm's statistic T=1024 d=768", dtype, lambda: norm.rms_rstd(x, 1e-6))
    images, groups = meta(8, 64, 32, 32, dtype=dtype), meta(8, 32, dtype=torch.float32)
    last = images.to(memory_format=torch.channels_last)
    for name, y in (("", images), (" last", last)):
        call = lambda y=y: norm.group_affine_per_sample(y, y, groups, groups, 32)
        yield Case(f"group norm C=64 32^2{name}", dtype, call)


def segment_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Rows of 8 samples routed to 16 experts."""
    a, g, c = meta(2048, 1024, dtype=dtype), meta(2048, 2816, dtype=dtype), meta(2048, dtype=torch.float32)
    starts, into = meta(129, dtype=torch.int64), meta(128, 2816, 1024, dtype=torch.float32)
    yield Case("norm of segments", dtype, lambda: segments.norm_sq(a, g, starts))
    yield Case("store segments", dtype, lambda: segments.overwrite_sums(a, g, starts, into))
    yield Case("sum of segments", dtype, lambda: segments.overwrite_sums(a, g, starts[:17], into[:16], c))


def many_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Twelve layers at once, found by their addresses; stored rows."""
    c, limits = meta(8, dtype=torch.float32), (1e-6, 5e-5)
    for t, i, o in ((512, 768, 3072), (1, 768, 768)):
        pairs = [(meta(8, t, i, dtype=dtype), meta(8, t, o, dtype=dtype)) for _ in range(12)]
        name = f"many T={t} I={i} O={o}"
        for method in ("gram", "direct") if t > 1 else ("auto",):
            yield Case(f"{method} {name}", dtype, lambda p=pairs, m=method: many.linear_norm_sq(p, m, *limits))
        if dtype.itemsize == 2:
            yield Case(f"sum {name}", dtype, lambda p=pairs, c=c: many.linear_clipped_sum(list(p), c))
    stored = meta(8, 768, 768, dtype=dtype)
    yield Case("stored square sum", dtype, lambda: rows.square_sum(stored))
    yield Case("stored weighted sum", dtype, lambda: rows.weighted_sum(stored, c))


def head_cases(dtype: torch.dtype) -> Iterator[Case]:
    """A head's loss, whose logits are float32 whatever the model's type."""
    z, y, lse = (
        meta(*shape, dtype=kind)
        for shape, kind in (((512, 50257), torch.float32), ((512,), torch.int64), ((512,), torch.float32))
    )
    for name, options in (("", {}), (" again", {"lse": lse}), (" softcap", {"softcap": 30.0})):
        yield Case(f"head loss V=50257{name}", dtype, lambda o=options: head_loss.gradient_(z, y, 0, 50257, **o))


def embedding_cases(dtype: torch.dtype) -> Iterator[Case]:
    """A table that is also the head, of an odd number of words."""
    ids, g = meta(8, 512, dtype=torch.int64), meta(8, 512, 50257, dtype=dtype)
    for d in (768, 4096):
        e, h = meta(8, 512, d, dtype=dtype), meta(8, 512, d, dtype=dtype)
        yield Case(f"tied cross term d={d}", dtype, lambda e=e, h=h: embedding.cross_term_and_spread(ids, e, h, g))


def noise_cases(dtype: torch.dtype) -> Iterator[Case]:
    """What stands in for CUDA C++: noise, the updates that draw it, look-ups, factors."""
    key = [0x9E3779B9 + k for k in range(8)]
    tensors = [[meta(1280, 5120, dtype=kind), meta(1280, dtype=kind)] for kind in (dtype, torch.float32, dtype, dtype)]
    draw: dict[str, Any] = {"key": key, "step": 3, "std": 0.7, "scale": 0.1, "keep_grads": False, "lr": 0.1}
    adam = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "t": 3}
    yield Case("noise", dtype, lambda: noise.noise_(tensors[0][0], 0.7, key, 3, 5))
    yield Case("noise added", dtype, lambda: noise.add_noise_(tensors[1][0], 0.7, 0.1, key, 3, 5))
    yield Case("update AdamW", dtype, lambda: step.noisy_adamw_step_(*tensors, [5, 6553606], **draw, **adam))
    yield Case("update SGD", dtype, lambda: step.noisy_sgd_step_(*tensors[:3], [5, 6553606], **draw, momentum=0.9))
    past: dict[str, Any] = {"earlier_steps": [2, 1], "earlier_weights": [-0.5, 0.1]}
    yield Case("correlated noise", dtype, lambda: noise.add_noise_(tensors[1][0], 0.7, 0.1, key, 3, 5, **past))
    yield Case(
        "correlated update", dtype, lambda: step.noisy_adamw_step_(*tensors, [5, 6553606], **draw, **past, **adam)
    )
    ids, g, c = meta(8, 512, dtype=torch.int64), meta(8, 512, 768, dtype=dtype), meta(8, dtype=torch.float32)
    yield Case("look-ups' norm", dtype, lambda: lookup.embedding_norm_sq(ids, g))
    yield Case("look-ups' sum", dtype, lambda: lookup.embedding_clipped_sum(ids, g, c, 50257))
    for kind in ("local", "global", "automatic"):
        yield Case(f"factors {kind}", dtype, lambda k=kind: clip.clip_factors(c, 1.0, k))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every launcher."""
    families = (
        linear_cases, many_cases, segment_cases, conv_cases, norm_cases, head_cases, embedding_cases, noise_cases,
    )  # fmt: skip
    for family in families:
        yield from family(dtype)


def builds(case: Case, arch: int) -> Iterator[Build]:
    """Compile all a case launches."""
    with recorded(arch) as launches:
        case.call()
    for launch in launches:
        yield build(launch, arch)


def compiled(options: argparse.Namespace) -> Iterator[tuple[Case, Build]]:
    """Every case asked for, compiled."""
    for dtype in (dtype for dtype, name in TYPES.items() if name in options.dtype):
        for case in cases(dtype):
            if not options.only or any(part in case.name for part in options.only):
                for arch in options.arch:
                    for made in builds(case, arch):
                        yield case, made


def main() -> None:
    """Compile every kernel and print a table."""
    parser = argparse.ArgumentParser(prog="fastdp.kernels.report", description=main.__doc__)
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--dtype", nargs="*", default=["bf16", "fp32"], choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--only", nargs="*", help="cases whose name contains one of these")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args()
    if knobs.runtime.interpret:
        parser.error("unset TRITON_INTERPRET: interpreted kernels are not compiled")
    if not options.json:
        print(f"{'kernel':<18}{'case':<36}{'type':<6}{'arch':<8}{'regs':>5}{'stack':>7}{'local':>7}{'shared':>8}"
              f"{'wide':>6}  matrix")  # fmt: skip
    for case, made in compiled(options):
        if options.json:
            print(json.dumps({"case": case.name, "type": TYPES[case.dtype], **made._asdict()}), flush=True)
        else:
            print(f"{made.kernel:<18}{case.name:<36}{TYPES[case.dtype]:<6}sm_{made.arch:<5}{made.registers:>5}"
                  f"{made.stack:>7}{made.local:>7}{made.shared:>8}{made.wide:>6}  {made.matrix}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
