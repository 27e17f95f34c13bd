"""Recordings and what is made of them: what is left out, what is kept, and writes through views."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import fastdp
from fastdp.errors import GraphError
from fastdp.graphs.program import Program, recording_of
from fastdp.graphs.recorder import Recorder, Watch


def program_of(function, *inputs: Tensor, held: dict[str, Tensor] | None = None) -> Program:
    inputs = tuple(t.clone() for t in inputs)
    recorder = Recorder(inputs, held or {})
    with Watch(recorder), recorder:
        outputs = function(*inputs)
    return Program(recording_of(recorder, len(inputs), outputs))


def written_through_a_view(x: Tensor) -> list[Tensor]:
    out = x * 2
    out[1].mul_(3)
    out.T[0].add_(1)
    return [out]


def views_of_one_memory(x: Tensor) -> list[Tensor]:
    a = x + 1
    b = a.view(-1)[2:4]
    b.zero_()
    return [a.sum(1), b]


def several_results(x: Tensor) -> list[Tensor]:
    parts = x.unbind(0)
    values, places = x.sort(1)
    return [parts[1] * 2, values, places, *torch.native_layer_norm(x, [4], None, None, 1e-5)]


def of_lists(x: Tensor) -> list[Tensor]:
    return [torch.cat([x, x * 2], 1), torch.stack([x[0], x[2]]), x[torch.tensor([0, 2])], torch.where(x > 0, x, 0.5)]


def reads_and_writes(x: Tensor) -> list[Tensor]:
    """Python reads two numbers, over which something else is written afterwards."""
    least = x.min().view(1)
    positive = bool((least > 0).all())
    equal = torch.equal(least, torch.full((1,), 2.0))
    least.zero_()
    return [x * 2 + least if positive or equal else x * 3]


FUNCTIONS = [written_through_a_view, views_of_one_memory, several_results, of_lists]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_program_makes_what_the_function_makes(function) -> None:
    program = program_of(function, torch.randn(3, 4))
    for seed in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        found, same = program.run([x.clone()])
        assert same
        for a, b in zip(found, function(x.clone()), strict=True):
            assert torch.equal(a, b)


def test_what_nothing_needs_is_left_out() -> None:
    def function(x: Tensor) -> list[Tensor]:
        (x * 5).exp().sum()
        unused = x.clone()
        unused.add_(1)
        return [x.detach().view(3, 4) + 1]

    program = program_of(function, torch.randn(3, 4))
    assert [operation.func for operation in program.operations] == [torch.ops.aten.add.Tensor]


def test_random_numbers_are_drawn_though_nothing_needs_them() -> None:
    """As Python would: what is drawn next is the same."""

    def function(x: Tensor) -> list[Tensor]:
        torch.rand(3)
        return [torch.nn.functional.dropout(x, 0.5)]

    program = program_of(function, torch.randn(3, 4))
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    (found,), _ = program.run([x])
    after = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(found, function(x)[0]) and torch.equal(after, torch.rand(2))


def test_numbers_that_python_read_are_compared() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [x * 2] if bool((x > 0).all()) else [x * 3]

    program = program_of(function, torch.ones(3, 4))
    assert program.run([torch.full((3, 4), 2.0)])[1] and not program.run([-torch.ones(3, 4)])[1]
    assert program.read[0].where.startswith("test_program.py, line ")

    def rows(x: Tensor) -> list[Tensor]:
        return [x[x[:, 0] > 0].sum(0)]

    program = program_of(rows, torch.ones(3, 4))
    assert (
        program.run([torch.full((3, 4), 2.0)])[1] and not program.run([torch.tensor([[-1.0] * 4, *[[1.0] * 4] * 2])])[1]
    )


def test_parameters_are_read_anew() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    program = program_of(lambda x: [x * weight], torch.ones(3, 4), held={"weight": weight})
    with torch.no_grad():
        weight.mul_(5)
    assert torch.equal(program.run([torch.ones(3, 4)])[0][0], torch.full((3, 4), 5.0))
    assert not program.constants


def grows(x: Tensor) -> list[Tensor]:
    x.add_(1)
    return [x * 2]


def filled_beside_torch(x: Tensor) -> list[Tensor]:
    out = torch.empty(3, 4)
    out.numpy()[:] = 1.0
    return [out * x]


def only_filled(x: Tensor) -> list[Tensor]:
    return [torch.empty(3, 4)]


def a_list(x: Tensor) -> list[Tensor]:
    return [x * sum(x.tolist()[0])]


def transposed_in_place(x: Tensor) -> list[Tensor]:
    return [(x * 2).t_()]


BUFFER = torch.zeros(4)


def into_a_buffer(x: Tensor) -> list[Tensor]:
    BUFFER.add_(x.sum(0))
    return [x * BUFFER]


REFUSED = {
    grows: "there before the step",
    filled_beside_torch: "no call of torch's has written to",
    only_filled: "was not made by torch's functions",
    a_list: r"tolist\(\) gives numbers of the batch to Python",
    transposed_in_place: "changes where a tensor's numbers lie",
    into_a_buffer: "writes to 'buffer' in the forward",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_a_replay_would_not_do_is_refused(function) -> None:
    with pytest.raises(GraphError, match=REFUSED[function]):
        program_of(function, torch.ones(3, 4), held={"buffer": BUFFER})


def test_programs_are_compared() -> None:
    count = [0]

    def counts(x: Tensor) -> list[Tensor]:
        count[0] += 1
        return [x * count[0]]

    x = torch.randn(3, 4)
    assert program_of(of_lists, x).difference(program_of(of_lists, x + 1)) == ""
    assert "mul() takes 1 on one batch, 2 on another" in program_of(counts, x).difference(program_of(counts, x))
    assert "calls of torch" in program_of(of_lists, x).difference(program_of(several_results, x))


def test_other_modes_of_the_dispatcher_change_nothing() -> None:
    """Who counts flops, say, sees a private step as it is."""
    from torch.utils.flop_counter import FlopCounterMode

    found = []
    for counted in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
        optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=0.1, expected_batch_size=4, seed=1)
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
        with FlopCounterMode(display=False) if counted else contextlib.nullcontext():
            model(x).square().sum(1).mean().backward()
            optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
