"""The optimizers' fused step against the two-pass one: noise into `.grad`, then torch's own update."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.optim import fused_update

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.5)),
    "momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05)),
    "nesterov": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True)),
    "adam": (torch.optim.Adam, dict(lr=0.01, weight_decay=0.1)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)),
    "adamw maximize": (torch.optim.AdamW, dict(lr=0.01, maximize=True)),
}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 3)).to(dtype)


def train(base: type, options: dict, two_pass: bool, monkeypatch: pytest.MonkeyPatch, steps: int = 4,
          dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer, list]:  # fmt: skip
    model = model_of(dtype)
    optimizer = fastdp.privatize(
        base(model.parameters(), **options), model, noise_multiplier=0.8, expected_batch_size=6, seed=5
    )
    x, y = torch.randn(6, 7, generator=torch.Generator().manual_seed(1)).to(dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    grads = []
    with monkeypatch.context() as patch:
        if two_pass:
            patch.setattr(fused_update, "kind_of", lambda base: None)
        else:  # the two-pass way must not be taken
            patch.setattr(fastdp.ops.Noise, "add_scaled_", None)
        for number in range(steps):
            F.cross_entropy(model(x), y).backward()
            if number == 2:
                model[0].bias.requires_grad_(False)  # skips steps, so that ages differ
            if number == 3:
                model[0].bias.requires_grad_(True)
            optimizer.step()
            grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
    return model, optimizer, grads


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_trajectory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, options = OPTIMIZERS[name]
    one, one_optimizer, one_grads = train(base, options, False, monkeypatch)
    two, two_optimizer, two_grads = train(base, options, True, monkeypatch)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        assert not torch.equal(a, dict(model_of().named_parameters())["0.weight"]) or a.shape != (9, 7)
    for first, second in zip(one_grads, two_grads, strict=True):
        for a, b in zip(first, second, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
    assert one_optimizer.history == two_optimizer.history == [(0.8, None, 4)]


@pytest.mark.parametrize("change", ["replaced", "written", "all", "loaded"])
def test_numbers_of_steps_that_others_change_are_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie side by side and are counted at once; a bias correction of another age is another update."""
    found = []
    for two_pass in (False, True):
        model = model_of()
        inner = torch.optim.AdamW(model.parameters(), lr=0.05)
        optimizer = fastdp.privatize(inner, model, noise_multiplier=0.0, expected_batch_size=6)
        x, y = torch.randn(6, 7, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])
        with monkeypatch.context() as patch:
            if two_pass:
                patch.setattr(fused_update, "kind_of", lambda base: None)
            for number in range(6):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                states = [optimizer.state[p] for p in model.parameters()]
                if number == 2 and change == "replaced":
                    states[1]["step"] = torch.tensor(40.0)
                elif number == 2 and change == "written":
                    states[1]["step"].fill_(40.0)
                elif number == 2 and change == "all":
                    torch._foreach_add_([state["step"] for state in states], 7)
                elif number == 2:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert [float(optimizer.state[p]["step"]) for p in model.parameters()][:2] == {
                "replaced": [6.0, 43.0], "written": [6.0, 43.0], "all": [13.0, 13.0], "loaded": [6.0, 6.0],
            }[change]  # fmt: skip
        found.append(model)
    for p, q in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, grads = train(torch.optim.AdamW, dict(lr=0.01), False, monkeypatch, dtype=dtype)
    assert all(torch.isfinite(p).all() and p.dtype == dtype for p in model.parameters())
    if dtype == torch.float64:
        two, _, _ = train(torch.optim.AdamW, dict(lr=0.01), True, monkeypatch, dtype=dtype)
        for a, b in zip(model.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "options", [dict(amsgrad=True), dict(lr=torch.tensor(0.01)), dict(capturable=False, amsgrad=True, foreach=True)]
)
def test_what_is_not_fused_takes_the_other_way(options: dict) -> None:
    model = model_of()
    optimizer = fastdp.DPAdamW(
        model, **{"lr": 0.01, "noise_multiplier": 1.0, "expected_batch_size": 6, "seed": 1, **options}
    )
    assert not fused_update.can_fuse("adam", optimizer.param_groups, optimizer.state)
    model(torch.randn(6, 7)).square().sum(1).mean().backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_are_tied_by_their_memory_take_each_others_updates(name: str) -> None:
    base, options = OPTIMIZERS[name]
    x, weights = torch.randn(6, 7), []
    for private in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        optimizer = base(model.parameters(), **options)
        if private:
            optimizer = fastdp.privatize(
                optimizer, model, noise_multiplier=0.0, max_grad_norm=1e6, expected_batch_size=6
            )
        for number in range(4):
            if number == 2:
                model[2].weight.data = model[0].weight.data
            model(x).square().sum(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(list(model.parameters()))
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_subclass_with_a_step_of_its_own_is_not_fused() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.copy_(torch.full_like(p, 3.0) + 0 * p.grad)

    class Same(torch.optim.AdamW):
        pass

    assert (
        fused_update.kind_of(Own) is None
        and fused_update.kind_of(Same) == "adam"
        and fused_update.kind_of(torch.optim.NAdam) is None
    )
    model = model_of()
    optimizer = fastdp.privatize(Own(model.parameters(), lr=0.1), model, noise_multiplier=1.0, expected_batch_size=6)
    model(torch.randn(6, 7)).square().sum(1).mean().backward()
    optimizer.step()
    assert all((p == 3).all() for p in model.parameters())
