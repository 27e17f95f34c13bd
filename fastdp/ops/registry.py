"""Operators: one schema, one reference in plain PyTorch, faster kernels by device.

    define(schema, reference, fake, CPU=Kernel("C++", load), CUDA=Kernel("Triton", load))

registers `torch.ops.fastdp.<name>` and returns what `fastdp.ops.<name>` calls. A kernel is loaded at its
first use; where it cannot be (no compiler, no Triton), the reference serves, and `served_by` says why.
No operator is differentiable: they take what backward has left.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .common import exactly
from .noise_reference import STREAM

PACKAGE = Path(__file__).parents[1]
LIBRARY = torch.library.Library("fastdp", "DEF")
OPERATORS: dict[str, Operator] = {}
_forced: list[str] = []


class Kernel:
    """A faster implementation. `load` returns the function, or says in words why it is not here.

    instead: serves where this one is not here.
    """

    def __init__(
        self, backend: str, load: Callable[[], Callable[..., Any] | str], instead: Kernel | None = None
    ) -> None:
        self.backend, self._own, self.instead = backend, functools.cache(load), instead

    def load(self) -> Callable[..., Any] | str:
        """The function that serves."""
        found = self._own()
        return self.instead.load() if isinstance(found, str) and self.instead is not None else found

    def serves(self) -> str:
        """The backend whose function that is."""
        return self.instead.serves() if isinstance(self._own(), str) and self.instead is not None else self.backend


class Operator:
    """A registered operator; calling it runs the kernel of the first tensor's device."""

    def __init__(self, schema: str, reference: Callable[..., Any], kernels: dict[str, Kernel]) -> None:
        self.schema, self.reference, self.kernels = schema, reference, kernels
        self.name = schema.split("(")[0]
        self.packet, _, overload = self.name.partition(".")
        self.overload = overload or "default"
        self.own: dict[str, Kernel] = {}  # by device, of users (`ops.user_kernels`)
        self.bound = {*kernels}  # devices whose calls through the dispatcher come to `_serve`

    def implementation(self, device_type: str) -> Callable[..., Any]:
        """The function that serves a device."""
        kernel = self.own.get(device_type) or self.kernels.get(device_type)
        if kernel is None or is_forced():
            return self.reference
        found = kernel.load()
        return self.reference if isinstance(found, str) else found

    def is_shipped(self, device_type: str) -> bool:
        """Whether a kernel of fastdp serves a device: what else it can do may be asked of it past the operator."""
        return device_type not in self.own and self.implementation(device_type) is not self.reference

    def served_by(self, device_type: str) -> str:
        """The backend that serves a device, and why it is not the fast one."""
        kernel = self.own.get(device_type) or self.kernels.get(device_type)
        if kernel is None:
            return "PyTorch"
        found = kernel.load()
        return f"PyTorch ({found})" if isinstance(found, str) else kernel.serves()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if isinstance(first, list | tuple):
            first = first[0] if first else None
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor) and each.device != first.device:
                raise ValueError(
                    f"{self.packet}: its tensors lie on {first.device} and on {each.device}; move them to one device"
                )
        plain = type(first) in (Tensor, torch.nn.Parameter) and not is_watched()
        if plain and not torch.compiler.is_compiling():
            with torch.no_grad(), exactly():  # past the dispatcher, which costs more than a small kernel
                return self.implementation(first.device.type)(*args, **kwargs)
        packet = getattr(torch.ops.fastdp, self.packet)
        return getattr(packet, self.overload)(*args, **kwargs)


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any], *, CPU: Kernel | None = None,
           CUDA: Kernel | None = None) -> Operator:  # fmt: skip
    """Register an operator. `fake` gives the result's shape and type from meta tensors."""
    kernels = {device: kernel for device, kernel in (("cpu", CPU), ("cuda", CUDA)) if kernel is not None}
    operator = Operator(schema, reference, kernels)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(operator.name, reference, "CompositeExplicitAutograd")
    for device in kernels:
        LIBRARY.impl(operator.name, functools.partial(_serve, operator, device), device.upper())
    LIBRARY.impl(operator.name, functools.partial(_below_autograd, operator), "Autograd")
    torch.library.register_fake(f"fastdp::{operator.name}", fake, lib=LIBRARY)
    OPERATORS[operator.name] = operator
    return operator


WITH_OWN: set[str] = set()  # kinds of devices on which users' kernels serve


def replace(operator: Operator, device: str, kernel: Kernel | None) -> None:
    """Let a user's kernel serve a device in place of what does; None: no longer. Times are then measured anew."""
    if kernel is None:
        del operator.own[device]
    else:
        operator.own[device] = kernel
        if device not in operator.bound:
            LIBRARY.impl(operator.name, functools.partial(_serve, operator, device), device.upper())
            operator.bound.add(device)
    WITH_OWN.clear()
    WITH_OWN.update(kind for each in OPERATORS.values() for kind in each.own)
    _changes.append(f"{operator.name} {device}")


_changes: list[str] = []


def changes() -> int:
    """How often kernels of users have come or gone: what is remembered of routes and times holds as long as this."""
    return len(_changes)


def any_own() -> bool:
    """Whether an operator has a kernel of a user."""
    return any(operator.own for operator in OPERATORS.values())


def _below_autograd(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """No graph is recorded: results do not require grad, whatever the inputs do."""
    with torch._C._AutoDispatchBelowAutograd(), exactly():
        return getattr(getattr(torch.ops.fastdp, operator.packet), operator.overload)(*args, **kwargs)


def _serve(operator: Operator, device: str, *args: Any, **kwargs: Any) -> Any:
    return operator.implementation(device)(*args, **kwargs)


_watching: list[None] = []


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Within it every kernel is to be seen by a mode of the dispatcher, which would not see one that runs past it."""
    _watching.append(None)
    try:
        yield
    finally:
        _watching.pop()


def is_watched() -> bool:
    """Whether it is so here. (Not within a kernel that the dispatcher runs: the mode waits there.)"""
    return bool(_watching) and bool(torch._C._len_torch_dispatch_stack())


@contextlib.contextmanager
def forced(backend: str) -> Iterator[None]:
    """Within it every operator runs by this backend: "reference" (plain PyTorch), or "auto"."""
    if backend not in ("reference", "auto"):
        raise ValueError(f"backend must be 'reference' or 'auto', not {backend!r}")
    _forced.append(backend)
    try:
        yield
    finally:
        _forced.pop()


def is_forced() -> bool:
    """Whether the reference is to run here, whatever there is."""
    return bool(_forced) and _forced[-1] == "reference"


# ---------------------------------------------------------------------- where kernels come from


@functools.cache
def native() -> ModuleType | str:
    """The compiled CPU module, or why it is absent."""
    return _module("fastdp._C", f"with a C++ compiler, {_reinstall('FASTDP_CPU')}")


@functools.cache
def native_cuda() -> ModuleType | str:
    """The compiled CUDA module, or why it is absent, or has no code for a GPU that is here."""
    found = _module("fastdp._CUDA", f"with nvcc, {_reinstall('FASTDP_CUDA')}")
    if isinstance(found, str):
        return found
    targets = [int(target) for target in getattr(found, "targets", "80_90_100").split("_")]
    return next(
        (
            f"fastdp._CUDA has code for sm_{', sm_'.join(map(str, targets))}, and none for {gpu}, which is sm_{arch}: "
            "reinstall with an nvcc that knows it"
            for gpu, arch in gpus()
            if not runs_on(arch, targets)
        ),
        found,
    )


@functools.cache
def triton_module(name: str) -> ModuleType | str:
    """A module of `fastdp.kernels`, or why it is absent, or a GPU that is here too old for it."""
    old = next((f"Triton needs sm_{OLDEST}; {gpu} is sm_{arch}" for gpu, arch in gpus() if arch < OLDEST), None)
    return old or _module(f"fastdp.kernels.{name}", "install triton")


OLDEST = 80  # GPUs that Triton makes code for


def gpus() -> list[tuple[str, int]]:
    """The NVIDIA GPUs that torch sees, and their capabilities: 90 for 9.0."""
    if not torch.version.cuda or not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_capability(number) for number in range(torch.cuda.device_count())]
    return [(f"cuda:{number}", 10 * major + minor) for number, (major, minor) in enumerate(found)]


def runs_on(arch: int, targets: list[int]) -> bool:
    """Whether a GPU runs machine code for one of these (of its own generation, not newer), or PTX for the last."""
    return arch >= targets[-1] or any(target // 10 == arch // 10 and target <= arch for target in targets)


def _module(name: str, remedy: str) -> ModuleType | str:
    try:
        found = importlib.import_module(name)
        if name.startswith("fastdp._") and getattr(found, "stream", 1) != STREAM:
            return f"{name} was built from older sources, and would draw other noise: {remedy}"
        return found
    except ModuleNotFoundError as error:
        others = [path.name for path in PACKAGE.glob(f"{name.rpartition('.')[2]}.*") if name.startswith("fastdp._")]
        if others:
            return f"{', '.join(others)} is for another Python or system than this one: {remedy}"
        return f"{error.name or name} is not installed: {remedy}"
    except ImportError as error:
        return f"{name} does not load ({error}): {remedy}"


def _reinstall(variable: str) -> str:
    """What builds an extension, or fails and says why: a command where this is a checkout."""
    if not (PACKAGE.parent / "setup.py").exists():
        return f"reinstall fastdp from its sources with {variable}=1"
    return f"run `{variable}=1 python -m pip install --no-deps -e {shlex.quote(str(PACKAGE.parent))}`"


def cpp(function: Callable[..., Any]) -> Kernel:
    """A kernel that calls `fastdp._C`."""
    return Kernel("C++", lambda: found if isinstance(found := native(), str) else function)


def cuda_cpp(function: Callable[..., Any], instead: Kernel | None = None) -> Kernel:
    """A kernel that calls `fastdp._CUDA`, where nvcc built that."""
    return Kernel("CUDA C++", lambda: found if isinstance(found := native_cuda(), str) else function, instead)


def triton(module: str, function: str) -> Kernel:
    """A kernel of `fastdp.kernels`, with the operator's own signature."""

    def load() -> Callable[..., Any] | str:
        found = triton_module(module)
        return found if isinstance(found, str) else getattr(found, function)

    return Kernel("Triton", load)
