"""Private optimizers: real torch optimizers, their groups, hooks and schedulers, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch

import fastdp
from fastdp.errors import StepError

from ..runs import backward, data, model_of, steps

BASES = {
    "DPSGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "DPAdam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9)}),
    "DPAdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "DPRMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
}


@pytest.mark.parametrize("name", BASES)
def test_without_noise_and_clipping_it_is_torchs_optimizer(name):
    base, options = BASES[name]
    plain, private = model_of(), model_of()
    ours = getattr(fastdp, name)(private, noise_multiplier=0.0, max_grad_norm=1e4, expected_batch_size=6, **options)
    theirs = base(plain.parameters(), **options)
    assert isinstance(ours, base) and isinstance(ours, torch.optim.Optimizer)
    for step in range(4):
        for model, optimizer in ((plain, theirs), (private, ours)):
            backward(model, data(seed=step))
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), private.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


class Shifted(torch.nn.Module):
    """All elements of the shift have the same gradient: autograd keeps one number."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift = torch.nn.Linear(4, 1), torch.nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.layer(x) + self.shift.sum()


def test_gradients_of_several_backwards_add_up_though_they_are_expanded():
    model = Shifted()
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=1e4, loss_reduction="sum")
    for seed in range(3):
        model(data(seed=seed)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.shift.grad, torch.full((5,), 18.0))


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_step_the_private_step(when):
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5) if when == "before" else None
    optimizer = fastdp.privatize(inner, model, noise_multiplier=0.0, max_grad_norm=1e-3, expected_batch_size=6)
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = model[0].weight.detach().clone()
    backward(model, 100 * data())
    optimizer.step()
    schedule.step()
    assert float((model[0].weight - before).norm()) <= 1e-3, "the step was clipped"
    assert optimizer.param_groups[0]["lr"] == 0.5 and len(optimizer.history) == 1


def test_groups_and_add_param_group():
    model = model_of()
    optimizer = fastdp.DPSGD(
        model,
        params=[{"params": model[0].parameters(), "lr": 0.0}],
        lr=0.5,
        noise_multiplier=0.0,
        expected_batch_size=6,
    )
    before = copy.deepcopy(model.state_dict())
    backward(model, data())
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "lr 0, and the rest is not trained"
    only = optimizer.norms
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})
    model.zero_grad()
    backward(model, data())
    assert bool((optimizer.norms > only).all())
    optimizer.step()
    assert not torch.equal(model[2].weight, before["2.weight"])


# --------------------------------------------------------------------------- state


def test_state_dict_holds_no_secret_and_survives_torch_save(tmp_path):
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1)
    steps(optimizer, model, 1)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert set(state["fastdp"]) == {
        "history", "noise_step", "seed", "noise_multiplier", "clipping", "max_grad_norm", "dropped", "style",
        "gamma", "grouped", "makers", "stream"
    } and state["fastdp"]["seed"] is None  # fmt: skip
    optimizer.load_state_dict(state)
    assert optimizer.history == [(1.0, 0.1, 1)]


def test_explain_is_a_table_of_all_uses():
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6)
    with pytest.raises(StepError):
        optimizer.explain()
    backward(model, data())
    lines = optimizer.explain().splitlines()
    assert lines[0].split() == ["parameter", "function", "shape", "route", "units", "bytes", "predicted", "ms"]
    assert {line.split()[0] for line in lines[1:-1]} == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_explain_says_that_norms_lie_far_below_the_clipping_norm(style):
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, style=style)
    for scale, told in ((1.0, False), (1e-3, True)):
        (scale * model(data()).square().sum(1).mean()).backward()
        optimizer.step()
        assert ("If the loss is scaled down" in optimizer.explain()) == told
