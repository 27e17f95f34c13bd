"""Replayed steps on a GPU, as CUDA graphs, against Python's; and, without one, whole steps with a stand-in for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fastdp
import fastdp.graphs.steps
import fastdp.optim.graphed_forwards
import fastdp.optim.graphed_step
from fastdp.errors import FastDPError, StepError

from .. import cases
from ..graphs.fake_cuda import FakeCuda, NoGraphs
from .test_graphed import B, Net, assert_equal, batch, conv_net, eagerly, losses, pair, pictures

pytestmark = pytest.mark.slow  # `make test-all` runs it

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def flat(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids), labels, reduction="none")


def mlp(dropout: float = 0.0) -> nn.Module:
    """No number of it is read by Python or by a check."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3))


class OnDevice(Net):
    """Its positions lie where the ids do."""

    def body(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        return (x + self.drop(torch.tanh(self.two(F.gelu(self.one(self.norm(x))))))) * self.scale


def rows(seed: int, size: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator)


# ---------------------------------------------------------------------- with a stand-in


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setattr(fastdp.optim.graphed_step, "device_of", lambda device: found)
    return found


@pytest.mark.parametrize("options", [{}, dict(style="layerwise", clipping="automatic")], ids=["flat", "layerwise"])
def test_steps_are_those_of_python(cuda: FakeCuda, options: dict[str, Any]) -> None:
    """Bit by bit: new data, padding, two sizes in turn, and changes of lr, noise and clipping on the way."""
    (one, first), (two, second) = pair(mlp, "DPSGD", **options)
    step = second.graphed(flat, rows(99), (3, B))
    assert step.captured and not step.compiled
    captures = cuda.calls.count("capture")
    for k, size in enumerate((B, 3, B, B, 3)):
        for optimizer in (first, second):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + k)
            optimizer.noise_multiplier = 0.7 + 0.1 * k
            if k == 3:
                optimizer.set_clipping(None, 0.3)
        assert torch.equal(eagerly(one, first, rows(k, size), flat), step(*rows(k, size)))
        assert_equal(one, two)
    eagerly(one, first, rows(9, 2), flat), step(*rows(9, 2))  # padded
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert step.replayed == 6 and cuda.calls.count("capture") == captures == 2


def test_gradients_of_an_earlier_replay_are_refused(cuda: FakeCuda) -> None:
    """Their memory holds what the next replay gave, whose samples would count twice, with norms of others."""
    _, (model, optimizer) = pair(mlp, "DPSGD")
    step = optimizer.graphed(flat, rows(99))
    earlier, later = step.loss(*rows(0)), step.loss(*rows(1))
    with pytest.raises(StepError, match="which has overwritten them"):
        earlier.backward()
    later.backward()
    optimizer.step()


def test_dropout_draws_anew_at_every_launch(cuda: FakeCuda) -> None:
    (one, first), (two, second) = pair(lambda: mlp(0.3), "DPSGD")
    step = second.graphed(flat, rows(99))
    assert step.captured
    for k in range(3):
        torch.manual_seed(k)
        a = eagerly(one, first, rows(0), flat)
        torch.manual_seed(k)
        assert torch.equal(a, step(*rows(0)))
        assert_equal(one, two)


class Branching(nn.Sequential):
    """With dropout, whose masks Python draws again for a batch that goes the other way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool((x < 100).all()) else x * 0)


def test_a_batch_that_branches_another_way_goes_through_python(cuda: FakeCuda) -> None:
    def branching() -> nn.Module:
        torch.manual_seed(0)
        return Branching(nn.Linear(8, 3), nn.Dropout(0.3))

    (one, first), (two, second) = pair(branching, "DPSGD")
    step = second.graphed(flat, rows(99))
    assert step.captured
    for k, factor in enumerate((1, 1000, 1)):
        x, y = rows(k)
        torch.manual_seed(k)
        eagerly(one, first, (x * factor, y), flat)
        torch.manual_seed(k)
        if factor > 1:
            with pytest.warns(UserWarning, match="Python decides by the numbers of this batch another way"):
                step(x * factor, y)
        else:
            step(x, y)
        assert_equal(one, two)
    assert (step.replayed, step.eager) == (2, 1)


def test_where_nothing_is_captured_the_step_is_replayed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastdp.optim.graphed_step, "device_of", lambda device: NoGraphs())
    (one, first), (two, second) = pair(mlp, "DPSGD")
    with pytest.warns(UserWarning, match="not as a CUDA graph: CUDA does not capture it"):
        step = second.graphed(flat, rows(99))
    eagerly(one, first, rows(0), flat), step(*rows(0))
    assert_equal(one, two)
    assert step.replayed == 1 and not step.captured


# ---------------------------------------------------------------------- on a GPU


def on_gpu(make: Any) -> Any:
    return lambda: make().cuda()


@GPU
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["mlp", "net", "convolutions"])
def test_cuda_graphs_give_python_s_steps(name: str, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """New data, padding, and changes of lr, noise and clipping on the way."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    make, data, loss_fn = {
        "mlp": (lambda: mlp(dropout), rows, flat),
        "net": (lambda: OnDevice(dropout=dropout), batch, losses),
        "convolutions": (conv_net, pictures, losses),
    }[name]
    (one, first), (two, second) = pair(on_gpu(make), "DPSGD")

    def moved(seed: int, size: int = B) -> tuple[Tensor, ...]:
        return tuple(t.cuda() for t in data(seed, size))

    step = second.graphed(loss_fn, moved(99), (3, B))
    assert step.captured
    for k in range(8):
        size = (B, 3, B, 2)[k % 4] if not dropout else (B, 3)[k % 2]  # padding draws masks of its own
        for optimizer in (first, second):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + k)
            optimizer.noise_multiplier = 0.7 + 0.1 * k
            if k == 5:
                optimizer.set_clipping(None, 0.3)
        torch.manual_seed(k)
        wanted = eagerly(one, first, moved(k, size), loss_fn)
        torch.manual_seed(k)
        torch.testing.assert_close(wanted, step(*moved(k, size)))
        torch.testing.assert_close(first.norms, second.norms, rtol=1e-4, atol=1e-6)
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert step.replayed == 8


@GPU
def test_cuda_graphs_draw_new_masks() -> None:
    _, (model, optimizer) = pair(on_gpu(lambda: mlp(0.5)), "DPSGD", lr=0.0)
    x, y = (t.cuda() for t in rows(0))
    step = optimizer.graphed(flat, (x, y))
    assert step.captured and len({float(step(x, y)) for _ in range(5)}) == 5


def in_a_plain_loop(name: str, graphed: bool) -> tuple[nn.Module, Any]:
    """Six steps of a case without noise, and the optimizer."""
    model, batch, losses = cases.build(name)
    model, batch = model.cuda(), tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, Tensor) else leaf, batch)
    optimizer = fastdp.DPSGD(
        model, lr=0.01, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=4, graphed=graphed
    )
    torch.manual_seed(1)
    for _ in range(6):
        losses(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@GPU
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", cases.CASES)
def test_plain_loops_as_cuda_graphs(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The steps of every case that are those of Python; the report says which were replayed, and which as graphs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(fastdp.optim.graphed_forwards, "PAYS", 0)
    try:
        wanted, _ = in_a_plain_loop(name, False)
    except FastDPError as why:
        pytest.skip(f"refused: {why}")
    found, optimizer = in_a_plain_loop(name, True)
    told = optimizer._privacy.graphs
    graphs = [each.captured is not None for shape in told._shapes.values() for each in shape.programs]
    record_property("replayed", told.replayed)
    record_property("graphs", f"{sum(graphs)} of {len(graphs)}")
    for p, q in zip(wanted.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@GPU
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_plain_loop_is_replayed_as_cuda_graphs(dropout: float) -> None:
    runs = []
    for graphed in (False, True):
        model = mlp(dropout).cuda()
        optimizer = fastdp.DPAdamW(
            model, lr=0.01, noise_multiplier=0.7, expected_batch_size=B, sample_rate=0.1, seed=3, graphed=graphed
        )
        for k in range(6):
            torch.manual_seed(k)
            x, y = (t.cuda() for t in rows(k))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    (one, _), (two, optimizer) = runs
    told = optimizer._privacy.graphs
    (program,) = (each for shape in told._shapes.values() for each in shape.programs)
    assert told.replayed == 4 and program.captured is not None
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
