"""Weight gradients of convolutions per sample, in 1, 2 and 3 dimensions, also transposed.

A convolution is a matrix product over its patches; source: Bu et al. 2022, arXiv 2205.10683.
With x and g exchanged a transposed convolution is a convolution: its kernels are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import bounds, extension, linear
from .checks import added, check_factors
from .common import CHUNK_BYTES, accumulate, chunks, each_its_own, norm_type, of_kept, scaled, sum_type, without_dropped
from .geometry import Geometry, Sizes, geometry_of, is_dense, patches_of, positions_of, spatial, weight_gradient
from .registry import Operator, cpp, define, is_watched, native
from .rows import square_sum

IM2COL_POSITIONS = 320  # below this many output positions patches + matmul beat a convolution a sample

# ---------------------------------------------------------------------- reference


def _reference_per_sample(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    x, g = accumulate(x), accumulate(g)
    batch, images = x.shape[:2]
    if x.numel() == 0 or g.numel() == 0:
        return x.new_zeros((batch, *geometry.weight))
    if is_dense(geometry) and (math.prod(geometry.weight[2:]) == 1 or math.prod(g.shape[3:]) <= IM2COL_POSITIONS):
        patches = patches_of(x.flatten(0, 1), g.flatten(0, 1), geometry)
        rows = torch.bmm(g.flatten(0, 1).flatten(2), patches.mT).unflatten(0, (batch, images))
        return (rows.squeeze(1) if images == 1 else rows.sum(1)).view(batch, *geometry.weight)
    if math.prod(g.shape[3:]) <= IM2COL_POSITIONS:
        return torch.stack([weight_gradient(x[b], g[b], geometry) for b in range(batch)])
    # Long sums in double: PyTorch's float32 convolution adds position by position and loses 4e-4 on constant images
    each = [weight_gradient(x[b].double(), g[b].double(), geometry) for b in range(batch)]
    return torch.stack(each).to(x.dtype)


def gram_is_cheaper(g: Tensor, geometry: Geometry) -> bool:
    """Whether few output positions make the gram route the cheaper one; g [B,F,O,*]."""
    p, o, i = positions_of(g, geometry), geometry.weight[0] // geometry.groups, math.prod(geometry.weight[1:])
    if isinstance(native(), str) or g.device.type != "cpu" or not extension.takes(g):
        return is_dense(geometry) and linear.reference_gram_is_cheaper(p, i, o)
    # Cycles of the compiled kernels, MEASURED: packing takes one or two for each element.
    pack = 1.2 if max(geometry.stride) == 1 else 2.0
    return p * (p / 2 + 8) * (i + o) / 25 + pack * p * (i + o) < i * o * (p / 30 + 0.3)


def _reference_norm_sq(x: Tensor, g: Tensor, geometry: Geometry, method: str = "auto") -> Tensor:
    x, g = accumulate(x), accumulate(g)
    batch, images = x.shape[:2]
    inputs, positions = math.prod(geometry.weight[1:]), positions_of(g, geometry)
    gram = method == "gram"
    if method == "auto":
        gram = is_dense(geometry) and linear.reference_gram_is_cheaper(positions, inputs, g.size(2))
    if x.numel() == 0 or g.numel() == 0:
        return x.new_zeros(batch, dtype=torch.float64)
    size = inputs * positions + (0 if gram else math.prod(geometry.weight))
    parts = []
    for low, high in chunks(batch, 4 * size, CHUNK_BYTES // 4):
        some = x[low:high], g[low:high]
        parts.append(_gram(*some, geometry) if gram else square_sum(_reference_per_sample(*some, geometry)))
    return torch.cat(parts)


def _gram(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The sum over groups of their gram norms, [B] float64."""
    if geometry.transposed:
        x, g = g, x
    total = x.new_zeros(x.size(0), dtype=torch.float64)
    pairs = zip(x.chunk(geometry.groups, 2), g.chunk(geometry.groups, 2), strict=True)
    for some, grads in pairs:
        a = patches_of(some.flatten(0, 1), grads.flatten(0, 1), geometry).mT  # [B F, P, I]
        a = a.unflatten(0, x.shape[:2]).flatten(1, 2)
        rows = grads.flatten(3).mT.flatten(1, 2)  # [B, F P, O]
        total += linear.reference_norm_sq(a, rows, "gram", dtype=torch.float64)
    return total


def _reference_clipped_sum(x: Tensor, g: Tensor, c: Tensor, geometry: Geometry) -> Tensor:
    c, x, g = of_kept(c, accumulate(x), accumulate(g))
    x, g = (scaled(x, c), without_dropped(g, c)) if x.numel() < g.numel() else (without_dropped(x, c), scaled(g, c))
    if x.numel() == 0 or g.numel() == 0:
        return x.new_zeros(geometry.weight)
    return weight_gradient(x.flatten(0, 1), g.flatten(0, 1), geometry)


# ---------------------------------------------------------------------- compiled


def _packed(x: Tensor, g: Tensor, geometry: Geometry) -> Any:
    """The arguments of the kernels of csrc/cpu/conv.cpp: 3 dimensions, x and g exchanged if transposed."""
    if geometry.transposed:
        x, g = g, x
    n = x.dim() - 3

    def three(values: Sequence[int], fill: int) -> list[int]:
        return [fill] * (3 - n) + list(values)

    def images(t: Tensor) -> tuple[int, int, list[int]]:
        return t.data_ptr(), extension.TYPES[t.dtype], [*t.stride()[:3], *three(t.stride()[3:], 0)]

    groups = geometry.groups
    sizes = [x.size(0), x.size(1), groups, x.size(2) // groups, g.size(2) // groups]
    return extension.module().Conv(
        images(x), images(g), sizes, three(x.shape[3:], 1), three(geometry.weight[2:], 1), three(g.shape[3:], 1),
        three(geometry.stride, 1), three(geometry.padding, 0), three(geometry.dilation, 1),
    )  # fmt: skip


def _compiled_per_sample(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    if not extension.takes(x, g) or x.numel() == 0 or g.numel() == 0:
        return _reference_per_sample(x, g, geometry)
    kernels, threads, conv = extension.module(), torch.get_num_threads(), _packed(x, g, geometry)
    out = torch.empty((x.size(0), *geometry.weight), dtype=torch.float32)
    memory = extension.scratch(threads * conv.scratch(kernels.CONV_STORE))
    conv.per_sample(out.data_ptr(), memory.data_ptr(), threads)
    return out


def _compiled_norm_sq(x: Tensor, g: Tensor, geometry: Geometry, method: str = "auto") -> Tensor:
    if not extension.takes(x, g) or x.numel() == 0 or g.numel() == 0:
        return _reference_norm_sq(x, g, geometry, method)
    if method == "gram" or (method == "auto" and gram_is_cheaper(g, geometry)):
        return _compiled_gram(x, g, geometry)[0]
    kernels, threads, conv = extension.module(), torch.get_num_threads(), _packed(x, g, geometry)
    out, parts = extension.doubles(x.size(0)), extension.doubles(conv.parts(kernels.CONV_NORM))
    memory = extension.scratch(threads * conv.scratch(kernels.CONV_NORM))
    conv.norm(out.data_ptr(), parts.data_ptr(), memory.data_ptr(), threads)
    return out


def _compiled_gram(x: Tensor, g: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The norms, and what the kernel leaves of each block."""
    kernels, threads, conv = extension.module(), torch.get_num_threads(), _packed(x, g, geometry)
    out, parts = extension.doubles(x.size(0)), extension.doubles(conv.parts(kernels.CONV_GRAM))
    memory = extension.scratch(threads * conv.scratch(kernels.CONV_GRAM))
    doubt = torch.empty(x.size(0), dtype=torch.bool)
    doubtful = conv.gram(
        linear.ROUNDING_COMPILED, linear.GRAM_TOLERANCE, linear.UNDERFLOW, out.data_ptr(), doubt.data_ptr(),
        parts.data_ptr(), memory.data_ptr(), threads,
    )  # fmt: skip
    if doubtful:
        again = torch.nonzero(doubt).flatten()
        out[again] = _compiled_norm_sq(x[again], g[again], geometry, "direct")
    return out, parts


# ---------------------------------------------------------------------- for the engine: F images, also transposed


def _simple(operator: Operator, x: Tensor, geometry: Geometry) -> bool:
    """Whether the operators below take it: on a device they may have a kernel of their own, a user may have given one,
    and whoever watches the dispatcher is to see them."""
    served = x.device.type != "cpu" or "cpu" in extension.BY_TRITON
    asked = served or is_watched() or "cpu" in operator.own
    return asked and x.size(1) == 1 and not geometry.transposed


def _is_compiled(operator: Operator, x: Tensor) -> bool:
    return x.device.type == "cpu" and operator.is_shipped("cpu") and not is_watched()


def per_sample(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The weight gradient of each sample, [B, *weight]. x [B,F,C,*], g [B,F,O,*]: F images a sample."""
    if _simple(_per_sample_op, x, geometry):
        return _per_sample_op(x.squeeze(1), g.squeeze(1), *_arguments(geometry))  # type: ignore[no-any-return]
    return (_compiled_per_sample if _is_compiled(_per_sample_op, x) else _reference_per_sample)(x, g, geometry)


def norm_sq(x: Tensor, g: Tensor, geometry: Geometry, method: str = "auto") -> Tensor:
    """Squared norm of each sample's weight gradient, [B] float64; never stored for the whole batch."""
    if _simple(_norm_sq_op, x, geometry):
        arguments = *_arguments(geometry), method
        return _norm_sq_op(x.squeeze(1), g.squeeze(1), *arguments, dtype=torch.float64)  # type: ignore[no-any-return]
    return (_compiled_norm_sq if _is_compiled(_norm_sq_op, x) else _reference_norm_sq)(x, g, geometry, method)


def clipped_sum(x: Tensor, g: Tensor, c: Tensor, geometry: Geometry) -> Tensor:
    """sum_b c_b (weight gradient of sample b), by one convolution over scaled output gradients."""
    if _simple(_clipped_sum_op, x, geometry):
        return _clipped_sum_op(x.squeeze(1), g.squeeze(1), c, *_arguments(geometry))  # type: ignore[no-any-return]
    return _reference_clipped_sum(x, g, c, geometry)


def laid_out(x: Tensor, g: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Both sides as the kernels of a device read them, channels last where each call would copy them so: once for the
    norms and the clipped sum."""
    kernels = extension.on_device("conv", x, g)
    if kernels is None or x.size(1) != 1 or geometry.transposed:
        return x, g
    copied = kernels.wants_last(x.squeeze(1), g.squeeze(1), *_arguments(geometry))
    x, g = (t.movedim(2, -1).contiguous().movedim(-1, 2) if copy else t for t, copy in zip((x, g), copied, strict=True))
    return x, g


def product_of(x: Tensor, g: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor] | None:
    """The rows [B,P,C] and [B,P,O] of a convolution that is a matrix product at every position, where they lie. None:
    it is none, or they would have to be copied."""
    ones = max(*geometry.weight[2:], *geometry.stride) == 1 and max(geometry.padding) == 0
    if not ones or geometry.groups > 1 or geometry.transposed or x.size(1) != 1 or x.dtype != g.dtype:
        return None
    rows = []
    for side in (x, g):
        pairs = zip(side.stride()[3:-1], side.shape[4:], side.stride()[4:], strict=True)
        if side.numel() == 0 or any(stride != size * inner for stride, size, inner in pairs):
            return None
        rows.append(side.squeeze(1).flatten(2).mT)
    return rows[0], rows[1]


def clipped_sums(x: Tensor, g: Tensor, c: Tensor, geometry: Geometry, count: int) -> Tensor:
    """`clipped_sum` of `count` convolutions of one geometry at once, x [count * B,F,C,*] and g [count * B,F,O,*], one
    convolution after the other, with factors c [count * B], or the same ones [B]: [count, *weight]. They are groups of
    one convolution."""
    if x.device.type in _clipped_sum_op.own:
        each = zip(x.chunk(count), g.chunk(count), each_its_own(c, x.size(0)).chunk(count), strict=True)
        return torch.stack([clipped_sum(*own, geometry) for own in each])
    if c.size(0) == x.size(0):
        x, g = without_dropped(accumulate(x), c), scaled(accumulate(g), c)
        c = torch.ones_like(c[: c.size(0) // count])
    x, g = (t.unflatten(0, (count, -1)).movedim(0, 2).flatten(2, 3) for t in (x, g))
    weight = (count * geometry.weight[0], *geometry.weight[1:])
    joint = geometry._replace(weight=weight, groups=count * geometry.groups)
    return clipped_sum(x, g, c, joint).unflatten(0, (count, -1))


def rounding(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor | None:
    """How far rounding may have a sample's part of `clipped_sum` off, [B] float64; None: no sum at all."""
    positions = positions_of(g, geometry)
    if positions <= 1 or x.numel() == 0 or g.numel() == 0:
        return None
    return (square_sum(x) * square_sum(g)).sqrt_().mul_(_units(x, geometry, positions))


def _units(x: Tensor, geometry: Geometry, positions: int) -> float:
    """The bound of `rounding` as a share of |x| |g|."""
    # a number of x (g, if transposed) stands in so many patches at most
    sizes = zip(geometry.weight[2:], geometry.stride, geometry.dilation, strict=True)
    patches = math.prod(-(-k * math.gcd(stride, dilation) // stride) for k, stride, dilation in sizes)
    return bounds.roundings(positions) * math.sqrt(patches) * bounds.unit(x)


def bounded_norm_sq(x: Tensor, g: Tensor, geometry: Geometry, method: str = "auto") -> Tensor:
    """`norm_sq` enlarged by what rounding may do to the clipped sum."""
    positions = positions_of(g, geometry)
    kernels = extension.on_device("conv", x, g)
    if kernels is not None and x.size(1) == 1 and not geometry.transposed:
        linear.check_method(method)
        product = min(geometry.weight[:2]) > 1
        units = bounds.roundings(positions, product) * bounds.unit(x)
        limits = _units(x, geometry, positions), bounds.TOLERANCE
        sides = x.squeeze(1), g.squeeze(1)
        return kernels.conv_norm_sq_and_bound(*sides, *_arguments(geometry), method, units, limits)  # type: ignore[no-any-return]
    gram = method == "gram" or (method == "auto" and gram_is_cheaper(g, geometry))
    built = _is_compiled(_norm_sq_op, x) and extension.takes(x, g) and x.numel() and g.numel()
    if built and gram:
        found, parts = _compiled_gram(x, g, geometry)
        bound, doubted = linear.bound_by_blocks(found, parts, bounds.roundings(positions) * bounds.unit(x))
        return bounds.enlarged(found, bound) if doubted else found
    if built and positions > 1 and x.is_contiguous() and g.is_contiguous():
        found = norm_sq(x, g, geometry, method)
        a, rows = x.flatten(1).unsqueeze(1), g.flatten(1).unsqueeze(1)
        linear.enlarge_by_data(found, a, rows, _units(x, geometry, positions))
        return found
    return bounds.enlarged(norm_sq(x, g, geometry, method), rounding(x, g, geometry))


def _arguments(geometry: Geometry) -> tuple[Any, ...]:
    return geometry.weight[2:], geometry.stride, geometry.padding, geometry.dilation, geometry.groups


# ---------------------------------------------------------------------- operators


def _per_sample_by(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, g, *args: function(x.unsqueeze(1), g.unsqueeze(1), geometry_of(x, g, *args))


def _norm_sq_by(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, g: Tensor, kernel_size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int,
            method: str = "auto", *, dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
        linear.check_method(method)
        geometry = geometry_of(x, g, kernel_size, stride, padding, dilation, groups)
        return function(x.unsqueeze(1), g.unsqueeze(1), geometry, method).to(norm_type(x, dtype))

    return run


def _clipped_sum(x: Tensor, g: Tensor, c: Tensor, *args: Any) -> Tensor:
    return _reference_clipped_sum(x.unsqueeze(1), g.unsqueeze(1), c, geometry_of(x, g, *args))


SIZES = "int[] kernel_size, int[] stride, int[] padding, int[] dilation, int groups"
_per_sample_op = define(
    f"conv_per_sample(Tensor x, Tensor g, {SIZES}) -> Tensor",
    _per_sample_by(_reference_per_sample),
    lambda x, g, *args: x.new_empty((x.size(0), *geometry_of(x, g, *args).weight), dtype=sum_type(x)),
    CPU=cpp(_per_sample_by(_compiled_per_sample)),
    CUDA=extension.on_cuda("conv", "conv_per_sample", _per_sample_by(_reference_per_sample)),
)
_norm_sq_op = define(
    f"conv_norm_sq(Tensor x, Tensor g, {SIZES}, str method='auto', *, ScalarType? dtype=None) -> Tensor",
    _norm_sq_by(_reference_norm_sq),
    lambda x, g, *args, dtype=None: x.new_empty(x.size(0), dtype=norm_type(x, dtype)),
    CPU=cpp(_norm_sq_by(_compiled_norm_sq)),
    CUDA=extension.on_cuda("conv", "conv_norm_sq", _norm_sq_by(_reference_norm_sq)),
)
_clipped_sum_op = define(
    f"conv_clipped_sum(Tensor x, Tensor g, Tensor c, {SIZES}) -> Tensor",
    _clipped_sum,
    lambda x, g, c, *args: x.new_empty(geometry_of(x, g, *args).weight, dtype=sum_type(x)),
    CUDA=extension.on_cuda("conv", "conv_clipped_sum", _clipped_sum),
)


def _lists(x: Tensor, *sizes: Sizes) -> list[list[int]]:
    return [list(spatial(value, x.dim() - 2)) for value in sizes]


def conv_per_sample(x: Tensor, g: Tensor, kernel_size: Sizes, stride: Sizes = 1, padding: Sizes = 0,
                    dilation: Sizes = 1, groups: int = 1) -> Tensor:  # fmt: skip
    """The weight gradient of each sample: x [B,C,*], g [B,O,*] -> [B, O, C / groups, *kernel_size].

    G_b[o,i,k] = sum_p g[b,o,p] x[b,i, p stride + k dilation - padding], in 1 to 3 dimensions, with x = 0 outside. The
    result is float32 (float64 for float64 inputs). Raises ValueError if a shape is wrong.
    """
    sizes = _lists(x, kernel_size, stride, padding, dilation)
    return _per_sample_op(x, g, *sizes, groups)  # type: ignore[no-any-return]


def conv_norm_sq(x: Tensor, g: Tensor, kernel_size: Sizes, stride: Sizes = 1, padding: Sizes = 0,
                 dilation: Sizes = 1, groups: int = 1, method: str = "auto", *,
                 dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """The squared norm of each sample's weight gradient: x [B,C,*], g [B,O,*] -> [B], in 1 to 3 dimensions.

    The sizes are those of the convolution.

    Args:
        method: "direct" (squares of the gradient's elements), "gram" (products of patches, and of output gradients,
            between positions), or "auto", which takes the cheaper one.
        dtype: the type of the result (default: float32, or float64 for float64 inputs).

    Raises:
        ValueError: if a shape or the method is wrong.

    Source: Bu et al. 2022 (arXiv 2205.10683).
    """
    sizes = _lists(x, kernel_size, stride, padding, dilation)
    return _norm_sq_op(x, g, *sizes, groups, method, dtype=dtype)  # type: ignore[no-any-return]


def conv_clipped_sum(x: Tensor, g: Tensor, c: Tensor, kernel_size: Sizes, stride: Sizes = 1, padding: Sizes = 0,
                     dilation: Sizes = 1, groups: int = 1, out: Tensor | None = None) -> Tensor:  # fmt: skip
    """sum_b c_b (weight gradient of sample b), with the shape of the weight, float32; it is added to `out` if given.

    Samples with c_b = 0 contribute nothing, even if their numbers are NaN or infinite. Raises ValueError if a shape is
    wrong.
    """
    sizes = _lists(x, kernel_size, stride, padding, dilation)
    check_factors(c, x.size(0))
    return added(_clipped_sum_op(x, g, c, *sizes, groups), out)
