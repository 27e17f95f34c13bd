"""Samples of an earlier batch must not act in a later one; what is not data may be kept."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fastdp
from fastdp.errors import SampleMixingError

from ..programs_by_hand import D, Program, run, squares


def keeping(use, keep):
    def forward(model, h):
        out = use(h, model.kept) if hasattr(model, "kept") else h
        model.kept = keep(h, getattr(model, "kept", None))
        return out

    return forward


STATES = {
    "the batch before": (lambda h, k: h + k[: len(h)].mean(0), lambda h, k: h.detach()),
    "by rows": (lambda h, k: h[: len(k)] + k[: len(h)], lambda h, k: h.detach()),
    "a queue": (
        lambda h, k: h - k.mean(0),
        lambda h, k: torch.cat([h.detach()] + ([] if k is None else [k]))[:9],
    ),
    "an average": (
        lambda h, k: h - k,
        lambda h, k: h.mean(0).detach() if k is None else 0.9 * k + 0.1 * h.mean(0).detach(),
    ),
    "an average in place": (
        lambda h, k: h - k,
        lambda h, k: torch.zeros(h.size(1)) if k is None else k.mul_(0.9).add_(h.detach().mean(0), alpha=0.1),
    ),
    "a memory by attention": (lambda h, k: h + (h @ k.T).softmax(-1) @ k, lambda h, k: h.detach()),
    "one number": (lambda h, k: h * k, lambda h, k: h.detach().abs().max()),
}


@pytest.mark.parametrize("sizes", [(6, 6, 6), (6, 5, 7), (1, 1, 1)])
@pytest.mark.parametrize("name", STATES)
def test_states_of_earlier_batches_are_refused(name: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(SampleMixingError, match="earlier batch|by their place"):
        run(keeping(*STATES[name]), sizes=sizes)


MADE_ONCE = {
    "cast": lambda h, kept: kept.to(h) if kept is not None else torch.linspace(-1, 1, h.size(1)),
    "cast by type": lambda h, kept: kept.type_as(h) if kept is not None else torch.linspace(-1, 1, h.size(1)),
    "of the data's dtype": lambda h, kept: h.new_ones(h.size(1)) if kept is None else kept,
    "of the data's shape": lambda h, kept: torch.ones_like(h[0]).cumsum(0) if kept is None else kept,
}


@pytest.mark.parametrize("sizes", [(1, 2, 3), (2, 1, 2), (4, 4, 1, 4)])
@pytest.mark.parametrize("name", MADE_ONCE)
def test_constants_made_once_are_no_state(name: str, sizes: tuple[int, ...]) -> None:
    """A batch of one, as Poisson sampling draws it, makes no data of them."""

    def forward(model, h):
        model.kept = MADE_ONCE[name](h, getattr(model, "kept", None))
        return h * MADE_ONCE[name](h, model.kept)

    run(forward, sizes=sizes)


KEPT = {
    "a count, and what is only looked at": (
        lambda h, k: h * (1 + 0.1 * k[0]),
        lambda h, k: (1 if k is None else k[0] + 1, h.detach()),
    ),
    "positions": (lambda h, k: h + k, lambda h, k: torch.arange(h.size(1), dtype=h.dtype) if k is None else k),
    "an average that is not used": (lambda h, k: h, lambda h, k: (0 if k is None else k) * 0.9 + h.detach().mean(0)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_meet_data_may_be_kept(name: str) -> None:
    assert len(run(keeping(*KEPT[name]), sizes=(6, 6, 5, 1))) == 4


def test_two_forwards_before_one_backward_are_one_batch() -> None:
    model = Program(lambda m, h: h)
    engine = fastdp.PerSampleGradients(model)
    for _ in range(2):
        one, two = model(torch.randn(6, D)), model(torch.randn(6, D))
        (one - two).square().sum(1).mean().backward()
        assert engine.norms().shape == (6,)
    one, two = model(torch.randn(6, D)), model(torch.randn(6, D))
    squares(one, one).backward()
    squares(two, two).backward()
    engine.detach()


def test_a_state_kept_by_the_loss() -> None:
    centre: list[torch.Tensor] = []

    def loss(out, labels):
        found = (out - (centre[-1] if centre else 0)).square().sum(1).mean()
        centre.append(out.detach().mean(0))
        return found

    with pytest.raises(SampleMixingError, match="earlier batch"):
        run(lambda m, h: h, loss, sizes=(6, 6))


def test_what_the_training_loop_keeps_of_outputs() -> None:
    """Taken after backward, out of sight: the memory tells."""
    model = Program(lambda m, h: h + m.kept.mean(0) if hasattr(m, "kept") else h)
    fastdp.PerSampleGradients(model)
    out = model(torch.randn(6, D))
    out.square().sum(1).mean().backward()
    model.kept = out.detach()
    with pytest.raises(SampleMixingError, match="earlier batch"):
        model(torch.randn(6, D)).square().sum(1).mean().backward()


def test_parts_of_one_tensor_may_be_the_batches_and_come_again() -> None:
    model, data, labels = Program(lambda m, h: h), torch.randn(18, D), torch.randint(0, 4, (18,))
    engine = fastdp.PerSampleGradients(model)
    found = []
    for start in (0, 6, 12, 3, 0):
        nn.functional.cross_entropy(model(data[start : start + 6]), labels[start : start + 6]).backward()
        found.append(engine.norms())
    assert torch.equal(found[0], found[-1]) and not torch.equal(found[0], found[1])
    engine.detach()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_labels_are_labels(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    labels = torch.randint(0, 4, (6,))
    for model in (Program(lambda m, h: h), Program(lambda m, h: h)):  # of another model's, too
        engine = fastdp.PerSampleGradients(model)
        for times in (0, 1, 0):
            given = copied(labels) if times else labels
            nn.functional.cross_entropy(model(torch.randn(6, D)), given).backward()
        assert engine.norms().shape == (6,)
        engine.detach()


def test_a_hidden_state_passed_on_is_refused() -> None:
    model, h = nn.GRUCell(D, D), torch.zeros(6, D)
    fastdp.PerSampleGradients(model)
    for step in range(2):
        with pytest.raises(SampleMixingError, match="earlier batch") if step else torch.enable_grad():
            out = model(torch.randn(6, D), h)
            h = out.detach()
            out.square().sum(1).mean().backward()
