"""The CUDA kernels on a GPU; skipped without one, or without fastdp._CUDA.

`compute-sanitizer python -m pytest tests/ops/test_cuda_device.py -k sanitizer` runs every kernel at small sizes.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.ops import cuda
from fastdp.ops.noise import reference_box_muller, reference_noise
from fastdp.ops.registry import native_cuda

from . import cuda_checks as checks
from . import cuda_sample_checks as sample_checks

ROOT = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(isinstance(native_cuda(), str), reason=f"no kernels: {native_cuda()}"),
]
DEVICE = "cuda:0"


ON = checks.On(DEVICE)
CHECKS = [*checks.CHECKS, *checks.OF_CUDA]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_device(check: Callable[[checks.On], None]) -> None:
    check(ON)


@pytest.mark.parametrize("check", sample_checks.CHECKS, ids=lambda check: check.__name__)
def test_samples_on_device(check: Callable[[str], None]) -> None:
    check(DEVICE)


@pytest.mark.parametrize("dtype", checks.FLOATS)
def test_on_device_by_type(dtype: torch.dtype) -> None:
    checks.check_noise(ON, dtype)
    sample_checks.check_embedding(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "state_dtype"), checks.PAIRS)
@pytest.mark.parametrize(("rule", "options"), checks.RULES)
def test_steps_on_device(rule: Any, options: Any, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    rule(ON, dtype, state_dtype, **options)


def test_sanitizer_small_sizes_of_everything() -> None:
    for check in CHECKS:
        check(ON)
    for check in sample_checks.CHECKS:
        check(DEVICE)
    checks.check_noise(ON, torch.bfloat16)
    sample_checks.check_embedding(DEVICE, torch.float16)
    checks.check_sgd(ON, torch.float16, torch.float16, momentum=0.9)
    checks.check_adamw(ON, torch.bfloat16, torch.float32, weight_decay=0.1)
    checks.check_adamw(ON, torch.float64, torch.float64, weight_decay=0.1)
    torch.cuda.synchronize()


# ---------------------------------------------------------------------- larger than the emulation can


def test_transform_of_many_words() -> None:
    """The hardware's logarithm and square root keep the bound of the header, over 4.8e7 normals."""
    worst = 0.0
    for seed in range(4):
        words = torch.randint(0, 1 << 32, (16, 1_000_000), generator=torch.Generator().manual_seed(seed))
        truth = reference_box_muller(words).view(6, 2, -1)
        radius = truth.square().sum(1, keepdim=True).sqrt()
        found = checks.transformed(words, torch.float32, DEVICE).view(6, 2, -1)
        worst = max(worst, float(((found - truth).abs() / radius).max()))
    print(f"largest error over the radius: {worst:.2e}")
    assert worst <= checks.NORMAL_ERROR


def test_many_tiles_and_elements_behind_two_to_the_31() -> None:
    big = torch.full(((1 << 31) + 1001,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    cuda.noise_(big, 1.0, checks.WORDS, 3, 77)
    for low, count in ((0, 5000), (1 << 30, 5000), (big.numel() - 5000, 5000)):
        truth = reference_noise(count, checks.KEY, 3, 77 + low, dtype=torch.float64)
        assert checks.rounded(ON, big[low : low + count], truth, torch.float32)
    assert not bool(big[:: 1 << 10].isnan().any())


def test_statistics_of_ten_million_normals() -> None:
    normal = cuda.noise_(torch.empty(10_000_000, device=DEVICE), 1.0, checks.SEED_KEY, 0).double()
    assert abs(float(normal.mean())) < 5 / 10_000_000**0.5
    assert abs(float(normal.square().mean()) - 1) < 5 * (2 / 10_000_000) ** 0.5
    ordered = normal.sort().values
    grid = torch.arange(1, len(ordered) + 1, device=DEVICE, dtype=torch.float64) / len(ordered)
    distance = float((torch.special.ndtr(ordered) - grid).abs().max())
    assert distance * len(ordered) ** 0.5 < 1.95  # Kolmogorov & Smirnov: once in a thousand keys


def test_the_same_bits_every_time_on_any_stream() -> None:
    def all_of_it() -> list[Tensor]:
        params, offsets = checks.problem(torch.float32, DEVICE, [(100_003,), (7, 1000)])
        sums = checks.sums_like(params, 0)
        state = checks.adamw_state(params)
        cuda.noisy_adamw_step_(params, sums, *state, offsets, step=1, t=1, **checks.COMMON, **checks.ADAMW)
        ids, g = (x.to(DEVICE) for x in sample_checks.look_up(8, 600, 96, 50, torch.bfloat16))
        c = torch.rand(8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        norms = cuda.embedding_norm_sq(ids, g, dtype=torch.float64)
        return [*params, *sums, norms, cuda.embedding_clipped_sum(ids, g, c, 50)]

    first = all_of_it()
    for _ in range(3):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            again = all_of_it()
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ---------------------------------------------------------------------- CUDA graphs


def graph_problem() -> tuple[list[Tensor], list[Tensor], tuple[list[Tensor], list[Tensor]], list[int]]:
    params, offsets = checks.problem(torch.float32, DEVICE)
    return params, checks.sums_like(params, 3), checks.adamw_state(params), offsets


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
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state[0], eager_state[0], strict=True))
    gradients = [
        (b - 0.9 * a) / 0.1 for a, b in zip([m[3] for m in states[:-1]], [m[3] for m in states[1:]], strict=True)
    ]
    assert float((gradients[1] - gradients[0]).abs().mean()) > 0.05  # the sums are the same: this is noise


def test_graph_without_a_counter_is_refused() -> None:
    params, sums, state, offsets = graph_problem()
    before = [p.clone() for p in params]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="every replay"), torch.cuda.graph(graph):
        cuda.noisy_adamw_step_(params, sums, *state, offsets, step=5, t=1, **checks.COMMON, **checks.ADAMW)
    with pytest.raises(RuntimeError, match="every replay"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        cuda.noise_(params[0], 1.0, checks.WORDS, 0)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_norms_factors_and_sums_can_be_captured() -> None:
    ids, g = (x.to(DEVICE) for x in sample_checks.look_up(4, 70, 33, 9, torch.float32))
    results: list[Tensor] = []

    def work() -> None:
        norm_sq = cuda.embedding_norm_sq(ids, g, dtype=torch.float64)
        c = cuda.clip_factors(norm_sq, 1.0)
        results[:] = [norm_sq, c, cuda.embedding_clipped_sum(ids, g, c, 9)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    eager = [x.clone() for x in results]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for x in results:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(eager, results, strict=True))


# ---------------------------------------------------------------------- misuse


OUTSIDE = """
import torch
from fastdp.ops import cuda
cuda.embedding_clipped_sum(torch.tensor([[0, 9]], device="cuda"), torch.ones(1, 2, 4, device="cuda"),
                           torch.ones(1, device="cuda"), 3)
torch.cuda.synchronize()
"""


def test_ids_outside_the_table_stop_the_program() -> None:
    done = subprocess.run([sys.executable, "-c", OUTSIDE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "assert" in done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_launches_go_to_the_tensors_device() -> None:
    with torch.cuda.device(0):
        out = cuda.noise_(torch.empty(100, device="cuda:1"), 1.0, checks.WORDS, 0)
        assert torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), cuda.noise_(torch.empty(100, device="cuda:0"), 1.0, checks.WORDS, 0).cpu())
