"""Noise: the RFC's vectors, elements against a scalar truth in Python, the compiled kernel against plain PyTorch."""

import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastdp.ops import noise
from fastdp.ops.noise import reference_noise

from .noise_truth import (
    KEY,
    NATIVE,
    VECTORS,
    blocks,
    correlation,
    draw,
    scalar_block,
    scalar_normal,
    single_error,
    words_of,
)

ROOT = Path(__file__).parent.parent.parent

# ---------------------------------------------------------------------- the generator


@pytest.mark.parametrize(("key", "counter", "nonce", "stream"), VECTORS)
def test_block_function_gives_the_vectors_of_rfc_8439(
    backend: str, key: str, counter: int, nonce: str, stream: str
) -> None:
    state = [*noise.SIGMA, *struct.unpack("<8I", bytes.fromhex(key)), counter, *words_of(nonce)]
    assert struct.pack("<16I", *blocks(backend, state)[:, 0].tolist()).hex() == stream


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


# in a tile, across tiles, across the low counter word's end (3 * 2^34 elements), and beyond 2^40 elements
OFFSETS = [0, 1, 63, 64, 767, 768, 1000, 3 * 2**34 - 300, 2**40 + 77, 2**62 - 5000]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("step", [0, 3, 2**48 - 1])
def test_elements_are_the_documented_function_of_key_step_and_index(backend: str, offset: int, step: int) -> None:
    found = draw(1000, KEY, step, offset, torch.float64)
    picked = [0, 1, 2, 63, 64, 65, *range(130, 768, 64), 299, 300, 301, 767, 768, 999]
    expected = torch.tensor([scalar_normal(offset + k, KEY, step) for k in picked], dtype=torch.float64)
    torch.testing.assert_close(found[picked], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("count", [0, 1, 5, 64, 767, 768, 769, 4099])
def test_backends_agree(backend: str, count: int, offset: int) -> None:
    expected = reference_noise(count, KEY, 5, offset, dtype=torch.float64)
    assert expected.shape == (count,)
    torch.testing.assert_close(draw(count, KEY, 5, offset, torch.float64), expected, rtol=0, atol=1e-13)
    found = draw(count, KEY, 5, offset)
    assert ((found.double() - expected).abs() <= single_error(expected, backend)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_and_threads_change_no_bit(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    count, start = 180_001 if backend == "native" else 20_001, 37  # 7 threads want 172 thousand
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = draw(count, offset=start, dtype=dtype)
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(draw(count, offset=start, dtype=dtype), whole)
    finally:
        torch.set_num_threads(before)
    for cuts in ([0, 1, 2, 515, 771, 1027, 7000, count], [0, count - 2, count]):
        parts = [draw(b - a, offset=start + a, dtype=dtype) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    monkeypatch.setattr(noise, "CHUNK", 3)
    assert torch.equal(draw(5000, offset=start, dtype=dtype), whole[:5000])


def test_key_step_and_offset_each_change_every_element(backend: str) -> None:
    base = draw(2000)
    keys = [bytes([KEY[k] ^ 1 if k == at else KEY[k] for k in range(32)]) for at in range(32)]
    others = [draw(2000, key) for key in keys]
    others += [draw(2000, step=step) for step in (1, 2**31, 2**32, 2**47)]
    others += [draw(2000, offset=offset) for offset in (1, 64, 128, 768, 3 * 2**34, 2**38, 2**40)]
    for other in others:
        assert (other == base).sum() <= 1
        assert abs(correlation(other, base)) < 5 / math.sqrt(2000)
