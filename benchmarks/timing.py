"""What the benchmarks share: interleaved timing, the machine's roofs, versions, tables and CSV rows."""

from __future__ import annotations

import csv
import datetime
import io
import os
import platform
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fastdp.engine.attach_checks import missing
from fastdp.grad_sample.cost_model import seconds_of as seconds
from fastdp.ops.registry import native, native_cuda

Row = dict[str, object]
FACTS = ("device", "threads", "torch", "triton", "opacus", "fastdp", "commit", "date")  # what `versions` tells


# glibc keeps what is freed, and gives nothing back to the system: else every step fetches fresh pages, ten to sixty
# thousand here, which took up to a third of a step, whoever's it was
KEPT = {"MALLOC_TOP_PAD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_MAX_": "0",
        "THP_MEM_ALLOC_ENABLE": "1"}  # torch's: large tensors in large pages  # fmt: skip


def keep_memory(module: str) -> None:
    """Start `python -m module` again with an allocator that keeps memory, unless told of another by the environment
    (or --system-allocator)."""
    if "--system-allocator" in sys.argv:
        sys.argv.remove("--system-allocator")
    elif sys.platform == "linux" and not any(name.startswith("MALLOC_") or name == "LD_PRELOAD" for name in os.environ):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **KEPT})


def versions(device: torch.device | str = "cpu") -> Row:
    """Device, versions, commit and date: beside every figure. fastdp's version says which extension is not there."""
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "-"

    device = torch.device(device)
    modules = {"_C": native(), **({"_CUDA": native_cuda()} if device.type == "cuda" else {})}
    without = "".join(f", without {name}" for name, module in modules.items() if isinstance(module, str))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    return {
        "device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "triton": of("triton"),
        "opacus": of("opacus"), "fastdp": of("fastdp") + without, "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def require_kernels(device: torch.device | str = "cpu") -> None:
    """Where fastdp would be measured without its kernels: SystemExit, unless FASTDP_CPU=0 or FASTDP_CUDA=0 says that
    they are not wanted."""
    if lacking := "; ".join({why: None for kind in ("cpu", torch.device(device).type) for why in missing(kind)}):
        raise SystemExit(f"no figure is taken without fastdp's kernels: {lacking}")


def commit(digits: int = 7) -> str:
    """FASTDP_COMMIT (of a tree that travelled without its history), else this checkout's, else "-"."""
    told = os.environ.get("FASTDP_COMMIT")
    if told:
        return told
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", f"--short={digits}", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:  # no git
        return "-"
    return done.stdout.strip() or "-"


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(
    runs: dict[str, Callable[[], object]], device: torch.device, rounds: int = 15, warm: int = 2
) -> dict[str, float]:
    """Median seconds of each, round robin, so that all meet the same noise of the machine."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + warm):
        for name, run in runs.items():
            spent = seconds(run, device)
            if number >= warm:
                times[name].append(spent)
    return {name: statistics.median(values) for name, values in times.items()}


def roofs(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(flop/s of a large matrix product, bytes/s of a copy, read and written), measured."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.empty((2**30 if device.type == "cuda" else 2**26) // 4, device=device).normal_()
    target = torch.empty_like(source)
    found = interleaved({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, device, 9)
    return 2 * n**3 / found["product"], 2 * source.numel() * 4 / found["copy"]


def show(rows: Sequence[Row], columns: Sequence[str], left: int = 2) -> None:
    """Print rows as an aligned table; the first `left` columns are text."""
    cells = [list(columns), *[[str(row.get(c, "-")) for c in columns] for row in rows]]
    widths = [max(len(r[k]) for r in cells) for k in range(len(columns))]
    for line in cells:
        print(
            "  ".join(
                c.rjust(w) if k >= left else c.ljust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))
            )
        )


def begin(module: str) -> None:
    """A benchmark begins: `keep_memory`, no warnings, and fastdp's kernels are there."""
    keep_memory(module)
    warnings.simplefilter("ignore")
    require_kernels()


def publish(rows: Sequence[Row], columns: Sequence[str], about: Row, out: Path | None, left: int = 2) -> None:
    """Print rows, and what they were measured on; append both to a CSV file, if one is given."""
    show(rows, columns, left)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    append(out, [{**row, **about} for row in rows], (*columns, *about))


def append(path: Path | None, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Add tidy rows to a CSV file, if one is given: in one write, so that processes side by side keep theirs. One
    written with other columns keeps its rows and gets the new columns too."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_bytes().decode() if path.exists() else ""
    reader = csv.DictReader(io.StringIO(text))
    header = list(reader.fieldnames or ())
    names = [*header, *(c for c in columns if c not in header)]
    lines = io.StringIO()
    end = "\n" if text and "\r\n" not in text.partition("\n")[0] + "\n" else "\r\n"
    writer = csv.DictWriter(lines, names, restval="-", extrasaction="ignore", lineterminator=end)
    same = names == header
    if not same:
        writer.writeheader()
        writer.writerows(reader)
    writer.writerows(rows)
    with path.open("a" if same else "w", newline="") as file:
        file.write(lines.getvalue())
