"""Rows of numbers, one a sample: sums of squares, and the weighted sum that leaves dropped rows unread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import extension
from .common import accumulate, sum_type
from .registry import Kernel, cpp, define, triton_module

BLOCK = 1024  # elements whose squares are added in float32


def _flat(rows: Tensor) -> Tensor:
    """[B, ...] -> [B, n], complex numbers as pairs."""
    flat = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    return torch.view_as_real(flat.resolve_conj()).flatten(1) if flat.is_complex() else flat


def _square_sum(rows: Tensor) -> Tensor:
    flat = _flat(rows)
    batch, n = flat.shape
    if flat.numel() == 0:
        return flat.new_zeros(batch, dtype=torch.float64)
    if flat.dtype != torch.float32 or flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()
    # torch squares in float32 many times faster, which is exact enough for short blocks, but under- and overflows
    whole = n // BLOCK * BLOCK
    norms = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, BLOCK)), dim=2).double()
    rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, dtype=torch.float64)
    odd = torch.nonzero(~((norms > 1e-15) & (norms < 1e15)).all(1)).flatten()
    total = norms.square().sum(1) + rest.square()
    if odd.numel():
        total[odd] = torch.linalg.vector_norm(flat[odd], dim=1, dtype=torch.float64).square()
    return total


def _compiled_square_sum(rows: Tensor) -> Tensor:
    flat = _flat(rows)
    if flat.dtype != torch.float32 or flat.numel() == 0:
        return _square_sum(rows)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    kernels, (batch, n) = extension.module(), flat.shape
    out, parts = extension.doubles(batch), extension.doubles(kernels.square_parts(batch, n))
    kernels.square_sum(
        flat.data_ptr(), batch, n, flat.stride(0), parts.data_ptr(), out.data_ptr(), torch.get_num_threads()
    )
    return out


def _check(rows: Tensor, c: Tensor) -> None:
    if rows.dim() == 0 or c.shape != rows.shape[:1] or c.device != rows.device:
        raise ValueError(
            f"expected rows [B, ...] and c [B] on one device; got {tuple(rows.shape)} on {rows.device} and "
            f"{tuple(c.shape)} on {c.device}"
        )
    if c.is_complex() or not (rows.is_floating_point() or rows.is_complex()):
        raise TypeError(f"rows are floating-point numbers, and factors real ones, not {rows.dtype} and {c.dtype}")


def _weighted_sum(rows: Tensor, c: Tensor) -> Tensor:
    _check(rows, c)
    rows = rows if rows.is_complex() else accumulate(rows)
    if rows.numel() == 0:
        return rows.new_zeros(rows.shape[1:])
    flat, c = rows.reshape(rows.size(0), -1), c.to(rows.dtype)
    if rows.device.type == "cpu" and not bool((c == 0).any()):
        return torch.mv(flat.mT, c).view(rows.shape[1:])
    kept = torch.where((c == 0).unsqueeze(1), torch.zeros((), dtype=rows.dtype, device=rows.device), flat)
    return torch.mv(kept.mT, c).view(rows.shape[1:])


def _compiled_weighted_sum(rows: Tensor, c: Tensor) -> Tensor:
    _check(rows, c)
    flat = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    if rows.dtype != torch.float32 or rows.numel() == 0:
        return _weighted_sum(rows, c)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    c = c.float().contiguous()
    out = torch.empty(flat.size(1), dtype=torch.float32)
    extension.module().weighted_sum(
        flat.data_ptr(), c.data_ptr(), flat.size(0), flat.size(1), flat.stride(0), out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out.view(rows.shape[1:])


def _by_triton(name: str, reference: Callable[..., Tensor]) -> Kernel:
    """A kernel of `fastdp.kernels.rows` for what it takes: it reads each number once, and copies none."""

    def load() -> Callable[..., Tensor] | str:
        found = triton_module("rows")
        if isinstance(found, str):
            return found
        takes, function = found.takes, getattr(found, name)

        def serve(rows: Tensor, *c: Tensor) -> Tensor:
            for factors in c:
                _check(rows, factors)
            return (function if rows.numel() and takes(rows) else reference)(rows, *c)  # type: ignore[no-any-return]

        return serve

    return Kernel("Triton", load)


_square_sum_op = define(
    "square_sum(Tensor rows) -> Tensor",
    _square_sum,
    lambda rows: rows.new_empty(rows.size(0), dtype=torch.float64),
    CPU=cpp(_compiled_square_sum),
    CUDA=_by_triton("square_sum", _square_sum),
)
_weighted_sum_op = define(
    "weighted_sum(Tensor rows, Tensor c) -> Tensor",
    _weighted_sum,
    lambda rows, c: rows.new_empty(rows.shape[1:], dtype=rows.dtype if rows.is_complex() else sum_type(rows)),
    CPU=cpp(_compiled_weighted_sum),
    CUDA=_by_triton("weighted_sum", _weighted_sum),
)


def square_sum(rows: Tensor) -> Tensor:
    """The sum of the squares of each sample's numbers: [B, ...] -> [B] float64, with a relative error of 1e-7."""
    return _square_sum_op(rows)  # type: ignore[no-any-return]


def weighted_sum(rows: Tensor, c: Tensor) -> Tensor:
    """sum_b c_b rows_b: rows [B, ...], c [B] -> [...], float32 (float64 of float64, complex of complex rows).

    Rows with c_b = 0 contribute nothing, even if their numbers are NaN or infinite. Raises ValueError if a shape or a
    device is wrong, and TypeError for rows of whole numbers.
    """
    return _weighted_sum_op(rows, c)  # type: ignore[no-any-return]


def square_sums_of_many(stacks: Sequence[Tensor]) -> Tensor:
    """`square_sum` of tensors of one shape and type, by few launches: [len(stacks), B] float64."""
    kernels = extension.on_device("many", stacks[0])
    return torch.stack([square_sum(stack) for stack in stacks]) if kernels is None else kernels.square_sum(stacks)


def weighted_sums_of_many(stacks: list[Tensor], c: Tensor, drop: bool = False) -> list[Tensor]:
    """`weighted_sum` of tensors of one shape and type, by few launches. c: [B], or [len(stacks), B]. drop: the list is
    emptied."""
    kernels = extension.on_device("many", stacks[0])
    if kernels is None:
        each = [c] * len(stacks) if c.dim() == 1 else c.unbind()
        return [weighted_sum(stack, own) for stack, own in zip(stacks, each, strict=True)]
    return kernels.weighted_sum(stacks, c, drop)  # type: ignore[no-any-return]
