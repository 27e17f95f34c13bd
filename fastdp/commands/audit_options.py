"""The flags of `python -m fastdp audit`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parsing import declare

DESCRIPTION = """\
Test a training step for bugs that void differential privacy, from outside: clipping, noise, sampling, accounting.
STEP names what is tested: my_script.py:make_step, which is a function without arguments that returns a
fastdp.audit.Trainable (fastdp.audit.TorchTrainable wraps a PyTorch script), or such an object itself. examples/audit/
has three examples to start from; docs/audit.md says what each test does and needs."""

EPILOG = """\
exit codes: 0 no bug was found; 1 a bug was found, or no test could run (with --strict, also if one test could not
run or is undecided); 2 the usage was wrong, or nothing could be measured (the script fails, or returns something
wrong).

example: python -m fastdp audit examples/audit/by_hand.py:make_step --plots audit-plots"""

FLAGS: dict[str, dict[str, Any]] = {
    "step": dict(metavar="STEP", nargs="?", help="FILE.py:NAME or package.module:NAME"),
    "--tests": dict(metavar="A,B", help="only these tests (default: all; --list names them)"),
    "--skip": dict(metavar="A,B", default="", help="tests to leave out"),
    "--statistics": dict(
        choices=("fastdp", "paper", "both"), default="fastdp",
        help="whose tests: fastdp's, those of the paper 'Finding private bugs' as it describes them, or both "
        "(default: %(default)s)",
    ),
    "--seed": dict(type=int, default=0, help="the seed of the weights and the data (default: %(default)s)"),
    "--plots": dict(type=Path, metavar="DIR", help="draw the curves as PNG files in this folder; needs matplotlib"),
    "--json": dict(type=Path, metavar="FILE", help="write everything that was measured to this file"),
    "--strict": dict(action="store_true", help="also fail if a test could not run, or is undecided"),
    "--list": dict(action="store_true", help="list the tests, and stop"),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    declare(parser, FLAGS, DESCRIPTION, EPILOG)
