"""Programs as Inductor's code: the same results within rounding, the same random numbers, or a reason why not."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._inductor
from torch import Tensor

import fastdp.ops
from fastdp.errors import GraphError
from fastdp.graphs.execution import Example, way_of
from fastdp.graphs.inductor import Compiled, NotCompiled
from fastdp.ops.registry import OPERATORS, watched
from fastdp.utils.rng_state import random_states

from .test_program import FUNCTIONS, program_of, reads_and_writes

pytestmark = pytest.mark.slow  # `make test-all` runs it


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compiled_of(function, x: Tensor, **options) -> Compiled:
    with watched():
        program = program_of(function, x, **options)
    random = random_states(torch.device("cpu"))
    outputs, _ = program.run([x.clone()])
    way_of(program, [Example([x.clone()], outputs, random)], True, None)
    return Compiled(program, [x.clone()])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_makes_what_the_program_makes(function) -> None:
    """Writes through views too: they stay within the program, and each replay has memory of its own."""
    compiled = compiled_of(function, numbers(0, 3, 4))
    earlier = []
    for seed in range(3):
        x = numbers(seed, 3, 4)
        found, same = compiled.run([x])
        assert same and torch.equal(x, numbers(seed, 3, 4))
        wanted, _ = compiled.program.run([x])
        earlier.append((found, wanted))
    for found, wanted in earlier:
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()


def test_small_per_sample_gradients_are_given_to_inductor_as_torch_s_functions(monkeypatch) -> None:
    def function(x: Tensor) -> list[Tensor]:
        mean, rstd = x.mean(2), torch.ones(3, 5)
        return [*fastdp.ops.norm_affine_per_sample(x * 2, x, mean, rstd), fastdp.ops.linear_per_sample(x, x + 1)]

    compiled = compiled_of(function, numbers(0, 3, 5, 4))
    for operator in ("norm_affine_per_sample", "linear_per_sample"):
        monkeypatch.setattr(OPERATORS[operator], "implementation", None)  # nobody asks for it
    replayed, _ = compiled.run([numbers(1, 3, 5, 4)])
    monkeypatch.undo()
    for a, b in zip(replayed, function(numbers(1, 3, 5, 4)), strict=True):
        torch.testing.assert_close(a, b)


def test_other_operators_of_fastdp_run_as_they_are() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [fastdp.ops.embedding_norm_sq(x.abs().long(), x.unsqueeze(2)) * 2]

    compiled = compiled_of(function, numbers(0, 3, 4))
    assert torch.equal(compiled.run([numbers(1, 3, 4)])[0][0], function(numbers(1, 3, 4))[0])


@pytest.mark.skipif(torch.__version__ < "2.10", reason="Inductor of torch 2.9 draws other numbers, which is refused")
def test_dropout_draws_what_python_draws() -> None:
    """New numbers at every replay; and what is drawn behind is the same."""

    def function(x: Tensor) -> list[Tensor]:
        torch.rand(3)
        return [torch.nn.functional.dropout(x, 0.5), torch.nn.functional.dropout(x * 2, 0.1)]

    compiled = compiled_of(function, numbers(0, 30, 4))
    x = numbers(1, 30, 4)
    torch.manual_seed(0)
    found = [compiled.run([x])[0] for _ in range(2)]
    after = torch.rand(2)
    torch.manual_seed(0)
    wanted = [function(x) for _ in range(2)]
    assert torch.equal(after, torch.rand(2)) and not torch.equal(found[0][0], found[1][0])
    for outputs in zip(found, wanted, strict=True):
        for a, b in zip(*outputs, strict=True):
            torch.testing.assert_close(a, b)


def test_numbers_that_python_read_are_compared_as_they_were_when_it_read() -> None:
    compiled = compiled_of(reads_and_writes, torch.ones(3, 4))
    assert len(compiled.program.read) == 2
    assert compiled.run([torch.full((3, 4), 3.0)])[1]
    assert not compiled.run([torch.full((3, 4), 2.0)])[1] and not compiled.run([-torch.ones(3, 4)])[1]


def test_rows_picked_by_numbers_are_not_compiled() -> None:
    program = program_of(lambda x: [x[x[:, 0] > 0].sum(0)], torch.ones(3, 4))
    with pytest.raises(NotCompiled, match="picks rows"):
        Compiled(program, [torch.ones(3, 4)])


def test_a_failure_of_inductor_is_told(monkeypatch) -> None:
    def fails(*args, **options):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch._inductor, "compile", fails)
    with pytest.raises(NotCompiled, match=r"Inductor fails \(RuntimeError: no compiler\)"):
        Compiled(program_of(lambda x: [x * 2], torch.ones(3, 4)), [torch.ones(3, 4)])


def scaled(outputs: list[Tensor]) -> list[Tensor]:
    return [outputs[0], outputs[1] * 1.01]


def drawing(outputs: list[Tensor]) -> list[Tensor]:
    torch.rand(1)
    return outputs


WRONG = {
    "scaled": (scaled, "differ by more than rounding"),
    "moved": (lambda outputs: [outputs[0].roll(1, 0), outputs[1]], "differ by more than rounding"),
    "lost": (lambda outputs: [outputs[0], outputs[1].masked_fill(outputs[1] == outputs[1].max(), torch.nan)],
             "differ by more than rounding"),
    "drawing": (drawing, "draws other random numbers"),
    "rounded": (lambda outputs: [outputs[0], outputs[1] * (1 + 1e-6)], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_another_result_is_refused(monkeypatch, name: str) -> None:
    change, words = WRONG[name]
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, *_, **__: lambda *args: change(list(graph(*args))))
    refused = pytest.raises(GraphError, match=words) if words else contextlib.nullcontext()
    with refused:
        compiled_of(lambda x: [x.sum(1), x.exp()], numbers(0, 3, 4))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_rounding_is_that_of_the_coarsest_numbers(monkeypatch, kind: torch.dtype) -> None:
    """An error of 1e-5 is none in 16 bits, but one of 64."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, *_, **__: lambda *args: scaled(list(graph(*args))))
    refused = contextlib.nullcontext() if kind == torch.bfloat16 else pytest.raises(GraphError, match="1 of 2 results")
    x = numbers(0, 3, 4) if kind == torch.bfloat16 else numbers(0, 3, 4).double()
    with refused:
        compiled_of(lambda x: [x.sum(1), (x.to(kind) * 2).to(x.dtype) / 2], x)
