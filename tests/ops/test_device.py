"""Every kernel on a card: the table's shapes and those of real models against float64, equal bits, replay as a CUDA
graph, memory that is written whole. `-k "not real"` leaves the large ones out; `compute-sanitizer python -m pytest
tests/ops/test_device.py -k sanitizer` runs every kernel at small sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdp import ops
from fastdp.losses import linear_cross_entropy
from fastdp.ops import cuda, linear
from fastdp.ops.noise_reference import reference_box_muller, reference_noise
from fastdp.ops.registry import OPERATORS, native_cuda

from . import past_checks, test_norm, test_rows
from . import step_checks as checks
from .backends import DTYPES, assert_sums, poisoned, random, weighted
from .noise_truth import kolmogorov
from .table import (
    FAMILIES,
    TYPICAL,
    assert_norms,
    check,
    check_bad_number,
    check_strides,
    conv_data,
    linear_gradients,
    put,
    squares,
)
from .test_clip import check_clip_factors
from .test_embedding import assert_cross, head
from .test_triton import check_many

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE, FLOATS = "cuda:0", DTYPES[:3]
BUILT = not isinstance(native_cuda(), str)
ROOT = Path(__file__).parent.parent.parent
ON = checks.On(DEVICE)
CUDA_CPP = pytest.mark.skipif(not BUILT, reason=f"no CUDA C++: {native_cuda()}")


@pytest.fixture(autouse=True, params=["as built", *(["Triton alone"] if BUILT else [])])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What serves here, and what serves where CUDA C++ is not built; new memory holds NaN."""
    for operator in OPERATORS.values():
        kernel = operator.kernels.get("cuda")
        if request.param == "Triton alone" and kernel is not None and kernel.instead is not None:
            monkeypatch.setitem(operator.kernels, "cuda", kernel.instead)
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # of the truth by float32, which errors are compared with
    with poisoned(DEVICE):
        yield
    torch.backends.cudnn.conv.fp32_precision = before


# ---------------------------------------------------------------------- the operators


EVERY = [(name, shape) for name, family in FAMILIES.items() for shape in family.shapes | family.large]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "shape"), EVERY)
def test_norms_gradients_and_sums(name: str, shape: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    check(family, (family.shapes | family.large)[shape], dtype, "card", DEVICE)


@pytest.mark.parametrize(("name", "shape"), TYPICAL)
def test_strides_and_bad_numbers(name: str, shape: str) -> None:
    for dtype in FLOATS:
        check_strides(name, shape, dtype, "card", DEVICE)
    check_bad_number(name, shape, DEVICE)


@pytest.mark.parametrize("dtype", FLOATS)
def test_norm_layers_rows_many_layers_and_cross_terms(dtype: torch.dtype) -> None:
    for shape in (*test_norm.ROWS, (5, 197, 130), (4, 1, 768)):
        test_norm.check_rows(shape, dtype, DEVICE)
    for shape in (*test_norm.CHANNELS, (4, 64, 32, 32)):
        test_norm.check_channels(shape, dtype, DEVICE)
    for shape in test_rows.SHAPES:
        test_rows.check(shape, dtype, DEVICE)
    for shape in test_rows.MANY:
        test_rows.check_many(shape, dtype, DEVICE)
    for shape in ((4, 512, 1280, 5120), (4, 197, 768, 768), (4, 1, 768, 3072), (2, 20, 21, 18)):
        check_many(shape, dtype, "card", DEVICE)
    for shape in ((2, 16, 16, 16, 97), (2, 40, 9, 69, 41), (4, 512, 512, 768, 50257)):
        assert_cross(head(*shape, dtype, DEVICE))


@pytest.mark.parametrize("words", [7, 2049, 50257])
def test_losses_of_heads(words: int) -> None:
    h, w, y = random(2, 5, 16).to(DEVICE), random(words, 16).to(DEVICE), torch.arange(10, device=DEVICE).view(2, 5)
    given = [h.requires_grad_(), w.requires_grad_()]
    found = linear_cross_entropy(h, w, y % words)
    logits = h.double() @ w.double().t()
    exact = F.cross_entropy(logits.flatten(0, 1), (y % words).flatten(), reduction="none").view(2, 5).mean(1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(found.sum(), given), torch.autograd.grad(exact.sum(), given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_clip_factors() -> None:
    check_clip_factors(DEVICE)


def launch(name: str, shape: str, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """All operators of a family on one input."""
    family = FAMILIES[name]
    data = put(family.data((family.shapes | family.large)[shape], dtype), DEVICE)
    c = torch.linspace(0, 1, len(family.per_sample(data)), device=DEVICE)
    return lambda: [*family.norms(data, None), family.per_sample(data), family.clipped_sum(data, c)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "shape"), TYPICAL)
def test_equal_bits_on_any_stream_and_as_a_graph(name: str, shape: str, dtype: torch.dtype) -> None:
    run, stream = launch(name, shape, dtype), torch.cuda.Stream()
    first = run()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run(), strict=True))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = run()
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, captured, strict=True))


def test_sanitizer_a_few_launches_of_every_kernel() -> None:
    """For compute-sanitizer, under which all others would take an hour."""
    for name, shape in TYPICAL:
        for dtype in (torch.float32, torch.bfloat16):
            launch(name, shape, dtype)()
    for check_all in (*checks.CHECKS, *past_checks.CHECKS, *(checks.OF_CUDA if BUILT else [])):
        check_all(ON)
    checks.check_noise(ON, torch.bfloat16)
    checks.check_sgd(ON, torch.float16, torch.float16, momentum=0.9)
    checks.check_adamw(ON, torch.float64, torch.float64, weight_decay=0.1)
    test_norm.check_rows((3, 37, 50), torch.bfloat16, DEVICE)
    test_norm.check_channels((3, 12, 5, 31), torch.bfloat16, DEVICE)
    assert_cross(head(2, 16, 16, 16, 97, torch.bfloat16, DEVICE))
    torch.cuda.synchronize()


# ---------------------------------------------------------------------- larger than the interpreter can


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize(
    "shape", [(2, 1024, 4096, 4096), (8, 512, 768, 3072), (4, 2048, 1024, 1000), (64, 1, 768, 1000)]
)
def test_real_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(FAMILIES["linear"], shape, dtype, "card", DEVICE)


@pytest.mark.parametrize(
    "shape",
    [((16, 64, 56, 56), 64, 3, 1, 1, 1, 1), ((16, 256, 14, 14), 512, 3, 2, 1, 1, 1),
     ((16, 512, 7, 7), 512, 3, 1, 1, 1, 1), ((4, 3, 64, 64), 96, 16, 16, 0, 1, 1)],
)  # fmt: skip
@pytest.mark.parametrize("last", [False, True])
def test_real_convolutions(shape: Any, last: bool) -> None:
    change = lambda t: t.to(memory_format=torch.channels_last) if last else t
    family = FAMILIES["conv"]._replace(data=lambda s, d: (*map(change, conv_data(s, d)[:2]), *conv_data(s, d)[2:]))
    check(family, shape, torch.bfloat16, "card", DEVICE)


@pytest.mark.parametrize("method", ["gram", "direct"])
@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize(("t", "i", "o"), [(64, 8192, 8192), (4096, 256, 256)])
def test_real_long_sums_of_one_sign_are_not_cut_off(method: str, dtype: torch.dtype, t: int, i: int, o: int) -> None:
    # matrix units round sums towards zero: if nothing is done, norms come out too small where products have one sign
    a, g = (random(2, t, n, seed=n).abs().to(DEVICE, dtype) for n in (i, o))
    g = g * 0.01
    norms = ops.linear_norm_sq(a, g, method, dtype=torch.float64).sqrt()
    ratio = norms / squares(linear_gradients(a, g)).sqrt()
    assert bool((ratio >= 1 - 1e-6).all()) and bool((ratio <= 1 + 1e-5).all()), (ratio - 1).tolist()


def test_real_offsets_beyond_2_to_the_31() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB")
    a, g = random(2, 80, 16, dtype=torch.bfloat16).to(DEVICE), random(2, 80, 24, dtype=torch.bfloat16).to(DEVICE)
    wide = torch.empty(2, 80, 2**25, dtype=torch.bfloat16, device=DEVICE)  # rows 2^25 apart
    wide[:, :, :24] = g
    far, exact = wide[:, :, :24], linear_gradients(a, g)
    for method in ("gram", "direct"):
        assert_norms(linear.norm_sq_and_bound(a, far, method)[0], squares(exact), 2e-5)
    c = torch.ones(2, device=DEVICE)
    assert_sums(ops.linear_clipped_sum(a, far, c), weighted(exact, c), weighted(exact, c).float())


# ---------------------------------------------------------------------- noise and steps


@pytest.mark.parametrize("check", [*checks.CHECKS, *past_checks.CHECKS], ids=lambda check: check.__name__)
def test_noise_and_steps(check: Callable[[checks.On], None]) -> None:
    check(ON)


@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_noise_of_every_type(dtype: torch.dtype) -> None:
    checks.check_noise(ON, dtype)


@pytest.mark.parametrize(("dtype", "state_dtype"), checks.PAIRS)
@pytest.mark.parametrize(("rule", "options"), checks.RULES)
def test_torchs_steps(rule: Any, options: Any, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    rule(ON, dtype, state_dtype, **options)


@CUDA_CPP
@pytest.mark.parametrize("check", checks.OF_CUDA, ids=lambda check: check.__name__)
def test_cuda_cpp_alone(check: Callable[[checks.On], None]) -> None:
    check(ON)


@CUDA_CPP
def test_real_transform_of_many_words() -> None:
    """The hardware's logarithm and square root keep the bound of the header, over 4.8e7 normals."""
    worst = 0.0
    for seed in range(4):
        words = torch.randint(0, 1 << 32, (16, 1_000_000), generator=torch.Generator().manual_seed(seed))
        truth = reference_box_muller(words).view(6, 2, -1)
        radius = truth.square().sum(1, keepdim=True).sqrt()
        found = checks.transformed(words, torch.float32, DEVICE).view(6, 2, -1)
        worst = max(worst, float(((found - truth).abs() / radius).max()))
    assert worst <= checks.NORMAL_ERROR


def test_real_tensors_of_more_than_2_to_the_31_numbers() -> None:
    big = torch.full(((1 << 31) + 1001,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    ops.noise_(big, 1.0, checks.WORDS, 3, 77)
    for low, count in ((0, 5000), (1 << 30, 5000), (big.numel() - 5000, 5000)):
        truth = reference_noise(count, checks.KEY, 3, 77 + low, dtype=torch.float64)
        assert checks.rounded(ON, big[low : low + count], truth, torch.float32)
    assert not bool(big[:: 1 << 10].isnan().any())


def test_real_statistics_of_ten_million_normals() -> None:
    normal = ops.noise_(torch.empty(10_000_000, device=DEVICE), 1.0, checks.SEED_KEY, 0).double()
    assert abs(float(normal.mean())) < 5 / 10_000_000**0.5
    assert abs(float(normal.square().mean()) - 1) < 5 * (2 / 10_000_000) ** 0.5
    assert kolmogorov(normal) < 1.95  # Kolmogorov & Smirnov: once in a thousand keys


def graph_problem() -> tuple[list[Tensor], list[Tensor], tuple[list[Tensor], list[Tensor]], list[int]]:
    params, offsets = checks.problem(torch.float32, DEVICE)
    return params, checks.sums_like(params, 3), checks.adamw_state(params), offsets


@CUDA_CPP
def test_graph_with_a_counter_draws_fresh_noise_and_equals_eager_steps() -> None:
    params, sums, state, offsets = graph_problem()
    expected, _, eager_state, _ = graph_problem()
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    options = {**checks.COMMON, **checks.ADAMW, "keep_grads": False}

    def step() -> None:
        cuda.noisy_adamw_step_(params, sums, *state, offsets, step=5, t=1, counter=counter, **options)
        cuda.advance_(counter)

    step()  # eager: step 5, t 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    states = []
    for k in range(4):
        cuda.noisy_adamw_step_(expected, sums, *eager_state, offsets, step=5 + k, t=1 + k, **options)
        states.append([m.clone() for m in eager_state[0]])
    assert int(counter) == 4
    assert all(torch.equal(a, b) for a, b in zip([*params, *state[0]], [*expected, *eager_state[0]], strict=True))
    gradients = [(b[3] - 0.9 * a[3]) / 0.1 for a, b in zip(states[:-1], states[1:], strict=True)]
    assert float((gradients[1] - gradients[0]).abs().mean()) > 0.05  # the sums are the same: this is noise


def test_graph_without_a_counter_is_refused() -> None:
    params, sums, state, offsets = graph_problem()
    before = [p.clone() for p in params]
    with pytest.raises(RuntimeError, match="every replay"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.noisy_adamw_step_(params, sums, *state, offsets, step=5, t=1, **checks.COMMON, **checks.ADAMW)
    with pytest.raises(RuntimeError, match="every replay"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.noise_(params[0], 1.0, checks.WORDS, 0)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


OUTSIDE = """
import torch
from fastdp import ops
ops.embedding_clipped_sum(torch.tensor([[0, 9]], device="cuda"), torch.ones(1, 2, 4, device="cuda"),
                          torch.ones(1, device="cuda"), 3)
torch.cuda.synchronize()
"""


@CUDA_CPP
def test_ids_outside_the_table_stop_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", OUTSIDE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "assert" in done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_launches_go_to_the_tensors_device() -> None:
    with torch.cuda.device(0):
        out = ops.noise_(torch.empty(100, device="cuda:1"), 1.0, checks.WORDS, 0)
        assert torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), ops.noise_(torch.empty(100, device="cuda:0"), 1.0, checks.WORDS, 0).cpu())
