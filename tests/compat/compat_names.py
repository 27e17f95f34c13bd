"""Every public name of the installed Opacus: where fastdp.compat.opacus has it, or why it does not.

python -m tests.compat.compat_names    prints what is missing
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

OURS = "fastdp.compat.opacus"

# module, or module:name -> why it is not there
ABSENT: dict[str, str] = {
    "opacus.grad_sample.grad_sample_module_fast_gradient_clipping:create_norm_sample": "part of Opacus's hooks",
}


def modules() -> Iterator[str]:
    """All modules of opacus but its tests."""
    import opacus

    yield "opacus"
    for found in pkgutil.walk_packages(opacus.__path__, "opacus."):
        if not found.name.startswith("opacus.tests"):
            yield found.name


def public(module: str) -> list[str]:
    """Names that the module exports, or defines itself."""
    found: Any = importlib.import_module(module)
    exported = [name for name in getattr(found, "__all__", []) if hasattr(found, name)]
    own = [
        name
        for name, value in vars(found).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", module) == module
        and name not in ("logger", "annotations")
    ]
    return sorted({*exported, *own})


def reason(module: str, name: str = "") -> str:
    """Why the name is absent, or ""."""
    return ABSENT.get(f"{module}:{name}") or ABSENT.get(module, "")


def ours(module: str) -> Any:
    """The module of the same path below fastdp.compat, or None."""
    try:
        return importlib.import_module(module.replace("opacus", OURS, 1))
    except ModuleNotFoundError:
        return None


def missing() -> list[str]:
    """Names that neither are there nor have a reason."""
    found = []
    for module in modules():
        if reason(module):
            continue
        mine = ours(module)
        if mine is None:
            found.append(module)
        else:
            found += [f"{module}:{n}" for n in public(module) if not hasattr(mine, n) and not reason(module, n)]
    return found


if __name__ == "__main__":
    print("missing without a reason:", missing() or "none")
