"""A program as a CUDA graph: captured once, launched as one.

A launch reads and writes the memory that the capture used: batches are copied into it, and what it gives stands there
until the next launch. So what is read of a replay must be read before the next one begins. `Pool.count` says which
launch is the last; who holds results of an earlier one is refused (`Pool.check`). The norms and clipped sums of a step
are tensors of their own, in memory of torch's, taken before.

The graphs of all sizes of a step share one pool of memory: each keeps its inputs and results, and the memory between is
used by whichever runs. They run one after the other, on whatever stream (`Pool.launch`).

Random numbers: torch registers the device's default generator with every graph, and each launch draws on from the
generator's state, as calls would. Parameters are read where they lie: that they do not move is what `Guards` checks.

Numbers that Python read in the recording are read after the launch, of copies, which waits for the device once
(`Program.is_same`). Numbers of tensors on the CPU would stand in the graph as they were in the capture: programs with
such numbers that change are not captured.

Written without a GPU, by torch's documentation: what asks torch.cuda is `Cuda` alone, and tests put another in its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import StepError
from .program import Program

_WARM = 3  # runs before a capture: libraries make their handles, kernels are loaded and tuned
Outputs = list[Tensor]
Run = Callable[[Sequence[Tensor]], tuple[Outputs, bool]]
RunApart = Callable[[Sequence[Tensor]], tuple[Outputs, Outputs]]


class NotCaptured(Exception):
    """Why a program does not become a CUDA graph; it can be replayed without."""


class Cuda:
    """What is asked of torch.cuda, of one device: all on one stream beside the user's, with one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def stream(self) -> Any:
        """The user's stream."""
        return torch.cuda.current_stream(self.device)

    def warm(self, run: Callable[[], Outputs]) -> None:
        """Run it beside the user's stream, after what that does and before what it will do."""
        self._side.wait_stream(self.stream())
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            run()
        self.stream().wait_stream(self._side)

    def capture(
        self, run: Callable[[list[Tensor]], Outputs], given: list[Tensor]
    ) -> tuple[Callable[[], None], Outputs]:
        """What launches run(given), and where its results will stand. It may empty `given`: what else holds none of
        these is then memory for what comes behind them, in this graph as well."""
        graph = torch.cuda.CUDAGraph()
        # other threads may go on: those that load and pin batches call CUDA as well. The user's stream is entered so
        # that it is current behind, which torch does not see to where a capture fails
        with (
            torch.cuda.device(self.device),
            torch.cuda.stream(self.stream()),
            torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"),
        ):
            outputs = run(given)
        return graph.replay, outputs


class Device(Protocol):
    """`Cuda`, or what stands in its place."""

    def stream(self) -> Any: ...
    def warm(self, run: Callable[[], Outputs]) -> None: ...
    def capture(
        self, run: Callable[[list[Tensor]], Outputs], given: list[Tensor]
    ) -> tuple[Callable[[], None], Outputs]: ...


def device_of(device: torch.device) -> Device | None:
    """What captures on a device; None where nothing does."""
    return Cuda(device) if device.type == "cuda" else None


class Pool:
    """The memory that the graphs of one step share. count: of the launches so far."""

    def __init__(self, device: Device) -> None:
        self.device, self.count = device, 0
        self._last: Any = None  # the stream of the last launch
        self.user: Any = None  # a weak reference to the replay of a forward that was launched last

    def launch(self, inputs: Sequence[Tensor], given: Sequence[Tensor], replay: Callable[[], None]) -> int:
        """Copy a batch to where a graph reads it, and launch; the number of the launch."""
        now = self.device.stream()
        if self._last is not None and now != self._last:
            now.wait_stream(self._last)  # what the last launch gave may still be read there
        self._last = now
        self.count += 1
        for own, tensor in zip(inputs, given, strict=True):
            own.copy_(tensor, non_blocking=True)
        replay()
        return self.count

    def check(self, number: int) -> None:
        """Raises StepError if there was a launch since."""
        if number != self.count:
            raise StepError(
                "a replayed step was asked for its gradients after the next one had begun, which has overwritten them: "
                "call backward() on each loss before the next forward"
            )


class Captured:
    """Replays a program as a CUDA graph. run: `Program.run_apart`, or that of `Compiled`; inputs: an example.

    Raises NotCaptured.
    """

    def __init__(self, program: Program, run: RunApart, inputs: Sequence[Tensor], pool: Pool) -> None:
        if why := why_not_captured(program, inputs):
            raise NotCaptured(why)
        self._program, self._pool = program, pool
        self._inputs = [tensor.clone() for tensor in inputs]
        self._replay, self._found = warm_and_capture(pool, lambda given: in_a_row(run(self._inputs)), [])
        self.number = 0  # of its last launch

    def run(self, inputs: Sequence[Tensor]) -> tuple[Outputs, bool]:
        """As `Program.run`; the results stand until the next launch of the pool."""
        self.number = self._pool.launch(self._inputs, inputs, self._replay)
        count = len(self._program.outputs)
        return self._found[:count], self._program.is_same(self._found[count:])

    def lasting(self) -> Callable[[], None]:
        """What raises StepError once the results of the last replay are overwritten."""
        number = self.number
        return lambda: self._pool.check(number)


def why_not_captured(program: Program, inputs: Sequence[Tensor]) -> str:
    """Why a program cannot become CUDA graphs, "" if nothing is known against it."""
    if program.counts_rows:
        return "it picks rows by the numbers of the batch, for whose count it waits for the device"
    if program.beside or any(tensor.device != program.device for tensor in inputs):
        what = f"{program.beside}()" if program.beside else "the loss function"
        return f"{what} takes numbers on the CPU, which a graph would keep as they are"
    return ""


def warm_and_capture(
    pool: Pool, run: Callable[[list[Tensor]], Outputs], given: list[Tensor]
) -> tuple[Callable[[], None], Outputs]:
    """`Device.capture`, after a few runs. Raises NotCaptured."""
    try:
        for _ in range(_WARM):
            pool.device.warm(lambda: run(list(given)))
        return pool.device.capture(run, given)
    except RuntimeError as problem:
        words = str(problem).strip().splitlines() or [""]
        raise NotCaptured(f"CUDA does not capture it ({words[0][:200]})") from problem


def in_a_row(found: tuple[Outputs, Outputs]) -> Outputs:
    return [*found[0], *found[1]]
