"""Table 1 as a command: its fast steps against a real optimizer, and the claims that must hold."""

from __future__ import annotations

import copy
import sys

import pytest
import torch

import fastdp
from fastdp.__main__ import main
from fastdp.commands import ntk_table
from fastdp.commands.ntk_table import ROWS, descend, draw, kernel_of, loss_of, measure, table

pytestmark = pytest.mark.slow  # `make test-all` runs it

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
        assert float(loss.detach()) == pytest.approx(float(step.losses[number]))
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
    nets = draw(6, seed=0)
    steps = {"no clipping": 100, "large R, layerwise": 100, "small R, flat": 600, "small R, layerwise": 600}
    found = {name: measure(nets, BY_NAME[name], count) for name, count in steps.items()}
    for name in ("no clipping", "large R, layerwise"):
        assert found[name].held[:3] == (6,) * 3 and found[name].held[4] == 6 and found[name].left < 0.6
    assert found["small R, flat"].held[:3] == (0, 0, 6) and found["small R, flat"].held[4] < 6
    assert found["small R, layerwise"].held[:2] == (0, 0) and found["small R, layerwise"].held[4] < 6
    text = table(list(found.values()))
    assert "6/6 (yes)" in text and "(no)" in text


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.paper and row.paper[4]])
def test_a_rise_where_the_paper_guarantees_none_is_seen(name, monkeypatch):
    """With steps that are too long the loss rises, whatever the kernel says: the column can fail."""
    monkeypatch.setattr(ntk_table, "RATE", 3.0)
    assert measure(draw(4, seed=0), BY_NAME[name], 60).held[4] < 4


def test_a_broken_guarantee_is_said():
    row = BY_NAME["small R, flat"]
    assert ntk_table.broken([ntk_table.Result(row, 4, (0, 0, 4, 2, 0, 2), 0.0)]) == []
    assert ntk_table.broken([ntk_table.Result(row, 4, (4, 4, 3, 3, 4, 2), 0.0)]) == [
        "small R, flat: positive in eigenvalues in 3 of 4", "small R, flat: zero loss, if it converges in 2 of 3"
    ]  # fmt: skip


def test_the_command(tmp_path, monkeypatch, capsys):
    out = tmp_path / "table.csv"
    command = "fastdp ntk --networks 1 --steps 5 --out".split()
    monkeypatch.setattr(sys, "argv", [*command, str(out)])
    main()
    said = capsys.readouterr().out
    assert "small R, layerwise" in said and "positive in eigenvalues" in said
    assert len(out.read_text().splitlines()) == 1 + len(ROWS) * len(ntk_table.COLUMNS)
