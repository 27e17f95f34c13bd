"""What is here: versions, backends and why one is absent, devices."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from ..ops.noise import native_status
from ..ops.registry import OPERATORS, native_cuda, triton_module
from ..utils.extras import install_command

TESTED = ("2.9", "2.13", "2.14")  # versions of torch: all tests passed (2.13, .ci/run), or those of .ci/matrix
_HF = ("transformers", "accelerate", "peft")
EXTRAS = {  # and the modules by which each is told
    "demo": ("sklearn", "matplotlib"), "gpu": ("triton",), "hf": _HF, "lightning": ("lightning",),
    "finetune": (*_HF, "datasets", "matplotlib", "pyarrow", "tqdm"),
    "trl": (*_HF, *["trl"] * (sys.version_info >= (3, 11))), "sentences": (*_HF, "sentence_transformers", "datasets"),
}  # fmt: skip


def report() -> str:
    """The text of `python -m fastdp info`."""
    rows = [("fastdp", _version("fastdp")), ("python", platform.python_version())]
    rows += [("torch", f"{torch.__version__} ({tested(torch.__version__)})")]
    rows += [(name, _version(name)) for name in ("numpy", "opacus", "triton")]
    rows += [
        ("C++ kernels (CPU)", native_status()),
        ("CUDA C++ kernels", _state(native_cuda())),
        ("Triton kernels", _state(triton_module("linear"))),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()}"),
        ("devices", ", ".join(_devices())),
    ]
    missing = missing_extras()
    for extra in EXTRAS:
        rows.append((f"extra {extra}", "installed" if extra not in missing else f"missing {', '.join(missing[extra])}"))
    rows += [
        (f"  {name}", "; ".join(f"{d}: {backends}" for d, backends in by.items())) for name, by in served().items()
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name.ljust(width)}  {value}" for name, value in rows), "", *to_do(list(missing))])


def missing_extras() -> dict[str, list[str]]:
    """The extras of which a module is not installed, with these modules."""
    found = {name: [m for m in modules if importlib.util.find_spec(m) is None] for name, modules in EXTRAS.items()}
    return {name: modules for name, modules in found.items() if modules}


def to_do(extras: list[str]) -> list[str]:
    """The lines that end the report: what this installation lacks, and what to run next."""
    cpu, lines = native_status(), []
    if cpu != "built":
        lines.append(f"Training on the CPU takes up to three times as long without C++ kernels: {cpu}")
    if torch.cuda.is_available() and isinstance(triton_module("linear"), str):
        lines.append(f"Training on the GPU takes many times as long without Triton: {install_command('gpu')}")
    for extra in extras:
        lines.append(f"For the extra {extra}, if you need it: {install_command(extra)}")
    return [*lines, *([] if lines else ["Nothing is missing."]), "Try it: python -m fastdp demo"]


def tested(version_of_torch: str) -> str:
    """Whether fastdp's tests have passed with this version of torch, in words.

    >>> tested("2.13.0+cpu")
    "fastdp's tests passed with 2.13"
    """
    if ".".join(version_of_torch.split(".")[:2]) in TESTED:
        return f"fastdp's tests passed with {'.'.join(version_of_torch.split('.')[:2])}"
    return (
        f"not tested with this fastdp, whose tests passed with {', '.join(TESTED)}: run fastdp.verify on your "
        "model, and expect an error where names of torch's differ"
    )


def served() -> dict[str, dict[str, str]]:
    """Which backend serves each operator, by device: {operator: {"cpu": ..., "cuda": ...}}."""
    public = {name: operator for name, operator in OPERATORS.items() if "." not in name}
    return {
        name: {device: operator.served_by(device).split(" (")[0] for device in ("cpu", "cuda")}
        for name, operator in sorted(public.items())
    }


def _state(module: object) -> str:
    return module if isinstance(module, str) else "built"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    else:
        found.append("no CUDA device" if torch.version.cuda else "torch is built without CUDA")
    return found
