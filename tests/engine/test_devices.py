"""Every case on a device apart from the CPU, and models spread over several, without a GPU (see second_device.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .. import cases

pytestmark = pytest.mark.slow  # `make test-all` runs it

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")
def test_no_tensor_lies_on_a_wrong_device(request: pytest.FixtureRequest) -> None:
    folder = request.config.cache.mkdir("second_device")
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.second_device", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=threads,
    )
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [f"{row['check']}: {row['problem']}" for row in found if row["kind"] == "failed"]
    kinds = Counter(row["kind"] for row in found)
    assert len(found) > len(cases.CASES) and kinds["unsupported"] <= 0.1 * len(found), kinds
