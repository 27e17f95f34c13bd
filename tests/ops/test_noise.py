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
from torch import Tensor, nn

import fastdp
from fastdp.ops import noise
from fastdp.ops.noise import Noise, noise_

from .backends import CPU, assert_equal_bits
from .noise_truth import (
    KEY,
    NATIVE,
    SINGLE_ERROR,
    VECTORS,
    blocks,
    correlation,
    draw,
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
        state = [*noise.SIGMA, *struct.unpack("<8I", bytes.fromhex(key)), counter, *words_of(nonce)]
        assert struct.pack("<16I", *blocks(backend, state)[:, 0].tolist()).hex() == stream
    state = [*noise.SIGMA, *range(8), 0xFFFFFFF0, 4, 1, 2]
    found = blocks(backend, state)
    for lane in (0, 15, 16, 63):
        counter = 0xFFFFFFF0 + (4 << 32) + lane
        alone = [*state[:12], counter & noise.MASK, counter >> 32, 1, 2]
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


# in a tile, across tiles, across the low counter word's end (3 * 2^34 elements), and beyond 2^40 elements
OFFSETS = [0, 1, 63, 64, 767, 768, 1000, 3 * 2**34 - 300, 2**40 + 77, 2**62 - 5000]


@ON_CPU
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("step", [0, 3, 2**48 - 1])
def test_elements_are_the_documented_function_of_key_step_and_index(backend: str, offset: int, step: int) -> None:
    picked = [0, 1, 2, 63, 64, 65, *range(130, 768, 64), 299, 300, 301, 767, 768, 999]
    expected = torch.tensor([scalar_normal(offset + k, KEY, step) for k in picked], dtype=torch.float64)
    found = draw(1000, KEY, step, offset, torch.float64)
    torch.testing.assert_close(found[picked], expected, rtol=0, atol=1e-12)
    single = draw(1000, KEY, step, offset).double()
    assert bool(((single - found).abs() <= found.abs() * 2.0**-24 + 6.5 * SINGLE_ERROR).all())
    for count in (0, 1, 5, 768):
        assert torch.equal(draw(count, KEY, step, offset), single[:count].float())


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_and_threads_change_no_bit(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    count, start = 180_001 if backend == "C++" else 20_001, 37  # 7 threads want 172 thousand
    assert_equal_bits(lambda: [draw(count, offset=start, dtype=dtype)], (1, 2, 3, 7))
    whole = draw(count, offset=start, dtype=dtype)
    for cuts in ([0, 1, 2, 515, 771, 1027, 7000, count], [0, count - 2, count]):
        parts = [draw(b - a, offset=start + a, dtype=dtype) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(noise, "CHUNK", 3)
    assert torch.equal(draw(5000, offset=start, dtype=dtype), whole[:5000])


@ON_CPU
def test_key_step_and_offset_each_change_every_element(backend: str) -> None:
    base = draw(2000)
    keys = [bytes([KEY[k] ^ 1 if k == at else KEY[k] for k in range(32)]) for at in range(32)]
    others = [draw(2000, key) for key in keys]
    others += [draw(2000, step=step) for step in (1, 2**31, 2**32, 2**47)]
    others += [draw(2000, offset=offset) for offset in (1, 64, 128, 768, 3 * 2**34, 2**38, 2**40)]
    for other in others:
        assert (other == base).sum() <= 1
        assert abs(correlation(other, base)) < 5 / math.sqrt(2000)


# ---------------------------------------------------------------------- sizes that float cannot hold


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
    if backend == "C++":
        allowed = allowed + (total.abs() * 2.0**-24 + 6.5 * SINGLE_ERROR * std) * abs(scale)
        allowed = allowed + (exact.abs() * 2.0**-24 if found.dtype != torch.float32 else 0)
    assert ((found.double() - exact).abs() <= allowed).all()


@ON_CPU
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


@ON_CPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [1.0, 1e-7, 1e5, 1e-30])
def test_16_bit_noise_is_that_of_wider_types_rounded(backend: str, dtype: torch.dtype, std: float) -> None:
    found, normal = noise_(torch.empty(3001, dtype=dtype), std, KEY, 2, 77), draw(3001, KEY, 2, 77, torch.float64)
    if backend == "C++":
        assert torch.equal(noise_(torch.empty(3001), std, KEY, 2, 77).to(dtype), found)
    if dtype == torch.float16:
        overflow = (std * normal).abs() >= 65520
        assert torch.equal(found.double().isinf(), overflow)
        found, normal = found[~overflow], normal[~overflow]
    assert_noised(found, torch.zeros_like(normal), normal, std, 1.0, backend)


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
        *[(ValueError, {"std": std}) for std in (-1.0, math.nan, math.inf)],
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
