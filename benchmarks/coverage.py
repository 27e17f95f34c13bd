"""On what share of architectures is one private step exactly right?

    python -m benchmarks.coverage [--engines fastdp opacus-hooks ...] [--suite named transformers timm libraries]
                                  [--only NAME ...] [--jobs 2] [--out FILE.csv | --resume FILE.csv]
    python -m benchmarks.coverage --show FILE.csv

Every case runs in a process of its own, up to three times: with 3 samples, with as many samples as tokens, and, where
it reads text with an attention mask, with texts of different lengths. The update of one step without noise, at the
median norm as clipping norm, is compared with the clipped mean of float64 gradients of one sample at a time, relative
1e-4 by the two rules of coverage_truth.py. A model rightly refused is tried again, as 'NAME [repaired]', after
fastdp.make_compatible or Opacus' ModuleValidator.fix, where that replaces anything (batch norms). --resume leaves out
what the file has of the same engine and commit.

exact; rightly refused: the model itself couples the samples of a batch; refused: the library raised, on purpose, on a
model it could have trained; WRONG: an answer, but not the right one; crashed: any other exception; timeout; bad case:
a random model; not built: the benchmark could not make the model. Percentages are of the cases that were judged.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fastdp.utils.progress_bar import Bar

from .coverage_engines import ENGINES
from .coverage_models import MODELS
from .coverage_report import COLUMNS, NOT_JUDGED, REPAIRED, commit, done, read, summary, totals
from .coverage_truth import Built, Case, Sizes, clean, judge
from .timing import append

RUNS = {"": Sizes(3, 8), "tokens = samples": Sizes(4, 4), "padded": Sizes(3, 8, padded=True)}
SUITES = ("named", "transformers", "timm", "libraries")
_KEPT: list[torch.library.Library] = []  # an operator is defined as long as its library lives
MEMORY = 6 * 2**30  # bytes a process may take


def define_torchvision() -> None:
    """Its Python needs two operators of its compiled part, absent where it was installed beside a CPU torch."""
    if importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                   "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
        with contextlib.suppress(RuntimeError):  # the compiled part is there
            library.define(schema)
    _KEPT.append(library)


def warm(modules: Iterable[str]) -> None:
    """Import once what every forked process needs."""
    for module in modules:
        with contextlib.suppress(ImportError):  # said by the cases that need it
            importlib.import_module(module)


def cases_of(suite: str) -> dict[str, Case]:
    if suite == "named":
        from . import coverage_models as source
    elif suite == "transformers":
        from . import coverage_generic as source
    elif suite == "libraries":
        from . import coverage_libraries as source
    else:
        from . import coverage_timm as source
    return source.cases()


# ---------------------------------------------------------------------- one case


def measure(case: Case, engine: str) -> dict[str, Any]:
    """The first of its runs that is not exact, else the largest error of all."""
    result: dict[str, Any] = {}
    runs = []
    for name, sizes in RUNS.items():
        if (sizes.padded and not case.text) or (name and not case.tokens):
            continue
        found = {**judge(case, sizes, ENGINES[engine].step, ENGINES[engine].package), "sizes": name}
        if result and found["status"] in (*NOT_JUDGED, "rightly refused"):
            continue  # a model that does not run in these sizes, or couples samples only there
        runs.append(name or "plain")
        worse = found["status"] != "exact" or found["error"] > result.get("error", -1.0)
        result = found if worse else result
        if result["status"] != "exact":
            break
    return {**result, "runs": ", ".join(runs)}


def repaired(case: Case, engine: str) -> Case | Exception | None:
    """The case after the engine's own repair of its model; None where that changes no module; or what it raised."""

    def build(sizes: Sizes) -> Built:
        model, batch, losses = case.build(sizes)
        return ENGINES[engine].repair(model), batch, losses

    model = case.build(RUNS[""])[0]
    before = [type(m) for m in model.modules()]
    try:
        changed = [type(m) for m in ENGINES[engine].repair(model).modules()] != before
    except Exception as problem:  # noqa: BLE001
        return problem
    return case._replace(name=case.name + REPAIRED, build=build) if changed else None


def child(pipe: Connection, case: Case, engine: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        found = measure(case, engine)
        again = repaired(case, engine) if found["status"] == "rightly refused" else None
        pipe.send({**found, "more": again is not None})
        if isinstance(again, Exception):
            pipe.send({"status": "crashed", "message": f"repair: {type(again).__name__}: {clean(again)}"})
        elif again is not None:
            pipe.send(measure(again, engine))
    except BaseException as problem:  # noqa: BLE001  (also SystemExit: the parent must hear of it)
        pipe.send({"status": "crashed", "message": f"benchmark: {type(problem).__name__}: {clean(problem)}"})
    pipe.close()


# ---------------------------------------------------------------------- all of them


def run_all(todo: Iterable[tuple[str, str, Case]], jobs: int, limit: float) -> Iterable[dict[str, Any]]:
    """A forked process for each (suite, engine, case), `jobs` at a time."""
    context = multiprocessing.get_context("fork")
    waiting, running = collections.deque(todo), dict[Connection, tuple[Any, str, str, str, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            suite, engine, case = waiting.popleft()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(there, case, engine))
            process.start()
            there.close()
            running[here] = (process, suite, engine, case.name, time.monotonic())
        ready = wait(list(running), timeout=0.5)
        for pipe in list(running):
            process, suite, engine, name, started = running[pipe]
            seconds = time.monotonic() - started
            if pipe not in ready and seconds < limit:
                continue
            result = _received(pipe) if pipe in ready else {"status": "timeout", "message": f"over {limit:.0f} s"}
            if result is not None and result.pop("more", False):
                running[pipe] = (process, suite, engine, name + REPAIRED, time.monotonic())
            else:
                process.kill()
                process.join()
                del running[pipe]
            if result is None:
                result = {"status": "crashed", "message": f"the process died (exit code {process.exitcode})"}
            yield {"suite": suite, "engine": engine, "case": name, "seconds": round(seconds, 1), **result}


def _received(pipe: Connection) -> dict[str, Any] | None:
    try:
        return pipe.recv()
    except EOFError:
        return None


def show(result: dict[str, Any]) -> None:
    error = f"{result['error']:.1e}" if "error" in result else ""
    print(
        f"{result['engine']:16} {result['case']:44} {result['status']:16} {error:8} {result.get('message', '')}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", nargs="+", default=["fastdp"], choices=list(ENGINES))
    parser.add_argument("--suite", nargs="+", default=["named"], choices=SUITES)
    parser.add_argument("--only", nargs="+", default=[], help="names of cases")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds a case")
    parser.add_argument("--out", type=Path, help="append to this CSV file")
    parser.add_argument("--resume", type=Path, help="append to this CSV file what it does not hold of this commit")
    parser.add_argument("--show", type=Path, help="only sum up this CSV file")
    options = parser.parse_args(arguments)
    if options.show:
        print(summary(read(options.show)))
        return []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    define_torchvision()
    cases = {suite: cases_of(suite) for suite in options.suite}
    unknown = set(options.only) - {name for suite in cases.values() for name in suite}
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}")
    now = commit()
    old = done(options.resume, now) if options.resume else set()
    todo = [
        (suite, engine, case)
        for suite, named in cases.items()
        for engine in options.engines
        for case in [c for name, c in named.items() if not options.only or name in options.only]
        if (suite, engine, case.name) not in old
    ]
    print(f"{len(todo)} to run, {len(old)} of this commit there already, commit {now or 'unknown'}", flush=True)
    warm({ENGINES[e].package for e in options.engines})
    if any(case.name not in MODELS for suite, _, case in todo if suite in ("named", "transformers")):
        warm(["transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"])
    out, results = options.resume or options.out, []
    bar = Bar(len(todo))
    for result in run_all(todo, options.jobs, options.limit):
        results.append({"commit": now, **result})
        bar.clear()
        show(results[-1])
        bar.at(len(results))
        append(out, results[-1:], COLUMNS)
    print(totals(results))
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
