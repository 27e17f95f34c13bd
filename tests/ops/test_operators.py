"""Every operator by every backend of the CPU: against float64 a sample at a time, whatever shapes, types and strides;
what it refuses; and torch's registry."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fastdp
from fastdp import ops
from fastdp.ops import conv, cuda, registry, routed, segments
from fastdp.ops.common import DTYPES, bytes_of
from fastdp.ops.geometry import Geometry
from fastdp.ops.kernel_inputs import trials
from fastdp.ops.registry import OPERATORS

from .backends import BACKENDS, CPU, NATIVE, TRITON, assert_equal_bits, assert_sums, cases, random, weighted
from .table import FAMILIES, FORWARD, METHODS, TYPICAL, check, check_bad_number, check_strides, squares

pytestmark = pytest.mark.slow  # `make test-all` runs it

EVERY = [
    (backend, name, shape, dtype)
    for name, family in FAMILIES.items()
    for backend, shape, dtype in cases(family.shapes, family.large, tiled=family.tiled)
]
TRANSPOSED = [nn.functional.conv_transpose1d, nn.functional.conv_transpose2d, nn.functional.conv_transpose3d]
CPU_ONLY = pytest.mark.parametrize("backend", [*CPU, *TRITON[:1]], indirect=True)


@pytest.mark.parametrize(("backend", "name", "shape", "dtype"), EVERY, indirect=["backend"], ids=str)
def test_norms_gradients_and_sums(
    backend: str, name: str, shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    if name == "routed" and backend != "C++":
        monkeypatch.setattr(segments, "_HELD", 1 if shape[1] == "3" else 1 << 30)  # of products at a time
        by_tiles(monkeypatch)
        if backend in TRITON[1:]:
            monkeypatch.setattr("fastdp.kernels.segments.chunk_of", lambda x: 32)
    check(family, (family.shapes | family.large)[shape], dtype, backend)


def by_tiles(patch: pytest.MonkeyPatch) -> None:
    """As on a device, where a look at the lengths of segments would stop the stream."""
    patch.setattr(routed, "_by_tiles", lambda a, g, batch: batch > 0 and a.numel() > 0 and g.numel() > 0)


def test_segments_by_the_host_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with registry.forced("reference"):
        for shape in FAMILIES["routed"].shapes.values():
            check(FAMILIES["routed"], shape, torch.float32, "reference")


def test_rows_of_experts_ask_for_no_number() -> None:
    """Tensors without memory have none."""
    data = [t.to("meta") for t in FAMILIES["routed"].data((37, 5, 6, 4, 3), torch.float32)[:4]]
    factors = torch.rand(3, device="meta")
    assert OPERATORS["routed_norm_sq"].reference(*data, 4, 3).shape == (3,)
    assert OPERATORS["routed_per_sample"].reference(*data, 4, 3).shape == (3, 4, 6, 5)
    assert OPERATORS["routed_clipped_sum"].reference(*data, factors, 4).shape == (4, 6, 5)
    assert routed.rounding(*data, 4, 3).shape == (3,)


# ---------------------------------------------------------------------- strides, other samples, threads


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*((each, torch.float32) for each in BACKENDS), *((each, torch.bfloat16) for each in [*CPU, *TRITON[:1]])],
    indirect=["backend"],
)
@pytest.mark.parametrize(("name", "shape"), TYPICAL)
def test_strides_are_only_strides(backend: str, dtype: torch.dtype, name: str, shape: str) -> None:
    check_strides(name, shape, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize(("name", "shape"), TYPICAL)
def test_a_bad_number_stays_in_its_sample(backend: str, name: str, shape: str) -> None:
    check_bad_number(name, shape)


@pytest.mark.skipif(not NATIVE, reason="needs the compiled extension")
@pytest.mark.parametrize(
    ("name", "shape"),
    [("linear", "(2, 300, 21, 33)"), ("linear", "(3, 9, 700, 300)"), ("conv", "stem"), ("conv", "many outputs"),
     ("conv", "depthwise"), ("conv", "long line"), ("embedding", "(5, 64, 257, 40)"),
     ("routed", "(600, 200, 220, 2, 2)")],
)  # fmt: skip
def test_threads_and_repetition_change_no_bit(name: str, shape: str) -> None:
    family = FAMILIES[name]
    data = family.data((family.shapes | family.large)[shape], torch.float32)
    norms = lambda: list(family.norms(data, torch.float64))
    sums = (lambda: [family.clipped_sum(data, torch.linspace(0.1, 1, 5))]) if name == "embedding" else list
    assert_equal_bits(lambda: [*norms(), *sums()], (1, 2, 2, 3, 7))


def test_order_and_other_samples_change_no_bit_of_an_experts_norm() -> None:
    data = FAMILIES["routed"].data((600, 64, 70, 3, 4), torch.float32)[:4]
    order = torch.sort(data[2] * 4 + data[3], stable=True)[1]
    norms = lambda d: ops.routed_norm_sq(*d, 3, 4, dtype=torch.float64)
    assert torch.equal(norms(tuple(t[order] for t in data)), norms(data))
    a, g, ids, owner = (t[data[3] == 2] for t in data)
    assert torch.equal(ops.routed_norm_sq(a, g, ids, owner - 2, 3, 1, dtype=torch.float64), norms(data)[2:3])


SIZE = st.integers(1, 3)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_geometry(draw: st.DataObject) -> None:
    """F images a sample, groups, transposed, 1 to 3 dimensions: as the engine calls."""
    n, groups, batch, images = (draw.draw(s) for s in (SIZE, SIZE, SIZE, st.integers(1, 2)))
    inputs, outputs = (groups * draw.draw(st.sampled_from([1, 2, 3, 16, 17])) for _ in range(2))
    kernel, stride, dilation = ([draw.draw(SIZE) for _ in range(n)] for _ in range(3))
    transposed = draw.draw(st.booleans())
    most = [d * (k - 1) // (2 if transposed else 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = [draw.draw(st.integers(0, m)) for m in most]
    size = [(k - 1) * d + draw.draw(st.integers(1, 6)) for k, d in zip(kernel, dilation, strict=True)]
    extra = [draw.draw(st.integers(0, max(s, d) - 1)) * transposed for s, d in zip(stride, dilation, strict=True)]
    x = random(batch, images, inputs, *size)
    shape = (inputs, outputs // groups, *kernel) if transposed else (outputs, inputs // groups, *kernel)
    weight = torch.zeros(shape, dtype=torch.float64, requires_grad=True)

    def forward(some: Tensor) -> Tensor:
        if transposed:
            return TRANSPOSED[n - 1](some, weight, None, stride, padding, extra, groups, dilation)
        return FORWARD[n - 1](some, weight, None, stride, padding, dilation, groups)

    g = random(batch, images, *forward(x.double().flatten(0, 1)).shape[1:], seed=1)
    geometry = Geometry(shape, tuple(stride), tuple(padding), tuple(dilation), groups, transposed, tuple(extra))
    exact = torch.stack([torch.autograd.grad(forward(some), weight, grad)[0]
                         for some, grad in zip(x.double(), g.double(), strict=True)])  # fmt: skip
    c = torch.rand(batch)
    for force in ("auto", "reference"):
        with registry.forced(force):
            assert_sums(conv.per_sample(x, g, geometry), exact, exact.float())
            for method in METHODS:
                found = conv.norm_sq(x, g, geometry, method)
                torch.testing.assert_close(found, squares(exact), rtol=1e-5, atol=1e-8)
            assert_sums(conv.clipped_sum(x, g, c, geometry), weighted(exact, c), weighted(exact, c).float())


@CPU_ONLY
def test_what_dropped_samples_hold_is_not_read(backend: str) -> None:
    """As many rows as the compiled sums take."""
    a, g, c = random(4, 40, 6), random(4, 40, 5), torch.tensor([0.5, 0.0, 1.0, 0.25])
    a[1], kept = float("nan"), c.nonzero().flatten()
    exact = torch.einsum("b,bto,bti->oi", c[kept].double(), g[kept].double(), a[kept].double())
    assert_sums(ops.linear_clipped_sum(a, g, c), exact, exact.float())


# ---------------------------------------------------------------------- refusals

A, G, X, Y = torch.ones(2, 3, 4), torch.ones(2, 3, 5), torch.ones(2, 4, 8, 8), torch.ones(2, 4, 4, 4)
IDS, E = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, 3)
MANY = torch.ones(2, 40, 4)  # rows, as the compiled kernel takes them
ROWS = (torch.ones(6, 3), torch.ones(6, 2), torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.long))
REFUSED: list[tuple[str | None, Callable[[], Any]]] = [
    ("method", lambda: ops.linear_norm_sq(A, G, "fast")), ("expected a", lambda: ops.linear_norm_sq(A, G[:, :2])),
    ("float32", lambda: ops.linear_norm_sq(A, G, dtype=torch.float16)),
    ("expected a", lambda: ops.linear_clipped_sum(A, G[:1], torch.ones(2))),
    ("method", lambda: ops.conv_norm_sq(X, Y, 3, 2, 1, method="fast")),
    ("groups", lambda: ops.conv_norm_sq(X, Y, 3, 2, 1, groups=3)), ("expected g", lambda: ops.conv_per_sample(X, Y, 2)),
    ("one number or 2", lambda: ops.conv_per_sample(X, Y, (3, 3, 3))),
    ("1 to 3 dimensions", lambda: ops.conv_clipped_sum(X, Y[:1], torch.ones(2), 3)),
    *[(None, lambda s=sizes: ops.conv_norm_sq(X, Y, *s))  # PyTorch has no such convolution
      for sizes in ((3, 1, -1, 1, 1), (3, 0, 1, 1, 1), (3, 2, 1, 0, 1), (0, 2, 0, 1, 1), (3, 2, 1, 1, 0))],
    *[("num_embeddings [+] padding_idx", call) for call in (
        lambda: ops.embedding_norm_sq(IDS, E, -1), lambda: ops.embedding_per_sample(IDS, E, 6, -1),
        lambda: ops.embedding_clipped_sum(IDS, E, torch.ones(2), 6, -1, out=torch.ones(6, 3)),
        lambda: torch.ops.fastdp.embedding_norm_sq.default(IDS, E, -1), lambda: cuda.embedding_norm_sq(IDS, E, -1),
        lambda: cuda.embedding_clipped_sum(IDS, E, torch.ones(2), 6, -1))],
    ("expected ids", lambda: ops.embedding_norm_sq(IDS, E[:, :4])),
    *[("factor of each of 2 samples", lambda call=call, c=c: call(c))
      for call in (lambda c: ops.linear_clipped_sum(A, G, c), lambda c: ops.linear_clipped_sum(MANY, MANY, c),
                   lambda c: ops.conv_clipped_sum(X, Y, c, 3, 2, 1), lambda c: ops.embedding_clipped_sum(IDS, E, c, 6))
      for c in (torch.ones(1), torch.ones(3), torch.zeros(3), torch.ones(2, 1), torch.ones(()))],
    *[("shape", lambda out=out: ops.linear_clipped_sum(A, G, torch.ones(2), out))
      for out in (torch.ones(4, 5), torch.ones(1, 5, 4), torch.ones(5, 1))],
    *[("move them to one device", call) for call in (
        lambda: ops.embedding_norm_sq(IDS, E.to("meta")),
        lambda: ops.linear_clipped_sum(A, G, torch.ones(2, device="meta")),
        lambda: ops.embedding_clipped_sum(IDS, E, torch.ones(2), 6, out=torch.ones(6, 3, device="meta")),
        lambda: ops.norm_affine_per_sample(A, A, A[..., 0].to("meta"), A[..., 0]))],
    *[(f"{name} = nan", lambda name=name: stepped(**{name: float("nan")})) for name in ("lr", "scale", "momentum")],
    *[("steps|expected x", lambda x=x, active=active: torch.ops.fastdp.lstm_steps(
        x, A[0, :, :2], A[0, :, :2], torch.ones(8, 2), None, active)) for x, active in (
        (torch.ones(4, 2, 8), None), (torch.ones(4, 3, 6), None), (torch.ones(4, 3, 8), torch.ones(3, 3) > 0))],
    ("h_head", lambda: ops.tied_cross_term(IDS, E, torch.ones(3, 4, 3), torch.ones(3, 4, 6))),
    (r"expected a \[S,I\], g \[S,O\]", lambda: ops.routed_norm_sq(ROWS[0], ROWS[1][1:], *ROWS[2:], 4, 3)),
    ("owner", lambda: ops.routed_clipped_sum(*ROWS[:3], ROWS[3][1:], torch.ones(3), 4)),
    *[("expected rows", lambda r=rows, c=c: ops.weighted_sum(r, c)) for rows, c in (
        (A, torch.ones(4)), (A, torch.ones(2, 1)), (torch.ones(()), torch.ones(())))],
    (None, lambda: ops.norm_affine_per_sample(A, A[:1], A[..., 0], A[..., 0])),
    (None, lambda: ops.norm_affine_per_sample(A, A, A[:, :2, 0], A[..., 0])),
    (None, lambda: ops.norm_affine_per_sample(A, A, A[..., 0].T, A[..., 0].T)),
    (None, lambda: ops.group_affine_per_sample(X, X, torch.ones(4, 2), torch.ones(4, 2), 4)),
    (None, lambda: ops.group_affine_per_sample(A, A, A[:, :, 0], A[:, :, 0], 2)),
]  # fmt: skip


@CPU_ONLY
@pytest.mark.parametrize(("words", "call"), REFUSED)
def test_refusals(backend: str, words: str | None, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def stepped(**options: Any) -> None:
    given = {"key": bytes(32), "step": 5, "std": 1.0, "scale": 1.0, "lr": 0.1, **options}
    ops.noisy_sgd_step_([torch.ones(3)], [torch.ones(3)], [torch.ones(3)], [0], **given)


@pytest.mark.parametrize("owner", [-1, 3])
def test_owners_who_are_no_sample_are_refused(owner: int) -> None:
    a, g, ids, owners = ROWS
    for call in (lambda own: ops.routed_norm_sq(a, g, ids, own, 4, 3),
                 lambda own: ops.routed_clipped_sum(a, g, ids, own, torch.ones(3), 4)):  # fmt: skip
        with pytest.raises(IndexError, match=r"in \[0, 3\)"):
            call(owners + owner)
        with pytest.raises(TypeError, match="integers"):
            call(owners.float())
    assert ops.routed_norm_sq(a, g, ids - 1, owners + owner, 4, 3).eq(0).all(), "rows of no matrix"


def test_factors_and_rows_of_odd_types_are_refused() -> None:
    for call in (
        lambda: ops.linear_clipped_sum(A, G, torch.ones(2) + 0j),
        lambda: ops.weighted_sum(A.long(), A[:, 0, 0]),
        lambda: ops.embedding_norm_sq(IDS.float(), E),
    ):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("bad", [-1, 6, 2**40])
def test_ids_outside_the_table_are_named(bad: int) -> None:
    ids, g, out = torch.zeros(2, 5, dtype=torch.long), random(2, 5, 3), torch.ones(6, 3)
    ids[1, 2] = bad
    for call in (lambda: ops.embedding_clipped_sum(ids, g, torch.ones(2), 6),
                 lambda: ops.embedding_clipped_sum(ids, g, torch.ones(2), 6, out=out),
                 lambda: ops.embedding_per_sample(ids, g, 6)):  # fmt: skip
        with pytest.raises(IndexError, match=str(bad)):
            call()
    assert torch.equal(out, torch.ones(6, 3))


# ---------------------------------------------------------------------- the registry


@CPU_ONLY
@pytest.mark.parametrize("name", list(OPERATORS))
def test_what_serves_passes_the_comparison_with_the_reference(backend: str, name: str) -> None:
    """Strided memory, one position, odd sizes, dropped samples of NaN, `out`, and what is left in arguments."""
    kinds = [dtype for dtype in DTYPES if not backend.startswith("Triton") or dtype != torch.float64]
    ops.check_kernel(name, device="cpu", dtypes=kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(OPERATORS))
def test_it_is_registered_soundly(name: str, dtype: torch.dtype) -> None:
    overload = getattr(getattr(torch.ops.fastdp, OPERATORS[name].packet), OPERATORS[name].overload)
    for trial in list(trials(name, torch.device("cpu"), dtype))[:2]:
        torch.library.opcheck(overload, trial.args, trial.kwargs)


def test_the_compiled_kernel_serves_where_it_is_built() -> None:
    operator = OPERATORS["linear_norm_sq"]
    assert (operator.implementation("cpu") is not operator.reference) == NATIVE
    with registry.forced("reference"):
        assert operator.implementation("cpu") is operator.reference


TENSORS = [
    torch.arange(6).view(2, 3)[:, ::2], torch.arange(6)[::6], torch.arange(8).view(4, 2)[:1, 0], torch.tensor(3.5),
    torch.empty(0), torch.randn(3, dtype=torch.complex64).conj(), torch.tensor([True, False]),
]  # fmt: skip


def test_bytes_are_those_of_numpy() -> None:
    for tensor in TENSORS:
        assert bytes_of(tensor) == np.ascontiguousarray(tensor.resolve_conj().numpy()).tobytes()
    short = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert bytes_of(short) == short.view(torch.int16).numpy().tobytes()


def test_one_code_for_each_type_in_python_and_in_c() -> None:
    """C++ and CUDA take types as numbers: of csrc/dtypes.h, which no other header repeats."""
    root = Path(__file__).parent.parent.parent / "csrc"
    found = re.findall(r"FASTDP_(\w+) = (\d+)", (root / "dtypes.h").read_text())
    assert {name.lower(): int(code) for name, code in found} == {
        str(dtype).removeprefix("torch."): code for dtype, code in DTYPES.items()
    }
    for path in (*root.rglob("*.h"), *root.rglob("*.cuh")):
        assert path.name == "dtypes.h" or not re.search(r"enum \{[^}]*FLOAT(32|16)", path.read_text()), path


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[..., 0] > 0
        return torch.zeros(*x.shape[:2], 48).index_put((kept,), self.layer(x[kept]))


def test_the_plan_tells_rows_and_units() -> None:
    torch.manual_seed(0)
    engine = fastdp.PerSampleGradients(Masked())
    engine.model(torch.randn(4, 9, 64)).square().sum((1, 2)).mean().backward()
    plan = engine.explain()
    engine.detach()
    line = next(line for line in plan.splitlines() if "routed" in line)
    assert "of B=4 E=1 I=64 O=48" in line and 1.0 < float(line.split("routed")[1].split()[0]) < 1.2, plan
