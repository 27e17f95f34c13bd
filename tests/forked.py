"""Processes that are forked from one that has imported everything, where each would import torch by itself.

A forked process has the environment, arguments, folder and output it is given, fresh seeds, and an exit status as if
`python COMMAND` had begun it. No server has started a thread or drawn a number before it forks. There are two, so that
hashes and addresses differ between neighbouring ranks, as they do between processes that begin by themselves: an order
of a set that differs from rank to rank must not go unseen. FASTDP_TESTS_FORK=0 begins every process by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
IMPORTED = ("numpy", "torch", "torch.distributed", "opacus", "fastdp")  # by a server, before it is asked for anything
HEARD = 1 << 20  # bytes of a request
NUMBER = struct.Struct("<q")
SETTINGS = {"OMP_NUM_THREADS": "1", "FASTDP_CALIBRATE": "0", "PYTHONPATH": str(ROOT)}


def is_used() -> bool:
    return sys.platform == "linux" and os.environ.get("FASTDP_TESTS_FORK", "1") != "0"


class Process:
    """One that a server forked, with what tests use of `subprocess.Popen`."""

    def __init__(self, told: int, command: Sequence[str]) -> None:
        self._told, self.command = told, command
        self.returncode: int | None = None
        self.pid = 0

    def begun(self) -> None:
        """Wait for the fork, and learn its number."""
        self.pid = self._number(300)

    def _number(self, timeout: float | None) -> int:
        if not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(list(self.command), timeout or 0.0)
        said = os.read(self._told, NUMBER.size)
        if not said:
            raise RuntimeError(f"the server that was to fork {' '.join(self.command)} is gone")
        return int(NUMBER.unpack(said)[0])

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, or minus the signal that ended it."""
        if self.returncode is None:
            self.returncode = self._number(timeout)
            os.close(self._told)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Server:
    """Asks a server for processes. It ends, with all that it forked, once this process does."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT,
            stdin=subprocess.DEVNULL, env={**os.environ, **SETTINGS},
        )  # fmt: skip
        theirs.close()
        atexit.register(self.close)

    def start(self, request: dict[str, Any], out: int, err: int) -> Process:
        told, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs, out, err])
        finally:
            os.close(theirs)
        return Process(told, request["command"])

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_servers: dict[int, Server] = {}


def ready(world: int, imports: Sequence[str] = ()) -> None:
    """Let the servers of so many ranks import modules, at once: no rank shall wait for another that cannot begin."""
    if is_used():
        asked = [_server(rank).start({"command": [], "imports": list(imports)}, 1, 2) for rank in range(min(world, 2))]
        for each in asked:
            each.wait()


def _server(rank: int) -> Server:
    if rank % 2 not in _servers:
        _servers[rank % 2] = Server()
    return _servers[rank % 2]


def start(
    *command: str, env: dict[str, str] | None = None, cwd: Path = ROOT, rank: int = 0,
    out: IO[str] | None = None, err: IO[str] | None = None,
) -> Any:  # fmt: skip
    """`python COMMAND`, which is `-m MODULE ...` or `FILE ...`."""
    environment = {**os.environ, **SETTINGS, **(env or {})}
    if not is_used():
        return subprocess.Popen([sys.executable, *command], env=environment, cwd=cwd, stdout=out, stderr=err)
    process = _server(rank).start(
        {"command": command, "env": environment, "cwd": str(cwd)},
        out.fileno() if out else 1,
        err.fileno() if err else 2,
    )
    process.begun()
    return process


def torchrun(world: int, *command: str, imports: Sequence[str] = (), timeout: float = 200) -> Any:
    """`torchrun --nproc-per-node WORLD COMMAND` without its agent, as a `subprocess.CompletedProcess` of all ranks."""
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world),
              "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}  # fmt: skip
    ready(world, imports)
    made, end = [], time.monotonic() + timeout
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            for rank in range(world):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **of_all}
                made.append(start(*command, env=own, rank=rank, out=out, err=err))
            while None in (codes := [process.poll() for process in made]) and not any(codes):
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(list(command), timeout)
                time.sleep(0.02)
        finally:
            for process in made:  # the agent, too, ends the others once one has failed
                process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, next(filter(None, codes), 0), out.read(), err.read())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --------------------------------------------------------------------------- in a server


def _become(request: dict[str, Any], out: int, err: int) -> None:
    """What `python COMMAND` finds when it begins."""
    import numpy as np
    import torch

    for given, taken in ((out, 1), (err, 2)):
        os.dup2(given, taken)
        os.close(given)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    np.random.seed()  # Python's generator is seeded anew at a fork
    torch.default_generator.seed()


def _run(command: list[str]) -> None:
    """What it raises ends the process, as everywhere."""
    if command[0] == "-m":
        sys.modules.pop(command[1], None)
        sys.argv, sys.path[0] = command[1:], os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def _tell_of_the_ended(children: dict[int, tuple[int, int]]) -> None:
    """children: by a descriptor of the process, its number and where its exit status is told."""
    for descriptor in select.select(list(children), [], [], 0)[0]:
        pid, told = children.pop(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # nobody waits
            os.write(told, NUMBER.pack(code))
        os.close(descriptor)
        os.close(told)


FORKING = ("jemalloc_bg_thd",)  # pyarrow's allocator stops it before a fork, and starts it again


def _import(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # the process that needs it will say so
            importlib.import_module(name)
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    begun = [name for name in threads[1:] if name not in FORKING]
    assert not begun, f"{names} start threads, which no fork has: {begun}"
    gc.collect()
    gc.freeze()  # so that a collection writes into none of the memory that is shared


def _serve(asked: socket.socket) -> list[str]:
    """Fork a process for each request; it returns in those alone, with what they shall run."""
    _import(IMPORTED)
    children: dict[int, tuple[int, int]] = {}
    while True:
        select.select([asked, *children], [], [])
        _tell_of_the_ended(children)
        if not select.select([asked], [], [], 0)[0]:
            continue
        text, given, *_ = socket.recv_fds(asked, HEARD, 3)
        if not text:
            for pid, _ in children.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        request, (told, out, err) = json.loads(text), given
        if "imports" in request:
            _import(request["imports"])
            os.write(told, NUMBER.pack(0))
            for descriptor in given:
                os.close(descriptor)
            continue
        pid = os.fork()
        if not pid:
            for descriptor in (asked.fileno(), told, *children, *(status for _, status in children.values())):
                os.close(descriptor)
            _become(request, out, err)
            return list(request["command"])
        children[os.pidfd_open(pid)] = pid, told
        os.write(told, NUMBER.pack(pid))
        os.close(out)
        os.close(err)


if __name__ == "__main__":
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
