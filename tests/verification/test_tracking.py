"""What a run is watched by reaches each kind of writer, and is what the diagnostics say."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.diagnostics import NormHistogram
from fastdp.tracking import Tracker


class Board:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.histograms: dict[tuple[str, int], Tensor] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def add_histogram(self, name: str, values: Tensor, step: int) -> None:
        self.histograms[name, step] = values


class Run:
    """As a run of wandb."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))


def train(writer: Any, steps: int = 5, **options: Any) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=1.5, max_grad_norm=0.5, expected_batch_size=8, sample_rate=0.1
    )
    tracker, norms = Tracker(optimizer, writer, delta=1e-5, **options), []
    for _ in range(steps):
        model(torch.randn(8, 3)).square().mean().backward()
        norms.append(optimizer.norms.clone())
        optimizer.step()
        tracker.step()
        optimizer.zero_grad()
    tracker.close()
    return optimizer, norms


def test_a_function_gets_what_the_diagnostics_say() -> None:
    rows: list[tuple[dict[str, Any], int]] = []
    optimizer, norms = train(lambda values, step: rows.append((dict(values), step)), every=2)
    assert [step for _, step in rows] == [1, 3, 5]
    for values, step in rows:
        assert values["privacy/clipped_not_private"] == pytest.approx(float((norms[step - 1] > 0.5).float().mean()))
        assert values["privacy/norm_median_not_private"] == pytest.approx(
            float(norms[step - 1].double().quantile(0.5)), rel=1e-6
        )
        assert (
            isinstance(values["privacy/norms_not_private"], NormHistogram)
            and int(values["privacy/norms_not_private"].counts.sum()) == 8
        )
        noise = values["privacy/noise_over_signal_not_private"] * values["privacy/clipped_norm_not_private"]
        assert noise == pytest.approx(1.5 * 0.5 * math.sqrt(21), rel=1e-5)
    assert rows[-1][0]["privacy/epsilon"] == pytest.approx(optimizer.epsilon(1e-5))


def test_noise_is_that_of_the_step_where_the_clipping_norm_moves() -> None:
    rows: list[dict[str, Any]] = []
    model = nn.Linear(3, 1)
    optimizer = fastdp.DPSGD(
        model, lr=0.0, noise_multiplier=1.5, max_grad_norm=0.5, clipping="adaptive", quantile_rate=2.0, count_noise=4.0,
        expected_batch_size=8, sample_rate=0.1,
    )  # fmt: skip
    tracker = Tracker(optimizer, lambda values, step: rows.append(dict(values)), prefix="", every=1)
    for _ in range(3):
        before = optimizer.max_grad_norm
        model(torch.ones(8, 3)).square().mean().backward()
        optimizer.step()
        optimizer.noise_multiplier = optimizer.noise_multiplier * 2  # as a schedule does, for the next step
        optimizer.zero_grad()
        assert optimizer.max_grad_norm != before
        tracker.step()
        both = optimizer.noise_multiplier / 2
        gradients = (both**-2 - 8.0**-2) ** -0.5 if both < 8 else math.nan
        assert rows[-1]["noise_over_signal_not_private"] * rows[-1]["clipped_norm_not_private"] == pytest.approx(
            gradients * before * 2, rel=1e-5
        )
    tracker.close()


def test_tensorboard() -> None:
    board = Board()
    train(board, every=4, prefix="")
    assert {step for _, step in board.scalars} == {1, 5} and ("epsilon", 5) in board.scalars
    assert len(board.histograms["norms_not_private", 1]) == 8


@pytest.mark.parametrize("scale", [0.0, math.nan])
def test_a_step_without_a_norm_to_show_goes_on(scale: float) -> None:
    """A SummaryWriter raises for a histogram of nothing."""

    class Strict(Board):
        def add_histogram(self, name: str, values: Tensor, step: int) -> None:
            assert len(values)
            super().add_histogram(name, values, step)

    model, board = nn.Linear(3, 1), Strict()
    optimizer = fastdp.DPSGD(model, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4, sample_rate=0.1)
    tracker = Tracker(optimizer, board, delta=1e-5)
    (model(torch.randn(4, 3)) * scale).sum(1).mean().backward()
    optimizer.step()
    tracker.step()
    assert not board.histograms and ("privacy/epsilon", 1) in board.scalars
    tracker.close()


@pytest.mark.parametrize("installed", [True, False])
def test_wandb(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = types.SimpleNamespace(Histogram=lambda np_histogram: ("histogram", *np_histogram))
    monkeypatch.setitem(sys.modules, "wandb", kind if installed else None)
    run = Run()
    train(run, steps=1)
    ((values, step),) = run.logged
    shown = values["privacy/norms_not_private"]
    assert step == 1 and (shown[0] == "histogram" if installed else set(shown) == {"counts", "edges"})


def test_only_noised_steps_count() -> None:
    rows: list[int] = []
    model = nn.Linear(3, 1)
    data = torch.utils.data.TensorDataset(torch.randn(60, 3))
    loader = fastdp.poisson_loader(data, expected_batch_size=20, max_physical_batch_size=4, seed=1)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    tracker = Tracker(optimizer, lambda values, step: rows.append(step), every=1)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        tracker.step()
        optimizer.zero_grad()
    assert rows == [1, 2, 3]


@pytest.mark.parametrize(("writer", "options"), [(3, {}), (print, {"delta": 1.5}), (print, {"every": 0})])
def test_bad_arguments(writer: Any, options: dict[str, Any]) -> None:
    optimizer = fastdp.DPSGD(nn.Linear(3, 1), noise_multiplier=1.0, expected_batch_size=8)
    with pytest.raises(ValueError):
        Tracker(optimizer, writer, **options)
    Tracker(optimizer, print).close()  # nothing is left on it
