"""What the operators share: accumulation type, chunks of samples, rows that must not be read, numbers of clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20  # temporaries stay near this size
# codes of types in C++ and CUDA (csrc/dtypes.h)
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
KINDS = ("local", "global", "automatic")  # of clipping
GAMMA = 0.01
# A norm may come out too small by rounding; factors are computed for a norm larger by this share, so that no
# contribution exceeds the clipping norm. Float32 accumulation errs by about 1e-7 to 1e-6 here.
MARGIN = 4e-6


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in the type sums are taken in: float64 stays, all else becomes float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) or tensor.is_complex() else tensor.float()


def sum_over(tensor: Tensor, over: int | list[int]) -> Tensor:
    """`accumulate(tensor).sum(over)`, on a GPU without a copy of 16-bit numbers: torch's sum casts as it reads."""
    kind = tensor.dtype if tensor.is_complex() else sum_type(tensor)
    return tensor.sum(over, dtype=kind)


def autocast_kinds() -> tuple[str, ...]:
    """Kinds of devices whose autocast may be on: the CPU's, and the accelerator's; none where none is."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


_AS_IT_IS = contextlib.nullcontext()


def exactly() -> contextlib.AbstractContextManager[None]:
    """Without autocast: a backward within it would turn products of float32 into 16 bits."""
    if not torch._C._is_any_autocast_enabled():  # (asked in the backward of every call)
        return _AS_IT_IS
    kinds = [kind for kind in autocast_kinds() if torch.is_autocast_enabled(kind)]
    return _without_autocast(kinds) if kinds else contextlib.nullcontext()


@contextlib.contextmanager
def _without_autocast(kinds: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def streams_of(device: torch.device) -> Any:
    """torch's functions for devices of this kind, if it has streams and events; None for the CPU and MPS."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "Event") and hasattr(module, "current_stream") else None


def event_on(device: torch.device, timed: bool = False) -> Any:
    """An event behind what is queued on this device, be it the current one or not; None where there are no events."""
    if (module := streams_of(device)) is None:
        return None
    event = module.Event(enable_timing=timed)
    event.record(module.current_stream(device))
    return event


def full_float32(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    """Products of float32 on the tensor's device as such, not of tf32 or bfloat16 numbers, as PyTorch may be told.

    Norms are of the full numbers: sums of rounded ones would exceed them by up to 2^-8 of themselves.
    """
    if tensor.dtype != torch.float32:
        return contextlib.nullcontext()
    places = _PRODUCTS.get(tensor.device.type, ())
    # what torch.backends reads, past its properties, which take ten times as long
    lowered = [place for place in places if torch._C._get_fp32_precision_getter(*place) not in ("ieee", "none")]
    return with_ieee_products(lowered) if lowered else contextlib.nullcontext()


_PRODUCTS = {"cpu": (("mkldnn", "matmul"), ("mkldnn", "conv")), "cuda": (("cuda", "matmul"), ("cuda", "conv"))}


@contextlib.contextmanager
def with_ieee_products(places: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Products of float32 numbers as such at (backend, operation), as torch names them."""
    before = [torch._C._get_fp32_precision_getter(*place) for place in places]
    try:
        for place in places:
            torch._C._set_fp32_precision_setter(*place, "ieee")
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            torch._C._set_fp32_precision_setter(*place, precision)


def bytes_of(tensor: Tensor) -> bytes:
    """The numbers of a tensor, in order, as bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
    # a single number is contiguous whatever its stride, and is not seen as bytes with another one than 1
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().tobytes()


def sum_type(tensor: Tensor) -> torch.dtype:
    """The type of sums over such tensors: float64 stays, all else becomes float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def norm_type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type of squared norms: as asked for, else that of sums."""
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"norms are float32 or float64, not {dtype}")
    return dtype or sum_type(tensor)


def check_padding(padding_idx: int | None) -> None:
    """Raises ValueError on a negative one, which no id can equal."""
    if padding_idx is not None and padding_idx < 0:
        raise ValueError(
            f"padding_idx={padding_idx} must not be negative: torch.nn.Embedding counts such ones from the end of its "
            "table, norms do not know where that is. Give num_embeddings + padding_idx"
        )


def chunks(batch: int, bytes_per_sample: int, limit: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Ranges [low, high) of samples whose temporaries fit the limit (one sample at least)."""
    size = max(1, limit // max(bytes_per_sample, 1))
    for low in range(0, batch, size):
        yield low, min(batch, low + size)


def column(values: Tensor, like: Tensor) -> Tensor:
    """Values [B] as [B, 1, ...] beside `like` [B, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


def each_its_own(c: Tensor, rows: int) -> Tensor:
    """Factors [B] of each of several products, one after the other, as factors [rows]; those [rows] as they are."""
    return c if c.size(0) == rows else c.repeat(rows // c.size(0))


def of_kept(c: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(c, *tensors) of the samples whose factor is not 0, where that is known without stopping a device's stream.

    Global clipping drops whole samples: their part of the sum is not computed, nor are they read as numbers.
    """
    if c.device.type != "cpu" or not bool((c == 0).any()):
        return c, *tensors
    rows = c.nonzero().flatten()
    return c[rows], *[t.index_select(0, rows.to(t.device)) for t in tensors]


def scaled(g: Tensor, c: Tensor) -> Tensor:
    """c_b * g_b, and exactly 0 where c_b = 0, whatever g_b holds (0 * inf would be NaN)."""
    return without_dropped(g * column(c.to(g.dtype), g), c)


def by_factors(a: Tensor, g: Tensor, c: Tensor, kept: bool = False) -> tuple[Tensor, Tensor]:
    """a [n,*,I] and g [n,*,O], the smaller of them times c [n], the rows of dropped samples zeros in both. kept: there
    are none."""
    kept = kept or _none_dropped(c, a)
    if a.size(-1) < g.size(-1):
        a = a * column(c.to(a.dtype), a)
    else:
        g = g * column(c.to(g.dtype), g)
    return (a, g) if kept else (_without(a, c), _without(g, c))


def _none_dropped(c: Tensor, of: Tensor) -> bool:
    """Whether no factor is 0, where that is known without stopping a device's stream."""
    return of.device.type == "cpu" and not bool((c == 0).any())


def _without(a: Tensor, c: Tensor) -> Tensor:
    return torch.where(column(c == 0, a), torch.zeros((), dtype=a.dtype, device=a.device), a)


def without_dropped(a: Tensor, c: Tensor) -> Tensor:
    """`a` with the rows of samples whose factor is 0 replaced by zeros.

    On the CPU the look whether there are any costs nothing; on a device it would stop the stream.
    """
    return a if _none_dropped(c, a) else _without(a, c)
