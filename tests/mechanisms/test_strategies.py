"""Strategies of correlated noise: rows, encoders, marks, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime

from fastdp.errors import StepError
from fastdp.mechanisms import Banded, Bisr, Independent, Lambda, Matrix, Strategy, TreeAggregation, variance_of
from fastdp.mechanisms.banded import TAIL, _loss, best_coefficients
from fastdp.mechanisms.encoders import Toeplitz

STEPS = 40
DENSE = np.tril(np.random.default_rng(0).standard_normal((STEPS, STEPS))) + 9 * np.eye(STEPS)
EVERY = [
    Independent(),
    Lambda(0.0),
    Lambda(0.95),
    Bisr(1),
    Bisr(5),
    Bisr(5, momentum=0.9, weight_decay=0.01),
    Banded(4, steps=STEPS),
    Banded(3, coefficients=[2, 1, 0.5]),
    TreeAggregation(),
    Matrix(DENSE),
    Matrix(encoder=DENSE),
]


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
def test_the_encoder_is_the_inverse_of_the_rows(strategy: Strategy) -> None:
    for steps in (1, 7, STEPS):
        rows = np.zeros((steps, steps))
        for step in range(steps):
            own, earlier = strategy.noise_row(step)
            rows[step, step] = own
            lags = [lag for lag, _ in earlier]
            assert all(1 <= lag <= step for lag in lags) and len(set(lags)) == len(lags)
            assert all(weight for _, weight in earlier)
            for lag, weight in earlier:
                rows[step, step - lag] = weight
        assert np.array_equal(rows, strategy.rows(steps))
        assert np.abs(strategy.encoder(steps) @ rows - np.eye(steps)).max() < 1e-12


@pytest.mark.parametrize("strategy", [s for s in EVERY if isinstance(s, Toeplitz)], ids=repr)
def test_coefficients_are_the_first_column(strategy: Any) -> None:
    few = strategy.coefficients(3).copy()
    assert np.allclose(strategy.coefficients(STEPS), strategy.encoder(STEPS)[:, 0], atol=1e-14)
    assert np.array_equal(few, strategy.coefficients(STEPS)[:3])


def test_lambda_has_geometric_columns() -> None:
    c = Lambda(0.8).coefficients(200)
    assert np.allclose(c, 0.8 ** np.arange(200))
    assert math.isclose(c @ c, 1 / (1 - 0.8**2))


def test_bisr_is_the_square_root_of_the_inverse_workload() -> None:
    root = Bisr(6, momentum=0.7, weight_decay=0.1).weights
    square = np.convolve(root, root)[:6]
    assert np.allclose(square, [1, -1.6, 0.63, 0, 0, 0])
    assert np.allclose(np.convolve(Bisr(6).weights, Bisr(6).weights)[:6], [1, -1, 0, 0, 0, 0])


def test_the_noise_of_a_tree_is_that_of_its_nodes() -> None:
    sums = TreeAggregation().rows(STEPS).cumsum(axis=0)
    assert [row @ row for row in sums] == [variance_of(t, reduced=False) for t in range(1, STEPS + 1)]
    encoder = TreeAggregation().encoder(STEPS)
    assert set(encoder.ravel()) == {0.0, 1.0}
    assert encoder.sum(axis=0).max() == STEPS.bit_length()  # as many nodes over a step as DPFTRL counts


def test_banded_keeps_its_bands_and_cuts_little() -> None:
    strategy = Banded(6, steps=300)
    c = strategy.coefficients(300)
    assert strategy.bands == 6 and strategy.draws <= 64
    assert np.allclose(c[:6], strategy.designed, atol=1e-14)
    assert 0 < np.abs(c[6:]).sum() == strategy.tail(300) < 100 * TAIL
    whole = np.linalg.inv(np.tril(sum(np.diag([v] * (300 - k), -k) for k, v in enumerate(strategy.designed))))
    assert np.abs(whole[strategy.draws :, 0]).sum() < TAIL
    assert Banded(6, steps=300) == strategy != Banded(6, steps=30)
    assert Banded(6, steps=300, draws=16).draws <= 16
    assert Banded(1, steps=9).draws == 1
    assert Banded(3, coefficients=[2, 1, 0.5]).coefficients(9)[:3].tolist() == [1, 0.5, 0.25]


def test_banded_has_little_noise() -> None:
    """Twice the bands are never worse; many bands without a cut come near to the square root."""

    def cost(c: np.ndarray) -> float:
        return float(_loss(c[1:], 128, np.eye(len(c)), None, 0.0)[0])

    costs = [cost(best_coefficients(bands, 128)) for bands in (2, 4, 8, 32, 128)]
    assert costs == sorted(costs, reverse=True)
    root = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, 128))])
    assert costs[-1] <= cost(root) < costs[-1] + 0.05


@pytest.mark.parametrize(("draws", "weight"), [(None, 0.0), (5, 1e-2), (2, 1e-2)])
def test_the_gradient_of_the_loss(draws: int | None, weight: float) -> None:
    free, spread = np.array([0.6, 0.5, 0.4]), np.eye(4) + 0.1
    numeric = approx_fprime(free, lambda c: _loss(c, 50, spread, draws, weight)[0], 1e-7)
    assert np.allclose(_loss(free, 50, spread, draws, weight)[1], numeric, rtol=1e-4)


def test_marks_tell_strategies_apart() -> None:
    assert len({strategy.mark for strategy in EVERY}) == len(EVERY)
    assert Bisr(4) == Bisr(4) != Bisr(5) and hash(Bisr(4)) == hash(Bisr(4))
    assert Matrix(DENSE) == Matrix(DENSE.copy()) != Matrix(DENSE * 2)
    assert Lambda(0.5) != 0.5


def test_bands() -> None:
    assert (Independent().bands, Lambda(0.5).bands, Bisr(4).bands, TreeAggregation().bands) == (1, None, None, None)
    assert Matrix(encoder=np.eye(9) + np.eye(9, k=-2)).bands == 3
    assert Matrix(np.eye(3)).bands == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Lambda(1.0), r"weight must lie in \[0, 1\)"),
        (lambda: Lambda(-0.1), "weight must lie"),
        (lambda: Lambda(math.nan), "weight must lie"),
        (lambda: Bisr(0), "bands must be a whole number of at least 1"),
        (lambda: Bisr(True), "bands must be"),
        (lambda: Bisr(2, momentum=1.0), r"momentum must lie in \[0, 1\)"),
        (lambda: Bisr(2, weight_decay=-1), "weight_decay must lie"),
        (lambda: Banded(4), "give either steps="),
        (lambda: Banded(2, steps=9, coefficients=[1, 0.5]), "give either steps="),
        (lambda: Banded(2, steps=0), "steps must be"),
        (lambda: Banded(2, steps=9, draws=65), "draws must be at most 64"),
        (lambda: Banded(2, coefficients=[1, 0.5, 0.2]), "coefficients must be 2 finite numbers"),
        (lambda: Banded(2, coefficients=[0, 1]), "the first is not 0"),
        (lambda: Banded(2, coefficients=[1, 1]), "terms beyond 64 sum to inf.*take smaller coefficients"),
        (lambda: Banded(2, coefficients=[1, 0.9], draws=20), "terms beyond 20 sum to"),
        (Matrix, "give either rows="),
        (lambda: Matrix(DENSE, encoder=DENSE), "give either rows="),
        (lambda: Matrix(np.ones((2, 3))), r"rows must be a square matrix, not of shape \(2, 3\)"),
        (lambda: Matrix(encoder=np.ones((2, 2))), "encoder must be lower triangular"),
        (lambda: Matrix([[1.0, 0.0], [1.0, 0.0]]), "rows must have no 0 on its diagonal"),
        (lambda: Matrix([[1.0, 0.0], [math.nan, 1.0]]), "rows must be finite"),
        (lambda: Matrix([[1.0, 0.0], [1j, 1.0]]), "rows must be real"),
        (lambda: Matrix(torch.eye(2, requires_grad=True)), "rows must be an array of numbers"),
    ],
)
def test_bad_settings_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_matrix_has_no_more_steps() -> None:
    for ask in (lambda: Matrix(DENSE).noise_row(STEPS), lambda: Matrix(DENSE).encoder(STEPS + 1)):
        with pytest.raises(StepError, match="a matrix of 40 steps, and the run has more"):
            ask()


def test_the_sign_of_a_normal_is_its_own() -> None:
    signs = np.where(np.arange(STEPS) % 3, 1.0, -1.0)
    assert np.array_equal(Matrix(DENSE * signs).rows(STEPS), DENSE)
    assert np.allclose(Matrix(encoder=DENSE * signs[:, None]).encoder(STEPS), DENSE)


def test_a_matrix_whose_own_normal_hardly_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="add up to"):
        Matrix([[1.0, 0.0], [1.0, 1e-4]])
