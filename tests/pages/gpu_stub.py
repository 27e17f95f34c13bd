"""Stands for the programs that `benchmarks/gpu.sh` runs on a device: writes what they would, row by row.

STUB_SLOW names the program that hangs after its second row; STUB_DEAF=1: it does not end on SIGINT.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

NAMES = ("pytest", "benchmarks.kernels", "benchmarks.training", "benchmarks.smoke", "warm", "host", "info")
JUNIT = '<testsuites><testsuite name="stub" tests="{}"/></testsuites>\n'


def main(args: list[str]) -> None:
    name = next((name for name in NAMES if name in args), "-")
    slow = os.environ.get("STUB_SLOW") == (name if "sanitizer" not in args else "sanitizer")
    if os.environ.get("STUB_DEAF"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def told(option: str) -> Path | None:
        return Path(args[args.index(option) + 1]) if option in args else None

    out, junit, profile, done = told("--out"), told("--junitxml"), told("--profile"), 0
    if out is not None and name == "benchmarks.training":
        out = out / "training_cuda.csv"
    try:
        for row in range(4):
            print(f"{name}: line {row}", flush=True)
            for path in filter(None, (out, profile)):
                with path.open("a") as file:
                    file.write(f"{name},{row}\n")
            if name == "warm":
                kernel = Path(os.environ["TRITON_CACHE_DIR"]) / f"k{row}"
                kernel.mkdir(parents=True, exist_ok=True)
                for kind in ("cubin", "ttir"):
                    (kernel / f"gram.{kind}").write_text(kind)
            done += 1
            if slow and row == 1:
                Path(os.environ["STUB_HANGS"]).touch()
                time.sleep(60)
    finally:
        if junit is not None:
            junit.write_text(JUNIT.format(done))


if __name__ == "__main__":
    main(sys.argv[1:])
