"""torch.compile: what is refused, what is never taken from an earlier step, and what is held."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp import PerSampleGradients
from fastdp.engine.compile_graph import Run
from fastdp.errors import FastDPError, StepError

from ..cases import Net
from ..compiled_models import B, D, assert_exact, build, losses

pytestmark = pytest.mark.usefixtures("fresh")


def test_compiled_afterwards_is_refused() -> None:
    plain, batch = build("lora")
    engine = PerSampleGradients(plain)
    later = torch.compile(plain, backend="eager")
    with pytest.raises(StepError, match="compiled after"):
        later(batch())
    with torch.no_grad():
        later(batch())
    engine.detach()
    later(batch()).sum().backward()
    plain.zero_grad()
    engine = PerSampleGradients(later)  # made anew: taken
    before = copy.deepcopy(plain)
    for _ in range(2):
        assert_exact(engine, later, before, batch())


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_afterwards_is_refused_where_it_would_run_plainly(in_place: bool) -> None:
    model = nn.Linear(D, 2)
    fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0)
    later = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    data = torch.utils.data.TensorDataset(torch.randn(40, D))
    for (x,) in fastdp.poisson_loader(data, expected_batch_size=20, steps=1):  # followed, so that nothing is compiled
        with pytest.raises(StepError, match="compiled after"):
            later(x)
        with torch.no_grad():
            later(x)


def test_code_compiled_before_that_runs_past_the_engine_makes_no_step() -> None:
    model = nn.Linear(D, 2)
    alias = torch.compile(model, backend="eager")
    alias(torch.randn(B, D)).sum().backward()
    model.zero_grad()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=B)
    before = model.weight.detach().clone()
    with pytest.raises(FastDPError):
        alias(torch.randn(B, D)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_mixed_samples_are_refused_every_time() -> None:
    centred = lambda m, x: m.b((y := m.a(x)) - y.mean(0, keepdim=True))
    model = torch.compile(Net(centred, a=nn.Linear(D, D), b=nn.Linear(D, 2)), backend="eager")
    PerSampleGradients(model)
    for _ in range(3):
        with pytest.raises(FastDPError, match="mean"):
            model(torch.randn(B, D)).square().sum().backward()


def _identity_written_out(order: Tensor) -> Tensor:
    places = torch.arange(B)
    return torch.add(order, 0, out=places)


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda y, order: y[order],
    "gather": lambda y, order: torch.gather(y, 0, order[:, None].expand(-1, D)),
    "out": lambda y, order: y[_identity_written_out(order)],
    "one_hot": lambda y, order: F.one_hot(order, B).float() @ y,
    "attention": lambda y, order: F.scaled_dot_product_attention(
        *(y.view(1, 1, B, D),) * 3, attn_mask=(order[:, None] == torch.arange(B)) | (order < 0)
    ).view(B, D),
}  # fmt: skip


@pytest.mark.parametrize("way", TAKEN)
def test_rows_that_depend_on_values_are_never_taken_from_before(way: str, ran: dict[str, int]) -> None:
    """In the first step every sample is in its place; later in others', by the same graph."""

    torch.manual_seed(0)
    ordered = lambda m, x: m.second(TAKEN[way](torch.tanh(m.first(x)), m.order))
    model = Net(ordered, first=nn.Linear(D, D), second=nn.Linear(D, 2), order=nn.Buffer(torch.arange(B)))
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="eager")
    engines = [PerSampleGradients(eager), PerSampleGradients(compiled)]
    weight = torch.tensor([1.0, 2.0, 3.0])
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]):
        found: list[Any] = []
        x = torch.randn(B, D)
        for net, engine in zip((eager, compiled), engines, strict=True):
            (eager if net is eager else model).order.copy_(torch.tensor(order))
            try:
                (net(x).square().sum(1) * weight).mean().backward()
                found.append(engine.norms())
            except FastDPError as problem:
                found.append(type(problem))
        if isinstance(found[0], Tensor):
            torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)
        else:
            assert found[1] is found[0]
    assert ran["compiled"] == 0


def test_backward_twice_is_refused() -> None:
    plain, batch = build("lora")
    model = torch.compile(plain, backend="eager")
    PerSampleGradients(model)
    for _ in range(3):
        loss = losses(model, batch()).mean()
        loss.backward(retain_graph=True)
        with pytest.raises((StepError, RuntimeError), match=r"twice|retain_graph"):
            loss.backward()


def test_a_write_into_what_was_saved_is_an_error() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)), backend="eager")
    PerSampleGradients(model)
    for _ in range(3):
        x = torch.randn(B, D)
        out = model(x)
        with torch.no_grad():
            x.mul_(0.01)
        with pytest.raises(RuntimeError, match="inplace"):
            out.sum().backward()


def test_a_write_into_a_divisor_is_an_error() -> None:
    """Its use reads it in the backward, where no gradient of the data does."""
    plain = Net(lambda m, x: x / m.scale, scale=nn.Parameter(torch.rand(D) + 1))
    model = torch.compile(plain, backend="aot_eager")
    PerSampleGradients(model)
    for _ in range(3):
        out = model(torch.randn(B, D))
        with torch.no_grad():
            plain.scale.mul_(2)
        with pytest.raises(StepError, match="written to"):
            out.sum().backward()


# of what a captured call has saved: the input, a result, memory seen through another tensor
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "input": lambda x, h: x.mul_(0.5),
    "result": lambda x, h: F.relu(h, inplace=True),
    "detached": lambda x, h: h.detach().mul_(3.0),
    "view": lambda x, h: h[:, :2].mul_(2.0),
}


@pytest.mark.parametrize("batch", [B, 1])
@pytest.mark.parametrize("where", WRITES)
def test_a_write_within_the_graph_into_what_was_saved_is_an_error(where: str, batch: int) -> None:
    """As in eager mode. Compiled code would write elsewhere, and norms would be those of the new numbers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        z = m.b(h)
        WRITES[where](x, h)
        return z + h[:, :2]

    model = torch.compile(Net(forward, a=nn.Linear(D, D), b=nn.Linear(D, 2)), backend="aot_eager")
    PerSampleGradients(model)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="inplace"):
            model(torch.randn(batch, D)).sum().backward()


def test_a_second_optimizer_and_a_copy() -> None:
    plain, batch = build("lora")
    model = torch.compile(plain, backend="eager")
    engine = PerSampleGradients(model)
    with pytest.raises(FastDPError, match="already has"):
        PerSampleGradients(model)
    free = copy.deepcopy(model)
    free(batch()).sum().backward()
    assert free.head.weight.grad is not None
    for _ in range(2):
        assert_exact(engine, model, copy.deepcopy(plain), batch())


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 refuses the backward after saved_tensors was read")
def test_nothing_is_held_after_backward() -> None:
    import gc
    import weakref

    plain, batch = build("language")
    model = torch.compile(plain, backend="eager")
    PerSampleGradients(model, on_backward=lambda gradients: None)
    for _ in range(2):
        losses(model, batch()).mean().backward()
    loss = losses(model, batch()).mean()
    runs = [o for o in gc.get_objects() if type(o) is Run]
    held = [weakref.ref(t) for run in runs if run.keeper is not None for t in run.keeper.grad_fn.saved_tensors]
    del runs
    assert held
    loss.backward()
    del loss
    assert not [ref for ref in held if ref() is not None]
