"""Losses that couple samples are refused by name; sums and means of each sample's own are exact."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.engine.loss_tracking import LossTracking
from fastdp.errors import BatchReadWarning, LossReductionWarning, SampleMixingError

from ..programs_by_hand import C, D, Program, WithLoss, assert_norms_of_single_samples, run, truth

PERMUTED = torch.tensor([3, 1, 5, 0, 2, 4])
WEIGHTS = torch.tensor([0.1, 3.0, 1.0, 0.5])


def same(model, h):
    return h


def pairs(out, labels):
    near = F.normalize(out, dim=1)
    return F.cross_entropy(near @ near.T, torch.arange(len(out)))


def tokens(out, labels):
    each = F.cross_entropy(out, labels, reduction="none")
    mask = (labels != 0).float()
    return (each * mask).sum() / mask.sum()


COUPLED = {
    "contrastive": pairs,
    "mix-up of the batch": lambda o, y: 0.3 * F.cross_entropy(o, y) + 0.7 * F.cross_entropy(o, y[PERMUTED]),
    "shapes that broadcast": lambda o, y: F.mse_loss(o[:, :1], y.float()),
    "shapes that broadcast by hand": lambda o, y: (o[:, :1] - y.float()).square().mean(),
    "class weights": lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS),
    "class weights of nll": lambda o, y: F.nll_loss(o.log_softmax(1), y, weight=WEIGHTS),
    "ignored labels": lambda o, y: F.cross_entropy(o, torch.where(y == 0, -100, y)),
    "mean over tokens": tokens,
    "mean over what is positive": lambda o, y: o[o > 0].mean(),
    "centred": lambda o, y: (o - o.mean(0)).square().mean(),
    "square of the mean": lambda o, y: o.mean() ** 2,
    "root of the mean": lambda o, y: o.square().mean().sqrt(),
    "product": lambda o, y: o.square().mean() * o.abs().mean(),
    "ratio": lambda o, y: o.square().mean() / o.abs().mean(),
    "largest": lambda o, y: F.cross_entropy(o, y, reduction="none").max(),
    "logsumexp": lambda o, y: F.cross_entropy(o, y, reduction="none").logsumexp(0),
    "hardest half": lambda o, y: F.cross_entropy(o, y, reduction="none").topk(3).values.mean(),
    "scaled by a statistic": lambda o, y: o.square().mean() * o.detach().std(),
    "hinge on the mean": lambda o, y: o.square().mean().clamp(max=1.0),
    "first half": lambda o, y: o[:3].square().mean(),
    "halves": lambda o, y: o[:3].square().sum() + 2 * o[3:].square().sum(),
    "chunks of several sizes": lambda o, y: sum(part.square().mean() for part in o.split(4)),
    "variance": lambda o, y: o.var(0).mean(),
    "product with other weights": lambda o, y: (o.square().sum(1) @ torch.arange(6).to(o)) / len(o),
    "einsum of all pairs": lambda o, y: torch.einsum("bc,dc->", o, o) / len(o),
    "squared norm": lambda o, y: o.norm() ** 2 / len(o),
    "running sums, squared in place": lambda o, y: (o.square().cumsum(0).square_())[-1].sum() / len(o),
    "a diagonal, scaled in place": lambda o, y: torch.diag(o[:, 0].exp()).mul_(o.new_tensor([range(6)])).trace() / 6,
    "folded, one sum negated": lambda o, y: o.exp().sum(1).view(2, 3).sum(1).mul_(o.new_tensor([1, -1])).sum(),
    "einsum of a diagonal": lambda o, y: torch.einsum("bb->", torch.cat([o, o.exp()], 1)[:, :6].exp()) / 6,
    "running sums": lambda o, y: o.square().cumsum(0).mean(),
    "running sums but one": lambda o, y: o.square().cumsum(0)[-2].sum() / len(o),
    "added to two places": lambda o, y: o.new_zeros(2, C).index_add(0, PERMUTED % 2, o).square().sum() / len(o),
    "others' losses added to one place": lambda o, y: (
        o.new_zeros(1, C).index_add(0, torch.zeros(len(o)).long(), o - o.mean(0)).sum()
    ),
    "folded": lambda o, y: o.square().sum(1).view(2, 3).sum(1).square().sum(),
    "sums of some": lambda o, y: o.square().sum(1).view(2, 3).sum(1)[0],
    "samples for classes": lambda o, y: F.cross_entropy(torch.cat([o, o], 1)[:, :6].T, y),
    "correlation": lambda o, y: (o.T @ o).square().sum(),
}
APART = {
    "cross-entropy": F.cross_entropy,
    "label smoothing": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1) * 3 + 1,
    "nll": lambda o, y: F.nll_loss(o.log_softmax(-1), y),
    "by hand": lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean(),
    "by places": lambda o, y: -o.log_softmax(1)[torch.arange(len(o)), y].mean(),
    "one-hot": lambda o, y: (F.one_hot(y, C) - o).square().sum() / len(o),
    "weights of labels": lambda o, y: (F.cross_entropy(o, y, reduction="none") * WEIGHTS[y]).mean(),
    "equal weights": lambda o, y: F.cross_entropy(o, y, weight=torch.full_like(o[0], 2.0)),
    "as many that count": lambda o, y: (o.square() * (o < 1e9)).sum() / (o < 1e9).sum().clamp(min=1),
    "a loop": lambda o, y: sum(F.cross_entropy(o[i], y[i]) for i in range(len(o))) / len(o),
    "a list": lambda o, y: torch.stack([o[i].square().sum() for i in range(len(o))]).mean(),
    "equal chunks": lambda o, y: torch.stack([p.square().sum() for p in o.split(1)]).sum() / len(o),
    "several": lambda o, y: F.cross_entropy(o, y) + 0.1 * o.square().mean() - o.abs().mean() / 3,
    "a sum over samples first": lambda o, y: o.square().sum(0).sum() / len(o),
    "kl": lambda o, y: F.kl_div(o.log_softmax(1), torch.ones_like(o).softmax(1), reduction="batchmean"),
    "soft labels": lambda o, y: F.cross_entropy(o, F.one_hot(y, C) * 0.9 + 0.025),
    "dot with ones": lambda o, y: (o.square().sum(1) @ o.new_ones(len(o)) + o[:, 0].dot(o[:, 1])) / len(o),
    "einsum": lambda o, y: torch.einsum("bc,bd->", o, o.square()) / len(o),
    "einsum, unsaid": lambda o, y: torch.einsum("bc,bc", o, o) / len(o),
    "mean of what is a number": lambda o, y: o.square().nanmean(),
    "product with ones": lambda o, y: (o.square().sum(1)[None] @ o.new_ones(len(o), 1)).sum() / len(o),
    "linear with ones": lambda o, y: F.linear(o.square().T, o.new_ones(2, len(o))).sum() / len(o),
    "bmm with ones": lambda o, y: torch.bmm(o.square().T[None], o.new_ones(1, len(o), 2)).sum() / len(o),
    "vecdot with ones": lambda o, y: torch.linalg.vecdot(o[:, 0].square(), o.new_ones(len(o))) / len(o),
    "tensordot with ones": lambda o, y: torch.tensordot(o.square(), o.new_ones(len(o)), ([0], [0])).sum() / len(o),
    "norm of order 1": lambda o, y: (o.norm(p=1) + torch.linalg.vector_norm(o, 1, dim=0).sum()) / len(o),
    "last of running sums": lambda o, y: o.square().cumsum(0)[-1].sum() / len(o),
    "added to one place": lambda o, y: (
        o.new_zeros(1, C).index_add(0, torch.zeros(len(o)).long(), o.exp()).sum() / len(o)
    ),
    "scattered to one place": lambda o, y: (
        o.new_zeros(1).scatter_add(0, torch.zeros(len(o)).long(), o[:, 0].exp())[0] / len(o)
    ),
    "trace of a diagonal": lambda o, y: torch.diag(o[:, 0].square()).trace() / len(o),
    "sums of folded losses": lambda o, y: o.square().sum(1).view(-1, 1 + len(o) // 6).sum(1).sum() / len(o),
    "masked by numbers": lambda o, y: (o.square().sum(1) * (y < 9).to(o)).sum() / (y < 9).to(o).sum(),
    "weights of columns": lambda o, y: (o.square().mean(0) * o.new_tensor([1.0, 2.0, 3.0, 4.0])[:C]).sum(),
    "weights of as many losses as samples": lambda o, y: (
        torch.stack([(o[:, 0] - k).square().mean() for k in range(6)]) * torch.tensor([1.0, 2, 3, 4, 5, 6]).to(o)
    ).sum(),
    "folded, then summed": lambda o, y: o.square().sum(1).view(1, -1).mean(1).sum(),
    "focal": lambda o, y: ((1 - o.softmax(1).gather(1, y[:, None])) ** 2 * o[:, :1].square()).mean(),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("inside", [False, True])
def test_coupled_losses_are_refused(name: str, inside: bool) -> None:
    torch.manual_seed(0)  # samples with as many positive outputs each would share nothing
    loss = COUPLED[name]
    labels = torch.tensor([0, 1, 2, 3, 1, 0])
    with pytest.raises(SampleMixingError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if inside:
            model = WithLoss(loss)
            fastdp.PerSampleGradients(model)
            model(torch.randn(6, D), labels).backward()
        else:
            run(same, lambda out, _: loss(out, labels))


@pytest.mark.parametrize("name", APART)
def test_sums_of_single_losses_are_exact(name: str) -> None:
    loss = APART[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = run(same, loss)
    torch.testing.assert_close(found.double(), truth(same, loss), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", APART)
def test_they_are_exact_within_the_model(name: str) -> None:
    assert_norms_of_single_samples(WithLoss(APART[name]), torch.randn(6, D), torch.tensor([0, 1, 2, 3, 1, 0]))


@pytest.mark.parametrize(
    ("loss", "reduction", "warned"),
    [
        (lambda o, y: o.square().sum(), "mean", True),
        (lambda o, y: o.square().sum(), "sum", False),
        (lambda o, y: o.square().mean(), "sum", True),
        (lambda o, y: o.square().mean() + o.sum(), "mean", True),
        (lambda o, y: o.square().sum() / len(o), "mean", False),
        (lambda o, y: F.mse_loss(o, o.detach() + 1, reduction="sum"), "mean", True),
    ],
)
def test_a_sum_for_a_mean_is_warned_of(loss, reduction, warned) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(same, loss, reduction=reduction)
    assert any(issubclass(w.category, LossReductionWarning) for w in caught) == warned


def test_mixing_before_the_model_is_seen_of_a_loaders_batches() -> None:
    data = [(torch.randn(D), i % C) for i in range(40)]

    def train(prepare, relabel=lambda y: y):
        model = nn.Linear(D, C)
        optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
        try:
            for x, y in fastdp.poisson_loader(data, expected_batch_size=10, steps=3):
                F.cross_entropy(model(prepare(x)), relabel(y)).backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            optimizer.detach()
        return optimizer

    for apart in (lambda x: x, lambda x: (x + torch.randn_like(x)).flip(1) * 2, lambda x: x / x.norm(dim=1)[:, None]):
        assert train(apart).history
    for coupled in (lambda x: 0.3 * x + 0.7 * x[torch.randperm(len(x))], lambda x: x - x.mean(0)):
        with pytest.raises(SampleMixingError):
            train(coupled)
    for unknown in (lambda x: torch.from_numpy(x.numpy() - x.numpy().mean(0)), lambda x: torch.tensor(x.numpy())):
        with pytest.warns(BatchReadWarning, match="numpy.*the model is given a tensor"):
            train(unknown)
    for moved in (lambda y: torch.from_numpy(np.roll(y.numpy(), 1)), lambda y: torch.tensor(y.tolist())):
        with pytest.warns(BatchReadWarning, match="the loss is computed with a tensor"):
            train(lambda x: x, moved)


class Packed(nn.Module):
    """Works on the tokens that count, and reads one of them for every place."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.inner, self.head, self.mixed = nn.Linear(D, D), nn.Linear(D, C), mixed
        self.causal = None

    def forward(self, x, mask, ids):
        if self.causal is None:
            self.causal = torch.ones(5, 5).tril()  # kept, and as large as a batch
        x = self.causal.to(x) @ x
        rows, _ = mask.nonzero(as_tuple=True)
        h = x.new_zeros(len(x), D).index_add_(0, rows, self.inner(x[mask]))
        h = h + x[torch.arange(len(x))[:, None], ids % x.size(1)].mean(1)
        return self.head(h - h.mean(0) if self.mixed and not torch.is_grad_enabled() else h)


def consistency(model, x, other, mask, ids):
    out = model(x, mask, ids)
    with torch.no_grad():
        target = model(other, mask, ids)
    return (out - target).square().sum(1).mean()


@pytest.mark.parametrize("size", [5, 6])
def test_targets_of_the_model_itself_without_gradients(size: int) -> None:
    """Its inputs then are the batch's, in their order, as labels are: what is made of them is followed."""
    torch.manual_seed(0)
    model = Packed()
    engine = fastdp.PerSampleGradients(model)
    for _ in range(2):
        x, other = torch.randn(size, 5, D), torch.randn(size, 5, D)
        mask, ids = torch.rand(size, 5) < 0.7, torch.randint(0, 9, (size, 3))
        consistency(model, x, other, mask, ids).backward()
        found = engine.norms()
    engine.detach()
    for i in range(size):
        model.zero_grad()
        consistency(model, *[t[i : i + 1] for t in (x, other, mask, ids)]).backward()
        want = sum(p.grad.square().sum() for p in model.parameters()) ** 0.5
        torch.testing.assert_close(found[i], want, rtol=1e-4, atol=1e-6)


def test_targets_that_mix_samples_are_refused() -> None:
    torch.manual_seed(0)
    model, x = Packed(mixed=True), torch.randn(6, 5, D)
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError, match="combines the samples"):
        consistency(model, x, torch.randn(6, 5, D), torch.ones(6, 5) > 0, torch.randint(0, 9, (6, 3))).backward()


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "budget"])
def test_nothing_stays_behind_of_what_is_computed_again(way: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D)), nn.Linear(D, C)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=way == "reentrant"))

    options = {"memory_budget": 1} if way == "budget" else {}
    options |= {"sample_rate": 0.1, "expected_batch_size": 6}
    optimizer = fastdp.DPSGD(model := Block(), lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0, **options)
    for _ in range(4):
        losses = model(torch.randn(6, D, requires_grad=True)).square().sum(1)
        assert len(torch.overrides._get_current_function_mode_stack()) == 1
        losses.mean().backward()
        optimizer.step()
        assert not any(isinstance(mode, LossTracking) for mode in torch.overrides._get_current_function_mode_stack())


def test_numbers_read_of_what_was_made_of_a_loaders_batch_are_warned_of() -> None:
    optimizer = fastdp.DPSGD(model := nn.Linear(D, C), lr=0.1, noise_multiplier=1.0, expected_batch_size=12)
    with pytest.warns(BatchReadWarning):
        for (x,) in fastdp.poisson_loader([(torch.randn(D),) for _ in range(40)], sample_rate=0.3, steps=1):
            twice = x * 2
            model(twice / float(twice.abs().max())).square().sum(1).mean().backward()
            optimizer.step()
    optimizer.detach()


@pytest.mark.parametrize(
    "coupled",
    [
        lambda w: w / w.sum(),
        lambda w: w.softmax(0),
        lambda w: w * w.max(),
        lambda w: w / torch.linalg.norm(w),
        lambda w: w / torch.einsum("i,i->", w, w),
        lambda w: w[torch.randperm(len(w))],
        lambda w: F.mse_loss(w, w * 0) * torch.ones(len(w)),
    ],
)
def test_numbers_of_records_that_numpy_holds_are_not_coupled_before_the_forward(coupled) -> None:
    """They come without a layout: what has a row for each sample is taken for theirs."""
    optimizer = fastdp.DPSGD(model := nn.Linear(D, C), lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    records = [(torch.randn(D), float(n + 1)) for n in range(40)]
    collate = lambda batch: (torch.stack([x for x, _ in batch]), np.array([w for _, w in batch], dtype=np.float32))
    for x, w in fastdp.poisson_loader(records, sample_rate=0.3, steps=1, collate_fn=collate):
        weights = coupled(torch.from_numpy(w))
        with pytest.raises(SampleMixingError):
            (model(x).square().sum(1) * weights).mean().backward()
            optimizer.step()
    optimizer.detach()


def test_numbers_by_place_from_before_the_forward_are_seen_of_a_loaders_batches() -> None:
    model = nn.Linear(3, 2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3))
    loader = fastdp.poisson_loader(data, sample_rate=0.2)
    fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    (x,) = next(iter(loader))
    weights = torch.linspace(-3, 3, len(x))
    losses = model(x).square().sum(1)
    with pytest.raises(SampleMixingError, match="place"):
        (losses * weights).mean().backward()


def test_other_modes_may_begin_within_and_end_after() -> None:
    model = Program(same)
    engine = fastdp.PerSampleGradients(model)
    with torch.device("cpu"):
        out = model(torch.randn(6, D))
    with torch.device("cpu"):
        loss = out.square().sum(1).mean()
    loss.backward()
    assert engine.norms().shape == (6,)
    with pytest.raises(SampleMixingError):
        with torch.device("cpu"):
            out = model(torch.randn(6, D))
        out.mean(0).square().sum().backward()


@pytest.mark.parametrize("table", [torch.randn(6, 4), torch.randn(9, 4)])
def test_a_table_that_has_as_many_rows_as_the_batch_may_be_marked(table: torch.Tensor) -> None:
    """Positions of a teacher's: [T, D] beside [B, T, D], where T is B by chance."""
    engine = fastdp.PerSampleGradients(model := nn.Linear(4, 4))
    distance = lambda x: (model(x) - (x + table[:6])).square().sum((1, 2)).mean()
    with pytest.raises(SampleMixingError, match=r"mark_rows\(tensor, None\)"):
        distance(torch.randn(6, 6, 4)).backward()
    fastdp.mark_rows(table, None)
    distance(torch.randn(6, 6, 4)).backward()
    assert engine.norms().shape == (6,)
    engine.detach()


def test_pairs_that_the_loop_concatenates_say_how() -> None:
    """Chosen and rejected texts in one forward. The remedy of the message works."""
    for mark in (False, True):
        model, x = nn.Linear(D, 1), torch.randn(12, D)
        engine = fastdp.PerSampleGradients(model)
        if mark:
            x = fastdp.mark_rows(x, torch.arange(6).repeat(2), samples=6)
        chosen, rejected = model(x).squeeze(-1).chunk(2)
        loss = -F.logsigmoid(chosen - rejected).mean()
        if mark:
            loss.backward()
            norms = engine.norms()
            engine.detach()
            for i in range(6):
                own = -F.logsigmoid(-model(x[[i, i + 6]].detach()).diff(dim=0)).sum()
                grads = torch.autograd.grad(own, list(model.parameters()), allow_unused=True)
                whole = torch.cat([g.flatten() for g in grads if g is not None]).norm()
                torch.testing.assert_close(norms[i], whole, rtol=1e-5, atol=1e-7)
        else:
            with pytest.raises(SampleMixingError, match=r"concatenated.*mark_rows\(x, torch.arange\(n\).repeat"):
                loss.backward()


def test_figures_in_inference_mode_before_the_backward() -> None:
    """Nobody counts how often its tensors are written to."""
    model = nn.Linear(D, C)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, sample_rate=0.1, expected_batch_size=6)
    for _ in range(2):
        x, y = torch.randn(6, D), torch.randint(0, C, (6,))
        out = model(x)
        loss = F.cross_entropy(out, y)
        with torch.inference_mode():
            F.one_hot(y, C).float().mul_(out).sum()
            out.topk(2).indices.eq(y[:, None]).any(1).sum().item()
            torch.zeros_like(out)[:3].add_(1)
            torch.ones_like(out).cumsum(0)[y]
        loss.backward()
        optimizer.step()
    optimizer.detach()
