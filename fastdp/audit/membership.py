"""Membership inference: can an attacker who sees only a model's outputs tell what it was trained on?

The attack is a logistic regression on (logits, label) that tells members from non-members. It is trained on half of
both and tested on the other half. The result is the area under the ROC curve (AUC), overall and for each class: 0.5 is
a coin toss, and 1 identifies every member. A low AUC does not prove privacy, because this attacker is weak and asks
about average records. A high AUC is evidence against privacy.

Source: Bu et al., On the convergence and calibration of deep learning with differential privacy, 2023 (arXiv
2106.07830).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LEAST = 8  # members, and non-members, of a class: fewer leave under four to test on


class AUC(NamedTuple):
    """The area under the ROC curve on the tested half, its bootstrap interval, and the numbers of records tested."""

    value: float
    low: float
    high: float
    members: int
    nonmembers: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Membership(NamedTuple):
    """The attacker's results: overall, by class, and the classes with too few records, with the reason."""

    overall: AUC
    by_class: dict[int, AUC]
    left_out: dict[int, str]

    def __str__(self) -> str:
        lines = [f"membership inference, AUC: {self.overall} (0.5: a coin)"]
        lines += [f"  class {label}: {found}" for label, found in self.by_class.items()]
        lines += [f"  class {label}: not tested, {why}" for label, why in self.left_out.items()]
        return "\n".join(lines)


def membership_inference(
    member_logits: Any, member_labels: Any, nonmember_logits: Any, nonmember_labels: Any, *, with_loss: bool = False,
    seed: int = 0, bootstrap: int = 1000, confidence: float = 0.95,
) -> Membership:  # fmt: skip
    """Attack by logits and labels. The attacker of a class is trained on that class alone.

    Args:
        member_logits: [N,C] of records that were trained on, as arrays or tensors.
        member_labels: [N], whole numbers in 0..C-1.
        nonmember_logits: [M,C] of records of the same population that were never trained on.
        nonmember_labels: [M], whole numbers in 0..C-1.
        with_loss: whether the attacker also sees each record's cross-entropy. On logits and labels, a linear attacker
            cannot tell over all classes together how well the model predicts the right class, because that is a product
            of the two. With the loss it can. (Within one class the label is known, so both can.)
        seed: the seed of the halves and of the bootstrap.
        bootstrap: the number of resamples of the tested half, for members and non-members each. The interval is that of
            this attacker; it does not include the choice of the half that trained it.
        confidence: the confidence of the interval, which has equal tails.

    Returns:
        A Membership.

    Raises:
        ValueError: if a shape is wrong, a label is out of range, an output is not finite, or there are fewer than 8
            members or non-members.

    >>> rng = np.random.default_rng(0)
    >>> logits, labels = rng.normal(size=(400, 3)), rng.integers(0, 3, 400)
    >>> bool(membership_inference(logits + 9, labels, logits, labels).overall.value > 0.99)
    True
    """
    members, member_classes = _checked(member_logits, member_labels, "member")
    others, other_classes = _checked(nonmember_logits, nonmember_labels, "non-member")
    if members.shape[1] != others.shape[1]:
        raise ValueError(
            f"members have {members.shape[1]} logits, non-members {others.shape[1]}: give the same model's"
        )
    if not 0 < confidence < 1 or bootstrap < 1:
        raise ValueError(f"confidence must lie in (0, 1) and bootstrap be positive; got {confidence} and {bootstrap}")
    if min(len(members), len(others)) < LEAST:
        raise ValueError(f"{len(members)} members and {len(others)} non-members: at least {LEAST} of each are needed")
    x = np.concatenate([members, others])
    labels = np.concatenate([member_classes, other_classes])
    member = np.arange(len(x)) < len(members)
    features = [x, np.eye(x.shape[1])[labels]] + ([_cross_entropy(x, labels)[:, None]] if with_loss else [])
    table = np.concatenate(features, 1)
    rng = np.random.default_rng(seed)
    taught = _half(member, labels, rng)
    overall = _attack(table, member, taught, rng, bootstrap, confidence)
    by_class: dict[int, AUC] = {}
    left_out: dict[int, str] = {}
    for label in np.unique(labels):
        mine = labels == label
        count = int((mine & member).sum()), int((mine & ~member).sum())
        if min(count) < LEAST:
            left_out[int(label)] = f"{count[0]} members and {count[1]} non-members, at least {LEAST} of each are needed"
        else:
            by_class[int(label)] = _attack(table[mine], member[mine], taught[mine], rng, bootstrap, confidence)
    return Membership(overall, by_class, left_out)


def attack_model(
    predict: Callable[[Any], Any], members: tuple[Any, Any], nonmembers: tuple[Any, Any], *, batch_size: int = 256,
    **options: Any,
) -> Membership:  # fmt: skip
    """Attack by queries: predict(x) returns logits [B,C] for a slice of at most batch_size records.

    Args:
        predict: the model as an outsider meets it. Put it into evaluation mode first; torch needs no `no_grad`.
        members: (x, labels) of records that were trained on; each can be sliced.
        nonmembers: (x, labels) of records that were never trained on.
        batch_size: the largest number of records per call.
        options: the options of `membership_inference`.
    """

    def ask(x: Any) -> Floats:
        return np.concatenate([_array(predict(x[i : i + batch_size])) for i in range(0, len(x), batch_size)])

    (x, labels), (other_x, other_labels) = members, nonmembers
    return membership_inference(ask(x), labels, ask(other_x), other_labels, **options)


# ---------------------------------------------------------------------- the attacker


def logistic_regression(x: Floats, y: NDArray[Any], *, l2: float = 1.0) -> Callable[[Floats], Floats]:
    """Minimise sum_n log(1 + exp(-s_n z_n)) + l2/2 |w|^2; s = +1 where y is true, else -1; z = w . x + intercept.

    Args:
        x: [N,D]; each column is standardised first (a constant one counts as 0).
        y: [N], truth values, both present.
        l2: of the weights of standardised columns, not of the intercept; positive, so that separable data have a
            minimum.

    Returns:
        A function from x [M,D] to the log-odds [M] of "y is true".

    Raises ValueError where y has one value.
    """
    y = np.asarray(y, bool)
    if y.all() or not y.any():
        raise ValueError("logistic regression needs both members and non-members")
    centre, spread = x.mean(0), x.std(0)
    scale = np.where(spread > 1e-12 * np.maximum(1.0, np.abs(centre)), spread, np.inf)
    penalty, sign = np.append(np.full(x.shape[1], l2), 1e-12), np.where(y, 1.0, -1.0)

    def design(x: Floats) -> Floats:
        return np.concatenate([(x - centre) / scale, np.ones((len(x), 1))], 1)  # [N,D+1]

    table = design(x)

    def objective(w: Floats) -> tuple[float, Floats]:
        margin = sign * (table @ w)
        value = np.logaddexp(0.0, -margin).sum() + 0.5 * (penalty * w * w).sum()
        return float(value), penalty * w - table.T @ (sign * special.expit(-margin))

    def hessian(w: Floats) -> Floats:
        p = special.expit(table @ w)
        return (table * (p * (1 - p))[:, None]).T @ table + np.diag(penalty)

    found = optimize.minimize(objective, np.zeros(table.shape[1]), jac=True, hess=hessian, method="trust-exact",
                              options={"gtol": 1e-6 * len(x)})  # fmt: skip
    return lambda x: design(x) @ found.x


def _attack(table: Floats, member: NDArray[np.bool_], taught: NDArray[np.bool_], rng: np.random.Generator,
            bootstrap: int, confidence: float) -> AUC:  # fmt: skip
    """Learn on the taught half, test on the other."""
    scores = logistic_regression(table[taught], member[taught])(table[~taught])
    tested = member[~taught]
    low, high = auc_interval(scores, tested, rng, bootstrap, confidence)
    return AUC(auc(scores, tested), low, high, int(tested.sum()), int((~tested).sum()))


def _half(member: NDArray[np.bool_], labels: Ints, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A random half of the members and of the non-members of each class; odd ones fall to either side."""
    taught = np.zeros(len(member), bool)
    for label in np.unique(labels):
        for kind in (True, False):
            rows = rng.permutation(np.flatnonzero((labels == label) & (member == kind)))
            taught[rows[: (len(rows) + int(rng.integers(2))) // 2]] = True
    for kind in (True, False):  # classes of one record each may all have fallen to one side
        rows = np.flatnonzero(member == kind)
        if taught[rows].all() or not taught[rows].any():
            taught[rows] = False
            taught[rng.permutation(rows)[: len(rows) // 2]] = True
    return taught


# ---------------------------------------------------------------------- AUC


def auc(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """P(a positive's score is above a negative's), a tie counting half: by mean ranks (Mann and Whitney).

    >>> auc(np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, False, True, True]))
    0.875
    """
    return float(stats.mannwhitneyu(scores[positive], scores[~positive]).statistic / positive.sum() / (~positive).sum())


def auc_interval(scores: Floats, positive: NDArray[np.bool_], rng: np.random.Generator, bootstrap: int,
                 confidence: float) -> tuple[float, float]:  # fmt: skip
    """Percentiles of the AUC over resamples of the positives and of the negatives."""

    def area(above: Any, below: Any, axis: int = -1) -> Any:
        u = stats.mannwhitneyu(above, below, method="asymptotic", axis=axis).statistic
        return u / above.shape[axis] / below.shape[axis]

    found = stats.bootstrap(
        (scores[positive], scores[~positive]), area, n_resamples=bootstrap, confidence_level=confidence,
        method="percentile", vectorized=True, batch=100, random_state=rng,
    )  # fmt: skip
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


# ---------------------------------------------------------------------- input


def _array(values: Any) -> NDArray[Any]:
    """A tensor of any type and device, or an array, as an array."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    return np.asarray(values)


def _checked(logits: Any, labels: Any, whose: str) -> tuple[Floats, Ints]:
    x, y = np.asarray(_array(logits), np.float64), _array(labels)
    if x.ndim != 2 or y.shape != x.shape[:1] or x.shape[1] < 2:
        raise ValueError(f"expected {whose} logits [N,C] (C >= 2) and labels [N]; got {x.shape} and {y.shape}")
    if not np.isfinite(x).all():
        count = int((~np.isfinite(x).all(1)).sum())
        raise ValueError(f"{count} {whose} records have logits that are NaN or infinite")
    classes = y.astype(np.int64)
    if (classes != y).any() or len(y) and (classes.min() < 0 or classes.max() >= x.shape[1]):
        raise ValueError(f"{whose} labels must be whole numbers in 0..{x.shape[1] - 1}, one for each logit")
    return x, classes


def _cross_entropy(logits: Floats, labels: Ints) -> Floats:
    return special.logsumexp(logits, 1) - logits[np.arange(len(logits)), labels]  # type: ignore[no-any-return]
