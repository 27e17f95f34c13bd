"""Forked processes begin and end as those that begin by themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from . import forked

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not forked.is_used(), reason="processes begin by themselves here")]


@pytest.fixture(scope="module", autouse=True)
def servers():
    """Of these tests alone: those of others may have imported what says something at its end, as Triton does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked, "_servers", {})
        yield
        for server in forked._servers.values():
            server.close()


PROGRAM = """
import atexit, json, os, random, signal, sys, threading
import numpy, torch
class Here: pass
found = {
    "name": __name__, "main": sys.modules["__main__"].Here is Here, "argv": sys.argv, "path": sys.path[0],
    "folder": os.getcwd(), "mine": os.environ.get("MINE"),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
    "threads": [threading.active_count(), torch.get_num_threads()],
    "signals": [int(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGCHLD)],
    "torch": torch.rand(1).item(), "random": random.random(), "numpy": numpy.random.rand(), "hash": hash("a"),
}
print(json.dumps(found))
print("an error", file=sys.stderr)
atexit.register(lambda: print("at the end"))
sys.exit(7)
"""


def run(path, *more, rank=0, **options):
    with open(path.with_suffix(".out"), "w+") as out, open(path.with_suffix(".err"), "w+") as err:
        process = forked.start(str(path), *more, rank=rank, out=out, err=err, **options)
        code = process.wait(60)
    return code, path.with_suffix(".out").read_text(), path.with_suffix(".err").read_text()


def test_a_process_finds_what_it_would_find_by_itself(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = []
    for rank in (0, 1, 0):
        code, out, err = run(program, "--x", "1", rank=rank, env={"MINE": "set"}, cwd=tmp_path)
        assert code == 7 and err == "an error\n" and out.splitlines()[1:] == ["at the end"], (out, err)
        found.append(json.loads(out.splitlines()[0]))
    by_itself = subprocess.run(
        [sys.executable, str(program), "--x", "1"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, **forked.SETTINGS, "MINE": "set"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert by_itself.returncode == 7, by_itself.stderr
    truth = json.loads(by_itself.stdout.splitlines()[0])
    drawn = {name: {each.pop(name) for each in (*found, truth)} for name in ("torch", "random", "numpy")}
    assert all(len(values) == 4 for values in drawn.values()), drawn  # each has its own
    hashes = [each.pop("hash") for each in (*found, truth)]
    assert hashes[0] == hashes[2] != hashes[1], "neighbouring ranks have the same order of sets"
    assert found == [truth] * 3


def test_a_module_runs_as_main(tmp_path):
    (tmp_path / "inner.py").write_text("import sys\nprint(__name__, sys.argv[1:], file=open('said', 'w'))\n")
    assert forked.start("-m", "inner", "a", cwd=tmp_path).wait(60) == 0
    assert (tmp_path / "said").read_text() == "__main__ ['a']\n"


def test_errors_and_signals_are_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("raise KeyError('nothing there')")
    code, _, err = run(program)
    assert code == 1 and "KeyError: 'nothing there'" in err
    program.write_text("import os\nos.kill(os.getpid(), 15)")
    assert run(program)[0] == -signal.SIGTERM
    program.write_text("import time\nwhile True: time.sleep(1)")
    process = forked.start(str(program))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert process.poll() is None
    process.kill()
    assert process.wait(10) == process.poll() == -signal.SIGKILL


def test_the_others_end_once_a_rank_has_failed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, time\nif os.environ['RANK'] == '1': raise SystemExit(3)\ntime.sleep(600)")
    begun = time.monotonic()
    assert forked.torchrun(2, str(program)).returncode == 3 and time.monotonic() - begun < 120


def test_nothing_is_left_once_the_tests_end(tmp_path):
    program, sleeper = tmp_path / "program.py", tmp_path / "sleeper.py"
    sleeper.write_text("import time\ntime.sleep(600)")
    program.write_text(f"from tests import forked\nprint(forked.start({str(sleeper)!r}).pid, flush=True)")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=100,
                          env={**os.environ, **forked.SETTINGS})  # fmt: skip
    with pytest.raises(ProcessLookupError):
        for _ in range(500):
            os.kill(int(done.stdout), 0)
            time.sleep(0.02)
