"""Start an example or a command as people do, and read what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from .. import forked
from .ranks import LOOPS, ROOT


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(*command: str) -> str:
    """As people start it."""
    environment = {**os.environ, **forked.SETTINGS}
    return said_by(subprocess.run([sys.executable, *command], env=environment, timeout=200, capture_output=True,
                                  text=True, cwd=ROOT))  # fmt: skip


def torchrun(*command: str) -> str:
    return said_by(forked.torchrun(2, *command, imports=LOOPS))


def accuracy_and_epsilon(out: str) -> tuple[float, float]:
    found = re.findall(r"^accuracy ([\d.]+).*epsilon ([\d.]+)", out, flags=re.M)
    assert len(found) == 1, out  # said by one process
    return float(found[0][0]), float(found[0][1])
