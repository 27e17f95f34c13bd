"""Uses of a head with its loss: routes, people, autocast, several batches, refusals, planted errors, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.errors import FastDPError, GraphError, SampleMixingError
from fastdp.grad_sample import head_loss as use_of_head
from fastdp.grad_sample.head_loss import HeadLoss
from fastdp.grad_sample.head_samples import HeadGradients, HeadParts
from fastdp.losses import linear_cross_entropy
from fastdp.ops import head, head_loss

from .. import cases
from ..truth import against, assert_refused, compare, norms_of, truth

FUSED = [name for name in cases.CASES if name.startswith("fused_head")]


class Model(nn.Module):
    """Embedding, a layer, a head; tied or not."""

    def __init__(self, tied: bool = False, v: int = 23, d: int = 8) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(v, d), nn.Linear(d, d)
        self.head = nn.Linear(d, v)
        if tied:
            self.head.weight = self.table.weight

    def hidden(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids)).tanh()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(self.hidden(ids), self.head.weight, labels, self.head.bias)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch)


def batch(b: int = 5, t: int = 7, v: int = 23) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    labels = torch.randint(0, v, (b, t))
    labels[0, 2:5] = -100
    return torch.randint(0, v, (b, t)), labels


@pytest.fixture(params=["stored", "by tokens", "partly", "recomputed", "slices"])
def route(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Gradients of samples stored (a few tokens at a time), of some of them, or logits computed again, of whole tokens
    or a few words at a time."""
    monkeypatch.setattr(use_of_head, "SHARE", 1e9 if request.param in ("stored", "by tokens") else 0.0)
    if request.param == "partly":
        monkeypatch.setattr(use_of_head._HeadLoss, "_stored", lambda *given: (len(given[2]) + 1) // 2)
    if request.param == "by tokens":
        monkeypatch.setattr(head_loss, "PART", 250)
    if request.param == "slices":
        monkeypatch.setattr(head_loss, "LIMIT", 1)
        monkeypatch.setattr(head, "SLICE", 200)
    yield request.param


@pytest.mark.parametrize("name", FUSED)
def test_every_route(route: str, name: str) -> None:
    found = against(truth(*cases.build(name)), *cases.build(name))
    assert found.worst < 1e-5, (route, found)
    if name in ("fused_head", "fused_head_tied", "fused_head_bias"):
        kinds = {"stored": HeadGradients, "by tokens": HeadGradients, "partly": HeadParts}
        assert any(isinstance(use, kinds.get(route, HeadLoss)) for use in found.uses)


@pytest.mark.parametrize("tied", [False, True])
def test_people(route: str, tied: bool) -> None:
    """The records of a person are clipped as one, unequally many of each."""
    model, given = Model(tied), batch(6)
    rows, owner = truth(model, given, losses), torch.tensor([0, 1, 0, 2, 2, 2])
    exact = {name: torch.zeros(3, *g.shape[1:], dtype=g.dtype).index_add_(0, owner, g) for name, g in rows.items()}
    engine = fastdp.PerSampleGradients(model)
    engine.group_by(owner.tolist())
    losses(model, given).mean().backward()
    norms = norms_of(exact)
    torch.testing.assert_close(engine.norms().double(), norms, rtol=1e-5, atol=0)
    factors = torch.rand(3)
    for name, total in engine.clipped_sum(factors).items():
        want = torch.einsum("b,b...->...", factors.double(), exact[name])
        torch.testing.assert_close(total.double(), want, rtol=0, atol=1e-5 * float(norms.max()))


def test_autocast_and_bfloat16(route: str) -> None:
    """Of numbers of 16 bits, as autocast makes them: norms equal those of the sums' own gradients."""
    for autocast in (True, False):
        model, given = Model(), batch()
        if not autocast:
            model.bfloat16()
        engine = fastdp.PerSampleGradients(model)
        with torch.autocast("cpu", enabled=autocast):
            found = losses(model, given)
        exact = losses(Model().float() if autocast else model, given)
        assert found.dtype == torch.float32 and found.shape == exact.shape
        found.mean().backward()
        norms = engine.norms().double()
        for number in range(len(norms)):
            alone = engine.clipped_sum(torch.nn.functional.one_hot(torch.tensor(number), len(norms)).float())
            size = sum(float(g.double().square().sum()) for g in alone.values()) ** 0.5
            assert norms[number] * (1 - 1e-5) <= size * (1 + 1e-5) <= norms[number] * (1 + 1e-3)
        engine.detach()


def test_a_sample_that_is_not_finite_contributes_nothing(route: str) -> None:
    model, (ids, labels) = Model(v=24), batch()
    with torch.no_grad():
        model.table.weight[23] = torch.nan
    ids[3, 1] = 23
    engine, others = fastdp.PerSampleGradients(model), [0, 1, 2, 4]
    exact = truth(model, (ids[others], labels[others]), losses)
    model(ids, labels).mean().backward()
    norms = engine.norms()
    assert not norms[3].isfinite()
    torch.testing.assert_close(norms[others].double(), norms_of(exact), rtol=1e-5, atol=0)
    for name, total in engine.clipped_sum(norms.isfinite().float()).items():
        torch.testing.assert_close(total.double(), exact[name].sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["predicted", "equal", "cancelling"])
def test_rounding_never_makes_a_norm_too_small(route: str, kind: str) -> None:
    """Where probabilities are near 1, numbers are rounded alike, or positions cancel."""
    torch.manual_seed(0)
    d, v, t = 256, 1000, 100
    weight, labels, hidden = torch.randn(v, d), torch.randint(0, v, (3, t)), 0.05 * torch.randn(3, t, d)
    if kind == "predicted":
        hidden = weight[labels] * (20 / d)
    elif kind == "equal":
        weight, hidden = torch.full((v, d), 0.2) + 1e-3 * weight, torch.full((3, t, d), 0.3)
    else:
        hidden = hidden[:, :1].expand(3, t, d).contiguous()
    if route == "slices":
        weight, hidden = weight[:, :16].contiguous(), hidden[:, :7, :16].contiguous()
        labels = labels[:, :7].contiguous()
    model = cases.Net(lambda m, h, y: linear_cross_entropy(h, m.weight, y), weight=nn.Parameter(weight))
    engine = fastdp.PerSampleGradients(model)
    model(hidden, labels).mean().backward()
    norms = engine.norms().double()
    for number in range(3):
        factors = torch.nn.functional.one_hot(torch.tensor(number), 3).float()
        size = float(engine.clipped_sum(factors)["weight"].double().norm())
        assert size <= float(norms[number]) * (1 + 1e-4), (route, kind, size, norms)


def test_compiled_models() -> None:
    model, given = Model(True), batch()
    engine = fastdp.PerSampleGradients(model)
    losses(model, given).mean().backward()
    exact = engine.norms()
    engine.detach()
    engine = fastdp.PerSampleGradients(compiled := torch.compile(model, backend="aot_eager"))
    for _ in range(2):
        losses(compiled, given).mean().backward()
        torch.testing.assert_close(engine.norms(), exact)
    engine.detach()


# ---------------------------------------------------------------------- refused


def test_replayed_steps_are_refused() -> None:
    model, given = Model(), batch()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=5)
    with pytest.raises(GraphError, match="cannot be replayed"):
        optimizer.graphed(losses, (given,))
    optimizer.detach()


def test_in_the_loss() -> None:
    """A model that returns hidden states; the head is its own, and the loss is taken outside."""
    body = cases.Net(lambda m, ids: m.model.hidden(ids), model=Model())
    fused = lambda m, given: linear_cross_entropy(m(given[0]), m.model.head.weight, given[1])
    assert compare(body, batch(), fused).worst < 1e-5


def test_refused_without_a_forward() -> None:
    model, (ids, labels) = Model(), batch()
    hidden = model.hidden(ids).detach()
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        linear_cross_entropy(hidden, model.head.weight, labels).mean().backward()
        engine.norms()


def test_refused_by_transforms() -> None:
    """torch.func's transforms say what to do; functional_call alone is an ordinary call."""
    model, (ids, labels) = Model(), batch()
    own = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], i: Tensor, y: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (i[None], y[None])).sum()

    with pytest.raises(GraphError, match="torch.func's transforms"):
        torch.func.grad(loss)(own, ids[0], labels[0])
    with pytest.raises(GraphError, match="causal_lm_loss"):
        torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(own, ids, labels)
    torch.testing.assert_close(loss(own, ids[0], labels[0]), losses(model, (ids[:1], labels[:1])).sum())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["labels of others", "labels by place", "weight of samples", "time major", "coupled"])
def test_samples_that_are_mixed_are_refused(kind: str, frozen: bool) -> None:
    class Mixing(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h, w = self.hidden(ids), self.head.weight
            if kind == "labels of others":
                labels = labels.roll(1, 0)
            elif kind == "labels by place":
                labels = torch.arange(len(ids))[:, None].expand(-1, ids.size(1)).contiguous()
            elif kind == "weight of samples":
                w = w + 0.01 * h.mean()
            elif kind == "time major":
                h, labels = h.transpose(0, 1), labels.t()
            found = linear_cross_entropy(h, w, labels)
            return found / found.sum() if kind == "coupled" else found

    model = Mixing()
    model.head.requires_grad_(not frozen)
    assert_refused(model, batch(5, 5), losses)


def test_hidden_states_of_no_sample_are_refused() -> None:
    class Constant(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return linear_cross_entropy(self.layer.weight.expand(len(ids), -1, -1), self.head.weight, labels)

    assert_refused(Constant(), batch(5, 8), losses, "no data of the samples", SampleMixingError)


def test_weights_written_to_before_the_sums_are_refused() -> None:
    model, given = Model(), batch()
    with patch.object(use_of_head, "SHARE", 0.0):
        engine = fastdp.PerSampleGradients(model)
        losses(model, given).mean().backward()
    engine.norms()
    with torch.no_grad():
        model.head.weight.add_(1)
    with pytest.raises(FastDPError, match="written to"):
        engine.clipped_sum(torch.ones(5))
