"""What a kernel must do, from the call that starts it: its operations, its bytes, its launches.

Calls of torch are counted as eager PyTorch runs them on a GPU: one kernel a call (LAUNCHES says which take more), all
that it reads and writes moved once. Calls of fastdp's operators are run on the meta device as their CUDA implementation
would run: what Triton launches is written down (`kernels.report`), and every copy that the launcher makes is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .roof_rates import rate

FREE = {"detach", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "alias",
        "_local_scalar_dense", "_unsafe_view", "_reshape_alias", "scalar_tensor", "_record_function_enter_new",
        "_record_function_exit", "is_same_size", "_has_same_storage_numel", "expand", "resize_"}  # fmt: skip
# of more than one kernel, as torch 2.11's CUDA sources run them
LAUNCHES = {"sort": 6, "convolution_backward": 2, "native_layer_norm_backward": 3, "native_group_norm": 2,
            "native_group_norm_backward": 4, "embedding_dense_backward": 8, "nonzero": 4,
            "_fused_rms_norm_backward": 3, "_scaled_dot_product_flash_attention_backward": 3}  # fmt: skip
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}  # their first argument is not read
PICKS = {"embedding", "gather", "index", "index_select"}  # of their first argument only what comes out is read
COPIES = {"linalg_vector_norm", "sum"}  # of other numbers in float64: of a copy in float64 (ReduceOps' make_reduction)


class Part(NamedTuple):
    """A kernel of the device (or several of one call). gathers: whether it loads two bytes at a time; rate: operations
    a second that its code can reach at most, where that was counted (`benchmarks.roof_rates`)."""

    flop: float = 0.0
    bytes: float = 0.0
    launches: int = 1
    float32: bool = False
    gathers: bool = False
    rate: float = math.inf


class Job(NamedTuple):
    """A call: its kernels, and the least that any kernel could do it with (None: an exact step has no need of it)."""

    name: str
    shape: str
    parts: tuple[Part, ...]
    least: Part | None = None


class Roof(NamedTuple):
    """A device: operations a second of 16-bit and of float32 products, bytes a second, seconds of a launch, and which
    share of its operations a kernel reaches that gathers its numbers two bytes at a time (gpu.md: a tenth)."""

    flop: float = 790e12
    bytes: float = 4.3e12
    float32: float = 67e12
    launch: float = 3e-6
    gathers: float = 0.1

    def seconds(self, part: Part | None) -> float:
        """Predicted time."""
        if part is None:
            return 0.0
        peak = (self.float32 if part.float32 else self.flop) * (self.gathers if part.gathers else 1.0)
        return max(part.flop / min(peak, part.rate), part.bytes / self.bytes) + part.launches * self.launch


def size_of(tensor: Tensor) -> int:
    """Bytes that a kernel meets of a tensor: what is expanded is there once."""
    sides = (1 if stride == 0 else side for side, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return math.prod(sides) * tensor.element_size()


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def sizes(values: Iterable[Tensor]) -> str:
    return " ".join("x".join(map(str, t.shape)) or "1" for t in values)


def bytes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """What a call reads and writes, by its schema."""
    name, read, written = func._schema.name.partition("::")[2], 0.0, 0.0
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        size = sum(map(size_of, tensors(value)))
        changed = argument.alias_info is not None and argument.alias_info.is_write
        written += size if changed else 0
        if not (number == 0 and name in OVERWRITES | PICKS) and not (changed and argument.name.startswith("out")):
            read += size
    for value, result in zip(out if isinstance(out, tuple) else (out,), func._schema.returns, strict=False):
        if result.alias_info is None:
            written += sum(map(size_of, tensors(value)))
    if name in PICKS:
        read += sum(map(size_of, tensors(out)))
    first = tensors(args)[:1]
    if name in COPIES and kwargs.get("dtype") == torch.float64 and first and first[0].dtype != torch.float64:
        read += 16.0 * first[0].numel()  # the copy, written and read
    return read + written


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """torch's own count; of causal attention half of it, which its kernels leave out."""
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return 0.0
    name, causal = func._schema.name, [a.name for a in func._schema.arguments].count("is_causal")
    if func._overloadname == "dtype":  # of products with a type of the result, which the counter takes for a shape
        args = args[:2]
    whole = float(count(*args, **kwargs, out_val=out))
    if name.endswith("convolution_backward") and args[9] > 1 and args[10][1]:  # torch takes it for one group
        flop = 2.0 * args[0].size(0) * math.prod(args[0].shape[2:]) * args[2].numel()
        whole = flop * sum(args[10][:2])
    if causal and "attention" in name:
        place = [a.name for a in func._schema.arguments].index("is_causal")
        whole *= 0.5 if (args[place] if place < len(args) else kwargs.get("is_causal")) else 1.0
    return whole


def torch_job(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Job | None:
    """A call of torch; None: no kernel runs."""
    name = func._schema.name.partition("::")[2]
    if name in FREE or func.is_view:
        return None
    first = tensors(args)[:1]
    exact = bool(first) and first[0].dtype == torch.float32
    launches = LAUNCHES.get(name, 1) + (name in COPIES and kwargs.get("dtype") == torch.float64)
    part = Part(flops_of(func, args, kwargs, out), bytes_of(func, args, kwargs, out), launches, exact)
    return Job(name, sizes(tensors((args, kwargs))[:3]), (part,))


# ---------------------------------------------------------------------- fastdp's operators


def product_of(name: str, args: tuple[Any, ...]) -> tuple[int, int, int, int, int] | None:
    """(B, T, I, O, groups) of an operator on products or convolutions."""
    if not name.startswith(("linear_", "conv_")):
        return None
    a, g = args[:2]
    if name.startswith("linear_"):
        t = 1 if a.dim() == 2 else a.size(1)
        return a.size(0), t, a.size(-1), g.size(-1), 1
    place = 3 if name == "conv_clipped_sum" else 2
    kernel, groups = args[place], int(args[place + 4]) if len(args) > place + 4 else 1
    taps = math.prod(kernel) if isinstance(kernel, list | tuple) else kernel ** (a.dim() - 2)
    return a.size(0), math.prod(g.shape[2:]), a.size(1) // groups * taps, g.size(1), groups


def least_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], moved: float) -> Part:
    """The fewest operations and bytes of an operator, in one launch that costs nothing."""
    shape = product_of(name, args)
    if shape is None:
        return Part(0.0, moved, 0)
    b, t, i, o, groups = shape
    whole = 2.0 * b * t * i * o
    if name.endswith("norm_sq"):  # symmetric gram matrices, of the groups that do not meet, or the product itself
        whole = min(whole, 1.0 * b * t * (t + 1) * (i * groups + o) if groups == 1 else whole)
    return Part(whole, moved, 0, args[0].dtype == torch.float32)


def tiles_of(kernel: str, grid: int, given: dict[str, Any]) -> float | None:
    """Operations of a launch in whole tiles; None of a kernel that this file does not know."""
    up = lambda size, block: math.ceil(size / block) * block
    if kernel == "gram_kernel":
        depth = up(given["D_I"], given["BLOCK_I"]) + up(given["D_O"], given["BLOCK_O"])
        return 2.0 * grid * given["BLOCK"] ** 2 * depth
    if kernel == "cross_kernel":
        return 2.0 * grid * given["BLOCK_T"] * given["BLOCK_K"] * up(given["D"], given["BLOCK_D"])
    if kernel in ("direct_kernel", "clipped_kernel", "clipped_rows_kernel"):
        samples = 1 if kernel == "direct_kernel" else given["share"]
        return 2.0 * grid * given["BLOCK_O"] * given["BLOCK_I"] * samples * up(given["T"], given["BLOCK_T"])
    if kernel == "conv_kernel":
        return 2.0 * grid * given["BLOCK_O"] * given["BLOCK_N"] * given["share"] * up(given["P"], given["BLOCK_P"])
    if kernel == "conv_gram_kernel":
        depth = up(given["N"], given["BLOCK_N"]) + up(given["D_O"], given["BLOCK_O"])
        return 2.0 * grid * given["BLOCK"] ** 2 * depth
    if kernel == "depthwise_kernel":
        positions = up(min(given["P"], given["SPAN"]), given["BLOCK_P"])
        return 2.0 * grid * given["BLOCK_T"] * given["BLOCK_C"] * positions
    return None


def bytes_of_launch(given: dict[str, Any]) -> float:
    """What a launch reads and writes: each side of a product once; layers found by their addresses too."""
    moved = float(sum(size_of(value) for value in given.values() if isinstance(value, Tensor)))
    if "p_logits" in given:  # of a tied table: those of words looked up, 32 bytes at least of each
        logits, picked = given["p_logits"], given["p_ids"].numel() * given["T"]
        moved += min(0.0, 32.0 * picked - size_of(logits))
    kind = given.get("TYPE")
    if kind is not None:
        layers = given["p_x" if "p_x" in given else "p_a"].numel()
        size = kind.primitive_bitwidth // 8
        if "N" in given:
            moved += layers * given["B"] * given["N"] * size
            moved += layers * given["N"] * size if "p_c" in given else 0
        else:
            moved += layers * given["B"] * given.get("T", 1) * (given["D_I"] + given["D_O"]) * size
    if given.get("OUT") is not None:  # sums go to memory of their own
        moved += given["p_out"].numel() * math.prod((given["D_I"], given["D_O"], given["OUT"].primitive_bitwidth // 8))
    return moved


def triton_parts(launches: list[tuple[Any, int, dict[str, Any]]], flop: float) -> list[Part]:
    """The kernels that a launcher started, by (kernel, grid, arguments). `flop`: of the operator, for those whose tiles
    are not known."""
    parts, known = [], False
    for kernel, grid, given in launches:
        values = [value for value in given.values() if isinstance(value, Tensor)]
        name = kernel.fn.__name__
        count = tiles_of(name, grid, given)
        known = known or bool(count)
        kind = given.get("TYPE")
        exact = bool(values) and (values[0].dtype if kind is None else str(kind)) in (torch.float32, "fp32")
        gathers, most = name in ("conv_kernel", "conv_gram_kernel"), None
        if name == "depthwise_kernel" or (gathers and not exact):
            most = rate(name, given)
        parts.append(Part(count or 0.0, bytes_of_launch(given), 1, exact, gathers and most is None, most or math.inf))
    if parts and not known and flop:
        parts[0] = parts[0]._replace(flop=flop)
    return parts


@contextmanager
def launched() -> Iterator[list[tuple[Any, int, dict[str, Any]]]]:
    """Within it Triton kernels are written down with their grids instead of run, chosen for a Hopper GPU."""
    from triton.runtime.jit import JITFunction

    from fastdp.kernels import common

    found: list[tuple[Any, int, dict[str, Any]]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        found.append((self, math.prod(grid(given) if callable(grid) else grid), given))
        if compiling:
            before(self, *args, grid=grid, warmup=True, **kwargs)

    before, limits = JITFunction.run, list(common.ASSUMED)
    JITFunction.run, common.ASSUMED[:] = run, [common.Device(132, 227 * 1024, 90)]
    try:
        yield found
    finally:
        JITFunction.run, common.ASSUMED[:] = before, limits


compiling: list[bool] = []


class Hopper:
    """Triton's driver of a GPU that is not here: kernels are compiled for it, and none can be loaded."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")


def compile_kernels() -> None:
    """From now on what is written down is compiled, too, into Triton's cache (TRITON_CACHE_DIR)."""
    from triton.runtime import driver

    driver.set_active(Hopper())
    compiling.append(True)


def operator_job(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any,
                 watch: Callable[[Callable[[], Any]], list[Job]]) -> Job:  # fmt: skip
    """A call of one of fastdp's operators as its CUDA implementation runs it. watch: gives the calls of torch that a
    function makes."""
    from fastdp.ops.registry import OPERATORS

    name = func._schema.name.partition("::")[2]
    overload = func._overloadname
    operator = OPERATORS[name if overload == "default" else f"{name}.{overload}"]
    moved = bytes_of(func, args, kwargs, out)
    least = least_of(name, args, kwargs, moved)
    kernel = operator.kernels.get("cuda")
    if kernel is not None and kernel.backend == "CUDA C++":  # they work on pointers, and nothing is copied
        parts = [Part(0.0, moved, 8 if name.startswith("embedding") else 2 if name.startswith("noisy") else 1)]
    else:
        with launched() as found:
            run = operator.implementation("cuda")
            inner = watch(lambda: run(*args, **kwargs))
        parts = [part for job in inner for part in job.parts] + triton_parts(found, least.flop)
    shape = product_of(name, args)
    text = sizes(tensors((args, kwargs))[:3])
    if shape is not None:
        text = "B={} T={} I={} O={}".format(*shape[:4]) + (f" groups={shape[4]}" if shape[4] > 1 else "")
    method = [a for a in (*args, *kwargs.values()) if a in ("gram", "direct")] if name.endswith("norm_sq") else []
    return Job(" ".join([f"fastdp.{name}", *method]), text, tuple(parts), least)
