"""Launches and bytes of what a private step adds on a GPU, counted without one: `python -m benchmarks.launches`.

Norms and clipped sums run on tensors without numbers, with Triton's kernels written down instead of run. Every call of
torch that computes counts as a launch which reads its arguments and writes its results once; a kernel of ours reads
each side of a product once (what it reads again comes from the L2 cache). So the bytes are a floor, for both.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastdp  # noqa: F401  (registers the operators)
from fastdp.engine.gradients import Gradients
from fastdp.grad_sample.linear import Matmul, row_sums
from fastdp.grad_sample.parameter_use import ParameterUse, Stored
from fastdp.ops import embedding, extension
from fastdp.ops.registry import OPERATORS

FREE = {"empty", "empty_strided", "new_empty", "empty_like", "detach", "alias", "scalar_tensor", "lift_fresh"}
BF16 = torch.bfloat16


def bytes_of(tensors: list[Any]) -> int:
    """Of memory, each once: expanded dimensions are none."""
    total = 0
    for t in tensors:
        if isinstance(t, Tensor):
            sizes = [size for size, stride in zip(t.shape, t.stride(), strict=True) if stride or size == 0]
            total += t.element_size() * int(torch.Size(sizes).numel())
    return total


class Counted(TorchDispatchMode):
    """Counts launches of torch's kernels and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if name in FREE or aliases or name.startswith("_reshape_alias"):
            return out
        read, written = tree_leaves((args, kwargs)), tree_leaves(out)
        self.launches[name] += 1
        self.bytes += bytes_of(read) + bytes_of(written)
        first = args[0] if args else None
        kind = (kwargs or {}).get("dtype")
        if name == "linalg_vector_norm" and kind not in (None, first.dtype):  # torch casts a whole copy first
            if not (first.element_size() == 2 and kind == torch.float32):
                self.launches["copy to " + str(kind).removeprefix("torch.")] += 1
                self.bytes += 2 * first.numel() * kind.itemsize
        return out

    def kernel(self, launch: Any) -> None:
        """A launch of ours."""
        given = launch.arguments
        self.launches[launch.kernel.fn.__name__] += 1
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        if given.get("TYPE") is not None:
            layers = tensors["p_x" if "p_x" in tensors else "p_a"].numel()
            numbers = given["N"] if "N" in given else given.get("T", 1) * (given["D_I"] + given["D_O"])
            self.bytes += layers * given["B"] * numbers * (given["TYPE"].primitive_bitwidth // 8)
            if launch.kernel.fn.__name__ == "weighted_kernel":
                self.bytes += layers * numbers * 4
            if given.get("OUT") is not None:
                self.bytes += layers * given["D_I"] * given["D_O"] * 4
        self.bytes += bytes_of(list(tensors.values()))
        if "p_logits" in tensors:  # read: those of words that were looked up, 32 bytes at least of each
            picked = tensors["p_ids"].numel() * given["T"]
            self.bytes += min(0, 32 * picked - bytes_of([tensors["p_logits"]]))


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Within it tensors without numbers are served as a GPU's, and what would run is counted."""
    from fastdp.kernels import report

    served = getattr(extension, "BY_TRITON", set())
    for operator in OPERATORS.values():
        if "cuda" in operator.kernels and operator.kernels["cuda"].backend == "Triton":
            operator.kernels["meta"] = operator.kernels["cuda"]
    served.add("meta")
    mode = Counted()
    try:
        with report.recorded(90) as launches, mode:
            yield mode
        for launch in launches:
            mode.kernel(launch)
    finally:
        served.discard("meta")
        for operator in OPERATORS.values():
            operator.kernels.pop("meta", None)


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Plain:
    """A planner that goes by arithmetic."""

    memory_budget = None

    def norm_route(self, shape: Any, device: Any, short: bool) -> str:
        if shape.t == 1:
            return "T=1"
        return "gram" if shape.t * (shape.i + shape.o) < 2 * shape.i * shape.o else "direct"


def gpt2_large(
    b: int = 8, t: int = 512, layers: int = 36, d: int = 1280, vocabulary: int = 50257
) -> list[ParameterUse]:
    """The uses of its blocks and its head, not tied; 16 bits."""
    uses: list[ParameterUse] = []
    for _ in range(layers):
        for i, o in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)):
            uses.append(Matmul(meta(o, i), meta(b, t, i), meta(b, t, o), "linear"))
            uses.append(Stored(meta(o), meta(b, o, dtype=torch.float32), "linear"))
        uses += [Stored(meta(d), meta(b, d, dtype=torch.float32), "layer_norm") for _ in range(4)]
    return [*uses, Matmul(meta(vocabulary, d), meta(b, t, d), meta(b, t, vocabulary), "linear")]


def stored_products(b: int = 32, count: int = 48, i: int = 768, o: int = 768) -> list[ParameterUse]:
    """Products whose per-sample gradients are stored."""
    return [Stored(meta(o, i), meta(b, o, i, dtype=torch.float32), "linear") for _ in range(count)]


def gradients_of(uses: list[ParameterUse]) -> Gradients:
    return Gradients(uses, uses[0].batch, 1.0, torch.device("meta"), Plain())  # type: ignore[arg-type]


def norms_of(uses: list[ParameterUse]) -> Callable[[], Any]:
    parameters = [use.operand for use in uses]
    # within what is counted: a copy that norms and sums share is made for norms
    return lambda: gradients_of(uses).norm_sq(parameters)


def sums_of(uses: list[ParameterUse]) -> Callable[[], Any]:
    parameters, factors = [use.operand for use in uses], meta(uses[0].batch, dtype=torch.float32)
    with counted():
        gradients = gradients_of(uses)
    return lambda: gradients.clipped_sum(factors, parameters, True)


def cases() -> dict[str, Callable[[], Any]]:
    """What is counted, by name."""
    ids, e, h, g = meta(8, 512, dtype=torch.int64), meta(8, 512, 1280), meta(8, 512, 1280), meta(8, 512, 50257)
    routed = OPERATORS["routed_norm_sq"].reference, OPERATORS["routed_clipped_sum"].reference
    # 2,048 rows of 8 samples, sorted by 16 experts of 1024 -> 2816
    sent = meta(2048, 1024), meta(2048, 2816), meta(2048, dtype=torch.int64), meta(2048, dtype=torch.int64)
    return {
        "GPT-2-large 8 x 512: norms": norms_of(gpt2_large()),
        "GPT-2-large 8 x 512: clipped sums": sums_of(gpt2_large()),
        "its first block's norms": norms_of(gpt2_large(layers=1, vocabulary=64)),
        "its head's norm": norms_of(gpt2_large(layers=0)),
        "48 stored 768 x 768, B = 32: norms": norms_of(stored_products()),
        "48 stored 768 x 768, B = 32: sums": sums_of(stored_products()),
        "16 experts, 8 samples, 2,048 rows: norms": lambda: routed[0](*sent, 16, 8),
        "16 experts, 8 samples, 2,048 rows: sums": lambda: routed[1](*sent, meta(8, dtype=torch.float32), 16),
        "bias of 8 x 512 x 5120": lambda: row_sums(meta(8, 512, 5120)),
        "tied cross term, V = 50257": lambda: embedding.cross_term_and_spread(ids, e, h, g),
    }


def main() -> None:
    """Count launches and bytes, and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.launches", description=main.__doc__)
    parser.add_argument("--calls", action="store_true", help="every kernel and how often")
    options = parser.parse_args()
    print(f"{'case':<42}{'launches':>9}{'ours':>6}{'GB':>9}")
    for name, call in cases().items():
        with torch.no_grad(), counted() as found:
            call()
        ours = sum(count for kernel, count in found.launches.items() if kernel.endswith("_kernel"))
        print(f"{name:<42}{found.launches.total():>9}{ours:>6}{found.bytes / 1e9:>9.2f}")
        if options.calls:
            print("   " + ", ".join(f"{kernel} {count}" for kernel, count in found.launches.most_common()))


if __name__ == "__main__":
    main()
