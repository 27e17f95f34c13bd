"""What a loss takes besides its input: weights, margins, tables, labels in another order."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.errors import BatchReadWarning, LossNotFollowedWarning, LossReductionWarning, SampleMixingError

from ..programs_by_hand import C, D, WithLoss, assert_norms_of_single_samples, run, truth

CLASSES = torch.tensor([0.1, 3.0, 1.0, 0.5])
TABLE = torch.randn(C, 3, generator=torch.Generator().manual_seed(0))


def same(model, h):
    return h


def one_hot(y, like):
    return F.one_hot(y, C).to(like.dtype)


def rare(y):
    return 1 / torch.bincount(y, minlength=C).float().clamp(min=0.5) ** 2


def bce(o, y, **options):
    return F.binary_cross_entropy_with_logits(o, one_hot(y, o), **options)


def scatter_counts(y):
    return torch.zeros(C).scatter_add(0, y, torch.ones(len(y)))


def occurring(y):
    weights = torch.full((C,), 0.5)
    return weights.index_put_((y,), torch.ones(len(y)), accumulate=True)


COUPLED = {
    "weights by frequency": lambda o, y: bce(o, y, weight=1 / one_hot(y, o).mean(0).clamp(min=0.05) ** 2),
    "the same of softmax": lambda o, y: F.multilabel_soft_margin_loss(
        o, one_hot(y, o), weight=1 / one_hot(y, o).mean(0).clamp(min=0.05) ** 2
    ),
    "weights by the outputs": lambda o, y: bce(o, y, weight=o.detach().abs().mean(0) ** 8),
    "the largest outputs": lambda o, y: bce(o, y, weight=o.detach().abs().amax(0) ** 4),
    "weights of the positive": lambda o, y: bce(
        o, y, pos_weight=(1 - one_hot(y, o)).sum(0) / one_hot(y, o).sum(0).clamp(min=1)
    ),
    "counted": lambda o, y: F.cross_entropy(o, y, weight=rare(y), reduction="none").sum(),
    "counted by scatter": lambda o, y: F.nll_loss(
        o.log_softmax(1), y, weight=1 / scatter_counts(y).clamp(min=1), reduction="sum"
    ),
    "what occurs": lambda o, y: F.cross_entropy(o, y, weight=occurring(y), reduction="none").sum(),
    "of soft labels": lambda o, y: F.cross_entropy(o, one_hot(y, o), weight=rare(y)),
    "of margins": lambda o, y: F.multi_margin_loss(o, y, weight=one_hot(y, o).sum(0) ** 3),
    "one number for all": lambda o, y: F.margin_ranking_loss(
        o[:, 0], o[:, 1], (y > 0).long() * 2 - 1, margin=o.detach().std()
    ),
    "smoothing": lambda o, y: F.cross_entropy(o, y, label_smoothing=o.detach().softmax(1).amax() * 0.9),
    "a variance of the batch": lambda o, y: F.gaussian_nll_loss(o, one_hot(y, o), o.detach().var().expand(len(o), C)),
    "divided by weights": lambda o, y: F.mse_loss(o, one_hot(y, o), weight=one_hot(y, o) * (y[:, None] + 1)),
    "a target by place": lambda o, y: F.mse_loss(o[:, 0], torch.linspace(-9, 9, len(o))),
    "labels by place": lambda o, y: F.cross_entropy(o, torch.arange(len(o)) % C),
    "weights by place": lambda o, y: bce(o, y, weight=torch.linspace(0, 9, len(o))[:, None]),
    "samples as one row": lambda o, y: F.triplet_margin_loss(o[:, 0], o[:, 1], o[:, 2], margin=5.0),
    "samples as one pair": lambda o, y: F.cosine_embedding_loss(o[:, 0], o[:, 1], torch.tensor(1.0)),
    "a number summed first": lambda o, y: (lambda n: (F.cross_entropy(o, y, reduction="none") * (y > 0)).sum() / n)(
        (y > 0).sum()
    ),
    "a table by place": lambda o, y: (
        o[:, 0] * torch.arange(len(o) * C).view(-1, C).float().gather(1, y[:, None])[:, 0]
    ).mean(),
}
APART = {
    "class weights": lambda o, y: F.cross_entropy(o, y, weight=CLASSES.to(o.dtype), reduction="none").mean(),
    "class weights of elements": lambda o, y: bce(o, y, weight=CLASSES.to(o.dtype), pos_weight=CLASSES.to(o.dtype)),
    "weights of samples": lambda o, y: bce(o, y, weight=(y[:, None] + 1.0)),
    "weights of margins": lambda o, y: F.multi_margin_loss(o, y, weight=CLASSES.to(o.dtype)),
    "weights of soft margins": lambda o, y: F.multilabel_soft_margin_loss(
        o, one_hot(y, o), weight=CLASSES.to(o.dtype) * (y[:, None] + 1)
    ),
    "a variance for each": lambda o, y: F.gaussian_nll_loss(o, one_hot(y, o), y + 1.0),
    "a variance in a column": lambda o, y: F.gaussian_nll_loss(o, one_hot(y, o), y[:, None] + 1.0),
    "ranking": lambda o, y: F.margin_ranking_loss(o[:, 0], o[:, 1], (y > 0).long() * 2 - 1),
    "a constant beside": lambda o, y: F.triplet_margin_loss(o, 2 * o + 1, o.new_ones(1, C), margin=5.0),
    "the same target for all": lambda o, y: F.cross_entropy(o, torch.zeros(len(o), dtype=torch.long)),
    "gather": lambda o, y: weighed(o, y, CLASSES.gather(0, y)),
    "gather of rows": lambda o, y: (o[:, :3] * TABLE.gather(0, y[:, None].expand(-1, 3))).sum(1).mean(),
    "gather of one row": lambda o, y: weighed(o, y, CLASSES.expand(len(y), C).gather(1, y[:, None])[:, 0]),
    "take": lambda o, y: weighed(o, y, torch.take(CLASSES, y)),
    "index_select": lambda o, y: weighed(o, y, CLASSES.index_select(0, y)),
    "index": lambda o, y: weighed(o, y, CLASSES[y]),
    "take_along_dim": lambda o, y: weighed(o, y, torch.take_along_dim(CLASSES, y)),
    "take_along_dim of a row": lambda o, y: weighed(o, y, torch.take_along_dim(CLASSES[None], y[:, None], dim=1)[:, 0]),
}


def weighed(o, y, weights):
    return (F.cross_entropy(o, y, reduction="none") * weights).mean()


@pytest.mark.parametrize("name", COUPLED)
def test_what_a_loss_takes_is_not_made_of_the_batch(name: str) -> None:
    with pytest.raises(SampleMixingError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(same, COUPLED[name])


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("size", [6, C])
def test_constants_and_each_samples_own_are_exact(name: str, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = run(same, APART[name], sizes=(size,))
    torch.testing.assert_close(found.double(), truth(same, APART[name], size), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in APART if "gather" in name or "take" in name or "index" in name])
def test_tables_are_looked_up_within_the_model(name: str) -> None:
    assert_norms_of_single_samples(WithLoss(APART[name]), torch.randn(5, D), torch.tensor([0, 3, 1, 1, 2]))


# --------------------------------------------------------------------------- labels in another order


def step(loss, index=None, size: int = 6, times: int = 2) -> set[str]:
    """Steps on the same plain tensors, with an index from before each forward. Returns which warnings came."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(D, C), torch.randn(size, D), torch.arange(size) % C
    engine = fastdp.PerSampleGradients(model)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                loss(model, x, y, torch.randperm(size) if index is None else index(x)).backward()
                engine.norms()
    finally:
        engine.detach()
    return {w.category.__name__ for w in caught}


BEFORE = {
    "randperm": None,
    "sorted": lambda x: x[:, 0].argsort(),
    "backwards": lambda x: torch.arange(len(x) - 1, -1, -1),
    "a list": lambda x: [3, 1, 5, 0, 2, 4],
}
IN_ORDER = {
    "labels": lambda m, x, y, p: F.cross_entropy(m(x[p]), y[p]),
    "one-hot": lambda m, x, y, p: F.mse_loss(m(x[p]), F.one_hot(y, C).float()[p]),
    "cast": lambda m, x, y, p: F.mse_loss(m(x[p])[:, 0], y[p].float()),
    "twice": lambda m, x, y, p: (lambda z: both(m(z), y[p]) + both(m(z), y[p]))(x[p]),
    "itself": lambda m, x, y, p: F.mse_loss(m(x[p]), x[p][:, :C]),
}
MIXED = {
    "an index from after the forward": lambda m, x, y, p: after(m(x), y),
    "mix-up": lambda m, x, y, p: two(m(0.7 * x + 0.3 * x[p]), y, y[p]),
    "mix-up in the other order": lambda m, x, y, p: two(m(0.7 * x + 0.3 * x[p]), y[p], y),
    "mix-up of one-hots": lambda m, x, y, p: F.cross_entropy(m(x), 0.7 * F.one_hot(y, C) + 0.3 * F.one_hot(y, C)[p]),
    "only the outputs": lambda m, x, y, p: F.cross_entropy(m(x)[p], y),
    "inputs in another order": lambda m, x, y, p: F.mse_loss(m(x), x[p][:, :C]),
    "rolled": lambda m, x, y, p: F.cross_entropy(m(x), y.roll(1)),
    "columns of all labels": lambda m, x, y, p: m(x)[:, y].logsumexp(1).mean(),
    "columns of the labels that occur": lambda m, x, y, p: m(x)[:, y.unique()].logsumexp(1).mean(),
    **{
        f"targets of others, {name}": lambda m, x, y, p, pairs=pairs: (
            lambda t: (pairs(m(x), t).logsumexp(1) - (m(x) * t).sum(1)).mean()
        )(0.1 + F.one_hot(y, C))
        for name, pairs in {
            "matmul": lambda o, t: o @ t.T,
            "linear": F.linear,
            "cdist": torch.cdist,
            "einsum": lambda o, t: torch.einsum("id,jd->ij", o, t),
            "einsum, implicit": lambda o, t: torch.einsum("id,jd", o, t),
            "normalised": lambda o, t: F.normalize(o, dim=1) @ F.normalize(t, dim=1).mT,
        }.items()
    },
}


def _read(o, y):
    """What loops log."""
    return (o.argmax(1) == y).float().mean().item(), o.detach().numpy().max(), y.tolist(), o.mean(0).tolist()


def _after_reading(loss):
    return lambda m, x, y, p: (lambda o: (_read(o, y), loss(o, y))[1])(m(x))


READ = {
    "tolist": lambda o, y: (o - torch.tensor(o.mean(0).tolist())).square().mean(),
    "items": lambda o, y: (o - torch.tensor([v.item() for v in o.mean(0)])).square().mean(),
    "numpy": lambda o, y: (o - torch.from_numpy(o.detach().numpy().mean(0))).square().mean(),
    "counts": lambda o, y: (o * torch.tensor([1 / (1 + y.tolist().count(k)) for k in range(C)])).square().mean(),
    "as wide as the largest label": lambda o, y: o[:, : F.one_hot(y).shape[1]].square().sum(1).mean(),
    "up to the largest label": lambda o, y: o[:, : int(y.max()) + 1].square().sum(1).mean(),
}


def test_what_python_read_of_several_samples_and_the_loss_takes_is_warned_of() -> None:
    for name, loss in READ.items():
        assert step(lambda m, x, y, p, loss=loss: loss(m(x), y)) == {"BatchReadWarning"}, name
    assert not step(_after_reading(F.cross_entropy))  # a log
    assert not step(_after_reading(lambda o, y: (o * torch.tensor([0.1] * C)).square().mean()))


def both(o, y):
    return F.cross_entropy(o, y) + F.mse_loss(o, F.one_hot(y, C).float())


def two(o, first, second):
    return 0.7 * F.cross_entropy(o, first) + 0.3 * F.cross_entropy(o, second)


def after(o, y):
    return F.cross_entropy(o, y[torch.randperm(len(y))])


@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("made", BEFORE)
def test_an_index_from_before_the_forward_may_have_picked_inputs_and_labels(made: str, name: str) -> None:
    assert step(IN_ORDER[name], BEFORE[made]) <= {LossNotFollowedWarning.__name__}


def test_what_cannot_be_known_is_warned_of() -> None:
    assert step(lambda m, x, y, p: F.cross_entropy(m(x), y[p])) == {LossNotFollowedWarning.__name__}


@pytest.mark.parametrize("name", MIXED)
def test_labels_of_others_are_refused(name: str) -> None:
    with pytest.raises(SampleMixingError):
        step(MIXED[name])


# --------------------------------------------------------------------------- constants that equal the batch's size


def scaled(o, y):
    size = max(o.shape[0], 1)
    return o.square().sum() / size * 0.5


def added(o, y):
    each = F.cross_entropy(o, y, reduction="none")
    return each.sum() / len(y) * 2 + 3 * o.square().sum(1).mean() / 4


def accumulated(o, y):
    assert len(o) == len(y)
    return F.cross_entropy(o, y) / STEPS


STEPS = 4


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("loss", [scaled, added, accumulated])
def test_a_constant_may_equal_the_number_of_samples(loss, size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(same, loss, sizes=(size,))


def test_a_size_is_told_from_a_constant() -> None:
    for loss in (lambda o, y: F.cross_entropy(o, y) / len(y), lambda o, y: F.cross_entropy(o, y) * len(y)):
        with pytest.warns(LossReductionWarning):
            run(same, loss)


@pytest.mark.parametrize("one", [lambda h: h[0], lambda h: h[-1:].sum(0), lambda h: h.unbind(0)[1]])
def test_a_term_of_one_sample_beside_the_sum_over_all_is_warned_of(one):
    """It is of whoever stands there; of a loop over all samples it is each one's own."""
    engine = fastdp.PerSampleGradients(model := nn.Linear(4, 3), loss_reduction="sum")
    h = model(torch.randn(6, 4))
    with pytest.warns(BatchReadWarning, match="by their place"):
        (h.square().sum() + one(h).square().sum()).backward()
    h = model(torch.randn(6, 4))
    loss = h.square().sum()
    for row in h:
        loss = loss + row.sin().sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    engine.detach()


def masked(model, x, made):
    """Numbers left out at random are predicted, as masked autoencoders do."""
    mask = made(x)
    return (model(x * ~mask) - x).square() * mask, mask


def weighted(model, x):
    w = torch.rand(len(x)) ** 4
    return (w / w.mean() * (model(x) - x).square().mean(1)).mean()


def over_all(model, x, made=lambda x: torch.rand(x.shape) > 0.6):
    losses, mask = masked(model, x, made)
    return losses.sum() / mask.sum()


def over_own(model, x):
    losses, mask = masked(model, x, lambda x: torch.rand(*x.shape) > 0.6)
    return (losses.sum(1) / mask.sum(1).clamp(min=1)).mean()


def denoised(model, x):
    steps, noise = torch.randint(0, 10, (x.size(0),)), torch.randn(x.shape)
    kept = torch.linspace(0.9, 0.1, 10)[steps][:, None]
    return ((model(kept.sqrt() * x + (1 - kept).sqrt() * noise) - noise).square().mean(1) / kept.squeeze(1)).mean()


def shared(model, x, rows=9):
    """As many draws as samples, by chance: all samples meet them all."""
    return (model(x) @ torch.randn(rows, D).T).square().mean()


def of_columns(model, x):
    """As many columns as samples, by chance: one draw for all of them."""
    scale, samples = torch.rand(x.shape[1]), len(x)  # (in one line, where both sizes are told)
    scale = scale / scale.max()
    return (model(x[:, :D] * scale[:D]) - x[:, :D]).square().mean(1).sum() / samples


@pytest.mark.parametrize("loss", [over_all, weighted, over_own, denoised, shared, of_columns])
def test_what_the_loop_draws_for_each_sample_is_that_samples_own(loss) -> None:
    """In sight of the loader's batch: a sum over the draws of all divides one sample's loss by those of others."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(9, 9 if loss is of_columns else D))
    plain = nn.Linear(D, D)
    engine = fastdp.PerSampleGradients(copy.deepcopy(plain))
    for (x,) in fastdp.poisson_loader(data, sample_rate=1.0, steps=1):
        if loss in (over_all, weighted):
            with pytest.raises(SampleMixingError, match=r"(mean|sum)\(\) combines the samples"):
                loss(engine.model, x).backward()
            continue
        for model in (engine.model, plain):
            torch.manual_seed(1)
            loss(model, x).backward()
        found = engine.clipped_sum(torch.full((len(x),), 1 / len(x)))
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    engine.detach()
