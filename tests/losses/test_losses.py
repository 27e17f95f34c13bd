"""Losses that cannot couple samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.losses import causal_lm_loss, classification_loss, sequence_classification_loss, token_loss


def test_each_sample_is_the_mean_of_its_own_tokens():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    labels[0, 2:], labels[1, :] = -100, -100
    alone = [
        F.cross_entropy(logits[0, :2], labels[0, :2]), torch.tensor(0.0), F.cross_entropy(logits[2], labels[2])
    ]  # fmt: skip
    assert torch.allclose(token_loss(logits, labels, reduction="none"), torch.stack(alone))
    assert torch.allclose(token_loss(logits, labels), torch.stack(alone).mean())
    assert torch.allclose(token_loss(logits, labels, reduction="sum"), torch.stack(alone).sum())
    shifted = F.cross_entropy(logits[2, :-1], labels[2, 1:])
    assert torch.allclose(causal_lm_loss(logits, labels, reduction="none")[2], shifted)


def test_verify_passes_them_and_not_the_mean_over_tokens():
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    ids = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:] = labels[1, 6:] = -100
    assert fastdp.verify(model, lambda m, b: causal_lm_loss(m(b[0]), b[1]), (ids, labels)).ok
    with pytest.raises(fastdp.errors.VerificationError):
        fastdp.verify(model, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), (ids, labels))


def test_classification_by_the_type_of_labels():
    torch.manual_seed(0)
    logits = torch.randn(4, 3)
    whole = torch.tensor([0, 2, 1, 1])
    assert torch.allclose(classification_loss(logits, whole, label_smoothing=0.1),
                          F.cross_entropy(logits, whole, label_smoothing=0.1))  # fmt: skip
    several = (torch.rand(4, 3) > 0.5).float()
    assert torch.allclose(classification_loss(logits, several), F.binary_cross_entropy_with_logits(logits, several))
    assert torch.allclose(classification_loss(logits[:, :1], several[:, 0]), F.mse_loss(logits[:, 0], several[:, 0]))
    half = classification_loss(logits.bfloat16(), whole)
    assert half.dtype == torch.float32
    empty = classification_loss(logits[:0].requires_grad_(), whole[:0])
    assert float(empty) == 0 and empty.requires_grad


@pytest.mark.parametrize("logits, labels", [((2, 3), (3,)), ((2, 3, 4), (2,)), ((2, 3), (2, 2))])
def test_shapes_that_do_not_fit_are_refused(logits, labels):
    kind = torch.float32 if len(labels) == 2 else torch.long
    with pytest.raises(ValueError, match="not"):
        classification_loss(torch.zeros(logits), torch.zeros(labels, dtype=kind))
    for loss in (token_loss, causal_lm_loss):
        with pytest.raises(ValueError, match="not"):
            loss(torch.zeros(logits), torch.zeros(labels, dtype=torch.long))
    for labels_of, options, match in (
        (torch.ones(2, 3), {"label_smoothing": 0.1}, "label_smoothing"),
        (torch.zeros(2, dtype=torch.complex64), {}, "complex"),
    ):
        with pytest.raises(ValueError, match=match):
            classification_loss(torch.zeros(2, 3), labels_of, **options)
    with pytest.raises(ValueError, match="one class"):  # it would be 0, whatever the model says
        classification_loss(torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="whole numbers"):
        token_loss(torch.zeros(2, 3, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="reduction"):
        classification_loss(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), reduction="max")


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int32])
def test_labels_of_every_whole_type(kind):
    logits, labels = torch.randn(2, 3), torch.tensor([1, 0])
    assert torch.equal(classification_loss(logits, labels.to(kind)), classification_loss(logits, labels))
    tokens, ids = torch.randn(2, 2, 3), torch.tensor([[1, 0], [0, 1]])
    assert torch.equal(token_loss(tokens, ids.to(kind)), token_loss(tokens, ids))


def test_masks_leave_out_labels_and_never_the_weight_of_others():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    ignored = labels.masked_fill(mask == 0, -100)
    for kind in (mask, mask.bool(), mask.float()):
        for loss in (token_loss, causal_lm_loss):
            found = loss(logits, labels, mask=kind, reduction="none")
            assert torch.equal(found, loss(logits, ignored, reduction="none"))
    assert torch.allclose(
        token_loss(logits, labels, mask=mask, reduction="none")[0], F.cross_entropy(logits[0, 1:3], labels[0, 1:3])
    )
    assert float(found[2]) == 0
    one = causal_lm_loss(logits, labels, mask=torch.tensor([[1, 0, 0, 0, 1]] * 3), reduction="none")
    assert torch.allclose(one, F.cross_entropy(logits[:, 3], labels[:, 4], reduction="none"))
    half = torch.tensor([1, 0, 1])
    pooled = logits[:, 0]
    each = F.cross_entropy(pooled, labels[:, 0], reduction="none")
    assert torch.allclose(classification_loss(pooled, labels[:, 0], mask=half), (each * half).sum() / 3)
    assert torch.allclose(
        classification_loss(pooled, labels[:, 0].masked_fill(half == 0, -100)), (each * half).sum() / 3
    )
    several, known = (torch.rand(3, 7) > 0.5).float(), torch.rand(3, 7) > 0.4
    known[1] = False
    found = classification_loss(pooled, several.masked_fill(~known, float("nan")), mask=known, reduction="none")
    wanted = [
        F.binary_cross_entropy_with_logits(pooled[i][known[i]], several[i][known[i]]) if i != 1 else torch.tensor(0.0)
        for i in range(3)
    ]
    assert torch.allclose(found, torch.stack(wanted))
    assert torch.allclose(
        classification_loss(pooled[:, :1], several[:, 0], mask=half.bool(), reduction="none"),
        (pooled[:, 0] - several[:, 0]).square() * half,
    )
    for wrong, match in ((mask[:2], "shape"), (1.0 - 1e4 * mask, "0 and 1")):
        with pytest.raises(ValueError, match=match):
            token_loss(logits, labels, mask=wrong)


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_sequences_are_pooled_over_their_own_tokens(pool):
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4, 5), torch.tensor([0, 3, 4])
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]])  # padded right, left, and not
    rows = [(0, [0, 1]), (1, [2, 3]), (2, [0, 1, 2, 3])]
    pooled = torch.stack([logits[i, places[-1]] if pool == "last" else logits[i, places].mean(0) for i, places in rows])
    found = sequence_classification_loss(logits, labels, mask, pool, reduction="none")
    assert torch.allclose(found, F.cross_entropy(pooled, labels, reduction="none"))
    changed = torch.where(mask[..., None] == 0, 1e6, logits)  # padding has no say
    assert torch.allclose(sequence_classification_loss(changed, labels, mask, pool, reduction="none"), found, atol=1e-5)
    assert torch.equal(
        sequence_classification_loss(pooled, labels, reduction="none"), classification_loss(pooled, labels, "none")
    )
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5))
    batch = (torch.randint(0, 11, (3, 4)), labels, mask)
    assert fastdp.verify(model, lambda m, b: sequence_classification_loss(m(b[0]), b[1], b[2], pool), batch).ok
    for wrong, match in (((logits, labels, mask * 0), "no token"), ((logits[0], labels, mask), "without a mask")):
        with pytest.raises(ValueError, match=match):
            sequence_classification_loss(*wrong)
    with pytest.raises(ValueError, match="pool"):
        sequence_classification_loss(logits, labels, mask, "max")
