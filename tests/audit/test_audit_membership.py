"""The membership attacker: answers known beforehand, scikit-learn beside it, and a network that learnt by heart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.audit.membership import attack_model, auc, auc_interval, logistic_regression, membership_inference


def drawn(count: int, classes: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, classes)), rng.integers(0, classes, count)


def normal_auc(shift: float) -> float:
    """P(N(shift, 1) > N(0, 1)) = Phi(shift / sqrt 2)."""
    return float(0.5 * (1 + torch.erf(torch.tensor(shift / 2))))


# ---------------------------------------------------------------------- AUC


def test_auc_by_hand():
    scores = np.array([0.0, 1, 1, 2, 2, 3])
    positive = np.array([False, True, False, True, False, True])
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[positive] for n in scores[~positive]]
    assert auc(scores, positive) == pytest.approx(np.mean(pairs), abs=1e-15)
    assert auc(np.zeros(6), positive) == 0.5
    assert auc(scores, positive) + auc(-scores, positive) == pytest.approx(1, abs=1e-15)


def test_interval_covers_the_true_auc_as_often_as_it_says():
    covered = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        scores, positive = rng.normal(size=200), np.arange(200) < 100
        low, high = auc_interval(scores + 0.8 * positive, positive, rng, 200, 0.9)
        covered += low <= normal_auc(0.8) <= high
    assert 82 <= covered <= 97  # 90 are expected, standard deviation 3


def test_interval_counts_ties_as_the_auc_does():
    rng = np.random.default_rng(0)
    scores, positive = rng.integers(0, 3, 3000).astype(float), rng.random(3000) < 0.3
    low, high = auc_interval(scores, positive, rng, 200, 0.95)
    assert low < auc(scores, positive) < high and abs(low + high - 2 * auc(scores, positive)) < 0.01


# ---------------------------------------------------------------------- regression


def test_regression_is_the_minimum():
    """The gradient of the penalised loss, written out in plain, is 0 at the weights found."""
    x, y = drawn(300)
    member = np.random.default_rng(1).random(300) < 1 / (1 + np.exp(-x[:, 0] - 0.3))
    score = logistic_regression(5 * x - 70, member, l2=2.0)
    z = (5 * x - 70 - (5 * x - 70).mean(0)) / (5 * x - 70).std(0)
    weights = np.linalg.lstsq(np.c_[z, np.ones(300)], score(5 * x - 70), rcond=None)[0]
    error = 1 / (1 + np.exp(-score(5 * x - 70))) - member
    assert np.abs(z.T @ error + 2.0 * weights[:-1]).max() < 1e-3 and abs(error.sum()) < 1e-3


def test_separable_and_constant_columns_and_huge_ones():
    x, _ = drawn(60)
    member = x[:, 0] > 0
    x[:, 1], x[:, 2] = 7.0, 1e9 * x[:, 2]
    fitted = logistic_regression(x, member)
    moved = x + np.eye(4)[1]  # the constant column tells nothing
    assert np.isfinite(fitted(x)).all() and np.array_equal(fitted(x), fitted(moved)) and auc(fitted(x), member) > 0.99
    apart = logistic_regression(np.array([[-1.0]] * 9 + [[1.0]] * 9), np.arange(18) > 8, l2=1e-6)
    low, high = apart(np.array([[-1.0], [1.0]]))
    assert np.isfinite([low, high]).all() and high > 5 > -5 > low


def test_one_kind_only_is_refused():
    with pytest.raises(ValueError, match="both members and non-members"):
        logistic_regression(np.ones((3, 1)), np.ones(3, bool))


# ---------------------------------------------------------------------- the attack


def test_separable_is_one_and_the_same_distribution_near_a_half():
    x, y = drawn(600)
    apart = membership_inference(x + 20 * np.eye(4)[0], y, x, y)
    assert apart.overall.value == apart.overall.low == apart.overall.high == 1
    others, other_labels = drawn(600, seed=1)
    same = membership_inference(x, y, others, other_labels)
    assert abs(same.overall.value - 0.5) < 0.08 and same.overall.low < 0.5 < same.overall.high
    assert (same.overall.members, same.overall.nonmembers) == pytest.approx((300, 300), abs=4)


def test_what_is_tested_was_not_learnt():
    """400 columns of pure chance and 400 records: an attacker tested on what taught him would have an AUC of 1."""
    rng = np.random.default_rng(0)
    x, others = rng.normal(size=(200, 400)), rng.normal(size=(200, 400))
    labels = np.zeros(200, int)
    member = np.arange(400) < 200
    by_heart = logistic_regression(np.concatenate([x, others]), member)
    assert auc(by_heart(np.concatenate([x, others])), member) > 0.99
    assert abs(membership_inference(x, labels, others, labels, bootstrap=50).overall.value - 0.5) < 0.12


def test_each_class_has_its_own_attacker():
    """Members of class 0 have a higher first logit, those of class 1 a lower one, and class 2 leaks nothing.

    A class's attacker that had learnt on all classes would miss one of the two.
    """
    x, y = drawn(1500, 3)
    others, other_labels = drawn(1500, 3, seed=1)
    x[:, 0] += np.array([3.0, -3.0, 0.0])[y]
    found = membership_inference(x, y, others, other_labels, bootstrap=100)
    assert found.by_class[0].value > 0.95 and found.by_class[1].value > 0.95
    assert found.by_class[2].low < 0.55 and abs(found.by_class[2].value - 0.5) < 0.1
    assert "class 2" in str(found) and not found.left_out


def test_class_with_few_records_is_named_not_guessed():
    x, y = drawn(300, 3)
    y[y == 2] = 0
    y[:5] = 2
    found = membership_inference(x, y, x, y, bootstrap=10)
    assert set(found.by_class) == {0, 1} and "5 members" in found.left_out[2] and "class 2: not tested" in str(found)


def test_loss_shows_what_logits_and_labels_apart_hide():
    """Members' right logit is higher, whatever the class: linear in neither, but in the loss."""
    x, y = drawn(2000, 10)
    others, other_labels = drawn(2000, 10, seed=1)
    x[np.arange(2000), y] += 2.0
    plain = membership_inference(x, y, others, other_labels, bootstrap=50).overall
    seeing = membership_inference(x, y, others, other_labels, with_loss=True, bootstrap=50).overall
    assert seeing.value > 0.85 and seeing.low > plain.high


def test_seed_decides_everything():
    x, y = drawn(200)
    others, other_labels = drawn(100, seed=1)
    first, again, other = (membership_inference(x, y, others, other_labels, seed=s, bootstrap=50) for s in (0, 0, 1))
    assert first == again and first.overall.value != other.overall.value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:, 0], y), "logits"),
        (lambda x, y: (x, y[:-1]), "labels"),
        (lambda x, y: (np.where(x == x[0, 0], np.nan, x), y), "1 member records"),
        (lambda x, y: (x, y + 1), "0..3"),
        (lambda x, y: (x, y + 0.5), "whole numbers"),
        (lambda x, y: (x[:5], y[:5]), "at least 8"),
        (lambda x, y: (x[:, :3], np.minimum(y, 2)), "same model"),
    ],
)
def test_wrong_input_is_said(change, message):
    x, y = drawn(100)
    with pytest.raises(ValueError, match=message):
        membership_inference(*change(x, y), x, y)


def test_a_network_that_learnt_by_heart_is_found():
    """Random labels: all a network can learn are the records themselves."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, 16, generator=generator), torch.randint(0, 3, (120,), generator=generator)
    other = torch.randn(120, 16, generator=generator), torch.randint(0, 3, (120,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 3))
    fresh = attack_model(model, (x, y), other, with_loss=True, batch_size=50, bootstrap=100)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    learnt = attack_model(model.bfloat16(), (x.bfloat16(), y), (other[0].bfloat16(), other[1]), with_loss=True,
                          batch_size=50, bootstrap=100)  # fmt: skip
    assert fresh.overall.low < 0.5 < fresh.overall.high
    assert learnt.overall.low > 0.8


def test_the_pages_code_runs(capsys):
    text = (Path(__file__).parent.parent.parent / "docs/membership.md").read_text()
    exec(compile(re.search(r"```python\n(.*?)```", text, re.S).group(1), "docs/membership.md", "exec"), {})
    out = capsys.readouterr().out
    assert "membership inference, AUC" in out and "class 2" in out
