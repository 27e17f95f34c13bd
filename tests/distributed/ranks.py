"""Start some processes once, let them run many cases, and bring back what each said."""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .. import forked
from ..forked import ROOT, free_port

Case = Callable[[int, int], object]
LOOPS = (  # what loops of people import once they run
    "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp", "sklearn.datasets",
    "accelerate", "peft", "transformers.trainer", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama", "lightning.pytorch", "fastdp.hf", "fastdp.lightning",
)  # fmt: skip
OPTIMIZERS = ("torch._dynamo",)  # what torch's import once one is made
LATER = {  # what cases import once they run, by module
    "tests.distributed.loops": LOOPS,
    "tests.distributed.test_sharded": ("torch._inductor.pattern_matcher", "torch._dynamo.backends.common"),
    "tests.distributed.tensor": ("transformers.models.llama.modeling_llama",),
}
__all__ = ["LOOPS", "OPTIMIZERS", "ROOT", "Launches", "begin", "free_port", "killed", "results", "start"]


def begin(rank: int, world: int, port: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30))


def start(module: str, world: int, folder: Path, *names: str) -> list[Any]:
    """Run cases of a module, one process a rank, on one thread each."""
    command = ["-m", "tests.distributed.ranks", module]
    port = str(free_port())
    forked.ready(world, (module, *OPTIMIZERS, *LATER.get(module, ())))
    return [
        forked.start(*command, str(rank), str(world), port, str(folder), *names, rank=rank) for rank in range(world)
    ]


def results(processes: list[Any], folder: Path, timeout: float = 300) -> list[dict[str, object]]:
    """By rank: what each case returned, or its traceback as a `str` that begins so."""
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(len(processes))]


class Launches:
    """What each case of a module returned, by number of ranks: they are started once, when first asked for."""

    def __init__(self, module: str, folders: Any, **names: Any) -> None:
        """folders: pytest's `tmp_path_factory`; names: of the cases of `two`, `three` or `four` ranks."""
        self.module, self.folders = module, folders
        self.names = {2 + ("two", "three", "four").index(number): list(each) for number, each in names.items()}
        self._found: dict[int, list[dict[str, Any]]] = {}

    def of(self, world: int) -> list[dict[str, Any]]:
        if world not in self._found:
            folder = self.folders.mktemp(f"ranks{world}")
            self._found[world] = results(start(self.module, world, folder, *self.names[world]), folder)
        return self._found[world]

    def check(self, world: int, name: str, exact: bool = False) -> None:
        check(self.of(world), name, exact)


def check(found: list[dict[str, Any]], name: str, exact: bool = False) -> str:
    """No rank raised an error; exact: norms, weights and epsilon were those of one process. Returns their errors."""
    for rank, by_case in enumerate(found):
        said = by_case.get(name, "no answer")
        assert not isinstance(said, str), f"rank {rank}: {said}"
        if exact:
            norms, weights, epsilon, truth = said
            assert norms < 1e-6 and weights < 1e-6 and epsilon == truth == found[0][name][2], f"rank {rank}: {said}"
    worst = [max(by_case[name][number] for by_case in found) for number in range(2 if exact else 0)]
    return "norms {:.0e}, weights {:.0e}".format(*worst) if exact else "ok"


def killed(name: str, folder: Path) -> float:
    """The seconds after which the first of two ranks raised its error, once the second was killed in a case."""
    processes = start("tests.distributed.killed", 2, folder, name)
    try:
        processes[1].wait(60)
        processes[0].wait(60)
    finally:
        for process in processes:
            process.kill()
    found = pickle.loads((folder / "0.pickle").read_bytes())[name]
    assert isinstance(found, float), found
    return found


def main(module: str, rank: int, world: int, port: int, folder: Path, names: list[str]) -> None:
    begin(rank, world, port)
    cases: dict[str, Case] = __import__(module, fromlist=["CASES"]).CASES
    found: dict[str, object] = {}
    for name in names or list(cases):
        try:
            found[name] = cases[name](rank, world)
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - shown by the test; pytest.raises fails by the latter
            found[name] = traceback.format_exc()
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6:])
