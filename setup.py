"""Builds the optional extension fastdp._C; all else is in pyproject.toml.

Without a compiler, or where compiling fails, fastdp installs without it and runs on plain PyTorch.
torch is never needed to build.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
# -ffp-contract=off: noise has the same bits on every instruction set. The other two let loops with sqrt vectorise;
# neither changes a result (fastdp reads no errno and no floating-point flags).
FLAGS = "-std=c++17 -O3 -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden -g0".split()


class OptionalBuild(build_ext):
    """build_ext that reports a failure in one line instead of failing the installation."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # noqa: BLE001  (no compiler shows in many ways)
            self._without(error)

    def build_extension(self, ext: Extension) -> None:
        try:
            import pybind11

            ext.include_dirs.append(pybind11.get_include())
            super().build_extension(ext)
        except Exception as error:  # noqa: BLE001
            self._without(error)

    def _without(self, error: Exception) -> None:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        print(f"fastdp: WARNING: installing without the compiled extension fastdp._C (noise is slower): {reason}")


# Paths relative to this file, as setuptools wants them.
sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp"))
extension = Extension(
    "fastdp._C",
    sources,
    include_dirs=["csrc"],
    depends=["csrc/fastdp.h"],
    language="c++",
    optional=True,  # lets an in-place build go on without the file
    extra_compile_args=FLAGS,
    extra_link_args=["-fopenmp"],
)
os.chdir(ROOT)
setup(ext_modules=[extension], cmdclass={"build_ext": OptionalBuild})
