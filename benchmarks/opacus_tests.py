"""Do Opacus's own tests pass when only their imports are changed?

    python -m benchmarks.opacus_tests [--only NAME ...] [--examples 20] [--jobs 1] [--limit 600] [--no-compare]

Copies the tests of the installed Opacus to a temporary folder, replaces `opacus` by `fastdp.compat.opacus` in their
imports, and in nothing else, runs each file with pytest in a process of its own, and does the same with the files as
they are, on Opacus. Prints passed / failed / skipped of each file, then the reason of each failure. Nothing of theirs
is kept. Needs torchvision (pip install --no-deps torchvision parameterized, beside a CPU torch), hypothesis and pytest.

--only: files whose name holds one of these; --examples: of every hypothesis test (theirs: up to 100); --limit: seconds
a file. A failure is EXPLAINED where the table below says why it is right to fail: the test pins a fault of Opacus, or
a private part of it that fastdp does not have. The exit code is 1 if any other test fails.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple

from .opacus_tests_known import EXPLAINED, NOT_RUN

PACKAGE = "fastdp.compat.opacus"
CONFTEST = """
import importlib.util
import hypothesis, torch
hypothesis.settings.register_profile("here", max_examples=EXAMPLES, derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("here")
torch.set_num_threads(1)
if importlib.util.find_spec("torchvision") is not None:  # its compiled part is absent beside a CPU torch
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                   "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):
        try:
            library.define(schema)
        except RuntimeError:
            pass
"""


class Outcome(NamedTuple):
    """One test: its id 'file::Class::name', passed / failed / skipped, and why."""

    test: str
    status: str
    reason: str = ""


def copy_tests(source: Path, target: Path, examples: int, rewrite: bool) -> None:
    """The tests, as a package below target; imports of opacus become imports of fastdp.compat.opacus."""
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        if rewrite:
            text = re.sub(r"^(\s*from\s+)opacus(?=[.\s])", rf"\1{PACKAGE}", text, flags=re.M)
            text = re.sub(r"^(\s*)import opacus$", rf"\1import {PACKAGE} as opacus", text, flags=re.M)
            text = re.sub(r"""(patch\(\s*["'])opacus\.""", rf"\1{PACKAGE}.", text)
        copied = target / "moved" / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(text)
    (target / "conftest.py").write_text(CONFTEST.replace("EXAMPLES", str(examples)))
    (target / "pytest.ini").write_text("[pytest]\n")


def run_file(root: Path, name: str, limit: float) -> list[Outcome]:
    """Every test of one file; one outcome 'file' if the file itself could not be run."""
    report = root / (name.replace("/", "-") + ".xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    command += ["-W", "ignore", f"--junitxml={report}", f"moved/{name}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [Outcome(name, "failed", f"took over {limit:.0f} s")]
    if not report.exists():
        return [Outcome(name, "failed", (done.stdout + done.stderr)[-300:].replace("\n", " "))]
    return outcomes(name, report)


def outcomes(name: str, report: Path) -> list[Outcome]:
    found: dict[str, Outcome] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        owner = (case.get("classname") or "").split(".")[-1]
        test = f"{name}::{owner}::{case.get('name')}"
        status, reason = "passed", ""
        for kind, meaning in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            for element in case.iter(kind):
                status, reason = meaning, first_line(element)
        if found.get(test, Outcome(test, "passed")).status != "failed":  # a failed subtest fails the test
            found[test] = Outcome(test, status, reason)
    return list(found.values())


def first_line(element: xml.etree.ElementTree.Element) -> str:
    """The exception: pytest's message, or the last line of the traceback that names one."""
    message = (element.get("message") or "").strip()
    errors = re.findall(r"^E\s+(\w[\w.]*(?:Error|Exception|Warning|Failure)\b.*)$", element.text or "", re.M)
    line = errors[-1] if errors else message.splitlines()[0] if message else ""
    return re.sub(r"\s+", " ", line)[:160]


def explanation(test: str) -> str:
    """Why it is right that this test fails, or ""."""
    for pattern, reason in EXPLAINED.items():
        if re.search(pattern, test):
            return reason
    return ""


def count(results: list[Outcome]) -> str:
    counts = collections.Counter(result.status for result in results)
    return f"{counts['passed']} / {counts['failed']} / {counts['skipped']}"


def table(ours: dict[str, list[Outcome]], theirs: dict[str, list[Outcome]]) -> str:
    lines = [
        "| file (passed / failed / skipped) | fastdp.compat.opacus | explained | Opacus |",
        "| --- | --- | --- | --- |",
    ]
    for name, results in ours.items():
        known = len([r for r in results if r.status == "failed" and explanation(r.test)])
        compared = count(theirs[name]) if name in theirs else ""
        lines.append(f"| {name} | {count(results)} | {known or ''} | {compared} |")
    everything = [r for results in ours.values() for r in results]
    known = len([r for r in everything if r.status == "failed" and explanation(r.test)])
    compared = count([r for results in theirs.values() for r in results]) if theirs else ""
    lines.append(f"| **all** | {count(everything)} | {known or ''} | {compared} |")
    return "\n".join(lines)


def failures(ours: dict[str, list[Outcome]], theirs: dict[str, list[Outcome]]) -> str:
    lines = []
    also = {r.test for results in theirs.values() for r in results if r.status == "failed"}
    for results in ours.values():
        for result in results:
            if result.status == "failed":
                why = explanation(result.test)
                fails_there = " (fails on Opacus too)" if result.test in also else ""
                lines.append(f"{'explained' if why else 'FAILED'}: {result.test}{fails_there}: {why or result.reason}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--no-compare", action="store_true", help="leave out the run on Opacus itself")
    options = parser.parse_args(arguments)
    found = importlib.util.find_spec("opacus")
    assert found is not None and found.submodule_search_locations
    source = Path(found.submodule_search_locations[0]) / "tests"
    names = [
        str(p.relative_to(source)) for p in sorted(source.rglob("*.py")) if re.search(r"_test\.py$|prv_acc", p.name)
    ]
    names = [n for n in names if n not in NOT_RUN and (not options.only or any(part in n for part in options.only))]
    with tempfile.TemporaryDirectory() as folder:
        roots = {True: Path(folder) / "ours", False: Path(folder) / "theirs"}
        jobs = [(rewrite, name) for name in names for rewrite in ((True,) if options.no_compare else (True, False))]
        for rewrite, root in roots.items():
            copy_tests(source, root, options.examples, rewrite)
        results: dict[bool, dict[str, list[Outcome]]] = {True: {}, False: {}}
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            runs = pool.map(lambda job: run_file(roots[job[0]], job[1], options.limit), jobs)
            for (rewrite, name), outcome in zip(jobs, runs, strict=True):
                results[rewrite][name] = outcome
                print(f"{'fastdp' if rewrite else 'Opacus'} {name}: {count(outcome)}", file=sys.stderr, flush=True)
    ours, theirs = results[True], results[False]
    not_run = "\n".join(f"not run: {name}: {reason}" for name, reason in NOT_RUN.items())
    print("\n\n".join([table(ours, theirs), failures(ours, theirs), not_run]))
    return int(any(r.status == "failed" and not explanation(r.test) for rs in ours.values() for r in rs))


if __name__ == "__main__":
    sys.exit(main())
