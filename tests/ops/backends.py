"""Which backends serve the operators here, and what is asked of each: shapes, types and accuracy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.ops import registry

NATIVE = not isinstance(registry.native(), str)
INTERPRETED = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
CPU = ["reference", *(["C++"] if NATIVE else [])]
TRITON = ["Triton", "Triton in small tiles"] if INTERPRETED else []
BACKENDS = [*CPU, *TRITON]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# of squared norms. The reference squares in float32; matrix units' norms are enlarged by what these cut off
NORM_ERROR = {"reference": 6e-6, "C++": 2e-6, "Triton": 2e-5, "Triton in small tiles": 2e-5, "card": 2e-5}


def cases(
    shapes: Iterable[Any], large: Iterable[Any] = (), dtypes: list[torch.dtype] = DTYPES, tiled: Iterable[Any] = ()
) -> Iterator[tuple[str, Any, torch.dtype]]:
    """Backends, shapes and types. large: of the compiled kernels, whose tiles are large; tiled: those of small tiles,
    where these are not all. Triton leaves float64 to the reference, and loads float16 by the lines of bfloat16: one
    shape is enough for each."""
    for backend in BACKENDS:
        small = backend in TRITON[1:]
        few = [torch.float64] * (backend in TRITON) + [torch.float16] * small
        kept = [*(tiled or shapes)] if small else [*shapes, *(large if backend in CPU else [])]
        for number, shape in enumerate(kept):
            for dtype in dtypes:
                if number == 0 or dtype not in few:
                    yield backend, shape, dtype


def asked(shapes: Iterable[Any], *rest: Any, **options: Any) -> Any:
    """Parametrises `backend`, `shape` and `dtype` by `cases`."""
    found = list(cases(list(shapes), *rest, **options))
    return pytest.mark.parametrize(("backend", "shape", "dtype"), found, indirect=["backend"], ids=str)


def sum_of(dtype: torch.dtype) -> torch.dtype:
    """The type of sums of such numbers."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_sums(found: Tensor, exact: Tensor, plain: Tensor | None = None, limit: float = 1e-5) -> None:
    """Within `limit` of the largest element (1e-12 in float64), and four times what float32's own sum is off."""
    tight = found.dtype == torch.float64
    assert found.shape == exact.shape and found.dtype in (torch.float32, torch.float64)
    if not exact.numel():
        return
    slack = 0.0 if plain is None or tight else 4 * float((plain.double() - exact).abs().max())
    error, size = float((found.double() - exact).abs().max()), float(exact.abs().max())
    assert error <= slack + (1e-12 if tight else limit) * size + 1e-30, f"off by {error:.3g} of {size:.3g}"


def weighted(gradients: Tensor, c: Tensor) -> Tensor:
    """sum_b c_b G_b in float64."""
    return torch.einsum("b,b...->...", c.double(), gradients.double())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_equal_bits(run: Callable[[], Iterable[Tensor]], counts: Iterable[int] = (1, 2, 2, 3)) -> None:
    """Whatever the number of threads, and from run to run."""
    found = []
    for count in counts:
        with threads(count):
            found.append(list(run()))
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


@contextmanager
def poisoned(device: str = "cpu") -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3, device=device).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
