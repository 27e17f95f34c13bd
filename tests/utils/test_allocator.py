"""Memory that a step frees is used again by the next, unless the user chose how the C library allocates."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")]

PROGRAM = """
import ctypes, resource, torch, fastdp
from fastdp.utils.allocator import keep_freed
optimizer = fastdp.DPSGD(torch.nn.Linear(4, 2), 0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=3)
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [library.malloc(2**22) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 2**22)
    for block in blocks:
        library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    last = pages()
print(keep_freed(), last)
"""
PAGES = 40 * 2**22 // 4096


def run(**environment: str) -> tuple[str, int]:
    """Whether memory is kept, and the fresh pages of a round that allocates as much as the one before."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k not in ("LD_PRELOAD", "GLIBC_TUNABLES")
    }
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
                           env=clean | environment).stdout.split()  # fmt: skip
    return found[0], int(found[1])


def test_freed_memory_is_used_again() -> None:
    kept, fresh = run()
    assert kept == "True" and fresh < PAGES / 20


@pytest.mark.parametrize("name, value", [("FASTDP_KEEP_MEMORY", "0"), ("MALLOC_ARENA_MAX", "4"), ("LD_PRELOAD", "")])
def test_whoever_chose_otherwise_is_left_alone(name: str, value: str) -> None:
    kept, fresh = run(**{name: value})
    assert kept == "False" and fresh > PAGES / 4
