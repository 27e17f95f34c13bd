"""Graphs packed into one, and texts of several lengths: rows that are marked, constants written to by index."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fastdp
from fastdp.errors import SampleMixingError, StepError

from ..removal import sensitivity

D = 6
Graph = tuple[Tensor, Tensor]  # nodes [n, D], edges [2, e]


def shares(scores: Tensor, index: Tensor, groups: int) -> Tensor:
    """Softmax within the groups that an index names."""
    largest = scores.new_full((groups,), -1e30).scatter_reduce_(0, index, scores.detach(), "amax")
    weights = (scores - largest[index]).exp()
    return weights / scores.new_zeros(groups).scatter_add_(0, index, weights)[index]


def gcn(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    (source, target), h = edges, m.lin(x)
    degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(len(target))).clamp(min=1)
    sent = h[source] * (degree[source] * degree[target]).rsqrt()[:, None]
    return h.new_zeros(h.shape).scatter_add_(0, target[:, None].expand_as(sent), sent)


def gin(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    sent = x.index_select(0, edges[0])
    return m.lin(sent.new_zeros((len(x), D)).index_add_(0, edges[1], sent) + 1.1 * x)


def sage(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    target, sent = edges[1], x[edges[0]]
    added = sent.new_zeros(len(x), D).scatter_add_(0, target.view(-1, 1).expand(-1, D), sent)
    count = sent.new_zeros(len(x)).scatter_add_(0, target, sent.new_ones(len(target))).clamp(min=1)
    return m.lin(added / count[:, None]) + m.own(x)


def sage_max(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    sent, index = x[edges[0]], edges[1].view(-1, 1).expand(-1, D)
    return m.lin(torch.zeros(len(x), D).scatter_reduce_(0, index, sent, "amax", include_self=False)) + m.own(x)


def gat(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    (source, target), h = edges, m.lin(x)
    scores = F.leaky_relu((m.score(h)[source] + m.score(h)[target]).squeeze(-1), 0.2)
    sent = h[source] * shares(scores, target, len(x))[:, None]
    return h.new_zeros(len(x), D).scatter_add_(0, target[:, None].expand_as(sent), sent) + h


def by_zeros(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    h = m.lin(x)
    return torch.zeros(len(x), D).index_add_(0, edges[1], h[edges[0]]) + h


def by_put(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    h = m.lin(x)
    return torch.zeros(len(x), D).index_put_((edges[1],), h[edges[0]], accumulate=True) + h


def by_reduce(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    h = m.lin(x)
    return h.new_full((len(x), D), 0.0).index_reduce_(0, edges[1], h[edges[0]], "amax") + h


def by_copy(m: Any, x: Tensor, edges: Tensor) -> Tensor:
    h = m.lin(x)
    return torch.zeros(len(x), D).index_copy_(0, torch.arange(len(x)), h) + h


LAYERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "GCN": gcn, "GIN": gin, "SAGE": sage, "SAGE with a maximum": sage_max, "GAT": gat,
    "zeros": by_zeros, "index_put_": by_put, "index_reduce_": by_reduce, "index_copy_": by_copy,
}  # fmt: skip


class Graphs(nn.Module):
    """Two layers, and the mean, the maximum and an attention of each graph's nodes."""

    def __init__(self, layer: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.lin, self.own = layer, nn.Linear(D, D), nn.Linear(D, D)
        self.score, self.head = nn.Linear(D, 1), nn.Linear(3 * D, 3)

    def forward(self, data: Any) -> Tensor:
        x, index, graphs = data.x, data.graph_of, data.graphs
        for _ in range(2):
            x = self.layer(self, x, data.edges).tanh()
        added = x.new_zeros(graphs, D).index_add_(0, index, x)
        count = x.new_zeros(graphs).index_add_(0, index, x.new_ones(len(index))).clamp(min=1)
        largest = x.new_full((graphs, D), -1e9).scatter_reduce_(0, index[:, None].expand_as(x), x, "amax")
        weighted = x * shares(self.score(x).squeeze(-1), index, graphs)[:, None]
        attended = x.new_zeros((graphs, D)).index_add_(0, index, weighted)
        return self.head(torch.cat([added / count[:, None], largest, attended], -1))


def packed(graphs: list[Graph], marked: bool, extra_edge: tuple[int, int] | None = None) -> Any:
    """Graphs as one. marked: also the number of each node's graph is told to be data."""
    sizes = [len(x) for x, _ in graphs]
    edges = torch.cat([e + sum(sizes[:i]) for i, (_, e) in enumerate(graphs)], 1)
    if extra_edge is not None:
        edges = torch.cat([edges, torch.tensor(extra_edge)[:, None]], 1)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    data = SimpleNamespace(
        x=torch.cat([x for x, _ in graphs]), edges=edges, graph_of=owner.clone(), graphs=len(sizes), kept=owner
    )
    fastdp.mark_rows(data.x, owner, samples=len(sizes))
    if marked:
        fastdp.mark_rows(data.graph_of, owner, samples=len(sizes))
    return data


@pytest.fixture
def graphs() -> list[Graph]:
    """One of a single node, and nodes without edges."""
    torch.manual_seed(0)
    return [(torch.randn(n, D), torch.randint(0, n, (2, 2 * n if n > 1 else 0))) for n in (4, 1, 5, 3)]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_graphs_are_exact(name: str, marked: bool, graphs: list[Graph]) -> None:
    without = [[g for k, g in enumerate(graphs) if k != i] for i in range(len(graphs))]
    less = ((packed(left, marked),) for left in without)  # each marked when its turn comes: the latest marks count
    assert sensitivity(Graphs(LAYERS[name]), (packed(graphs, marked),), less) < 1.0001


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "index_copy_"])
def test_an_edge_to_another_graph_is_refused(name: str, graphs: list[Graph]) -> None:
    with pytest.raises(SampleMixingError):
        sensitivity(Graphs(LAYERS[name]), (packed(graphs, False, extra_edge=(0, 6)),), [])


@pytest.mark.parametrize("marked", [False, True])
def test_a_number_of_another_graph_is_refused(marked: bool, graphs: list[Graph]) -> None:
    data = packed(graphs, marked)
    data.graph_of[0] = 2
    with pytest.raises(SampleMixingError):
        sensitivity(Graphs(gin), (data,), [])


def test_the_number_of_graphs_must_be_known_and_may_change(graphs: list[Graph]) -> None:
    model = Graphs(gin)
    engine = fastdp.PerSampleGradients(model)
    for few in (graphs, graphs[:3]):
        model(packed(few, True)).square().sum(1).mean().backward()
        assert engine.norms().shape == (len(few),)
    data = packed(graphs, True)
    whose = data.__dict__.pop("kept")
    for rows, owner in ((data.x, whose), (data.graph_of, whose), (data.edges, None)):
        fastdp.mark_rows(rows, owner)
    with pytest.raises(StepError, match="samples="):
        model(data)
    engine.detach()


def test_a_loader_may_say_how_many_graphs_there_are(graphs: list[Graph]) -> None:
    model = Graphs(gin)
    engine = fastdp.PerSampleGradients(model)
    model(packed(graphs, True)).square().sum(1).mean().backward()
    exact = engine.norms()
    engine.detach()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0)
    for parts in fastdp.poisson_loader(graphs, sample_rate=1.0, steps=1, collate_fn=list):
        data = packed(parts, True)
        for rows in (data.x, data.graph_of):
            fastdp.mark_rows(rows, data.kept)
        model(data).square().sum(1).mean().backward()
        torch.testing.assert_close(optimizer.norms, exact)
        optimizer.step()
    optimizer.detach()


# --------------------------------------------------------------------------- lengths of packed sequences

T = 7


class Recurrent(nn.Module):
    """A recurrent layer over texts of several lengths, pooled under the mask that the lengths make."""

    def __init__(self, pool: str, batch_first: bool = True, ordered: bool = False, frozen: bool = True) -> None:
        super().__init__()
        self.pool, self.batch_first, self.ordered = pool, batch_first, ordered
        self.embed, self.core = nn.Linear(D, D), nn.LSTM(D, D, batch_first=batch_first).requires_grad_(not frozen)
        self.score, self.head = nn.Linear(D, 1), nn.Linear(D, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(x if self.batch_first else x.transpose(0, 1))
        h, _ = self.core(pack_padded_sequence(x, lengths, self.batch_first, enforce_sorted=self.ordered))
        h, given = pad_packed_sequence(h, self.batch_first)
        h = h if self.batch_first else h.transpose(0, 1)
        mask = torch.arange(h.size(1))[None] < given[:, None]
        if self.pool == "mean":
            h = (h * mask[..., None]).sum(1) / given[:, None]
        elif self.pool == "last":
            h = h.gather(1, (given - 1)[:, None, None].expand(-1, 1, D)).squeeze(1)
        elif self.pool == "by lengths of others":
            h = h.sum(1) * given.flip(0)[:, None]
        else:
            h = (h * self.score(h).squeeze(-1).masked_fill(~mask, -1e9).softmax(1)[..., None]).sum(1)
        return self.head(h)


@pytest.mark.parametrize("pool", ["mean", "last", "attention"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_masks_made_of_the_lengths_of_packed_texts(pool: str, batch_first: bool, ordered: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([7, 5, 4, 4, 2] if ordered else [3, 7, 2, 5, 5])
    x, rows = torch.randn(5, T, D), range(5)
    less = [(x[left], lengths[left]) for i in rows for left in [[k for k in rows if k != i]]]
    assert sensitivity(Recurrent(pool, batch_first, ordered, frozen), (x, lengths), less) < 1.0001


def test_lengths_of_others_are_still_refused() -> None:
    with pytest.raises(SampleMixingError):
        sensitivity(Recurrent("by lengths of others"), (torch.randn(5, T, D), torch.tensor([3, 7, 2, 5, 5])), [])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(D, 4)

    def forward(self, bags: list[Tensor]) -> Tensor:
        return torch.stack([self.head(rows).tanh().mean(0) for rows in bags])


def test_a_list_with_a_tensor_for_each_sample_is_told_apart_from_batches() -> None:
    """Unmarked, it is refused with the loop that marks it, which reads no number that a loader's loop would be warned
    of."""
    model, records = Bags(), [(torch.randn(n % 3 + 1, D), n % 4) for n in range(12)]
    plain, engine = copy.deepcopy(model), fastdp.PerSampleGradients(model)
    loader = fastdp.poisson_loader(
        records, sample_rate=1.0, steps=3, collate_fn=lambda b: ([x for x, _ in b], torch.tensor([y for _, y in b]))
    )
    with pytest.raises(StepError, match=r"have \[1, 2, 3\] rows. If each tensor is a sample, mark all of them"):
        model([x for x, _ in records])
    for bags, y in loader:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number, x in enumerate(bags):
                fastdp.mark_rows(x, [number] * len(x), samples=len(bags))
            F.cross_entropy(model(bags), y).backward()
        for x, label, norm in zip(bags, y, engine.norms(), strict=True):
            own = torch.autograd.grad(F.cross_entropy(plain([x]), label[None]), list(plain.parameters()))
            torch.testing.assert_close(norm, torch.cat([g.flatten() for g in own]).norm())
    engine.detach()
