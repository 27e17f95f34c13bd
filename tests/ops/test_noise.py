"""Noise: the RFC's vectors, elements against a scalar truth, what is refused, and keys: copies, forks, seeds."""

from __future__ import annotations

import copy
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fastdp
from fastdp.ops import noise, noise_reference
from fastdp.ops.checks import MASK
from fastdp.ops.noise import Noise, noise_
from fastdp.ops.noise_reference import LANES, SIGMA, SLOTS, TILE, Grid, KeyStream, nearest_whole
from fastdp.ops.registry import OPERATORS

from .backends import CPU, assert_equal_bits
from .noise_truth import (
    KEY,
    NATIVE,
    SINGLE_ERROR,
    VECTORS,
    bits_of,
    blocks,
    correlation,
    draw,
    nearly_halves,
    released,
    scalar_block,
    scalar_normal,
    words_of,
)

ROOT = Path(__file__).parent.parent.parent
ON_CPU = pytest.mark.parametrize("backend", CPU, indirect=True)

# ---------------------------------------------------------------------- the generator


@ON_CPU
def test_block_function_gives_the_vectors_of_rfc_8439_and_counts_to_64_bits(backend: str) -> None:
    for key, counter, nonce, stream in VECTORS:
        state = [*SIGMA, *struct.unpack("<8I", bytes.fromhex(key)), counter, *words_of(nonce)]
        assert struct.pack("<16I", *blocks(backend, state)[:, 0].tolist()).hex() == stream
    state = [*SIGMA, *range(8), 0xFFFFFFF0, 4, 1, 2]
    found = blocks(backend, state)
    for lane in (0, 15, 16, 63):
        counter = 0xFFFFFFF0 + (4 << 32) + lane
        alone = [*state[:12], counter & MASK, counter >> 32, 1, 2]
        assert found[:, lane].tolist() == scalar_block(alone)


def test_extension_is_there_unless_no_compiler_is(tmp_path: Path) -> None:
    """And fastdp installs without it where compiling fails."""
    compilers = [name for name in ("c++", "g++", "clang++", "cl") if shutil.which(name)]
    assert NATIVE or not compilers, f"{compilers} on PATH, but: {noise.native_status()}"
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    broken = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(command, cwd=ROOT, env=broken, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING: installing without the compiled extension fastdp._C") == 1
    assert not list(tmp_path.rglob("*.so"))


# ---------------------------------------------------------------------- element by element


# in a tile, across tiles, across the low counter word's end (2^36 elements), and beyond 2^40 elements
OFFSETS = [0, 1, 63, 64, 1023, 1024, 1300, 2**36 - 300, 2**40 + 77, 2**62 - 5000]


@ON_CPU
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("step", [0, 3, 2**48 - 1])
def test_elements_are_the_documented_function_of_key_step_and_index(backend: str, offset: int, step: int) -> None:
    picked = [0, 1, 2, 63, 64, 65, *range(130, 1000, 64), 299, 300, 301, 767, 768, 999]
    expected = torch.tensor([scalar_normal(offset + k, KEY, step) for k in picked], dtype=torch.float64)
    found = draw(1000, KEY, step, offset, torch.float64)
    torch.testing.assert_close(found[picked], expected, rtol=0, atol=1e-12)
    single = draw(1000, KEY, step, offset).double()
    assert bool(((single - found).abs() <= found.abs() * 2.0**-24 + 6.5 * SINGLE_ERROR).all())
    for count in (0, 1, 5, 960):
        assert torch.equal(draw(count, KEY, step, offset), single[:count].float())
    for dtype in (torch.float32, torch.float64):
        rounded = released(torch.zeros(1000, dtype=dtype), 1.0, 1.0, step, offset)
        assert torch.equal(rounded[picked].double(), (expected * 64).round() / 64)


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_and_threads_change_no_bit(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    count, start = 180_001 if backend == "C++" else 20_001, 37  # 7 threads want 172 thousand
    assert_equal_bits(lambda: [draw(count, offset=start, dtype=dtype)], (1, 2, 3, 7))
    whole = draw(count, offset=start, dtype=dtype)
    for cuts in ([0, 1, 2, 515, 987, 1027, 7000, count], [0, count - 2, count]):
        parts = [draw(b - a, offset=start + a, dtype=dtype) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(noise_reference, "CHUNK", 3)
    assert torch.equal(draw(5000, offset=start, dtype=dtype), whole[:5000])


@ON_CPU
def test_key_step_and_offset_each_change_every_element(backend: str) -> None:
    base = draw(2000)
    keys = [bytes([KEY[k] ^ 1 if k == at else KEY[k] for k in range(32)]) for at in range(32)]
    others = [draw(2000, key) for key in keys]
    others += [draw(2000, step=step) for step in (1, 2**31, 2**32, 2**47)]
    others += [draw(2000, offset=offset) for offset in (1, 64, 128, 1024, 2**36, 2**38, 2**40)]
    for other in others:
        assert (other == base).sum() <= 1
        assert abs(correlation(other, base)) < 5 / math.sqrt(2000)


# ---------------------------------------------------------------------- sizes that float cannot hold


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70_001,)])
@pytest.mark.parametrize(("std", "scale"), [(1.7, 0.3), (1e-3, -1.0), (1e-25, 1e24), (1e-50, 1e50), (1e25, 1e-30)])
def test_sums_are_released_as_multiples_of_a_grid(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], std: float, scale: float
) -> None:
    """Of large and small std, too: what float cannot hold is computed in double. The sum's own bits are lost."""
    source = Noise(seed=4)
    source.step = 9
    tensor = torch.randn(shape, dtype=dtype) * std
    normal = noise_reference.reference_noise(tensor.numel(), noise.key_of(4), 9, 1001).view(shape)
    size, unit = Grid.of(std, dtype)
    v, version = tensor.double() / unit + size * normal, tensor._version
    assert source.add_scaled_(tensor, std, scale, 1001) is tensor
    found = tensor.double() / unit / scale
    assert bool(((found - found.round()).abs() <= 3e-7 * found.abs()).all())  # rounding of the product
    sure = (v - v.round()).abs() < 0.5 - 1e-5
    assert torch.equal(found.round()[sure], v.round()[sure]) and sure.double().mean() > 0.999 or not tensor.numel()
    assert bool(((found - v).abs() <= 0.5 + 1e-4).all())
    assert tensor._version > version or not tensor.numel()  # autograd can see that it changed


def test_a_grid_is_a_64th_of_the_noise_that_is_never_less_than_asked_for() -> None:
    for std in (1.0, 1 - 2.0**-53, 1 + 1e-9, 0.7, 3.0, 1e-50, 1e30, 2.0**-1040):
        for dtype in (torch.float32, torch.float64):
            size, unit = Grid.of(std, dtype)
            assert 64 <= size < 128 and math.frexp(unit)[0] == 0.5 and std <= size * unit <= std * (1 + 2.0**-23)
            assert size == float(torch.tensor(size, dtype=torch.float32)) or dtype == torch.float64
            assert size * unit == std or dtype == torch.float32


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [1.0, 1e-7, 1e5, 1e-30])
def test_16_bit_noise_is_that_of_wider_types_rounded(backend: str, dtype: torch.dtype, std: float) -> None:
    kind = torch.float64 if backend == "reference" else torch.float32
    found, wide = (noise_(torch.empty(3001, dtype=each), std, KEY, 2, 77) for each in (dtype, kind))
    assert torch.equal(found, noise_reference.rounded(wide, dtype))
    found, wide = (released(torch.zeros(3001, dtype=each), std, 0.3, 2, 77) for each in (dtype, torch.float32))
    assert torch.equal(found, wide.to(dtype))


def test_open_elements_are_those_of_arbitrary_precision() -> None:
    """Against mpmath, of the key stream's first 32 levels: 1060 bits of x and 1051 of the angle."""
    mpmath = pytest.importorskip("mpmath")
    std, count, offset = 1.9, 400, TILE * 5
    sums, halves = nearly_halves(std, count, 6, offset, torch.float64)
    size, unit = Grid.of(std, torch.float64)
    found = sums.clone()
    torch.ops.fastdp.add_noise_(found, std, 1.0, noise.words_of(KEY), 6, offset)
    nonce = (6, noise_reference.DOMAIN << 16)
    with mpmath.workdps(400):
        for i in range(count):
            slot, lane = (offset + i) % TILE // 64, (offset + i) % 64
            block = [*SIGMA, *noise.words_of(KEY), 64 * ((offset + i) // TILE) + lane, 0]
            x, circle = bits_of(scalar_block([*block, *nonce]), slot // 2)
            y, turned = mpmath.mpf(circle % 2**27 - (circle % 2**27 >> 26 << 27)), circle >> 27
            x = mpmath.mpf(x)
            for level in range(1, 33):
                more = scalar_block([*block, nonce[0], nonce[1] + (level << 16)])
                x += mpmath.mpf(more[slot // 2 * 2]) / 2 ** (32 * level)
                y += mpmath.mpf(more[slot // 2 * 2 + 1]) / 2 ** (32 * level)
            radius = mpmath.sqrt(-2 * mpmath.log(1 - x / 2**36))
            angle = mpmath.pi * y / 2**27
            normal = (-1) ** turned * radius * (mpmath.sin(angle) if slot % 2 else mpmath.cos(angle))
            v = mpmath.mpf(float(sums[i])) / unit + size * normal
            assert abs(v - float(halves[i])) < 1e-5, "the sums are not near half-integers"
            assert float(found[i]) / unit == float(mpmath.nint(v)), i


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_normals_are_those_of_arbitrary_precision(dtype: torch.dtype) -> None:
    """Of radii above 5.3: the bits that are drawn first leave a 2000th of a unit of them, and more."""
    size, unit = Grid.of(1.9, dtype)
    count, crossed = TILE << 14, 0
    for begin in range(0, 4 * count, count):
        pairs = noise_(torch.empty(count, dtype=torch.float64), 1.0, KEY, 3, begin).view(-1, SLOTS // 2, 2, LANES)
        radii = pairs.square().sum(2).sqrt()
        for tile, pair, lane in (radii > 5.3).nonzero().tolist():
            radius = float(radii[tile, pair, lane])
            for odd, normal in enumerate(pairs[tile, pair, :, lane].tolist()):
                left = size * abs(normal) / radius * 2.0**-36 * math.exp(radius**2 / 2) / radius
                for share in (0.1, 0.3, 0.5, 0.7, 0.9):  # of what is left, below or above a half-integer
                    near = math.floor(size * normal) + 0.5 - math.copysign(share * left, normal)
                    total = torch.tensor([unit * (near - size * normal)], dtype=dtype)
                    place = begin + (tile * SLOTS + 2 * pair + odd) * LANES + lane
                    truth = total.clone()
                    OPERATORS["add_noise_"].reference(truth, 1.9, 1.0, noise.words_of(KEY), 3, place)
                    assert torch.equal(released(total, 1.9, 1.0, 3, place), truth), (radius, share)
                    crossed += float(truth) != round(near) * unit
    assert crossed > 40


def test_levels_are_taken_until_nothing_is_open() -> None:
    """A half and a normal of some 2^-138, of which the seventh level has the first bit that is not 0."""

    class Chosen(KeyStream):
        def level(self, number: int) -> list[int]:
            asked.append(number)
            return [MASK if number == 7 else 0] * 16

    for circle, whole in ((0, 1.0), (1 << 31, 0.0)):
        asked: list[int] = []
        stream = Chosen([0] * 15, 0, [0] * 8 + [circle] * 8)
        assert nearest_whole([(stream, 64.0)], 0, 0.5) == whole
        assert asked == [*range(1, 8)]


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fifty_million_draws_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    """Whose every element is decided by float64 with room to spare, or by arithmetic of any precision."""
    total = torch.randn(5_000_000, generator=torch.Generator().manual_seed(3), dtype=dtype)
    for begin in range(0, 50_000_000, 5_000_000):
        std, truth = 1 + begin / 50_000_000, total.clone()
        OPERATORS["add_noise_"].reference(truth, std, 0.1, noise.words_of(KEY), 11, begin)
        assert torch.equal(released(total, std, 0.1, 11, begin), truth)


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correlated_draws_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    total = torch.randn(1_000_000, generator=torch.Generator().manual_seed(3), dtype=dtype)
    for begin in range(0, 2_000_000, 1_000_000):
        std, past = 1 + begin / 2_000_000, ([10, 9, 2**40 + begin, 0], [-0.5, 1.75, -1.25, 0.01])
        truth, found = total.clone(), total.clone()
        OPERATORS["add_noise_"].reference(truth, std, 0.1, noise.words_of(KEY), 11, begin, *past)
        OPERATORS["add_noise_"](found, std, 0.1, noise.words_of(KEY), 11, begin, *past)
        assert torch.equal(found, truth)


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_correlated_draws_near_a_half_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    """So near to it that the error of float arithmetic counts: more than 2e-5, what the bits that x lacks may be."""
    past = [10, 2**40], [-0.01, 0.01]
    total, _ = nearly_halves(1.9, 5_000, 11, TILE, dtype, past)
    total += 4e-5 * Grid.of(1.9, dtype)[1] * torch.randn(5_000, generator=torch.Generator().manual_seed(3))
    truth, found = total.clone(), total.clone()
    OPERATORS["add_noise_"].reference(truth, 1.9, 0.1, noise.words_of(KEY), 11, TILE, *past)
    OPERATORS["add_noise_"](found, 1.9, 0.1, noise.words_of(KEY), 11, TILE, *past)
    assert torch.equal(found, truth)


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_zero_has_a_sign_and_odd_sums_stay(backend: str, dtype: torch.dtype) -> None:
    """A zero's sign, and a sum that was lost, would tell of the sum."""
    for total in (-1e-3, 0.0, -0.0, 1e-3):
        for scale in (0.5, -0.5):
            found = released(torch.full((20_000,), total, dtype=dtype), 1.0, scale)
            zeros = found[found == 0]
            assert len(zeros) > 50 and not zeros.signbit().any()
    largest = torch.finfo(dtype).max
    odd = torch.tensor([math.inf, -math.inf, math.nan, largest, -largest, largest / 8] * 40, dtype=dtype)
    torch.testing.assert_close(released(odd, 1e-3, 0.5), odd * 0.5, rtol=0, atol=0, equal_nan=True)


@ON_CPU
def test_without_noise_only_the_scale_is_left(backend: str) -> None:
    tensor = torch.tensor([1.0, -2.0])
    assert Noise().add_scaled_(tensor, 0.0, 0.5, 0).tolist() == [0.5, -1.0]
    torch.ops.fastdp.add_noise_(tensor, 0.0, -0.5, noise.words_of(KEY), 0, 0)  # the operator itself
    assert tensor.tolist() == [-0.25, 0.5]
    for dtype in noise.DTYPES:
        assert not noise_(torch.full((1300,), math.nan, dtype=dtype), 0.0, KEY, 0, 5).any()


@ON_CPU
@pytest.mark.parametrize(
    ("error", "change"),
    [
        (TypeError, {"out": torch.zeros(4, dtype=torch.int32)}),
        (ValueError, {"out": torch.zeros(4, 4).t()[1:]}),
        (ValueError, {"out": torch.zeros(4, requires_grad=True)}),
        *[(ValueError, {"key": key}) for key in ([1, 2], [0] * 7 + [1 << 32], b"short", "0" * 32)],
        *[(ValueError, {"step": step}) for step in (-1, 2**48)],
        *[(ValueError, {"offset": offset}) for offset in (-1, 2**62)],
        *[(ValueError, {"std": std}) for std in (-1.0, math.nan, math.inf, 1e-310)],
    ],
)
def test_refusals(backend: str, error: type[Exception], change: dict[str, object]) -> None:
    call = {"out": torch.zeros(4), "std": 1.0, "key": KEY, "step": 0, "offset": 0}
    noise_(**call)  # type: ignore[arg-type]
    with pytest.raises(error):
        noise_(**{**call, **change})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- keys


def first(source: Noise) -> list[float]:
    return source.add_scaled_(torch.zeros(4), 1.0, 1.0, 0).tolist()


def test_seeds_reproduce_and_secret_keys_differ() -> None:
    assert first(Noise(3)) == first(Noise(3)) != first(Noise(4))
    assert first(Noise(-3)) != first(Noise(3)) and first(Noise(2**200)) != first(Noise(0))
    assert not Noise(3).secure and Noise().secure
    assert first(Noise()) != first(Noise())
    with pytest.raises(TypeError):
        Noise(1.5)  # type: ignore[arg-type]


def test_copies_and_forks_do_not_repeat_secret_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    source, seeded = Noise(), Noise(3)
    source.step = seeded.step = 5
    drawn = first(source)
    assert first(source) == drawn
    for other in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert other.step == 5 and first(other) != drawn
    assert source.key not in pickle.dumps(source)
    assert first(copy.deepcopy(seeded)) == first(seeded)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert first(source) != drawn


def test_freezing_a_parameter_does_not_move_the_noise_of_others() -> None:
    moved = []
    for frozen in (False, True):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        for p in model.parameters():
            nn.init.zeros_(p)
        optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, expected_batch_size=5, seed=0)
        model[0].bias.requires_grad_(not frozen)
        (0 * model(torch.ones(5, 3))).sum(1).mean().backward()
        optimizer.step()
        optimizer.detach()
        moved.append([p.detach() for p in model.parameters()])
    assert [torch.equal(a, b) for a, b in zip(*moved, strict=True)] == [True, False, True, True]
