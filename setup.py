"""Builds the optional extensions fastdp._C and fastdp._CUDA; all else is in pyproject.toml.

Without a compiler, or where compiling fails, fastdp installs without them and runs on plain PyTorch and Triton; a wheel
is then one for every platform (py3-none-any). FASTDP_CPU=1 and FASTDP_CUDA=1 make such a failure an error, as wheels
for others need it, and FASTDP_CPU=0 builds no fastdp._C. fastdp._CUDA is built where nvcc and a GPU are found, or
FASTDP_CUDA=1 is set (FASTDP_CUDA=0: never). nvcc is looked for on the PATH, in $CUDA_HOME/bin and in
/usr/local/cuda/bin, and asked which GPUs it knows. torch is never needed to build. When training begins, fastdp warns
of an extension that is missing (fastdp.engine.attach_checks), unless its variable is 0 there, too.

An editable install (`pip install -e .`) leads to the sources by an import hook, as fastdp.kernels lies beside fastdp,
and type checkers and editors see no import hooks. So it has a path as well, to a folder that holds nothing but fastdp.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel
from setuptools.modified import newer_group

ROOT = Path(__file__).parent
# -ffp-contract=off: noise has the same bits on every instruction set. The other two let loops with sqrt vectorise;
# neither changes a result (fastdp reads no errno and no floating-point flags). Apple's clang has no OpenMP: one thread.
THREADS = [] if sys.platform == "darwin" else ["-fopenmp"]
FLAGS = [
    *"-std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden -g0".split(),
    *THREADS,
]
# Machine code for each generation of data-centre GPUs, and PTX for those to come. cudart is linked statically: torch's
# streams are the driver's handles, which it takes.
CUDA_FLAGS = "-std=c++17 -O3 -cudart static -Xcompiler -fPIC,-fvisibility=hidden,-g0".split()
CUDA_TARGETS = ("80", "90", "100")
SETTINGS = {"fastdp._C": "FASTDP_CPU", "fastdp._CUDA": "FASTDP_CUDA"}


def find_nvcc() -> str | None:
    """Where nvcc is."""
    usual = [Path(os.environ.get(name, "/usr/local/cuda")) / "bin" for name in ("CUDA_HOME", "CUDA_PATH")]
    return shutil.which("nvcc", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, usual)]))


def cuda_targets(nvcc: str) -> list[str]:
    """Of CUDA_TARGETS those that this nvcc makes code for: older ones know no newer GPUs, newer ones drop old ones."""
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=False).stdout.split()
    targets = [target for target in CUDA_TARGETS if f"sm_{target}" in known]
    if not targets:
        raise RuntimeError(f"nvcc makes code for none of {', '.join(CUDA_TARGETS)}: {nvcc}")
    return targets


def target_flags(targets: list[str]) -> list[str]:
    """Machine code for each, PTX of the last, and a word of which there is code (`fastdp.ops.registry` asks)."""
    flags = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets]
    flags += [f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}"]
    return [*flags, f"-DFASTDP_CUDA_TARGETS={'_'.join(targets)}"]  # nvcc cuts arguments at commas


def wish(variable: str) -> str:
    """What the environment says: "", "0" or "1"."""
    setting = os.environ.get(variable, "")
    if setting not in ("", "0", "1"):
        raise SystemExit(f"{variable} must be 0 or 1, not {setting!r}")
    return setting


def wants_cuda() -> bool:
    """Whether to build fastdp._CUDA."""
    setting = wish("FASTDP_CUDA")
    present = find_nvcc() is not None and Path("/dev/nvidiactl").exists()
    return setting == "1" or (setting == "" and present)


def in_parallel(compile_all: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """A compiler's `compile`, a thread a source."""

    def compile_each(sources: list[str], **options: Any) -> list[str]:
        with ThreadPool(os.cpu_count() or 1) as pool:
            objects = pool.map(lambda source: compile_all([source], **options), sources)
        return [name for names in objects for name in names]

    return compile_each


class OptionalBuild(build_ext):
    """build_ext that reports a failure in one line instead of failing the installation."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # no compiler shows in many ways
            if any(wish(SETTINGS[extension.name]) == "1" for extension in self.extensions):
                raise
            for extension in self.extensions:
                self._without(extension.name, error)

    def build_extension(self, ext: Extension) -> None:
        try:
            import pybind11

            ext.include_dirs.append(pybind11.get_include())
            if ext.name == "fastdp._CUDA":
                self._build_with_nvcc(ext)
            else:
                self.compiler.compile = in_parallel(self.compiler.compile)
                super().build_extension(ext)
        except Exception as error:  # noqa: BLE001
            self._without(ext.name, error)

    def _build_with_nvcc(self, ext: Extension) -> None:
        """nvcc compiles and links all of it: it knows where its headers and libraries are."""
        nvcc = find_nvcc()
        if nvcc is None:
            raise RuntimeError("nvcc is neither on the PATH nor at its usual place")
        target = Path(self.get_ext_fullpath(ext.name))
        if not (self.force or newer_group([*ext.sources, *ext.depends], str(target), "newer")):
            return
        includes = [f"-I{folder}" for folder in [*ext.include_dirs, *self.compiler.include_dirs]]
        flags = [*CUDA_FLAGS, *target_flags(cuda_targets(nvcc))]
        folder = Path(self.build_temp) / "cuda"
        folder.mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            result = str(folder / f"{Path(source).name}.o")
            run([nvcc, *flags, *includes, "-c", source, "-o", result])
            return result

        with ThreadPool(os.cpu_count() or 1) as pool:
            objects = pool.map(compile_one, ext.sources)
        target.parent.mkdir(parents=True, exist_ok=True)
        run([nvcc, "-shared", "-cudart", "static", *objects, "-o", str(target)])

    def _without(self, name: str, error: Exception) -> None:
        if wish(SETTINGS[name]) == "1":
            raise error
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        print(f"fastdp: WARNING: installing without the compiled extension {name} (training is slower): {reason}")


class Wheel(bdist_wheel):
    """bdist_wheel whose file says that it is for every platform if nothing compiled is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        compiled = [path for path in Path(self.bdist_dir).rglob("*") if path.suffix in (".so", ".pyd", ".dylib")]
        self.root_is_pure = not compiled
        return super().get_tag()  # type: ignore[no-any-return]


class VisibleEditable(editable_wheel):
    """editable_wheel that type checkers and editors see."""

    def run(self) -> None:
        super().run()
        if self.mode:
            return  # the user has chosen how
        try:
            folder = ROOT / "build" / "editable"
            folder.mkdir(parents=True, exist_ok=True)
            link = folder / "fastdp"
            if not link.is_symlink():
                link.symlink_to(Path("..", "..", "fastdp"), target_is_directory=True)
        except OSError as error:  # a system, or a disk, without links
            print(f"fastdp: WARNING: type checkers will not see this editable installation: {error}")
            return
        (wheel,) = Path(self.dist_dir).glob("fastdp-*.whl")
        add_to_wheel(wheel, "fastdp_editable.pth", f"{folder}\n".encode())


def add_to_wheel(wheel: Path, name: str, content: bytes) -> None:
    """Put one more file into a wheel, and its line into RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel) as old:
        files = [(info, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for info, data in files:
            if info.filename.endswith(".dist-info/RECORD"):
                data = data.rstrip(b"\r\n") + f"\n{name},sha256={digest},{len(content)}\n".encode()
            new.writestr(info, data)
        new.writestr(name, content)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout + done.stderr)
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout)[:80]}")


# Paths relative to this file, as setuptools wants them.
def found(*patterns: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


cuda_sources = found("csrc/bind_cuda.cpp", "csrc/cuda/*.cu")
extensions = [
    Extension(
        "fastdp._C",
        [source for source in found("csrc/**/*.cpp") if source not in cuda_sources],
        include_dirs=["csrc"],
        depends=found("csrc/**/*.h"),
        language="c++",
        optional=wish("FASTDP_CPU") != "1",  # lets an in-place build go on without the file
        extra_compile_args=FLAGS,
        extra_link_args=THREADS,
    )
]
if wants_cuda():
    depends = [*found("csrc/*.h", "csrc/cuda/*.cuh"), "setup.py"]
    extensions += [
        Extension(
            "fastdp._CUDA", cuda_sources, include_dirs=["csrc"], depends=depends, optional=wish("FASTDP_CUDA") != "1"
        )
    ]
if wish("FASTDP_CPU") == "0":
    extensions = [extension for extension in extensions if extension.name != "fastdp._C"]
os.chdir(ROOT)
COMMANDS = {"build_ext": OptionalBuild, "bdist_wheel": Wheel, "editable_wheel": VisibleEditable}
packages = [*find_packages(include=["fastdp", "fastdp.*"], exclude=["fastdp.kernels*"]), "fastdp.kernels"]
setup(packages=packages, ext_modules=extensions, cmdclass=COMMANDS)
