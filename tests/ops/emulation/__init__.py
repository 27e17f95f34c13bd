"""csrc/cuda compiled by g++ with a small stand-in for CUDA, so that its kernels run on the CPU.

`module()` gives what `fastdp._CUDA` would be: the same sources, the same binding. It is built once a state of the
sources, into build/.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent.parent
HERE = Path(__file__).parent
SOURCES = [ROOT / "csrc" / "bind_cuda.cpp", HERE / "hooks.cpp", *sorted((ROOT / "csrc" / "cuda").glob("*.cu"))]
HEADERS = [*sorted((ROOT / "csrc").glob("**/*.*h")), *sorted(HERE.glob("*.h"))]
FLAGS = "-std=c++17 -O1 -fPIC -ffp-contract=off -Wall -Wno-unknown-pragmas".split()


def compiler() -> str | None:
    """g++, which the stand-in is written for."""
    return shutil.which("g++")


@functools.cache
def module() -> ModuleType:
    """The emulated fastdp._CUDA. Raises RuntimeError with the compiler's words where it does not compile."""
    path = str(_built())
    loader = importlib.machinery.ExtensionFileLoader("_CUDA", path)
    spec = importlib.util.spec_from_loader("_CUDA", loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    loader.exec_module(found)
    return found


class Hooks:
    """What only the emulation can do."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_built()))

    def reverse(self, on: bool) -> None:
        """Run blocks, and the threads of a block, in the opposite order."""
        self._library.emulation_reverse(int(on))

    def fail_next_launch(self) -> None:
        self._library.emulation_fail_next_launch()

    def failed_assertions(self) -> int:
        """Device assertions that failed since the last call."""
        return int(self._library.emulation_failed_assertions())


def _built() -> Path:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in [*SOURCES, *HEADERS]:
        digest.update(path.read_bytes())
    folder = ROOT / "build" / f"emulation-{sysconfig.get_config_var('SOABI')}-{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"_CUDA{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:  # test workers do not build it twice
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with ThreadPool(os.cpu_count() or 1) as pool:
                objects = pool.map(functools.partial(_compiled, folder), SOURCES)
            part = folder / "part.so"
            _run(["g++", "-shared", *objects, "-o", str(part)])
            part.rename(library)
    return library


def _compiled(folder: Path, source: Path) -> str:
    target = str(folder / f"{source.name}.o")
    includes = [f"-I{path}" for path in (HERE, ROOT / "csrc", sysconfig.get_paths()["include"], *_pybind11())]
    _run(["g++", "-x", "c++", *FLAGS, *includes, "-c", str(source), "-o", target])
    return target


def _pybind11() -> list[str]:
    try:
        import pybind11
    except ImportError:  # torch carries its headers
        from torch.utils.cpp_extension import include_paths

        return include_paths()
    return [pybind11.get_include()]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
