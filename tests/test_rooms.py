"""The house: rooms of the package in a strict order, public modules at its root, files that a reader takes in."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import fastdp

PACKAGE = Path(fastdp.__file__).parent
# from below to above; those of one line never import each other
ORDER = (
    ("errors",),
    ("ops", "utils"),
    ("batch_axis",),
    ("grad_sample",),
    ("engine",),
    ("distributed", "graphs"),
    ("accounting",),
    ("data",),
    ("optim",),
    ("losses", "mechanisms", "ntk", "sampling", "schedule", "verification"),
    ("calibration", "diagnostics", "hf"),
    ("audit", "commands", "compat", "finetune", "lightning", "tracking"),
    ("__init__", "__main__"),
)
FLOOR = {name: number for number, names in enumerate(ORDER) for name in names}
GUESTS = (*ORDER[-2], "hf")  # they use fastdp as a user would: `import fastdp` is theirs, too
LONGEST = 400  # lines
WITHIN = {"kernels"}  # Triton's, which ops import when a device asks for them


def files() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if "kernels" not in path.relative_to(PACKAGE).parts:
            yield path


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[tuple[str, ...], int, bool]]:
    """The names of the package that a file imports, lazily too, with their lines; whether for type checkers alone."""
    package = ("fastdp", *path.relative_to(PACKAGE).parts[:-1])
    tree, for_types = ast.parse(path.read_text()), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for_types |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        found: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            found = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            found = [(*base, alias.name) for alias in node.names]
        yield from ((parts, node.lineno, id(node) in for_types) for parts in found if parts[0] == "fastdp")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The rooms whose files a file imports, with the lines; not those that only type checkers look at."""
    for parts, line, for_types in imports(path):
        if not for_types:
            inner = parts[1] if len(parts) > 1 else "__init__"
            yield (inner if inner in FLOOR or inner in WITHIN else "__init__"), line


def test_rooms_import_only_what_lies_below() -> None:
    wrong = []
    for path in files():
        room = room_of(path)
        for other, line in imported(path):
            if other == room or other in WITHIN or (other == "__init__" and room in GUESTS):
                continue
            if FLOOR[other] >= FLOOR[room]:
                wrong.append(f"{path.relative_to(PACKAGE)}, line {line}: {room} imports {other}, which is not below it")
    assert not wrong, "\n".join([*wrong, "docs/architecture.md says which rooms there are"])


def test_no_files_import_each_other() -> None:
    """No circle of files, imports for type checkers and within functions counted."""
    modules = {path.relative_to(PACKAGE.parent).with_suffix("").parts: path for path in files()}
    modules = {parts[:-1] if parts[-1] == "__init__" else parts: path for parts, path in modules.items()}
    below = {
        parts: {
            found
            for name, *_ in imports(path)
            for found in (name, name[:-1])
            if found in modules and found not in (parts, parts[: len(found)])
        }
        for parts, path in modules.items()
    }
    while free := {
        p for p in below if not below[p] & below.keys() or not any(p in others for others in below.values())
    }:
        below = {parts: others for parts, others in below.items() if parts not in free}  # at the bottom, or at the top
    assert not below, "\n".join(
        f"{'.'.join(p)} imports {sorted('.'.join(o) for o in below[p] & below.keys())}" for p in below
    )


def test_the_root_holds_public_modules_alone() -> None:
    found = {path.stem for path in PACKAGE.glob("*.py")}
    assert found <= set(FLOOR), f"{sorted(found - set(FLOOR))} belong into a room"
    assert len(found) <= 12
    for name in (found | fastdp._MODULES) - {"__init__", "__main__"}:
        with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
            assert getattr(fastdp, name).__name__ == f"fastdp.{name}"


def test_rooms_are_known() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} - WITHIN
    assert rooms <= set(FLOOR), f"{sorted(rooms - set(FLOOR))}: give them a place in ORDER"
    assert len(ORDER) <= 13


def test_files_are_not_long() -> None:
    root = PACKAGE.parent
    every = [p for top in ("fastdp", "kernels", "tests", "benchmarks", "examples") for p in (root / top).rglob("*.py")]
    long = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in every}
    assert not {name: lines for name, lines in long.items() if lines > LONGEST}


PAGE = PACKAGE.parent / "docs" / "architecture.md"


def test_the_page_of_the_architecture_names_files_that_are_there() -> None:
    named = {
        name for name in re.findall(r"`([\w/.]+/[\w.]+\.(?:py|cpp|cu|h|md))`", PAGE.read_text()) if "<" not in name
    }
    roots = (PACKAGE.parent, PACKAGE, PACKAGE.parent / "docs")
    assert len(named) > 30
    assert not {name for name in named if not any((root / name).exists() for root in roots)}


def test_the_page_of_the_architecture_has_the_order_of_rooms() -> None:
    rows = re.findall(r"^\| (\d+) \| (`[^|]+`) \|", PAGE.read_text(), flags=re.M)
    found = {int(floor): set(re.findall(r"`(\w+)`", names)) for floor, names in rows}
    expected = {number: set(names) for number, names in enumerate(ORDER, 1)}
    assert found == expected
