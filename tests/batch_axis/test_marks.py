"""Rows that a user marks: lists of samples, tables, packed sequences; what marks must agree with."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import fastdp
from fastdp.errors import BatchLayoutError, FastDPError, SampleMixingError

from ..cases import Net

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "rows.md"
D = 6


def assert_norms_alone(model: nn.Module, found: Tensor, samples: list[tuple[Tensor, ...]]) -> None:
    """found: norms of each sample's gradient, which are those of the model of its rows alone."""
    for norm, alone in zip(found, samples, strict=True):
        grads = torch.autograd.grad(model(*alone).square().sum(), list(model.parameters()))
        torch.testing.assert_close(norm, sum(g.square().sum() for g in grads).sqrt())


def test_a_mark_replaces_what_a_forward_before_took_the_tensor_for() -> None:
    torch.manual_seed(0)
    model, owner = Net(lambda m, ids, rows: m.a(rows), a=nn.Linear(D, 2)), torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    ids, rows = torch.randn(3), torch.randn(9, D)
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    with pytest.raises(BatchLayoutError, match="mark_rows"):
        model(ids, rows).square().sum().backward()  # two rows each, by the look of it
    model(ids, fastdp.mark_rows(rows, owner)).square().sum().backward()
    found = engine.norms()
    engine.detach()
    assert_norms_alone(model, found, [(ids[b], rows[owner == b]) for b in range(3)])


def each(m: Any, parts: list[Tensor]) -> Tensor:
    """A list of sequences, each worked on alone."""
    return torch.stack([m.a(x).tanh().mean(0) for x in parts])


def test_lists_of_samples() -> None:
    torch.manual_seed(0)
    model, parts = Net(each, a=nn.Linear(D, 3)), [torch.randn(5, D) for _ in range(3)]
    engine = fastdp.PerSampleGradients(model)
    model([fastdp.mark_rows(x.clone(), [i] * len(x), samples=3) for i, x in enumerate(parts)]).square().sum(
        1
    ).mean().backward()
    found = engine.norms()
    with pytest.warns(UserWarning, match="mark_rows"):  # they could be three inputs of five samples
        model([torch.randn(5, D) for _ in range(3)])
    engine.detach()
    assert_norms_alone(model, found, [([x],) for x in parts])


def test_what_marks_say_must_agree() -> None:
    model = Net(each, a=nn.Linear(D, 3))
    fastdp.PerSampleGradients(model)
    parts = [fastdp.mark_rows(torch.randn(2, D), [i, i], samples=2 + i) for i in range(2)]
    with pytest.raises(BatchLayoutError, match=r"samples=\[2, 3\]"):
        model(parts)
    for owner, samples, why in (([0, 1], 1, "samples=1"), ([-1, 1], None, "-1"), ([0], None, "shape")):
        with pytest.raises(ValueError, match=why):
            fastdp.mark_rows(torch.randn(2, D), owner, samples)
    beside = Net(lambda m, x, rows: m.a(x), a=nn.Linear(D, D))
    fastdp.PerSampleGradients(beside)
    with pytest.raises(FastDPError, match="3 samples"):
        beside(torch.zeros(3, D), fastdp.mark_rows(torch.zeros(2, D), [0, 3]))


def rotated(m: Any, x: Tensor, places: Tensor) -> Tensor:
    """Positions of text, a constant, and of images, an input without a batch: one table for all samples."""
    table = torch.cat([torch.zeros(4, 2), places]).sum(1)
    return (m.a(x) * table.cos()[:, None]).sum(1)


def test_a_table_taken_for_rows_of_samples_is_refused_with_the_remedy() -> None:
    torch.manual_seed(0)
    model, x, places = Net(rotated, a=nn.Linear(D, D)), torch.randn(4, 12, D), torch.randn(8, 2)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError, match=r"mark_rows\(tensor, None\)"):
        model(x, places).square().sum(1).mean().backward()
    model(x, fastdp.mark_rows(places, None)).square().sum(1).mean().backward()
    found = engine.norms()
    engine.detach()
    assert_norms_alone(model, found, [(x[b : b + 1], places) for b in range(4)])


def masked(m: Any, x: Tensor, mask: Tensor, own: Tensor) -> Tensor:
    """Attention with a mask [T, T] that all samples share, and one of each sample's own, [B, T]."""
    scores = m.a(x) @ x.transpose(1, 2) + mask + own[:, None]
    return (scores.softmax(-1) @ x).sum(1)


@pytest.mark.parametrize("how", ["the same", "made anew"])
def test_a_mask_in_a_batch_of_as_many_samples_as_it_has_rows(how: str) -> None:
    """Its numbers were given before, to a batch of another size; other ones are refused with the remedy."""
    torch.manual_seed(0)
    t, mask = 5, torch.full((5, 5), -9.0).triu(1)
    plain = Net(masked, a=nn.Linear(D, D))
    engine = fastdp.PerSampleGradients(copy.deepcopy(plain))
    for size in (3, t, 4, t):
        x, own = torch.randn(size, t, D), torch.randn(size, t)
        given = mask if how == "the same" else mask.clone()
        engine.model(x, given, own).square().sum(1).mean().backward()
        assert_norms_alone(plain, engine.norms(), [(x[b : b + 1], mask, own[b : b + 1]) for b in range(size)])
    x, own = torch.randn(t, t, D), torch.randn(t, t)
    for other in (mask * 2, mask.mul_(2)):  # in memory that was written to since, too
        with pytest.raises(SampleMixingError, match=r"mask of T x T.*mark_rows\(tensor, None\)"):
            engine.model(x, other, own).square().sum(1).mean().backward()
    engine.detach()


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


def test_states_of_layers_before_the_input_are_refused_with_the_remedy() -> None:
    """The first argument is [layers, B, H]."""
    model = Net(lambda m, state, x: m.rnn(x, (state, state))[0][:, -1], rnn=nn.LSTM(D, 3, 2, batch_first=True))
    given = torch.zeros(2, 5, 3), torch.randn(5, 4, D)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0)
    with pytest.raises(SampleMixingError, match=re.escape("(If the batch does not have 2 samples, give batch_size=.)")):
        model(*given).sum().backward()
    optimizer.detach()
    engine = fastdp.PerSampleGradients(model, batch_size=5)
    model(*given).square().sum(1).mean().backward()
    each = [(given[0][:, b : b + 1], given[1][b : b + 1]) for b in range(5)]
    found = engine.norms()
    engine.detach()
    assert_norms_alone(model, found, each)
