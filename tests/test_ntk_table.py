"""Table 1 as a command: its fast steps against a real optimizer, and the claims that must hold."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

import fastdp
from fastdp import ntk_table
from fastdp.ntk_table import ROWS, descend, draw, kernel_of, loss_of, measure, table

BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def nets():
    return draw(3, seed=7)


@pytest.mark.parametrize("row", [row for row in ROWS if row.clipping in ("local", "global")], ids=lambda r: r.name)
def test_a_step_is_the_optimizers(nets, row):
    step = descend(nets, row, nets.weights)
    for number in range(3):
        model = copy.deepcopy(nets.template)
        model.load_state_dict({name: w[number] for name, w in nets.weights.items()})
        kernel = kernel_of(nets, nets.weights, number)
        radius = row.ratio * float(nets.scale[number])
        largest = max(float(c.max()) for c in kernel.factors(kernel.clipping(row.clipping, radius, row.style)).values())
        optimizer = fastdp.DPSGD(
            model, lr=float(nets.rate[number]) / largest, noise_multiplier=0.0, clipping=row.clipping,
            max_grad_norm=radius, style=row.style, expected_batch_size=ntk_table.SAMPLES,
        )  # fmt: skip
        loss = loss_of(model(nets.x[number]), nets.y[number]).mean()
        assert float(loss) == pytest.approx(float(step.losses[number]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.detach()
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter, step.weights[name][number], rtol=1e-5, atol=1e-8)
        predicted = kernel.derivative(kernel.clipped(row.clipping, radius, row.style))
        assert (predicted > 0) == bool(step.cosine[number] > 0)


def test_without_clipping_and_batch_clipping_are_gradient_descent(nets):
    plain, batch = (descend(nets, BY_NAME[name], nets.weights) for name in ("no clipping", "batch clipping"))
    for name, weights in nets.weights.items():
        assert torch.allclose(plain.weights[name], batch.weights[name], rtol=1e-9, atol=1e-12)
        model = copy.deepcopy(nets.template)
        model.load_state_dict({n: w[0] for n, w in nets.weights.items()})
        loss_of(model(nets.x[0]), nets.y[0]).mean().backward()
        expected = weights[0] - nets.rate[0] * dict(model.named_parameters())[name].grad
        assert torch.allclose(plain.weights[name][0], expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(plain.cosine, -torch.ones(3, dtype=torch.float64))


def test_what_is_guaranteed_holds_and_what_is_not_fails_somewhere():
    nets = draw(8, seed=0)
    found = {name: measure(nets, BY_NAME[name], 400) for name in
             ("no clipping", "large R, layerwise", "small R, flat", "small R, layerwise")}  # fmt: skip
    for name in ("no clipping", "large R, layerwise"):
        assert found[name].held[:4] == (8,) * 4 and found[name].left < 0.1
    flat, layerwise = found["small R, flat"], found["small R, layerwise"]
    assert flat.held[0] < 8 and flat.held[1] < 8 and flat.held[2] == 8
    assert layerwise.held[2] < 8 and layerwise.held[3] < 8
    text = table(list(found.values()))
    assert "8/8 (yes)" in text and "(no)" in text


def test_a_broken_guarantee_is_said():
    row = BY_NAME["small R, flat"]
    assert ntk_table.broken([ntk_table.Result(row, 4, (0, 0, 4, 0, 4), 0.0)]) == []
    assert ntk_table.broken([ntk_table.Result(row, 4, (4, 4, 3, 4, 4), 0.0)]) == [
        "small R, flat: positive in eigenvalues in 3 of 4"
    ]


def test_the_command(tmp_path):
    out = tmp_path / "table.csv"
    done = subprocess.run(
        [sys.executable, "-m", "fastdp", "ntk", "--networks", "2", "--steps", "10", "--out", str(out)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "small R, layerwise" in done.stdout and "positive in eigenvalues" in done.stdout
    assert len(out.read_text().splitlines()) == 1 + len(ROWS) * len(ntk_table.COLUMNS)
