"""Weight gradients of a matrix product, per sample: G_b = g_b^T a_b.

Source: ghost norm, Goodfellow 2015 (T = 1) and Li et al. 2022, section 4 (T > 1):
|G_b|^2 = sum_{t,s} (a_t . a_s)(g_t . g_s). Book-keeping: Bu et al. 2023, arXiv 2210.00038.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import bounds, extension
from .checks import added, check_factors
from .common import accumulate, by_factors, chunks, each_its_own, full_float32, norm_type, of_kept, sum_type
from .registry import cpp, define
from .rows import square_sum

METHODS = ("auto", "gram", "direct")
# Rounding of the gram route is taken as random: of the reference ROUNDING * sqrt(sum M^2), M_ts the summands,
# of the compiled kernel as csrc/fastdp.h says. Where that is more than GRAM_TOLERANCE of the squared norm
# (summands cancel) the sample is computed again by the direct route.
ROUNDING = 4 * 2.0**-24
ROUNDING_COMPILED = 8 * 2.0**-24
GRAM_TOLERANCE = 4e-6
TINY = 1.2e-38  # a product of float32 may lose so much
GRAM_PARTS = 4  # numbers of a block of the compiled kernel (csrc/cpu/gram.h)
BLOCK_ROWS = 256  # rows of a product on the CPU whose terms a library sums as it likes
MANY_POSITIONS = 48  # of which each is so small a part of a sample's that such sums are off by less than is tolerated
FEW_ROWS = 32  # MEASURED: products of fewer are torch's sooner
UNDERFLOW = 1e-28  # below it products of float32 may have been lost: directly, too


def shaped(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """a and g as [B,T,I] and [B,T,O]. Raises ValueError on other shapes."""
    if a.dim() == 2 and g.dim() == 2:
        a, g = a.unsqueeze(1), g.unsqueeze(1)
    if a.dim() != 3 or g.dim() != 3 or a.shape[:2] != g.shape[:2]:
        raise ValueError(f"expected a [B,T,I] and g [B,T,O], or [B,I] and [B,O]; got {a.shape} and {g.shape}")
    return a, g


def _three(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    a, g = shaped(a, g)
    return accumulate(a), accumulate(g)


def check_method(method: str) -> None:
    """Raises ValueError unless it is one of METHODS."""
    if method not in METHODS:
        raise ValueError(f"method must be 'auto', 'gram' or 'direct', not {method!r}")


def reference_gram_is_cheaper(t: int, i: int, o: int) -> bool:
    """T^2 (I + O) against T I O, plus writing and reading what is formed."""
    return t * t * (i + o) + 8 * t * t < t * i * o + 8 * i * o


def compiled_gram_is_cheaper(t: int, i: int, o: int) -> bool:
    """Half of T^2 (I + O) with what tiles of 8 x 16 add on the diagonal, against T I O; nothing is stored.

    MEASURED: a product of the gram route costs 1.15 of one of the direct route; both pack their operands.
    """
    return 1.15 * (t / 2 + 8) * (i + o) < i * o


def reference_norm_sq(a: Tensor, g: Tensor, method: str = "auto", *, dtype: torch.dtype | None = None) -> Tensor:
    """linear_norm_sq in plain PyTorch."""
    kind = norm_type(a, dtype)
    a, g = _three(a, g)
    batch, t, i = a.shape
    o = g.size(2)
    check_method(method)
    if t == 0 or batch == 0:
        return a.new_zeros(batch, dtype=kind)
    if t == 1:
        return (square_sum(a) * square_sum(g)).to(kind)
    if method == "gram" or (method == "auto" and reference_gram_is_cheaper(t, i, o)):
        return _gram(a, g).to(kind)
    return _direct(a, g).to(kind)


def _norm_sq_cpu(a: Tensor, g: Tensor, method: str = "auto", *, dtype: torch.dtype | None = None) -> Tensor:
    """The compiled kernels; what they do not take (float64, one position) is left to the reference."""
    a, g = shaped(a, g)
    batch, t, i = a.shape
    if not extension.takes(a, g) or t <= 1 or a.numel() == 0 or g.numel() == 0:
        return reference_norm_sq(a, g, method, dtype=dtype)
    check_method(method)
    kind = norm_type(a, dtype)
    if method == "gram" or (method == "auto" and compiled_gram_is_cheaper(t, i, g.size(2))):
        return _compiled_gram_and_parts(a, g)[0].to(kind)
    return _compiled_direct(a, g).to(kind)


def vanished(a_sq: Tensor, g_sq: Tensor, t: int, i: int, o: int) -> Tensor:
    """What underflow may have taken from a gram norm, at most: [B] float64 from |a|^2 and |g|^2 of each sample.

    An entry of A = a a^T may lose I TINY and meets at most |g_t| |g_s| of g g^T; the sum of these is T |g|^2.
    """
    return TINY * t * (i * g_sq + o * a_sq)


def _compiled_gram_and_parts(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The norms, and what the kernel leaves of each block."""
    kernels, threads = extension.module(), torch.get_num_threads()
    batch, t, _ = a.shape
    out, doubt = extension.doubles(batch), torch.empty(batch, dtype=torch.bool)
    parts = extension.doubles(kernels.gram_parts(batch, t))
    memory = extension.scratch(threads * kernels.gram_scratch())
    doubtful = kernels.linear_gram(
        extension.matrix(a), extension.matrix(g), batch, t, ROUNDING_COMPILED, GRAM_TOLERANCE, UNDERFLOW,
        out.data_ptr(), doubt.data_ptr(), parts.data_ptr(), memory.data_ptr(), threads,
    )  # fmt: skip
    if doubtful:
        again = torch.nonzero(doubt).flatten()
        out[again] = _compiled_direct(a[again], g[again])
    return out, parts


def _compiled_direct(a: Tensor, g: Tensor) -> Tensor:
    kernels, threads = extension.module(), torch.get_num_threads()
    batch, t, i = a.shape
    out, parts = extension.doubles(batch), extension.doubles(kernels.direct_parts(batch, i, g.size(2)))
    memory = extension.scratch(threads * kernels.direct_scratch())
    kernels.linear_direct(
        extension.matrix(a), extension.matrix(g), batch, t, out.data_ptr(), parts.data_ptr(), memory.data_ptr(),
        threads,
    )  # fmt: skip
    return out


def _direct(a: Tensor, g: Tensor) -> Tensor:
    out = a.new_empty(a.size(0), dtype=torch.float64)
    for low, high in chunks(a.size(0), a.size(2) * g.size(2) * a.element_size()):
        out[low:high] = square_sum(torch.bmm(g[low:high].mT, a[low:high]))
    return out


def _gram(a: Tensor, g: Tensor) -> Tensor:
    out, spread = (a.new_empty(a.size(0), dtype=torch.float64) for _ in range(2))
    for low, high in chunks(a.size(0), 2 * a.size(1) ** 2 * a.element_size()):
        m = torch.bmm(a[low:high], a[low:high].mT)
        m *= torch.bmm(g[low:high], g[low:high].mT)  # [b, T, T]
        out[low:high] = m.sum((1, 2))
        spread[low:high] = torch.linalg.vector_norm(m, dim=(1, 2), dtype=torch.float64)
    if a.dtype == torch.float64:
        return out
    doubt = ROUNDING * spread + vanished(square_sum(a), square_sum(g), a.size(1), a.size(2), g.size(2))
    if a.device.type != "cpu":  # no look at values on a device: rather a norm too large by its rounding
        return out + torch.where(doubt > GRAM_TOLERANCE * out, doubt, torch.zeros_like(doubt))
    again = torch.nonzero(~(doubt <= GRAM_TOLERANCE * out) | (out < UNDERFLOW)).flatten()
    if again.numel():
        out[again] = _direct(a[again], g[again])
    return out


def _per_sample(a: Tensor, g: Tensor) -> Tensor:
    a, g = _three(a, g)
    return torch.bmm(g.mT, a)


def _weighted(a: Tensor, g: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """a and g as [B T, I] and [B T, O], the smaller of them times c, dropped samples left out or zeroed in both."""
    c, a, g = of_kept(c, *_three(a, g))
    a, g = by_factors(a, g, c, c.device.type == "cpu")
    return a.flatten(0, 1), g.flatten(0, 1)


def _clipped_sum(a: Tensor, g: Tensor, c: Tensor, into: Tensor | None = None) -> Tensor:
    positions = a.size(1) if a.dim() == 3 else 1
    return _products(*_weighted(a, g, c), positions, into)


def _clipped_sum_cpu(a: Tensor, g: Tensor, c: Tensor, into: Tensor | None = None) -> Tensor:
    """The compiled kernel; what it does not take (float64), or a library multiplies faster, is left to that."""
    a, g = shaped(a, g)
    if not _compiled_sums_take(a, g, c, 1):
        return _clipped_sum(a, g, c, into)
    c, a, g = of_kept(c, a, g)
    if not a.numel() or not g.numel():
        return _clipped_sum(a, g, c, into)
    out = a.new_empty(1, g.size(2), a.size(2), dtype=torch.float32) if into is None else into[None]
    return _compiled_sums(a, g, c, out)[0]


def _compiled_sums_take(a: Tensor, g: Tensor, c: Tensor, count: int) -> bool:
    return extension.takes(a, g) and c.device == a.device and a.size(0) // count * a.size(1) >= FEW_ROWS


def _compiled_sums(a: Tensor, g: Tensor, c: Tensor, out: Tensor) -> Tensor:
    """Those of one or several products, out [count,O,I], of no dropped samples."""
    count, batch, t = len(out), len(c) // len(out), a.size(1)
    kernels, threads = extension.module(), torch.get_num_threads()
    a, g, factors = a.reshape(count, -1, a.size(2)), g.reshape(count, -1, g.size(2)), c.float().contiguous()
    memory = extension.scratch(threads * kernels.direct_scratch())
    kernels.linear_sum(
        extension.matrix(a), extension.matrix(g), factors.data_ptr(), count, batch, t, out.data_ptr(),
        memory.data_ptr(), threads,
    )  # fmt: skip
    return out


def _products(a: Tensor, g: Tensor, positions: int, into: Tensor | None = None) -> Tensor:
    """g^T a of one or several pairs a [*,n,I] and g [*,n,O], whose rows are so many positions of each sample."""
    multiply, add = (torch.mm, torch.addmm) if a.dim() == 2 else (torch.bmm, torch.baddbmm)
    rows = a.size(-2)
    with full_float32(a):
        if a.device.type != "cpu" or rows <= BLOCK_ROWS or positions >= MANY_POSITIONS:
            return multiply(g.mT, a, out=into)
        # A library's own blocks have other borders if one row is missing (the last two are made equally long), so that
        # the terms of other samples would be rounded otherwise.
        parts = zip(a.split(BLOCK_ROWS, -2), g.split(BLOCK_ROWS, -2), strict=True)
        first, of_first = next(parts)
        total = multiply(of_first.mT, first, out=into)
        for part, of_part in parts:
            add(total, of_part.mT, part, out=total)
        return total


def clipped_sums(a: Tensor, g: Tensor, c: Tensor, count: int) -> Tensor:
    """`linear_clipped_sum` of `count` products at once, a [count * B,T,I] and g [count * B,T,O], one product after the
    other, with factors c [count * B], or the same ones [B]: [count,O,I]."""
    c = each_its_own(c, a.size(0))
    rows = a.size(0) // count * a.size(1)
    compiled = a.device.type == "cpu" and _clipped_sum_op.is_shipped("cpu") and _compiled_sums_take(a, g, c, count)
    if compiled or a.device.type in _clipped_sum_op.own:
        out = a.new_empty(count, g.size(-1), a.size(-1), dtype=sum_type(a))
        if compiled and a.numel() and g.numel() and not bool((c == 0).any()):
            return _compiled_sums(a, g, c, out)
        for each in zip(a.chunk(count), g.chunk(count), c.chunk(count), out, strict=True):
            write_clipped_sum(*each)
        return out
    a, g = by_factors(accumulate(a), accumulate(g), c)
    return _products(a.reshape(count, rows, -1), g.reshape(count, rows, -1), a.size(1))


def overwrite_clipped_sum(a: Tensor, g: Tensor, c: Tensor, into: Tensor) -> Tensor:
    """`linear_clipped_sum`, in float32 memory whose contents do not matter if a kernel can write there."""
    if a.device.type in _clipped_sum_op.own:
        return _clipped_sum_op(a, g, c)  # type: ignore[no-any-return]
    if a.dtype == torch.float64:
        return _clipped_sum(a, g, c)
    compiled = a.device.type == "cpu" and _clipped_sum_op.is_shipped("cpu")
    return (_clipped_sum_cpu if compiled else _clipped_sum)(a, g, c, into)


def write_clipped_sum(a: Tensor, g: Tensor, c: Tensor, into: Tensor) -> None:
    """`linear_clipped_sum` into memory whose contents do not matter."""
    found = overwrite_clipped_sum(a, g, c, into)
    if found.data_ptr() != into.data_ptr():
        into.copy_(found)


_norm_sq_op = define(
    "linear_norm_sq(Tensor a, Tensor g, str method='auto', *, ScalarType? dtype=None) -> Tensor",
    reference_norm_sq,
    lambda a, g, method="auto", *, dtype=None: a.new_empty(a.size(0), dtype=norm_type(a, dtype)),
    CPU=cpp(_norm_sq_cpu),
    CUDA=extension.on_cuda("linear", "linear_norm_sq", reference_norm_sq),
)
_per_sample_op = define(
    "linear_per_sample(Tensor a, Tensor g) -> Tensor",
    _per_sample,
    lambda a, g: a.new_empty(a.size(0), g.size(-1), a.size(-1), dtype=sum_type(a)),
    CUDA=extension.on_cuda("linear", "linear_per_sample", _per_sample),
)
_clipped_sum_op = define(
    "linear_clipped_sum(Tensor a, Tensor g, Tensor c) -> Tensor",
    _clipped_sum,
    lambda a, g, c: a.new_empty(g.size(-1), a.size(-1), dtype=sum_type(a)),
    CPU=cpp(_clipped_sum_cpu),
    CUDA=extension.on_cuda("clipped", "linear_clipped_sum", _clipped_sum),
)


def linear_norm_sq(a: Tensor, g: Tensor, method: str = "auto", *, dtype: torch.dtype | None = None) -> Tensor:
    """The squared Frobenius norm of each sample's weight gradient g_b^T a_b: [B].

    Squares of float32 numbers end at 1e-38 and 1e38: request float64 if norms may be that small or large.

    Args:
        a: inputs, [B,T,I] or [B,I].
        g: output gradients, [B,T,O] or [B,O].
        method: "gram" (T x T products), "direct" (the gradient itself), or "auto", which takes the cheaper one.
        dtype: the type of the result (default: float32, or float64 for float64 inputs).

    Raises:
        ValueError: if a shape or the method is wrong.

    Source: Li et al. 2022 (arXiv 2110.05679), section 4.
    """
    return _norm_sq_op(a, g, method, dtype=dtype)  # type: ignore[no-any-return]


def norm_sq_and_bound(a: Tensor, g: Tensor, method: str = "auto") -> tuple[Tensor, Tensor | None]:
    """`linear_norm_sq` in float64 of a [B,T,I] and g [B,T,O], enlarged by what rounding may do to the clipped sum, and
    that bound (`fastdp.ops.bounds`)."""
    if a.size(1) <= 1 or a.numel() == 0 or g.numel() == 0:
        return linear_norm_sq(a, g, method, dtype=torch.float64), None
    if (kernels := extension.on_device("linear", a, g)) is not None:
        check_method(method)
        limits = bounds.units_of_products(a, g), bounds.TOLERANCE
        return kernels.linear_norm_sq_and_bound(a, g, method, *limits)  # type: ignore[no-any-return]
    built = a.device.type == "cpu" and _norm_sq_op.is_shipped("cpu")
    if built and extension.takes(a, g):
        units = bounds.units_of_products(a, g)
        if method == "gram" or (method == "auto" and compiled_gram_is_cheaper(a.size(1), a.size(2), g.size(2))):
            found, parts = _compiled_gram_and_parts(a, g)
            bound, doubted = bound_by_blocks(found, parts, units)
            return found, enlarge_by_data(found, a, g, units) if doubted else bound
        found = _compiled_direct(a, g)
        return found, enlarge_by_data(found, a, g, units)
    found = linear_norm_sq(a, g, method, dtype=torch.float64)
    products = bounds.of_products(a, g)
    return bounds.enlarged(found, products), products


def filled_once(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """a [B,T,I] and g [B,T,O], or one with columns of zeros behind it, where kernels would copy it so for norms and
    again for sums: an odd vocabulary's logits. Norms and bounds stay; of sums, the first rows and columns are wanted.
    """
    kernels = extension.on_device("linear", a, g)
    if kernels is None:
        return a, g
    with torch.no_grad():
        return kernels.filled_once(a, g)  # type: ignore[no-any-return]


def norm_sq_of_many(pairs: Sequence[tuple[Tensor, Tensor]], method: str = "auto") -> Tensor:
    """`norm_sq_and_bound` of products of equal shapes and types, by few launches: [len(pairs), B] float64."""
    kernels = extension.on_device("many", *pairs[0])
    if kernels is None:
        return torch.stack([norm_sq_and_bound(a, g, method)[0] for a, g in pairs])
    limits = bounds.units_of_products(*pairs[0]), bounds.TOLERANCE
    return kernels.linear_norm_sq(pairs, method, *limits)  # type: ignore[no-any-return]


def clipped_sums_of_many(pairs: list[tuple[Tensor, Tensor]], c: Tensor, drop: bool = False) -> list[Tensor]:
    """`linear_clipped_sum` of products of equal shapes and types, by few launches. c: [B], or [len(pairs), B].

    drop: take those that are done out of the list.
    """
    kernels = extension.on_device("many", *pairs[0])
    if kernels is None:
        each = [c] * len(pairs) if c.dim() == 1 else c.unbind()
        return [linear_clipped_sum(a, g, own) for (a, g), own in zip(pairs, each, strict=True)]
    return kernels.linear_clipped_sum(pairs, c, drop)  # type: ignore[no-any-return]


def bound_by_blocks(norm_sq: Tensor, parts: Tensor, units: float) -> tuple[Tensor, int]:
    """A bound [B] for what rounding may do to the sums (`fastdp.ops.bounds`), and of how many samples it is so large
    that the norm may have to be enlarged.

    parts: what the compiled kernel of the gram route has left of each block; units: `bounds.units_of_products`.
    """
    batch, bound = norm_sq.numel(), torch.empty_like(norm_sq)
    doubted = extension.module().doubted_by_blocks(
        parts.data_ptr(), batch, parts.numel() // (GRAM_PARTS * batch), units, bounds.TOLERANCE, norm_sq.data_ptr(),
        bound.data_ptr(),
    )  # fmt: skip
    return bound, doubted


def enlarge_by_data(norm_sq: Tensor, a: Tensor, g: Tensor, units: float) -> Tensor:
    """Enlarge norms [B] in place by what rounding may do to sums over a [B,T,I] and g [B,T,O]; return the bound."""
    bound = torch.empty_like(norm_sq)
    extension.module().enlarge_by_data(
        extension.matrix(a), extension.matrix(g), *a.shape[:2], units, bounds.TOLERANCE, norm_sq.data_ptr(),
        bound.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return bound


def linear_per_sample(a: Tensor, g: Tensor) -> Tensor:
    """The weight gradient of each sample: [B,T,I], [B,T,O] -> [B,O,I], float32 (float64 for float64 inputs).

    Raises ValueError if a shape is wrong.
    """
    return _per_sample_op(a, g)  # type: ignore[no-any-return]


def linear_clipped_sum(a: Tensor, g: Tensor, c: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_b c_b g_b^T a_b: [O,I] float32.

    Samples with c_b = 0 contribute nothing, even if their numbers are NaN or infinite.

    Args:
        a: inputs, [B,T,I] or [B,I].
        g: output gradients, [B,T,O] or [B,O].
        c: factors, [B].
        out: a float32 tensor [O,I] to which the sum is added.

    Raises ValueError if a shape is wrong. Source: book-keeping, Bu et al. 2023 (arXiv 2210.00038).
    """
    check_factors(c, a.size(0))
    return added(_clipped_sum_op(a, g, c), out)
