"""Parameters that an ordinary optimizer trains beside a private one are named, once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fastdp


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def private(model: nn.Module, params=None, **given) -> fastdp.DPSGD:
    known = {"expected_batch_size": 6, "sample_rate": 1.0, **given}
    return fastdp.DPSGD(model, params=params, lr=0.1, noise_multiplier=1.0, **known)


def step(optimizers, loss: Tensor) -> None:
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_a_trunk_that_sgd_trains_is_named_once():
    model, x = net(), torch.randn(6, 4)
    both = [private(model, model[2].parameters()), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    with pytest.warns(UserWarning, match=r"no private optimizer trains.* 0\.weight, 0\.bias.*Freeze them") as found:
        for _ in range(3):
            step(both, model(x).square().sum(1).mean())
    assert sum("no private optimizer" in str(w.message) for w in found) == 1


def test_a_trunk_outside_of_the_model_is_seen_by_what_the_inputs_were_made_with():
    trunk, head, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3), torch.randn(6, 4)
    both = [private(head), torch.optim.SGD(trunk.parameters(), lr=0.1)]
    with pytest.warns(UserWarning, match=r"one of shape \(8, 4\), which the inputs were made with"):
        step(both, head(trunk(x)).square().sum(1).mean())


class Tempered(nn.Module):
    """A loss with a trained temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_t = nn.Parameter(torch.zeros(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits * self.log_t.exp(), labels)


@pytest.mark.parametrize("what", ["head", "bias", "tensor", "temperature"])
def test_what_stands_between_the_model_and_the_loss_is_named_once(what):
    model, x, labels = net(), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    made = {"head": nn.Linear(3, 3), "bias": nn.Parameter(torch.zeros(3)), "temperature": Tempered(),
            "tensor": torch.zeros(5, requires_grad=True)}[what]  # fmt: skip
    loss = {"head": lambda: nn.functional.cross_entropy(made(model(x)), labels),
            "bias": lambda: nn.functional.cross_entropy(model(x) + made, labels),
            "tensor": lambda: nn.functional.cross_entropy(model(x) + made[:3], labels),
            "temperature": lambda: made(model(x), labels)}[what]  # fmt: skip
    trained = list(made.parameters()) if isinstance(made, nn.Module) else [made]
    both = [private(model), torch.optim.SGD(trained, lr=0.1)]
    with pytest.warns(UserWarning, match=r"one of shape .*, which the loss was made with") as found:
        for _ in range(3):
            step(both, loss())
    assert sum("no private optimizer" in str(w.message) for w in found) == 1


def test_a_loss_that_is_made_otherwise_later_is_looked_at_again():
    model, x, shift = net(), torch.randn(6, 4), nn.Parameter(torch.zeros(3))
    mine = private(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            step([mine], model(x).square().sum(1).mean())
    with pytest.warns(UserWarning, match=r"one of shape \(3,\), which the loss"):
        step([mine], (model(x) - shift).square().sum(1).mean())


def test_what_is_private_or_no_parameter_between_model_and_loss_hears_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trunk, head, x = nn.Linear(4, 8), nn.Linear(8, 3), torch.randn(6, 4)
        both = [private(trunk), private(head)]
        step(both, head(trunk(x)).square().sum(1).mean())
        frozen = nn.Linear(3, 2).requires_grad_(False)
        model = net()
        mine = private(model)
        step([mine], frozen(model(x)).square().sum(1).mean())
        for _ in range(4):
            start = torch.zeros((), requires_grad=True)  # made anew: nobody trains it
            step([mine], start + model(x).square().sum(1).mean())
        target = torch.randn(6, 3, requires_grad=True)  # data
        step([mine], (model(x) - target).square().sum(1).mean())
        public = nn.Linear(4, 3)  # trained beside it, by backwards of its own
        ordinary = torch.optim.SGD(public.parameters(), lr=0.1)
        for _ in range(3):
            step([mine], model(x).square().sum(1).mean())
            step([ordinary], public(x).square().sum(1).mean())


def test_no_false_alarm():
    """Frozen trunks, detached inputs, inputs that are attacked, gradients from before, added groups."""
    x = torch.randn(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = net()
        step([private(model)], model(x).square().sum(1).mean())
        model = net()
        model[0].requires_grad_(False)
        step([private(model, model[2].parameters())], model(x).square().sum(1).mean())
        trunk, head = nn.Linear(4, 8), nn.Linear(8, 3)
        trunk(x).sum().backward()  # of no private backward
        mine = private(head)
        step([mine], head(trunk(x).detach()).square().sum(1).mean())
        step([mine], head(torch.randn(6, 8, requires_grad=True) * 2).square().sum(1).mean())
        two = nn.ModuleDict({"old": nn.Linear(4, 2), "new": nn.Linear(4, 2)})
        two["old"](x).sum().backward()  # stands in .grad, and nothing is added to it
        mine = private(two, two["new"].parameters())
        step([mine], two["new"](x).square().sum(1).mean())
        mine.add_param_group({"params": two["old"].parameters()})
        step([mine], (two["new"](x) + two["old"](x)).square().sum(1).mean())
        engine = fastdp.PerSampleGradients(model := net(), model[2].parameters())  # no training: nothing to warn of
        model(x).square().sum(1).mean().backward()
        assert engine.norms().shape == (6,)


def rated(rate: float, records: int = 600, batch: int = 60, workers: int = 0, **given) -> list[str]:
    """What a loop over an ordinary loader is told about its sample rate."""
    model = net()
    mine = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=batch, sample_rate=rate)
    loader = DataLoader(TensorDataset(torch.randn(records, 4)), batch_size=batch, shuffle=True, **given)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for (x,) in loader:
            step([mine], model(x).square().sum(1).mean())
    return [str(w.message) for w in found if "sample_rate" in str(w.message)]


def test_a_sample_rate_far_below_batch_by_records_is_warned_of_once():
    (said,) = rated(0.001)
    assert "0.001" in said and "60 of the 600" in said and "0.1" in said
    assert rated(0.1) == [] and rated(0.08) == [] and rated(1.0) == []
    assert len(rated(0.04)) == 1
    assert rated(1 / 11, records=601) == []


@pytest.mark.parametrize("with_norm", [False, True])
def test_parameters_beside_private_ones_that_another_optimizer_waits_for_in_vain_are_named(with_norm):
    """Matrices by one optimizer, biases by another: the calls that use both give the biases nothing."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), torch.randn(6, 4)
    both = [private(model, [model[0].weight, model[2].weight])]
    rest = [model[0].bias, model[2].bias, *(model[1].parameters() if with_norm else [])]
    both.append(torch.optim.AdamW(rest, lr=0.1))
    with pytest.warns(
        UserWarning, match=r"AdamW.step\(\) found no gradient of 2 of its parameters, as '0.bias'"
    ) as found:
        for _ in range(2):
            step(both, model(x).square().sum(1).mean())
    assert sum("in a group of their own" in str(w.message) for w in found) >= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model[0].bias.requires_grad_(False)
        model[2].bias.requires_grad_(False)
        ordinary = torch.optim.AdamW([model[0].bias, model[2].bias], lr=0.1)
        for _ in range(4):
            ordinary.step()
