"""`python -m fastdp audit FILE.py:NAME`: load the step, run the tests, print the report."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..utils.code_location import module_of_file
from ..utils.formatting import listed, nearest
from ..utils.progress_bar import Bar
from .ranks import OverRanks, begin_world
from .report import Report
from .runner import STATISTICS, audit
from .trainable import AuditError


def main(options: Namespace) -> int:
    """Run the command; returns the exit code."""
    if options.list:
        print(listing())
        return 0
    try:
        report = _audited(options)
    except (AuditError, OSError) as problem:
        if (cause := problem.__cause__) is not None:  # where in the script it happened
            traceback.print_exception(type(cause), cause, cause.__traceback__, limit=-4)
        print(f"fastdp audit: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfastdp audit: interrupted", file=sys.stderr)
        return 130
    if report is None:
        return 0
    print(report)
    if options.json is not None:
        options.json.write_text(report.to_json() + "\n")
    if options.plots is not None:
        try:
            from .plots import write_plots

            print("wrote", ", ".join(str(path) for path in write_plots(report, options.plots)) or "no plots")
        except ImportError:
            print("fastdp audit: --plots needs matplotlib: pip install matplotlib", file=sys.stderr)
    return 1 if options.strict and (report.untested or report.undecided) else report.exit_status


def _audited(options: Namespace) -> Report | None:
    """The report; None on all but the first of several processes."""
    if not options.step:
        raise AuditError("say what to audit: FILE.py:NAME (see --help)")
    for path in (options.plots, options.json and options.json.parent):
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    step = load(options.step)
    trainable = OverRanks(step) if begin_world() > 1 else step
    if isinstance(trainable, OverRanks) and not trainable.is_first:
        trainable.serve()
        return None
    bar = Bar(1.0)
    try:
        report = audit(trainable, _names(options.tests) or None, skip=_names(options.skip), seed=options.seed,
                       progress=lambda name, number, of: bar.at(number / of, name),
                       statistics=options.statistics)  # fmt: skip
    finally:
        bar.clear()
        if isinstance(trainable, OverRanks):
            trainable.end()
    report.subject = options.step
    return report


def listing() -> str:
    """Every test with the first sentence of what it does."""
    width, lines = max(map(len, STATISTICS["both"])), ["tests of python -m fastdp audit:"]
    for name, test in STATISTICS["both"].items():
        if name == next(iter(STATISTICS["paper"])):
            lines.append("with --statistics paper or both:")
        first = " ".join((inspect.getdoc(test) or "").split("\n\n")[0].split())
        lines.append(f"  {name.ljust(width)}  {first}")
    return "\n".join(lines)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def load(where: str) -> Any:
    """The Trainable that FILE.py:NAME or module:NAME names: called, where it is a function or a class.

    Raises AuditError where there is none.
    """
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise AuditError(f"{where!r} names no step: write FILE.py:NAME, for instance my_script.py:make_step")
    path = Path(place).resolve()
    if place.endswith(".py") and not path.is_file():
        raise AuditError(f"there is no file {place}")
    sys.path.insert(0, str(path.parent if place.endswith(".py") else Path.cwd()))
    try:
        module = module_of_file(path) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as problem:
        raise AuditError(f"{place} cannot be imported: {type(problem).__name__}: {str(problem)[:300]}") from problem
    found = getattr(module, name, None)
    if found is None:
        there = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise AuditError(f"{place} has no {name!r}{nearest(name, there) or '; it has ' + listed(there)}")
    if isinstance(found, type) or not hasattr(found, "run"):
        if not callable(found):
            raise AuditError(f"{where} is a {type(found).__name__}, neither a Trainable nor a function that makes one")
        try:
            found = found()
        except AuditError:
            raise
        except Exception as problem:
            raise AuditError(f"{name}() failed: {type(problem).__name__}: {str(problem)[:300]}") from problem
    if found is None:
        raise AuditError(f"{name}() returned None, not a Trainable: is a return missing?")
    return found
