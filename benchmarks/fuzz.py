"""Whole training programs drawn at random, judged by the batch minus one sample (tests/programs).

A program is a forward, a loss in the model or outside of it, state over steps, hooks and sizes. It is run as a user
would run it, on a batch and on the batch without each of its samples; the clipped sum may move by R and no more.

    python -m benchmarks.fuzz --minutes 60 --jobs 2 > fuzz.txt         # random programs, from --start on
    python -m benchmarks.fuzz --seed 17                                # one of them, with its source
    python -m benchmarks.fuzz --piece "mean(0)"                        # one piece on its own

Outcomes: exact (or bounded: coupled, yet within R here), refused, warned, escaped (coupled outside of torch, as
docs/limits.md says), skipped (no such program, or no gradient); and the faults: SILENT (moves by more than R, or other
steps' sums, without an error or a warning), WRONG (not the gradients of single samples), FALSE REFUSAL, CRASH.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import re
import sys
import time

import torch

from tests.programs.draw import Program, alone, draw, smaller, source
from tests.programs.judge import Verdict, judge

from .timing import commit

Task = tuple[str, int]  # a piece's name, or "" for a drawn program; a seed


def program_of(task: Task) -> Program:
    return alone(*task) if task[0] else draw(task[1])


def run(task: Task) -> tuple[Task, Verdict]:
    torch.set_num_threads(1)
    return task, judge(program_of(task))


def minimised(program: Program, verdict: Verdict) -> tuple[Program, Verdict]:
    """The smallest program by `smaller` with the same fault."""
    found = True
    while found:
        found = False
        for less in smaller(program):
            again = judge(less)
            if again.kind == verdict.kind and _reason(again) == _reason(verdict):
                program, verdict, found = less, again, True
                break
    return program, verdict


def _reason(verdict: Verdict) -> str:
    """The message, where there is one, without its numbers and names of modules."""
    if verdict.kind not in ("FALSE REFUSAL", "CRASH", "refused"):
        return verdict.kind
    return re.sub(r"'\w+'|\d+", "_", verdict.why)[:110]


class Tally:
    """Counts, and each fault told once with its smallest program."""

    def __init__(self) -> None:
        self.kinds: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.told = set[tuple[str, ...]]()

    def add(self, task: Task, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        if verdict.kind == "skipped" and "MISLABELLED" in verdict.why:
            print(f"mislabelled: {task} {program_of(task).names}")
        if not verdict.fault:
            return
        program, least = program_of(task), verdict
        first = (verdict.kind, *_telling(program))
        if first not in self.told or verdict.kind != "SILENT":
            program, least = minimised(program, verdict)
        reason = () if verdict.kind == "SILENT" else (_reason(verdict),)
        what = (verdict.kind, *_telling(program), *reason)
        self.faults[" + ".join(what)] += 1
        if what in self.told:
            return
        self.told.add(what)
        again = f"--seed {task[1]}" + (f" --piece {task[0]!r}" if task[0] else "")
        print(f"\n{verdict.kind}: {again}; smallest: {' | '.join(program.names)}\n  sens {least.sens:.4g}: {least.why}")
        print(source(program), flush=True)

    def summary(self, seconds: float, last: Task | None) -> None:
        judged = sum(self.kinds.values()) - self.kinds["skipped"]
        silent = self.kinds["SILENT"] + self.kinds["WRONG"]
        print(f"\n{sum(self.kinds.values())} programs in {seconds:.0f} s at {commit()}, to {last}: {dict(self.kinds)}")
        print(f"rate of silent faults: {silent} of {judged} judged = {silent / max(1, judged):.2e}")
        for what, count in self.faults.most_common():
            print(f"{count:6d} {what}")


def _telling(program: Program) -> tuple[str, ...]:
    """The names that say what was at fault: the pieces that couple samples, or all of them."""
    told = tuple(name for name, piece in zip(program.names, program.pieces, strict=True) if piece.label == "coupled")
    return told or tuple(name for name in program.names if not name.startswith("first"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--start", type=int, default=1_000_000, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, help="judge one program and print it")
    parser.add_argument("--piece", help="with --seed or without: the program of this piece alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.seed is not None or options.piece:
        return one((options.piece or "", options.seed or 0))
    return hunt(options)


def one(task: Task) -> int:
    """Judge one program; its source, and its smallest form if it is at fault."""
    _, verdict = run(task)
    print(f"{program_of(task)}\n\n{source(program_of(task))}\n{verdict}")
    if verdict.fault:
        program, least = minimised(program_of(task), verdict)
        print(f"\nsmallest: {' | '.join(program.names)}\n{source(program)}\n{least}")
    return int(verdict.fault)


def hunt(options: argparse.Namespace) -> int:
    """For so many minutes; prints what is found, and a count of all."""
    tally, last, seeds = Tally(), None, itertools.count(options.start)
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        while time.monotonic() - begin < 60 * options.minutes:
            some = [("", next(seeds)) for _ in range(16 * options.jobs)]
            for task, verdict in pool.imap_unordered(run, some):
                tally.add(task, verdict)
            last = some[-1]
    tally.summary(time.monotonic() - begin, last)
    return int(any(kind in tally.kinds for kind in ("SILENT", "WRONG", "CRASH", "FALSE REFUSAL")))


if __name__ == "__main__":
    sys.exit(main())
