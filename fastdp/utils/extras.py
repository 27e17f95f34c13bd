"""The command that installs what an extra of fastdp is for. It needs no index that has fastdp, as none has."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path


def packages_of(extra: str) -> list[str]:
    """The requirements of an extra, and of the extras that it is made of: ["transformers>=5", ...].

    [] if fastdp runs from a checkout that is not installed.
    """
    try:
        lines = requires("fastdp") or []
    except PackageNotFoundError:
        return []
    found: list[str] = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        if not re.search(rf"""extra == ["']{re.escape(extra)}["']""", marker):
            continue
        if "platform_system" in marker and platform.system() not in marker:
            continue
        least = re.search(r"""python_version >= ["']3\.(\d+)""", marker)
        if least and sys.version_info < (3, int(least[1])):
            continue
        inner = re.fullmatch(r"fastdp\[([\w,-]+)\]", requirement.strip())
        found += (
            [each for name in inner[1].split(",") for each in packages_of(name)] if inner else [requirement.strip()]
        )
    return list(dict.fromkeys(found))


def install_command(extra: str) -> str:
    """The line that installs an extra.

    >>> print(install_command("demo"))
    pip install matplotlib scikit-learn
    """
    root = Path(__file__).parents[2]
    needed = sorted(packages_of(extra)) or [f"{root}[{extra}]"]
    return f"pip install {' '.join(map(shlex.quote, needed))}"
