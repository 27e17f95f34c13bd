"""Bits to normals: accuracy on ordinary and extreme bits, each bit used once, alike on every instruction set."""

import math
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastdp.ops import noise_reference
from fastdp.ops.checks import MASK
from fastdp.ops.noise_reference import LANES, SLOTS
from fastdp.ops.registry import native

from .backends import CPU
from .noise_truth import LONGEST, NATIVE, PAIRS, SINGLE_ERROR, block_of, box_muller, draw, scalar_pair

ROOT = Path(__file__).parents[2]
ON_CPU = pytest.mark.parametrize("backend", CPU, indirect=True)
TOP, HALF, LOW, POINTS = MASK, 1 << 31, 15, 1 << 28


def random_words(count: int, seed: int) -> Tensor:
    return torch.randint(0, 2**32, (count, 16, LANES), generator=torch.Generator().manual_seed(seed))


@ON_CPU
def test_transform_is_accurate_on_ordinary_and_extreme_bits(backend: str) -> None:
    words = random_words(30, 1)
    words[10:20, :PAIRS] >>= torch.arange(LANES) % 33  # x next to 0, where the logarithm vanishes
    words[20:, :PAIRS] |= TOP << torch.arange(LANES) % 33 & TOP  # x next to 1
    for some in [*words, *extreme_words()]:
        expected = [scalar_pair(block, pair) for block in some.T.tolist() for pair in range(PAIRS)]
        wanted = torch.tensor(expected, dtype=torch.float64).view(LANES, SLOTS).T
        torch.testing.assert_close(box_muller(backend, some), wanted, rtol=0, atol=1e-13)


def extreme_words() -> Tensor:
    """[n, 16, 64]: x = 0 and next to it, the largest x, powers of two and 1/2 from both sides; angles likewise."""
    radii = (
        [(0, 1 << k) for k in range(4)] + [(1 << k, 0) for k in range(32)] + [((1 << k) - 1, LOW) for k in range(33)]
    )
    radii += [(TOP - (1 << k), 5) for k in range(32)] + [(TOP, LOW - (1 << k)) for k in range(4)] + [(0, 0), (TOP, 0)]
    radii += [(HALF, 0), (HALF - 1, LOW), (HALF, 1), (3 << 30, 0), ((3 << 30) - 1, LOW), (1 << 30, 0)]
    angles = [POINTS * k // 4 - below for k in range(1, 5) for below in (0, 1)][:-2] + [
        0,
        POINTS - 1,
        1,
        POINTS // 2 + 1,
        77,
    ]
    rows = torch.tensor([(*r, a) for r in radii for a in angles])  # [n, 3]
    rows = torch.cat([rows, rows[: -len(rows) % (PAIRS * LANES)]]).view(-1, PAIRS, LANES, 3)
    return torch.stack([block_of(*some.unbind(-1)) for some in rows])


@ON_CPU
def test_no_bit_of_the_key_stream_reaches_two_pairs(backend: str) -> None:
    """Where x is small, each of its bits moves the radius."""
    generator = torch.Generator().manual_seed(5)
    low = torch.randint(1, LOW, (PAIRS, 1), generator=generator)
    circle = torch.randint(0, POINTS, (PAIRS, 1), generator=generator)
    block = block_of(torch.zeros(PAIRS, 1, dtype=torch.int64), low, circle).repeat(1, LANES)
    before = box_muller(backend, block)
    reached = []
    for first in range(0, 512, LANES):
        changed = block.clone()
        for lane in range(LANES):
            changed[(first + lane) // 32, lane] ^= 1 << (first + lane) % 32
        moved = (box_muller(backend, changed) != before).view(PAIRS, 2, LANES).any(1)
        reached += moved.sum(0).tolist()
    assert reached == [1] * 512


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
def test_transform_in_float_is_within_7e_7_of_the_radius() -> None:
    words = random_words(100, 2)
    words[50:75, :PAIRS] >>= torch.arange(LANES) % 33
    words[75:, :PAIRS] |= TOP << torch.arange(LANES) % 33 & TOP
    for some in torch.cat([words, extreme_words()]):
        exact = noise_reference.reference_box_muller(some).view(PAIRS, 2, -1)
        radius = exact.square().sum(1).sqrt()[:, None]
        found = box_muller("C++", some, torch.float32).view(PAIRS, 2, -1)
        error = (found - exact).abs()
        assert (error <= SINGLE_ERROR * radius + 1e-25).all(), float((error / radius).nan_to_num(0).max())
        assert (found.square().sum(1).sqrt() <= LONGEST * (1 + SINGLE_ERROR)).all()


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
def test_float_noise_has_no_bias_against_double() -> None:
    """Errors of 6e-8 each: their mean over n draws is within 5 * 6e-8 / sqrt(n), that of squares not much more."""
    count = 1 << 22
    single, exact = draw(count, offset=77).double(), draw(count, offset=77, dtype=torch.float64)
    assert abs(float((single - exact).mean())) < 1e-9
    assert abs(float((single.square() - exact.square()).mean())) < 1e-7
    assert 1e-8 < float((single - exact).square().mean().sqrt()) < 1e-7


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the PATH")
def test_every_float_keeps_the_bounds_that_the_kernel_relies_on(tmp_path: Path) -> None:
    """Over all 10^9 floats. A normal of size c is off by c times its radius times what is added up here; the kernel
    looks closer where less than 6e-7 of that is left."""
    source, program = Path(__file__).parent / "float_error.cpp", tmp_path / "float_error"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fopenmp-simd", "-w"]
    flags += ["-mfma"] if platform.machine() == "x86_64" else []
    subprocess.run(["g++", *flags, f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)], check=True)
    radius, cosine, sine = map(float, subprocess.run([program], capture_output=True, check=True).stdout.split())
    # x and y are rounded twice, which moves the radius by 0.72 times this, the angle by pi / 2; two products, once
    unit = 2.0**-23
    assert radius + max(cosine, sine) + (0.72 + math.pi / 2 + 2) * unit / 2 + 1.2e-8 < 6e-7


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transform_has_the_same_bits_on_every_instruction_set(dtype: torch.dtype) -> None:
    module = native()
    best = module.instruction_set()  # type: ignore[union-attr]
    words = torch.cat([random_words(200, 3), extreme_words()])
    try:
        found = []
        for at_most in range(best + 1):
            module.instruction_set(at_most)  # type: ignore[union-attr]
            found.append(torch.stack([box_muller("C++", some, dtype) for some in words]))
    finally:
        module.instruction_set(best)  # type: ignore[union-attr]
    assert all(torch.equal(x, found[0]) for x in found) and not found[0].isnan().any()


@ON_CPU
def test_tail_reaches_beyond_7_sigma_and_is_fine_there(backend: str) -> None:
    left = torch.arange(LANES).repeat(PAIRS, 1)  # 1 - x = 1, 2, ... 64 times 2^-36
    circle = torch.zeros_like(left)  # angle pi 2^-28: the even slots are the radius
    circle[0, 1] = POINTS // 2  # turned
    words = block_of(TOP - left // 16, LOW - left % 16, circle)
    radii = box_muller(backend, words)[0::2]
    expected = [math.sqrt(2 * math.log(2) * 36 - 2 * math.log(k + 1)) for k in range(LANES)]
    assert float(radii[0, 0]) == pytest.approx(7.0645, abs=1e-4) == LONGEST
    assert float(radii[0, 1]) == pytest.approx(-expected[1], abs=1e-12)
    wanted = torch.tensor(expected, dtype=torch.float64).expand(PAIRS, LANES)
    torch.testing.assert_close(radii.abs(), wanted, rtol=0, atol=1e-12)
    single = box_muller(backend, words, torch.float32)[0::2]
    torch.testing.assert_close(single, radii, rtol=SINGLE_ERROR, atol=0)


@ON_CPU
def test_the_smallest_radius_is_zero_not_nan_and_the_next_is_not_zero(backend: str) -> None:
    left = torch.arange(LANES).repeat(PAIRS, 1)
    words = block_of(left // 16, left % 16, torch.zeros_like(left))
    for dtype in (torch.float32, torch.float64):
        radii = box_muller(backend, words, dtype)[0::2]
        expected = (left.double() * 2.0**-35).sqrt()  # of small x
        torch.testing.assert_close(radii, expected, rtol=SINGLE_ERROR, atol=0)


@ON_CPU
def test_no_coordinate_is_zero_by_its_angle(backend: str) -> None:
    """Next to the axes: 2^-28 of half a circle off them, in double."""
    quarter = POINTS // 4
    circle = torch.tensor([0, 2 * quarter - 1, quarter, quarter - 1]).repeat(PAIRS, LANES // 4)
    words = block_of(torch.full_like(circle, HALF), torch.zeros_like(circle), circle)
    normals = box_muller(backend, words).view(PAIRS, 2, LANES)
    radius = math.sqrt(2 * math.log(2))
    nearest = normals.abs().min(1).values
    torch.testing.assert_close(nearest, torch.full_like(nearest, radius * math.pi * 2.0**-28), rtol=1e-5, atol=0)
