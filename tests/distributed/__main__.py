"""All cases of several processes, on 2, 3 and 4 gloo ranks, and a table of what each has found.

    python -m tests.distributed [--ranks 2 3 4] [--only WORD]

--only: cases, or groups of cases, in whose name the word is. The exit status is 1 if one has failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import (
    alarms,
    cases,
    checkpoints,
    killed,
    loading,
    loops,
    sharded,
    tensor,
    test_alarms,
    test_sharded,
    test_tensor,
)
from .ranks import check, results, start
from .ranks import killed as kill
from .restarted import check_restart

RECORDS = {
    "records": loading.records, "persons": loading.persons, "correlated": loading.correlated,
    "in_order": loading.records, "in_order_by_persons": loading.persons, "in_order_correlated": loading.correlated,
}  # fmt: skip
IN_THREE = [name for name in tensor.EXACT if name not in tensor.OF_TRANSFORMERS]  # which have heads for two and four


class Group(NamedTuple):
    """Cases that begin together. on: their names by the number of ranks; exact: which give the errors of `compare`."""

    name: str
    module: str
    exact: Iterable[str]
    on: dict[int, list[str]]


def _all(*named: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for names in named for name in names))


GROUPS = (
    Group("copies", "tests.distributed.cases", cases.EXACT, {
        2: [*cases.CASES], 3: _all(cases.EXACT, cases.OTHERS, loading.CASES),
        4: _all(cases.EXACT, cases.OTHERS, loading.CASES),
    }),
    Group("parts", "tests.distributed.test_sharded", {**sharded.EXACT, **sharded.FOUR}, {
        2: [*test_sharded.TWO], 3: _all(test_sharded.TWO, ["taken_up"]),
        4: _all(sharded.EXACT, sharded.FOUR, sharded.OTHERS, ["taken_up"]),
    }),
    Group("tensor parallelism", "tests.distributed.tensor", {**tensor.EXACT, **tensor.COPIES}, {
        2: test_tensor.TWO, 3: _all(IN_THREE, ["same_noise"]), 4: test_tensor.FOUR,
    }),
    Group("errors", "tests.distributed.alarms", (), {2: [*alarms.CASES], 3: test_alarms.THREE, 4: test_alarms.THREE}),
)  # fmt: skip


def shown(what: Callable[[], str]) -> str:
    """What it returns, or why it failed."""
    try:
        return what()
    except Exception as error:  # noqa: BLE001 - it stands in the table
        return f"FAILED: {str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__}"[:300]


def verdict(name: str, exact: bool, found: list[dict[str, Any]]) -> str:
    if any(by_case.get(name) == "skipped" for by_case in found):
        return "skipped"
    said = check(found, name, exact)
    if name in RECORDS and found[0][name] is not None:
        return loading.check_records([by_case[name] for by_case in found], RECORDS[name](0, 1))
    return "refused" if "refuse" in name else said


def of_group(group: Group, world: int, word: str, folder: Path) -> Iterator[tuple[str, str]]:
    """The cases of a group on so many ranks: names, and what they found."""
    names = [name for name in group.on.get(world, []) if word in f"{group.name} {name}"]
    if "taken_up" in names and not Path(os.environ[checkpoints.FOLDER]).exists():
        names.remove("taken_up")  # nobody has saved it
    if names:
        folder.mkdir(parents=True)
        found = results(start(group.module, world, folder, *names), folder, 600)
        yield from ((name, shown(lambda name=name: verdict(name, name in group.exact, found))) for name in names)


def of_loops(word: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Two ranks, and one beside them."""
    names = [name for name in loops.CASES if word in f"loops {name}"]
    if not names:
        return
    begun = []
    for world in (1, 2):
        (folder / str(world)).mkdir(parents=True)
        own = [name for name in names if world == 2 or name in loops.ALONE]
        begun.append(start("tests.distributed.loops", world, folder / str(world), *own) if own else [])
    one, two = (results(each, folder / str(world), 600) for world, each in zip((1, 2), begun, strict=True))
    yield from ((name, shown(lambda name=name: loops.check_loop(name, *(one or [{}]), two))) for name in names)


def of_deaths(word: str, folder: Path) -> Iterator[tuple[str, str]]:
    """A rank is killed; torchrun begins all anew."""
    folder.mkdir(parents=True)
    for name in killed.CASES:
        if word in f"killed {name}":
            yield name, shown(lambda name=name: f"raised after {kill(name, folder):.1f} s")
    if word in "killed torchrun begins all anew":
        yield "torchrun begins all anew", shown(lambda: check_restart(folder))


def rows(ranks: list[int], word: str, folder: Path) -> Iterator[tuple[str, str, int, str]]:
    for world in ranks:
        for group in GROUPS:
            for name, said in of_group(group, world, word, folder / group.name / str(world)):
                yield group.name, name, world, said
        if world == 2:
            yield from (("loops", name, 2, said) for name, said in of_loops(word, folder / "loops"))
            yield from (("killed", name, 2, said) for name, said in of_deaths(word, folder / "killed"))


def main() -> int:
    arguments = argparse.ArgumentParser(prog="python -m tests.distributed", description=__doc__.splitlines()[0])
    arguments.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    arguments.add_argument("--only", default="", metavar="WORD")
    given, begun, made, failed = arguments.parse_args(), time.monotonic(), 0, 0
    warnings.simplefilter("ignore")
    table = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what cases print
    print(f"{'group':20}{'case':48}{'ranks':7}result", file=table)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[checkpoints.FOLDER] = f"{folder}/checkpoint"
        for group, name, world, said in rows(given.ranks, given.only, Path(folder)):
            made, failed = made + 1, failed + said.startswith("FAILED")
            print(f"{group:20}{name:48}{world:<7}{said}", file=table)
    print(f"{made} cases, {failed} failed, {time.monotonic() - begun:.0f} seconds", file=table)
    return int(failed > 0 or not made)


if __name__ == "__main__":
    sys.exit(main())
