"""Private optimizers: real torch optimizers, noise of the stated size, physical batches, checkpoints."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp import optim
from fastdp.errors import AccountingError, ClippingError, ParameterError, StepError


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def data(n=6, seed=1):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def backward(model, x):
    model(x).square().sum(1).mean().backward()


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


@pytest.mark.parametrize("base", [torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.NAdam, torch.optim.Adamax])
def test_privatize_any_optimizer(base):
    plain, private = model_of(), model_of()
    theirs = base(plain.parameters(), lr=0.01)
    inner = base(private.parameters(), lr=0.01)
    ours = fastdp.privatize(inner, private, noise_multiplier=0.0, max_grad_norm=1e4, expected_batch_size=6)
    assert ours is inner and isinstance(ours, base) and type(ours).__name__ == f"DP{base.__name__}"
    for model, optimizer in ((plain, theirs), (private, ours)):
        backward(model, data())
        optimizer.step()
    for a, b in zip(plain.parameters(), private.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_lbfgs_and_private_ones_are_refused():
    model = model_of()
    with pytest.raises(ParameterError, match="LBFGS"):
        fastdp.privatize(torch.optim.LBFGS(model.parameters()), model, noise_multiplier=1.0)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0)
    with pytest.raises(ParameterError, match="already"):
        fastdp.privatize(optimizer, model, noise_multiplier=1.0)


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


def test_hooks_run_once_even_after_a_plain_optimizer_was_made():
    torch.optim.AdamW(model_of().parameters())
    model = model_of()
    optimizer = fastdp.DPAdamW(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=6)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    backward(model, data())
    optimizer.step()
    assert calls == ["pre", "post"]


def test_closure():
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=6)

    def closure():
        optimizer.zero_grad()
        loss = model(data()).square().sum(1).mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0 and len(optimizer.history) == 1


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


# --------------------------------------------------------------------------- noise


def noise_of(steps=1, **options):
    """The difference of the gradient with and without noise, of a large model, in units of 1 / batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 100))
    sizes = {"expected_batch_size": 8, **options}
    optimizer = fastdp.DPSGD(model, lr=1.0, **sizes)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    (0 * model(torch.ones(4, 200)).sum(1)).mean().backward()
    optimizer.step()
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return (before - after).double()


@pytest.mark.parametrize(
    "options, std",
    [
        ({"noise_multiplier": 1.0, "max_grad_norm": 2.0}, 2.0 / 8),
        ({"noise_multiplier": 0.5, "max_grad_norm": 2.0, "style": "layerwise"}, 1.0 / 8),
        ({"noise_multiplier": 0.5, "max_grad_norm": 20.0, "clipping": "global"}, 10.0 / 8),
        ({"noise_multiplier": 0.5, "max_grad_norm": 2.0, "loss_reduction": "sum"}, 1.0),
        ({"noise_multiplier": 2.0, "style": [{"params": ["0.weight", "0.bias"], "max_grad_norm": 3.0},
                                             {"params": ["1.weight", "1.bias"], "max_grad_norm": 4.0}]}, 10.0 / 8),
    ],
)  # fmt: skip
def test_noise_has_the_stated_deviation(options, std):
    noise = noise_of(**options)
    n = noise.numel()
    assert abs(float(noise.std()) / std - 1) < 5 / math.sqrt(2 * n)
    assert abs(float(noise.mean())) < 5 * std / math.sqrt(n)


def test_noise_is_drawn_afresh_and_a_seed_repeats_it():
    a, b = noise_of(noise_multiplier=1.0), noise_of(noise_multiplier=1.0)
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02
    assert torch.equal(noise_of(noise_multiplier=1.0, seed=3), noise_of(noise_multiplier=1.0, seed=3))
    assert not torch.equal(noise_of(noise_multiplier=1.0, seed=3), noise_of(noise_multiplier=1.0, seed=4))


def test_noise_differs_by_step_and_parameter():
    model = nn.ModuleList([nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)])
    net = nn.Sequential(*model)
    optimizer = fastdp.DPSGD(net, lr=1.0, noise_multiplier=1.0, expected_batch_size=1, seed=0)
    drawn = []
    for _ in range(2):
        before = [p.detach().clone() for p in net.parameters()]
        (0 * net(torch.ones(2, 100)).sum(1)).mean().backward()
        optimizer.step()
        drawn += [(b - p.detach()).flatten() for b, p in zip(before, net.parameters(), strict=True)]
    correlation = torch.corrcoef(torch.stack(drawn)) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.05


def test_a_layer_skipped_in_a_step_gets_noise_and_no_old_norm():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.use = nn.Linear(4, 4), nn.Linear(4, 4), True

        def forward(self, x):
            return self.b(self.a(x)) if self.use else self.a(x)

    model = Skips()
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, max_grad_norm=1e-3, expected_batch_size=6)
    backward(model, data())
    optimizer.step()
    optimizer.zero_grad()
    model.use = False
    before = model.b.weight.detach().clone()
    backward(model, data())
    engine = fastdp.PerSampleGradients
    optimizer_norms = optimizer.norms.clone()
    optimizer.step()
    assert not torch.equal(before, model.b.weight), "noise for a parameter without a gradient"
    optimizer.detach()
    with torch.no_grad():
        model.b.weight.zero_()
    check = engine(model)
    del check
    assert optimizer_norms.shape == (6,)


def test_noise_once_for_a_logical_batch():
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    loader = fastdp.poisson_loader(
        TensorDataset(torch.zeros(400, 100)), sample_rate=0.2, max_physical_batch_size=16, steps=1, seed=0
    )
    optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=1.0, max_grad_norm=1.0)
    before = model.weight.detach().clone()
    physical = 0
    for (x,) in loader:
        model.weight.data.copy_(before) if physical == 0 else None
        (0 * model(x).sum(1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        physical += 1
    assert physical > 3 and len(optimizer.history) == 1 and optimizer.history[0] == (1.0, 0.2, 1)
    assert float((before - model.weight).std()) * 80 == pytest.approx(1.0, rel=0.05)


# --------------------------------------------------------------------------- accounting, clipping, state


def steps(optimizer, model, n):
    for _ in range(n):
        backward(model, data())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_epsilon_is_opacus_own(accountant):
    from opacus.accountants import create_accountant

    model = model_of()
    optimizer = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=1.1, sample_rate=0.01, expected_batch_size=6, accountant=accountant
    )
    assert optimizer.epsilon(1e-5) == 0
    steps(optimizer, model, 20)
    theirs = create_accountant(accountant)
    for _ in range(20):
        theirs.step(noise_multiplier=1.1, sample_rate=0.01)
    assert optimizer.epsilon(delta=1e-5) == pytest.approx(theirs.get_epsilon(delta=1e-5), rel=1e-6)


def test_epsilon_without_what_it_needs():
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6)
    steps(optimizer, model, 1)
    with pytest.raises(AccountingError, match="sample_rate="):
        optimizer.epsilon(1e-5)
    with pytest.raises(AccountingError, match="delta"):
        optimizer.epsilon(1.0)
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=6, sample_rate=0.1)
    steps(optimizer, model, 1)
    assert optimizer.epsilon(1e-5) == math.inf


def test_a_seed_voids_the_guarantee_and_epsilon_says_so():
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1, seed=1)
    steps(optimizer, model, 1)
    with pytest.warns(UserWarning, match="seed="):
        optimizer.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_noise_multiplier_for_meets_the_target(accountant):
    from fastdp.accounting import epsilon_of

    sigma = fastdp.noise_multiplier_for(
        target_epsilon=2.0, delta=1e-5, sample_rate=0.02, epochs=3, accountant=accountant
    )
    spent = epsilon_of([(sigma, 0.02, 150)], 1e-5, accountant)
    assert 1.98 < spent <= 2.0
    with pytest.raises(AccountingError, match="either"):
        fastdp.noise_multiplier_for(target_epsilon=2.0, delta=1e-5, sample_rate=0.02)


def test_papers_mnist_setting_under_gdp():
    """Bu et al.: MNIST, batch 256, 60 epochs, noise 1.1 is (2.32, 1e-5)-DP by GDP."""
    from fastdp.accounting import epsilon_of

    assert epsilon_of([(1.1, 256 / 60000, 60 * 234)], 1e-5, "gdp") == pytest.approx(2.32, abs=0.03)


def test_set_clipping_changes_factors_and_noise_but_not_the_accounting():
    model = model_of()
    optimizer = fastdp.DPSGD(
        model, lr=0.0, noise_multiplier=1.0, max_grad_norm=0.1, expected_batch_size=6, sample_rate=0.1
    )
    steps(optimizer, model, 1)
    optimizer.set_clipping("global", max_grad_norm=20.0)
    assert optimizer.max_grad_norm == 20.0 and optimizer._privacy.clipping.sensitivity == 20.0
    steps(optimizer, model, 1)
    assert optimizer.history == [(1.0, 0.1, 2)]
    backward(model, data())
    with pytest.raises(StepError, match="between steps"):
        optimizer.set_clipping("local")


def test_clipping_functions_have_their_formulas():
    norms = torch.tensor([0.0, 0.5, 1.0, 4.0])
    for clipping, want in {
        "local": [1, 1, 1, 0.25], "global": [1, 1, 0, 0], "automatic": [100, 1 / 0.51, 1 / 1.01, 1 / 4.01],
    }.items():  # fmt: skip
        found = fastdp.ops.clip_factors(norms.square(), 1.0, clipping)
        assert found.tolist() == pytest.approx(want, rel=2e-5, abs=1e-5), clipping
    assert fastdp.ops.clip_factors(norms.square(), 1.0, "automatic", gamma=0)[0] == 0
    with pytest.raises(ValueError, match="local"):
        fastdp.ops.clip_factors(norms, 1.0, "other")


def test_a_clipping_function_of_ones_own():
    model = model_of()
    optimizer = fastdp.DPSGD(
        model, lr=1.0, noise_multiplier=0.0, expected_batch_size=6, clipping=lambda n: 0.5 / (n + 1)
    )
    steps(optimizer, model, 1)
    for wrong, message in (
        (lambda n: n / n, "exceed"),
        (lambda n: n.sum(), "one factor"),
        (lambda n: -2 / n, "exceed"),
    ):
        optimizer.set_clipping(wrong)
        with pytest.raises(ClippingError, match=message):
            backward(model, 100 * data())
        optimizer.zero_grad()


def test_checkpoint_and_resume_is_the_same_run():
    def fresh():
        model = model_of()
        return model, fastdp.DPAdamW(
            model, lr=0.05, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1, seed=7
        )

    model, optimizer = fresh()
    steps(optimizer, model, 2)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    steps(optimizer, model, 2)
    other, resumed = fresh()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    steps(resumed, other, 2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.history == optimizer.history == [(1.0, 0.1, 4)]


def test_state_dict_holds_no_secret_and_survives_torch_save(tmp_path):
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=6, sample_rate=0.1)
    steps(optimizer, model, 1)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert set(state["fastdp"]) == {
        "history", "noise_step", "seed", "noise_multiplier", "clipping", "max_grad_norm", "dropped", "style",
        "gamma"
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


def test_public_names():
    for name in ("DPSGD", "DPAdam", "DPAdamW", "DPRMSprop", "privatize", "PerSampleGradients", "verify",
                 "noise_multiplier_for", "poisson_loader"):  # fmt: skip
        assert hasattr(fastdp, name) and (getattr(fastdp, name).__doc__ or "").strip()
    assert optim.privatize is fastdp.privatize
