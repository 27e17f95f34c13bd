"""Rows that a user marks: graphs packed into one, lists of samples, tensors hidden in other objects."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import fastdp
from fastdp.errors import BatchLayoutError, SampleMixingError, StepError

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "rows.md"
D = 6
NODES = [4, 1, 3]  # of each graph


class Messages(nn.Module):
    """Two rounds of messages along edges, then the sum of each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(D, D), nn.Linear(2 * D, D), nn.Linear(D, 3)

    def forward(self, data: Any) -> Tensor:
        x = data.x
        for _ in range(2):
            sent = self.message(x)[data.edges[0]].tanh()
            received = torch.zeros_like(x).index_add(0, data.edges[1], sent)
            x = self.update(torch.cat([x, received], 1)).tanh()
        pooled = x.new_zeros(data.graphs, D).index_add(0, data.graph_of, x)
        return self.head(pooled)


def ring(nodes: int, start: int = 0) -> Tensor:
    here = torch.arange(nodes)
    return torch.stack([here, (here + 1) % nodes]) + start


def together(parts: list[Tensor], extra_edge: tuple[int, int] | None = None, samples: int | None = None) -> Any:
    starts = [sum(NODES[:i]) for i in range(len(parts))]
    edges = torch.cat([ring(len(x), start) for x, start in zip(parts, starts, strict=True)], 1)
    if extra_edge is not None:
        edges = torch.cat([edges, torch.tensor(extra_edge)[:, None]], 1)
    graph_of = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(x) for x in parts]))
    data = SimpleNamespace(x=torch.cat(parts), edges=edges, graph_of=graph_of, graphs=len(parts))
    fastdp.mark_rows(data.x, graph_of, samples)
    fastdp.mark_rows(data.graph_of, graph_of, samples)
    fastdp.mark_rows(data.edges, None)
    return data


@pytest.fixture
def graphs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, D) for n in NODES]


def norms_alone(model: nn.Module, parts: list[Tensor]) -> Tensor:
    found = []
    for x in parts:
        data = SimpleNamespace(x=x, edges=ring(len(x)), graph_of=torch.zeros(len(x), dtype=torch.long), graphs=1)
        grads = torch.autograd.grad(model(data).square().sum(), list(model.parameters()))
        found.append(sum(g.double().square().sum() for g in grads).sqrt())
    return torch.stack(found).float()


def test_graphs_in_an_object_that_says_how_many_they_are(graphs: list[Tensor]) -> None:
    model = Messages()
    exact = norms_alone(model, graphs)
    engine = fastdp.PerSampleGradients(model)
    for _ in range(2):  # again, with other objects
        model(together(graphs, samples=3)).square().sum(1).mean().backward()
        torch.testing.assert_close(engine.norms(), exact)
    model(together(graphs[:2], samples=2)).square().sum(1).mean().backward()  # the number may change
    torch.testing.assert_close(engine.norms(), exact[:2])


def test_the_number_of_samples_must_be_known(graphs: list[Tensor]) -> None:
    model = Messages()
    fastdp.PerSampleGradients(model)
    with pytest.raises(StepError, match="samples="):
        model(together(graphs))


def test_the_loader_may_say_it(graphs: list[Tensor]) -> None:
    model = Messages()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0)
    data = [(x, torch.tensor(i)) for i, x in enumerate(graphs)]
    loader = fastdp.poisson_loader(data, sample_rate=1.0, steps=1, collate_fn=lambda items: [x for x, _ in items])
    exact = norms_alone_detached(model, graphs)
    for parts in loader:
        model(together(parts)).square().sum(1).mean().backward()
        torch.testing.assert_close(optimizer.norms, exact)
        optimizer.step()


def norms_alone_detached(model: nn.Module, parts: list[Tensor]) -> Tensor:
    twin = Messages()
    twin.load_state_dict(model.state_dict())
    return norms_alone(twin, parts)


class Rows(nn.Module):
    """A result for each row, of which samples have different numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 2)

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        return self.inner(rows)


def test_a_mark_replaces_what_a_forward_before_took_the_tensor_for() -> None:
    torch.manual_seed(0)
    model, owner = Rows(), torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    ids, rows = torch.randn(3), torch.randn(9, D)
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    with pytest.raises(BatchLayoutError, match="mark_rows"):
        model(ids, rows).square().sum().backward()  # two rows each, by the look of it
    model(ids, fastdp.mark_rows(rows, owner)).square().sum().backward()
    found = engine.norms()
    engine.detach()
    for b in range(3):
        grads = torch.autograd.grad(model(ids[b], rows[owner == b]).square().sum(), list(model.parameters()))
        torch.testing.assert_close(found[b], sum(g.square().sum() for g in grads).sqrt())


class Each(nn.Module):
    """A list of sequences, each worked on alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 3)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return torch.stack([self.inner(x).tanh().mean(0) for x in parts])


def test_lists_of_samples() -> None:
    torch.manual_seed(0)
    model, parts = Each(), [torch.randn(5, D) for _ in range(3)]
    engine = fastdp.PerSampleGradients(model)
    marked = [fastdp.mark_rows(x.clone(), [i] * len(x), samples=3) for i, x in enumerate(parts)]
    model(marked).square().sum(1).mean().backward()
    found = engine.norms()
    engine.detach()
    for x, norm in zip(parts, found, strict=True):
        grads = torch.autograd.grad(model([x]).square().sum(), list(model.parameters()))
        torch.testing.assert_close(norm, sum(g.square().sum() for g in grads).sqrt())


def test_lists_of_equal_tensors_are_told_how_they_are_read() -> None:
    model = Each()
    fastdp.PerSampleGradients(model)
    with pytest.warns(UserWarning, match="mark_rows"):
        model([torch.randn(5, D) for _ in range(3)])


def test_what_marks_say_must_agree() -> None:
    model = Each()
    fastdp.PerSampleGradients(model)
    parts = [fastdp.mark_rows(torch.randn(2, D), [i, i], samples=2 + i) for i in range(2)]
    with pytest.raises(BatchLayoutError, match=r"samples=\[2, 3\]"):
        model(parts)
    with pytest.raises(ValueError, match="samples=1"):
        fastdp.mark_rows(torch.randn(2, D), [0, 1], samples=1)
    with pytest.raises(ValueError, match="-1"):
        fastdp.mark_rows(torch.randn(2, D), [-1, 1])


class Rotated(nn.Module):
    """Positions of text, a constant, and of images, an input without a batch: one table for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        table = torch.cat([torch.zeros(4, 2), places]).sum(1)
        return (self.inner(x) * table.cos()[:, None]).sum(1)


def test_a_table_taken_for_rows_of_samples_is_refused_with_the_remedy() -> None:
    torch.manual_seed(0)
    model, x, places = Rotated(), torch.randn(4, 12, D), torch.randn(8, 2)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError, match=r"mark_rows\(tensor, None\)"):
        model(x, places).square().sum(1).mean().backward()
    model(x, fastdp.mark_rows(places, None)).square().sum(1).mean().backward()
    found = engine.norms()
    engine.detach()
    for b in range(4):
        grads = torch.autograd.grad(model(x[b : b + 1], places).square().sum(), list(model.parameters()))
        torch.testing.assert_close(found[b], sum(g.square().sum() for g in grads).sqrt())


def test_the_documents_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert len(blocks) == 3
    scope: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/rows.md, block {number}", "exec"), scope)
    assert scope["norms"].shape == (2,) and scope["optimizer"].norms.shape == (3,)


def test_packed_sequences_are_as_many_as_they_are_whatever_was_marked_before() -> None:
    before = fastdp.mark_rows(torch.randn(8, D), torch.arange(8) % 4, samples=4)  # of another batch, and kept
    model = nn.LSTM(D, 3, batch_first=True)
    gradients = fastdp.PerSampleGradients(model, loss_reduction="sum")
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, D) for n in (2, 5, 3)], enforce_sorted=False)
    model(packed)[0].data.square().sum().backward()
    assert gradients.norms().shape == (3,) and len(before) == 8


def test_an_edge_between_two_graphs_is_refused(graphs: list[Tensor]) -> None:
    model = Messages()
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        model(together(graphs, extra_edge=(0, 5), samples=3)).square().sum(1).mean().backward()
