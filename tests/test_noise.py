"""Noise: the RFC's vectors, a scalar truth in Python, the compiled kernel against plain PyTorch, statistics."""

import copy
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fastdp.ops import noise
from fastdp.ops.noise import LANES, SLOTS, TILE, Noise, noise_, reference_noise
from fastdp.ops.registry import forced, native
from fastdp.privacy import Privacy

NATIVE = noise.native_status() == "built"
BACKENDS = ["reference", "native"] if NATIVE else ["reference"]
KEY = bytes(range(32))
ROOT = Path(__file__).parent.parent


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every public function by the one implementation and by the other."""
    with forced("reference" if request.param == "reference" else "auto"):
        yield str(request.param)


def blocks(backend: str, state: list[int]) -> Tensor:
    """64 consecutive blocks, [16, 64] int64."""
    if backend == "native":
        words = torch.full((16, LANES), 7, dtype=torch.int32)
        given = torch.tensor(state).to(torch.int32)
        native().chacha20_blocks(given.data_ptr(), words.data_ptr())
        return words.long() & noise.MASK
    states = torch.tensor(state)[:, None].repeat(1, LANES)
    counter = [state[12] + (state[13] << 32) + lane for lane in range(LANES)]
    states[12] = torch.tensor([c & noise.MASK for c in counter])
    states[13] = torch.tensor([c >> 32 & noise.MASK for c in counter])
    return noise.reference_chacha20(states)


def box_muller(backend: str, words: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """[16, 64] int64 -> [8, 64] float64, computed in dtype by the compiled kernel."""
    if backend == "reference":
        return noise.reference_box_muller(words)
    out = torch.full((SLOTS, LANES), math.nan, dtype=dtype)
    given = words.to(torch.int32).contiguous()
    native().box_muller(given.data_ptr(), out.data_ptr(), noise.TYPES[dtype])
    return out.double()


# The compiled kernel computes normals of float32 and 16-bit data in float: within 7e-7 of their pair's radius.
SINGLE_ERROR = 7e-7
LONGEST = math.sqrt(2 * math.log(2) * 64)  # radius


def single_error(normal: Tensor, backend: str) -> Tensor:
    """How far float32 noise may be from these float64 normals of any indices: radii are below 6.5 here."""
    rounding = normal.abs() * 2.0**-24
    return rounding if backend == "reference" else rounding + 6.5 * SINGLE_ERROR


def draw(count: int, key: bytes = KEY, step: int = 0, offset: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return noise_(torch.full((count,), math.nan, dtype=dtype), 1.0, key, step, offset)


# ---------------------------------------------------------------------- the generator

# RFC 8439: 2.3.2, and appendix A.1 vectors 1 to 3: (key, counter, nonce, key stream)
VECTORS = [
    (
        KEY.hex(), 1, "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "00" * 32, 0, "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32, 1, "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01", 1, "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "counter", "nonce", "stream"), VECTORS)
def test_block_function_gives_the_vectors_of_rfc_8439(
    backend: str, key: str, counter: int, nonce: str, stream: str
) -> None:
    state = [*noise.SIGMA, *struct.unpack("<8I", bytes.fromhex(key)), counter, *words_of(nonce)]
    assert struct.pack("<16I", *blocks(backend, state)[:, 0].tolist()).hex() == stream


def words_of(nonce: str) -> tuple[int, ...]:
    return struct.unpack("<3I", bytes.fromhex(nonce))


def test_counter_has_64_bits(backend: str) -> None:
    state = [*noise.SIGMA, *range(8), 0xFFFFFFF0, 4, 1, 2]
    found = blocks(backend, state)
    for lane in (0, 15, 16, 63):
        counter = 0xFFFFFFF0 + (4 << 32) + lane
        alone = [*state[:12], counter & noise.MASK, counter >> 32, 1, 2]
        assert found[:, lane].tolist() == scalar_block(alone)


def test_extension_is_there_unless_no_compiler_is() -> None:
    compilers = [name for name in ("c++", "g++", "clang++", "cl") if shutil.which(name)]
    assert NATIVE or not compilers, f"{compilers} on PATH, but: {noise.native_status()}"


def test_installs_without_the_extension_where_compiling_fails(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    broken = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(command, cwd=ROOT, env=broken, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING: installing without the compiled extension fastdp._C") == 1
    assert not list(tmp_path.rglob("*.so"))


# ---------------------------------------------------------------------- element by element


def scalar_block(state: list[int]) -> list[int]:
    """The block function of RFC 8439 2.3.1, a word at a time."""
    x = list(state)

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for to, by, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = (x[to] + x[by]) % 2**32
            value = x[turned] ^ x[to]
            x[turned] = (value << bits | value >> (32 - bits)) % 2**32

    for _ in range(10):
        for k in range(4):
            quarter(k, 4 + k, 8 + k, 12 + k)
        for k in range(4):
            quarter(k, 4 + (k + 1) % 4, 8 + (k + 2) % 4, 12 + (k + 3) % 4)
    return [(a + b) % 2**32 for a, b in zip(x, state, strict=True)]


def scalar_normal(i: int, key: bytes, step: int) -> float:
    """Element i as the documentation defines it."""
    tile, slot, lane = i // 512, i % 512 // 64, i % 64
    nonce = step + (0x6E6F << 48)
    counter = 64 * tile + lane
    head = struct.unpack("<4I", b"expand 32-byte k")
    state = [*head, *struct.unpack("<8I", key), counter % 2**32, counter >> 32, nonce % 2**32, nonce >> 32]
    pair = 4 * (slot // 2)
    return scalar_pair(*scalar_block(state)[pair : pair + 4])[slot % 2]


def scalar_pair(w0: int, w1: int, w2: int, w3: int) -> tuple[float, float]:
    """Two normals of four words, by libm."""
    radius = math.sqrt(-2 * math.log(((w1 << 32) + w0 + 1) / 2**64)) * (-1 if w2 & 1 else 1)
    angle = math.pi * (((w3 << 32 | w2) >> 12) / 2**52 - 0.5)
    return radius * math.cos(angle), radius * math.sin(angle)


# in a tile, across tiles, across the low counter word's end (2^35 elements), and beyond 2^40 elements
OFFSETS = [0, 1, 63, 64, 511, 512, 700, 2**35 - 300, 2**40 + 77, 2**62 - 5000]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("step", [0, 3, 2**48 - 1])
def test_elements_are_the_documented_function_of_key_step_and_index(backend: str, offset: int, step: int) -> None:
    found = draw(600, KEY, step, offset, torch.float64)
    picked = [0, 1, 2, 63, 64, 65, 299, 300, 301, 447, 511, 512, 599]
    expected = torch.tensor([scalar_normal(offset + k, KEY, step) for k in picked], dtype=torch.float64)
    torch.testing.assert_close(found[picked], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("count", [0, 1, 5, 64, 511, 512, 513, 4099])
def test_backends_agree(backend: str, count: int, offset: int) -> None:
    expected = reference_noise(count, KEY, 5, offset, dtype=torch.float64)
    assert expected.shape == (count,)
    torch.testing.assert_close(draw(count, KEY, 5, offset, torch.float64), expected, rtol=0, atol=1e-13)
    found = draw(count, KEY, 5, offset)
    assert ((found.double() - expected).abs() <= single_error(expected, backend)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_and_threads_change_no_bit(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    count, start = 150_001 if backend == "native" else 20_001, 37  # 7 threads want 115 thousand
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = draw(count, offset=start, dtype=dtype)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(draw(count, offset=start, dtype=dtype), whole)
    finally:
        torch.set_num_threads(before)
    for cuts in ([0, 1, 2, 515, 1027, 7000, count], [0, count - 2, count]):
        parts = [draw(b - a, offset=start + a, dtype=dtype) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(noise, "CHUNK", 3)
    assert torch.equal(draw(5000, offset=start, dtype=dtype), whole[:5000])


def test_key_step_and_offset_each_change_every_element(backend: str) -> None:
    base = draw(2000)
    keys = [bytes([KEY[k] ^ 1 if k == at else KEY[k] for k in range(32)]) for at in range(32)]
    others = [draw(2000, key) for key in keys]
    others += [draw(2000, step=step) for step in (1, 2**31, 2**32, 2**47)]
    others += [draw(2000, offset=offset) for offset in (1, 64, 128, 512, 2**35, 2**38, 2**40)]
    for other in others:
        assert (other == base).sum() <= 1
        assert abs(correlation(other, base)) < 5 / math.sqrt(2000)


# ---------------------------------------------------------------------- the transform


def test_transform_is_accurate_on_ordinary_and_extreme_bits(backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 2**32, (30, 16, LANES), generator=generator)
    words[10:20, 1::4] = noise.MASK  # U next to 1, where its logarithm vanishes
    words[20:, 1::4] >>= torch.arange(LANES) % 33  # small U
    for some in words:
        pairs = some.view(4, 4, LANES).transpose(1, 2).flatten(0, 1).tolist()  # [4 * 64][4]
        expected = torch.tensor([scalar_pair(*pair) for pair in pairs], dtype=torch.float64)
        expected = expected.view(4, LANES, 2).transpose(1, 2).reshape(SLOTS, LANES)
        torch.testing.assert_close(box_muller(backend, some), expected, rtol=0, atol=1e-13)


def exact_pairs(words: Tensor) -> Tensor:
    """[16, 64] int64 -> [8, 64] float64; U is not rounded next to 1, where 53 bits would not do."""
    w0, w1 = words.view(4, 4, -1)[:, 0], words.view(4, 4, -1)[:, 1]
    below_one = (noise.MASK - w1).double() * 2.0**-32 + (noise.MASK - w0).double() * 2.0**-64  # 1 - U
    u = w1.double() * 2.0**-32 + (w0 + 1).double() * 2.0**-64
    radius = torch.where(w1 >> 31 == 1, torch.log1p(-below_one), u.log()).mul(-2).sqrt()
    angles = words.clone()
    angles[0::4], angles[1::4] = 0, 0
    points = noise.reference_box_muller(angles).view(4, 2, -1) / LONGEST
    return (points * radius[:, None]).flatten(0, 1)


def extreme_words() -> Tensor:
    """[n, 16, 64]: U = 1 and next to it, the smallest U, powers of two and 1/2 from both sides; angles likewise."""
    top, half = noise.MASK, 1 << 31
    powers = [(top, (1 << k) - 1) for k in range(32)] + [(0, 1 << k) for k in range(32)]
    powers += [((1 << k) - 1, 0) for k in range(32)] + [(1 << k, 0) for k in range(32)]
    radii = [*powers, (top, top), (top - 1, top), (half, top), (half - 1, top), (top, top - 1), (5, top - 3), (0, 0)]
    angles = [(0, 0), (top, top), (0, half), (0x1001, half), (0xFFFFEFFF, half - 1), (1, half // 2), (0, 3 * half // 2)]
    rows = torch.tensor([(*r, *a) for r in radii for a in angles])  # [n, 4]
    rows = torch.cat([rows, rows[: -len(rows) % 256]])
    return rows.view(-1, 4, LANES, 4).transpose(2, 3).reshape(-1, 16, LANES)


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
def test_transform_in_float_is_within_7e_7_of_the_radius() -> None:
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, 2**32, (100, 16, LANES), generator=generator)
    words[50:, 1::4] >>= torch.arange(LANES) % 33  # small U
    for some in torch.cat([words, extreme_words()]):
        exact = exact_pairs(some)
        radius = exact.view(4, 2, -1).square().sum(1).sqrt()[:, None]
        found = box_muller("native", some, torch.float32)
        error = (found - exact).view(4, 2, -1).abs()
        assert (error <= SINGLE_ERROR * radius + 1e-25).all(), float((error / radius).nan_to_num(0).max())
        assert (found.view(4, 2, -1).square().sum(1).sqrt() <= LONGEST * (1 + SINGLE_ERROR)).all()


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
def test_float_noise_has_no_bias_against_double() -> None:
    """Errors of 6e-8 each: their mean over n draws is within 5 * 6e-8 / sqrt(n), that of squares not much more."""
    count = 1 << 22
    single, exact = draw(count, offset=77).double(), draw(count, offset=77, dtype=torch.float64)
    assert abs(float((single - exact).mean())) < 1e-9
    assert abs(float((single.square() - exact.square()).mean())) < 1e-7
    assert 1e-8 < float((single - exact).square().mean().sqrt()) < 1e-7
    std = float(torch.tensor(1.7)) + 0.98 * 2.0**-24  # float32 would round it by 3e-8 of it
    scaled = noise_(torch.empty(count), std, KEY, 0, 77).double()
    assert abs(float((scaled * exact).sum() / exact.square().sum()) / std - 1) < 1e-8


@pytest.mark.skipif(not NATIVE, reason="the compiled kernel is absent")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transform_has_the_same_bits_on_every_instruction_set(dtype: torch.dtype) -> None:
    module = native()
    best = module.instruction_set()  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(3)
    words = torch.cat([torch.randint(0, 2**32, (200, 16, LANES), generator=generator), extreme_words()])
    try:
        found = []
        for at_most in range(best + 1):
            module.instruction_set(at_most)  # type: ignore[union-attr]
            found.append(torch.stack([box_muller("native", some, dtype) for some in words]))
    finally:
        module.instruction_set(best)  # type: ignore[union-attr]
    assert all(torch.equal(x, found[0]) for x in found) and not found[0].isnan().any()


def test_tail_reaches_beyond_9_sigma_and_is_fine_there(backend: str) -> None:
    words = torch.zeros(16, LANES, dtype=torch.int64)
    words[3::4] = 0x80000000  # angle 0: the even slots are the radius
    words[0] = torch.arange(LANES)  # U = 1, 2, ... 64 times 2^-64
    words[2, 1] = 1  # turned
    radii = box_muller(backend, words)[0]
    expected = [math.sqrt(2 * math.log(2) * 64 - 2 * math.log(k + 1)) for k in range(LANES)]
    assert radii[0] == pytest.approx(9.419, abs=1e-3) and radii[1] == pytest.approx(-expected[1], abs=1e-12)
    torch.testing.assert_close(radii.abs(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    single = box_muller(backend, words, torch.float32)[0]
    torch.testing.assert_close(single, radii, rtol=SINGLE_ERROR, atol=0)


def test_largest_uniform_gives_zero_not_nan(backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        normals = box_muller(backend, torch.full((16, LANES), noise.MASK), dtype)
        assert torch.equal(normals, torch.zeros_like(normals))


# ---------------------------------------------------------------------- statistics, of fixed keys

COUNT = 1 << 20


@pytest.fixture(scope="module")
def samples() -> Tensor:
    return draw(COUNT, offset=12345, dtype=torch.float64)


def kolmogorov(x: Tensor) -> float:
    """sqrt(n) sup |F_n - F|: above 1.95 with probability 0.001."""
    cdf = torch.special.ndtr(x.sort().values)
    grid = torch.arange(len(x) + 1, dtype=torch.float64) / len(x)
    return math.sqrt(len(x)) * float(torch.maximum((grid[1:] - cdf).max(), (cdf - grid[:-1]).max()))


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def test_distribution_of_float_noise_is_normal() -> None:
    single = draw(COUNT, offset=54321).double()
    assert kolmogorov(single) < 1.95 and abs(correlation(single[:-64], single[64:])) < 4.5 / math.sqrt(COUNT)


def test_distribution_is_normal(samples: Tensor) -> None:
    assert kolmogorov(samples) < 1.95
    assert kolmogorov(samples[:: 2 * LANES]) < 1.95
    assert kolmogorov(1.01 * samples) > 1.95 and kolmogorov(samples + 0.01) > 1.95  # the test can fail


def test_moments(samples: Tensor) -> None:
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        error = float((samples**power).mean()) - mean
        assert abs(error) < 4.5 * math.sqrt(variance / COUNT), power
    for sigma in (1, 2, 3, 4):
        share = math.erfc(sigma / math.sqrt(2))
        found = float((samples.abs() > sigma).double().mean())
        assert abs(found - share) < 4.5 * math.sqrt(share / COUNT), sigma


@pytest.mark.parametrize("lag", [1, 2, 32, LANES - 1, LANES, LANES + 1, 2 * LANES, TILE, 4 * TILE])
def test_neighbours_are_independent(samples: Tensor, lag: int) -> None:
    a, b = samples[:-lag], samples[lag:]
    for f in (lambda x: x, lambda x: x**2, lambda x: x.abs(), torch.sign):  # a pair shares its radius
        assert abs(correlation(f(a), f(b))) < 4.5 / math.sqrt(COUNT)


# ---------------------------------------------------------------------- operators


def assert_noised(found: Tensor, sums: Tensor, normal: Tensor, std: float, scale: float, backend: str) -> None:
    """found = (sums + std * normal) * scale in its type, of float64 sums and normals.

    Rounded once by the reference and in float64 (up to float64's own rounding); in float, normals have their error,
    and the sum and the product are rounded to 24 bits each, before the rounding to a shorter type.
    """
    total, exact = sums.double() + std * normal, (sums.double() + std * normal) * scale
    if found.dtype == torch.float64:
        torch.testing.assert_close(found, exact, rtol=1e-14, atol=1e-15)
        return
    smallest = {torch.bfloat16: -133, torch.float16: -24, torch.float32: -149}[found.dtype]
    last = (torch.finfo(found.dtype).eps * 2.0 ** exact.abs().log2().floor()).clamp(min=2.0**smallest)
    allowed = (0.5 + 1e-7) * last
    if backend == "native":
        allowed = allowed + (total.abs() * 2.0**-24 + 6.5 * SINGLE_ERROR * std) * abs(scale)
        allowed = allowed + (exact.abs() * 2.0**-24 if found.dtype != torch.float32 else 0)
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70_001,)])
@pytest.mark.parametrize(("std", "scale"), [(1.7, 0.3), (1e-3, -1.0), (1e-25, 1e24), (1e-50, 1e50), (1e25, 1e-30)])
def test_add_scaled_is_right_to_rounding(
    backend: str, dtype: torch.dtype, shape: tuple[int, ...], std: float, scale: float
) -> None:
    """Of large and small std, too: what float cannot hold is computed in double."""
    source = Noise(seed=4)
    source.step = 9
    tensor = torch.randn(shape, dtype=dtype) * std
    normal = draw(tensor.numel(), noise.key_of(4), 9, 1001, torch.float64).view(shape)
    before, version = tensor.clone(), tensor._version
    assert source.add_scaled_(tensor, std, scale, 1001) is tensor
    assert_noised(tensor, before, normal, std, scale, backend)
    assert tensor._version > version or not tensor.numel()  # autograd can see that it changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [1.0, 1e-7, 1e5, 1e-30])
def test_16_bit_noise_is_that_of_wider_types_rounded(backend: str, dtype: torch.dtype, std: float) -> None:
    found = noise_(torch.full((3001,), math.nan, dtype=dtype), std, KEY, 2, 77)
    normal = draw(3001, KEY, 2, 77, torch.float64)
    if dtype == torch.float16:
        overflow = (std * normal).abs() >= 65520
        assert torch.equal(found.double().isinf(), overflow)
        found, normal = found[~overflow], normal[~overflow]
    assert_noised(found, torch.zeros_like(normal), normal, std, 1.0, backend)
    single = noise_(torch.empty(3001), std, KEY, 2, 77)
    assert backend == "reference" or torch.equal(single.to(dtype)[: len(found)], noise_(
        torch.empty(3001, dtype=dtype), std, KEY, 2, 77)[: len(found)])  # fmt: skip


def test_disjoint_ranges_parameters_steps_are_independent_and_normal() -> None:
    count = 1 << 16
    draws = [
        draw(count, step=step, offset=rank * count + 31, dtype=torch.float64) for step in (0, 1) for rank in range(4)
    ]
    for x in draws:
        assert kolmogorov(x) < 1.95
    for k, x in enumerate(draws):
        assert all(abs(correlation(x, y)) < 4.5 / math.sqrt(count) for y in draws[:k])
    assert kolmogorov(torch.stack(draws).t()[0:8000].flatten()) < 1.95  # the same indices across steps and ranks


def test_memory_around_is_untouched(backend: str) -> None:
    whole = torch.full((3000,), math.pi)
    noise_(whole[700:1900], 2.0, KEY, 0, 3)
    assert (whole[:700] == math.pi).all() and (whole[1900:] == math.pi).all()
    normal = draw(1200, offset=3, dtype=torch.float64)
    assert_noised(whole[700:1900], torch.zeros(1200), normal, 2.0, 1.0, backend)


def test_without_noise_only_the_scale_is_left(backend: str) -> None:
    tensor = torch.tensor([1.0, -2.0])
    assert Noise().add_scaled_(tensor, 0.0, 0.5, 0).tolist() == [0.5, -1.0]
    torch.ops.fastdp.add_noise_(tensor, 0.0, -0.5, noise.words_of(KEY), 0, 0)  # the operator itself
    assert tensor.tolist() == [-0.25, 0.5]
    for dtype in noise.TYPES:
        found = noise_(torch.full((1300,), math.nan, dtype=dtype), 0.0, KEY, 0, 5)
        assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (TypeError, {"out": torch.zeros(4, dtype=torch.int32)}),
        (ValueError, {"key": [1, 2]}),
        (ValueError, {"key": [0] * 7 + [1 << 32]}),
        (ValueError, {"out": torch.zeros(4, 4).t()[1:]}),
        (ValueError, {"out": torch.zeros(4, requires_grad=True)}),
        (ValueError, {"key": b"short"}),
        (ValueError, {"key": "0" * 32}),
        (ValueError, {"step": -1}),
        (ValueError, {"step": 2**48}),
        (ValueError, {"offset": -1}),
        (ValueError, {"offset": 2**62}),
        (ValueError, {"std": -1.0}),
        (ValueError, {"std": math.nan}),
        (ValueError, {"std": math.inf}),
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


def test_seeds_reproduce_and_secret_keys_differ(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert source._key not in pickle.dumps(source)
    assert first(copy.deepcopy(seeded)) == first(seeded)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert first(source) != drawn


def test_freezing_a_parameter_does_not_move_the_noise_of_others() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    privacy = Privacy(model, model.parameters(), noise_multiplier=1.0, expected_batch_size=5, seed=0)

    def ranges_of_a_step() -> list[tuple[int, int]]:
        model(torch.ones(5, 3)).sum(1).mean().backward()
        assert privacy.ready()
        release = privacy.release()
        privacy.finish()
        return [(release.offsets[id(p)], p.numel()) for p in model.parameters() if id(p) in release.sums]

    assert ranges_of_a_step() == [(0, 12), (12, 4), (16, 8), (24, 2)]
    model[0].bias.requires_grad_(False)
    assert ranges_of_a_step() == [(0, 12), (16, 8), (24, 2)]
