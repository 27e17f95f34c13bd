"""The logic of captured programs, with a stand-in for CUDA's graphs (fake_cuda.py). No GPU has run `Cuda` itself yet:
tests/optim/test_graphed_device.py waits for one."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from fastdp.errors import StepError
from fastdp.graphs.cuda_graph import Captured, NotCaptured, Pool, device_of
from fastdp.graphs.execution import Example, way_of
from fastdp.utils.rng_state import random_states

from .fake_cuda import FakeCuda, FakeStream, NoGraphs
from .test_program import program_of, reads_and_writes

CPU = torch.device("cpu")


def doubled(x: Tensor) -> list[Tensor]:
    return [x * 2, x.sum(1)]


def captured_of(function, x: Tensor, cuda: FakeCuda) -> Captured:
    program = program_of(function, x)
    return Captured(program, program.run_apart, [x], Pool(cuda))


def test_batches_are_copied_into_the_memory_of_the_graph_before_it_is_launched() -> None:
    cuda, example = FakeCuda(), torch.ones(3, 4)
    captured = captured_of(doubled, example, cuda)
    assert cuda.calls == ["warm", "warm", "warm", "capture"]
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        found, same = captured.run([x])
        assert same and torch.equal(found[0], x * 2) and torch.equal(found[1], x.sum(1))
    assert cuda.calls[4:] == ["launch"] * 3
    assert torch.equal(example, torch.ones(3, 4))  # the example's own memory is not written to


def test_results_stand_until_the_next_launch_of_any_size() -> None:
    cuda = FakeCuda()
    pool = Pool(cuda)
    programs = [program_of(doubled, torch.ones(size, 4)) for size in (3, 5)]
    small, large = (Captured(p, p.run_apart, [torch.ones(n, 4)], pool) for p, n in zip(programs, (3, 5), strict=True))
    found, _ = small.run([torch.ones(3, 4)])
    lasting = small.lasting()
    lasting()
    large.run([torch.ones(5, 4)])
    with pytest.raises(StepError, match="which has overwritten them"):
        lasting()
    small.run([torch.zeros(3, 4)])
    assert not found[0].any()  # it is so: the results of the first launch are gone
    small.lasting()()


def test_a_launch_on_another_stream_waits_for_the_last() -> None:
    cuda = FakeCuda()
    captured = captured_of(doubled, torch.ones(3, 4), cuda)
    captured.run([torch.ones(3, 4)])
    cuda.now = FakeStream(cuda.calls, "other")
    captured.run([torch.ones(3, 4)])
    captured.run([torch.ones(3, 4)])
    assert cuda.calls[4:] == ["launch", "other waits for main", "launch", "launch"]


def test_numbers_that_python_read_are_read_after_the_launch_as_they_were() -> None:
    cuda = FakeCuda()
    captured = captured_of(reads_and_writes, torch.ones(3, 4), cuda)
    found, same = captured.run([torch.full((3, 4), 3.0)])
    assert same and torch.equal(found[0], torch.full((3, 4), 6.0)) and len(found) == 1
    assert not captured.run([torch.full((3, 4), 2.0)])[1] and not captured.run([-torch.ones(3, 4)])[1]
    assert captured.run([torch.ones(3, 4)])[1] and cuda.calls[4:] == ["launch"] * 4


def test_numbers_beside_the_device_are_not_captured() -> None:
    """They would stand in the graph as they were. Here the CPU's tensors are as on another device."""
    program = program_of(doubled, torch.ones(3, 4))
    program.device = torch.device("cuda")
    with pytest.raises(NotCaptured, match="numbers on the CPU, which a graph would keep"):
        Captured(program, program.run_apart, [torch.ones(3, 4)], Pool(FakeCuda()))
    program.beside = "mul"
    with pytest.raises(NotCaptured, match=r"mul\(\) takes numbers on the CPU"):
        Captured(program, program.run_apart, [], Pool(FakeCuda()))


def way(cuda: FakeCuda, function=doubled):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    program, random = program_of(function, x), random_states(CPU)
    outputs, _ = program.run([x])
    return way_of(program, [Example([x], outputs, random)], False, Pool(cuda))


def test_a_graph_is_compared_with_the_recording() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert way(FakeCuda()).captured is not None
    spoilt = FakeCuda()
    spoilt.spoil = True
    with pytest.warns(UserWarning, match="not as a CUDA graph: launched, it is another step: the losses differ"):
        found = way(spoilt)
    assert found.captured is None and found.lasting() is None


def test_a_capture_that_fails_is_told() -> None:
    with pytest.warns(UserWarning, match="not as a CUDA graph: CUDA does not capture it"):
        assert way(NoGraphs()).captured is None


def test_random_numbers_are_those_of_the_program() -> None:
    found = way(FakeCuda(), lambda x: [torch.nn.functional.dropout(x, 0.5)])
    x = torch.ones(3, 4)
    torch.manual_seed(0)
    masks = [found.run([x])[0][0].clone() for _ in range(2)]
    torch.manual_seed(0)
    wanted = [torch.nn.functional.dropout(x, 0.5) for _ in range(2)]
    assert torch.equal(torch.stack(masks), torch.stack(wanted)) and not torch.equal(*masks)


def test_a_graph_that_draws_nothing_is_refused() -> None:
    """A generator that was not registered would draw the same masks for ever."""

    class Frozen(FakeCuda):
        def capture(self, run, given):
            replay, outputs = super().capture(run, given)

            def frozen() -> None:
                before = torch.get_rng_state()
                replay()
                torch.set_rng_state(before)

            return frozen, outputs

    with pytest.warns(UserWarning, match="it draws other random numbers"):
        assert way(Frozen(), lambda x: [torch.nn.functional.dropout(x, 0.5)]).captured is None


def test_the_cpu_has_no_graphs() -> None:
    assert device_of(CPU) is None
