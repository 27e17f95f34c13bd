"""What stands in the place of `fastdp.graphs.cuda_graph.Cuda` without a GPU: a "graph" that runs the captured function
again at every launch and writes what it gives to the memory of the capture, as a graph does. Calls are noted in order.

What it cannot show: whether CUDA captures a call at all, its streams and its memory, and the generator of a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FakeStream:
    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name = calls, name

    def wait_stream(self, other: FakeStream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """random: as the generator of a device, which a capture leaves as it was."""

    def __init__(self, device: Any = None) -> None:
        self.calls: list[str] = []
        self.now = FakeStream(self.calls, "main")
        self.spoil = False  # what is launched gives something else than what was captured

    def stream(self) -> FakeStream:
        return self.now

    def warm(self, run: Callable[[], list[Tensor]]) -> None:
        self.calls.append("warm")
        run()

    def capture(
        self, run: Callable[[list[Tensor]], list[Tensor]], given: list[Tensor]
    ) -> tuple[Callable[[], None], list[Tensor]]:
        self.calls.append("capture")
        before, kept = torch.get_rng_state(), list(given)
        outputs = [spoilt(out) for out in run(given)]
        assert not given, "memory that is held goes to nothing else"
        torch.set_rng_state(before)  # a capture draws nothing

        def replay() -> None:
            self.calls.append("launch")
            for own, out in zip(outputs, run(list(kept)), strict=True):
                own.copy_(out * 1.01 if self.spoil and out.is_floating_point() else out)

        return replay, outputs


def spoilt(tensor: Tensor) -> Tensor:
    """Memory of a capture, which runs nothing: what stands in it is no result before the first launch."""
    real = tensor.is_floating_point() or tensor.is_complex()
    wrong = math.nan if real else True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max
    if 0 in tensor.stride():  # expanded: no copy could be written there
        return torch.full_like(tensor, wrong)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).fill_(wrong)


class NoGraphs(FakeCuda):
    """CUDA refuses the capture."""

    def capture(self, run: Callable[..., Any], given: list[Tensor]) -> tuple[Callable[[], None], list[Tensor]]:
        raise RuntimeError("operation not permitted when stream is capturing")
