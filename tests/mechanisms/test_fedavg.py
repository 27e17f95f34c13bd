"""DP-FedAvg against rounds by hand in float64: clipped sums, noise, sensitivity, epsilon, checkpoints, refusals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.errors import AccountingError, ParameterError, StepError
from fastdp.mechanisms import DPFedAvg
from fastdp.ops.noise import Noise

CLIENTS, R = 8, 0.4


class Tied(nn.Module):
    """A tied weight, a frozen bias, a buffer, an integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.one.bias.requires_grad_(False)
        self.register_buffer("mean", torch.ones(2))
        self.places = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)[:, self.places]))


def made(model: nn.Module, **options) -> DPFedAvg:
    return DPFedAvg(
        model, **{"noise_multiplier": 0.0, "max_update_norm": R, "clients": CLIENTS, "sample_rate": 1.0, **options}
    )


def data(client: int) -> Tensor:
    draw = torch.Generator().manual_seed(client)
    return torch.randn(5, 4, generator=draw, dtype=torch.float64) * (client + 1)


def train(local: nn.Module, client: int, steps: int = 3, term: Callable[[], Tensor] = lambda: torch.zeros(())) -> None:
    optimizer = torch.optim.SGD(local.parameters(), lr=0.06)
    for _ in range(steps):
        loss = local(data(client)).square().sum(1).mean() + term()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def play(fed: DPFedAvg, rounds: int = 1, left_out: int = -1) -> None:
    for _ in range(rounds):
        for client in fed.sample():
            if client != left_out:
                with fed.client(client) as local:
                    assert local.training
                    train(local, client)
        fed.step()


def shift(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(by)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]).clone()


def by_hand(model: nn.Module, clients: list[int]) -> tuple[Tensor, list[float]]:
    """The clipped sum of the updates, and their norms."""
    total, norms = torch.zeros_like(flat(model)), []
    for client in clients:
        local = copy.deepcopy(model)
        train(local, client)
        update = flat(local) - flat(model)
        norms.append(float(update.norm()))
        total += min(1.0, R / norms[-1]) * update
    return total, norms


def test_rounds_without_noise_are_those_by_hand() -> None:
    """Sampled clients, momentum of the server, tied, frozen and integer parameters; a client is dropped."""
    model = Tied().double().eval()
    hand, v = copy.deepcopy(model), 0.0
    server = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    fed = made(model, optimizer=server, expected_clients=4, sample_rate=None, seed=3)
    before, sizes, norms = copy.deepcopy(model.state_dict()), [], list[float]()
    for _ in range(4):
        drawn = fed.sample()
        assert drawn == fed.sample() and len(set(drawn)) == len(drawn)
        with pytest.raises(ZeroDivisionError), fed.client(drawn[0]) as local:
            train(local, 7)
            raise ZeroDivisionError  # discarded
        for client in drawn[1:-1]:
            with fed.client(client) as local:
                train(local, client)
        elsewhere = copy.deepcopy(model)
        train(elsewhere, drawn[-1])
        fed.receive(drawn[-1], elsewhere.state_dict())
        fed.step()
        total, found = by_hand(hand, drawn[1:])
        v, sizes, norms = 0.9 * v + total / 4, [*sizes, len(drawn)], norms + found
        place = 0
        with torch.no_grad():
            for p in (p for p in hand.parameters() if p.requires_grad):
                p += 0.7 * v[place : place + p.numel()].view_as(p)
                place += p.numel()
        torch.testing.assert_close(flat(model), flat(hand), rtol=0, atol=2e-5)  # norms are enlarged by 4e-6
    assert len(set(sizes)) > 1 and min(norms) < R < max(norms)
    assert place == 16 + 4  # the tied weight once, one bias
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in ("one.bias", "mean", "places"))
    assert (
        model.one.weight is model.two.weight and not model.training and all(p.grad is None for p in hand.parameters())
    )


def test_noise_is_sigma_r_over_the_expected_clients_and_a_round_without_clients_counts() -> None:
    for dtype, rate in ((torch.float32, 0.25), (torch.bfloat16, 1e-9)):
        model = nn.Linear(400, 500, dtype=dtype)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        fed = made(model, noise_multiplier=1.5, max_update_norm=0.2, sample_rate=rate, seed=1)
        fed.step()
        found = model.weight.detach().double() / (1.5 * 0.2 / (CLIENTS * rate))
        assert abs(float(found.std()) - 1) < 5 / (2 * found.numel()) ** 0.5
        assert abs(float(found.mean())) < 5 / found.numel() ** 0.5
        assert fed.history == [(1.5, rate, 1)]
        pair = torch.stack([model.bias.detach().double(), found.flatten()[:500]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.25  # noise of its own for each parameter
        first = model.weight.detach().clone()
        fed.step()
        again = (model.weight.detach() - first).double().flatten()
        assert abs(float(torch.corrcoef(torch.stack([first.double().flatten(), again]))[0, 1])) < 0.02


def test_noise_is_for_what_rounding_adds_to_the_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    stds: list[float] = []
    monkeypatch.setattr(Noise, "add_scaled_", lambda source, total, std, *more: stds.append(std) or total)
    made(nn.Linear(3, 2), noise_multiplier=1.5, max_update_norm=0.2, clients=800).step()
    assert stds == pytest.approx([0.3 * (1 + 2.0**-20 * 800 - 4e-6)] * 2, rel=1e-12)


def test_a_client_moves_the_sum_by_at_most_r() -> None:
    """One that is left out, with an update of any size; one that is not finite counts as none."""
    ends = []
    for left_out in (-1, 7):
        model = Tied().double()
        fed = made(model)
        play(fed, left_out=left_out)
        ends.append(flat(model))
    assert R * (1 - 1e-5) < float((ends[0] - ends[1]).norm()) * CLIENTS <= R  # client 7 is clipped
    for wrong in (float("nan"), float("inf"), 1e300, 1e38):
        model = nn.Linear(3, 1).double()
        fed, start = made(model, sample_rate=1.0), flat(model)
        with fed.client(2) as local:
            nn.init.constant_(local.weight, wrong)
        fed.step()
        assert float((flat(model) - start).norm()) * CLIENTS <= R
        assert fed.nonfinite_clients == (wrong != 1e38) and flat(model).isfinite().all()


def test_epsilon_is_of_clients_by_the_accountant() -> None:
    fed = made(nn.Linear(2, 1), noise_multiplier=0.9, clients=1000, sample_rate=0.01)
    assert fed.epsilon(1e-5) == 0.0
    for _ in range(5):
        fed.step()
    fed.noise_multiplier = 2.0
    fed.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fed.epsilon(1e-5) == epsilon_of([(0.9, 0.01, 5), (2.0, 0.01, 1)], 1e-5)
    with pytest.warns(UserWarning, match="random client"):
        fed.epsilon(1e-3)
    with pytest.warns(UserWarning, match="6 noised step"):  # a second one on the model
        made(fed.model).epsilon(1e-5)
    with pytest.warns(UserWarning, match="seed="):
        made(nn.Linear(2, 1), seed=1).epsilon(1e-5)


def test_a_run_that_resumes_goes_on_exactly() -> None:
    def begin() -> DPFedAvg:
        model = Tied().double()
        server = torch.optim.Adam(model.parameters(), lr=0.01)
        return made(model, noise_multiplier=0.8, sample_rate=0.5, seed=11, optimizer=server)

    whole, part = begin(), begin()
    play(whole, 5)
    play(part, 2)
    saved, weights = copy.deepcopy(part.state_dict()), copy.deepcopy(part.model.state_dict())
    again = begin()
    again.model.load_state_dict(weights)
    again.load_state_dict(saved)
    play(again, 3)
    assert torch.equal(flat(again.model), flat(whole.model))
    assert again.history == whole.history == [(0.8, 0.5, 5)]
    play(part, 1)
    with pytest.warns(UserWarning, match="1 noised step.* not in the history"):  # it was made all the same
        part.load_state_dict(saved)
    assert sum(run[2] for run in part.history) == 3
    secret = made(nn.Linear(2, 1), noise_multiplier=1.0)
    secret.step()
    other = made(nn.Linear(2, 1), noise_multiplier=1.0)
    other.load_state_dict(secret.state_dict())
    assert other.history == [(1.0, 1.0, 1)] and other._noise.key != secret._noise.key
    held = other.state_dict()
    for wrong in ({}, {**held, "mechanism": "x"}, {**held, "noise_multiplier": -1}, {**held, "history": [(1, 2, 3)]}):
        with pytest.raises(StepError, match="no state of a DPFedAvg"):
            other.load_state_dict(wrong)
    assert other.history == [(1.0, 1.0, 1)]


def test_what_would_break_the_bound_within_a_round_is_refused() -> None:
    fed = made(Tied().double())
    with pytest.raises(StepError, match="not drawn"), fed.client(CLIENTS):
        pass
    with pytest.raises(ZeroDivisionError), fed.client(0):
        raise ZeroDivisionError
    shift(fed.model, 0.5)  # no update was taken: not within the round
    shift(fed.model, -0.5)
    start = flat(fed.model)
    with fed.client(0) as local:
        train(local, 0)
        for inner in (lambda: fed.client(1).__enter__(), fed.step, fed.state_dict, fed.discard):
            with pytest.raises(StepError, match="block of client 0"):
                inner()
    with pytest.raises(StepError, match="two would move the sum by 2 R"), fed.client(0):
        pass
    with pytest.raises(StepError, match="not drawn"), fed.client(CLIENTS):
        pass
    with pytest.raises(StepError, match="state_dict.* within a round"):
        fed.state_dict()
    with pytest.raises(StepError, match="global model was changed"), fed.client(1):
        train(fed.model, 1)  # the optimizer of the wrong model
    assert torch.equal(flat(fed.model), start)
    shift(fed.model, 1.0)
    with pytest.raises(StepError, match="global model was changed"):
        fed.step()
    with pytest.raises(ParameterError, match=r"no 'one.weight'"), fed.client(1) as local:
        local.one = nn.Linear(3, 3)
    fed.model.two.bias.requires_grad_(False)
    with pytest.raises(StepError, match="frozen or unfrozen"):
        fed.step()
    fed.model.two.bias.requires_grad_(True)
    assert torch.equal(flat(fed.model), start) and fed.history == []
    fed.discard()
    shift(fed.model, 1.0)  # between rounds: weights are loaded, say
    play(fed)
    total, _ = by_hand(_shifted(), fed.sample())
    torch.testing.assert_close(flat(fed.model), flat(_shifted()) + total / CLIENTS, rtol=0, atol=1e-5)


def _shifted() -> nn.Module:
    model = Tied().double()
    shift(model, 1.0)
    return model


def test_models_optimizers_and_numbers_that_do_not_fit_are_refused() -> None:
    def model(*more: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), *more)

    unfit = (
        (model(nn.BatchNorm1d(4)), "GroupNorm"),
        (model().requires_grad_(False), "nothing to train"),
        (nn.LazyLinear(3), "no shape yet"),
        (nn.Linear(2, 2, dtype=torch.cfloat), "complex"),
    )
    for wrong, match in unfit:
        with pytest.raises(ParameterError, match=match):
            made(wrong)
    fixed = model(nn.BatchNorm1d(4).eval())
    fed = made(fixed)
    with fed.client(0) as local:
        assert local.training and not local[1].training
        train(local.double(), 0)
    sgd, one = torch.optim.SGD, model()
    for wrong in (sgd(one[0].weight[None].detach().unbind(), lr=1), sgd([one[0].weight], lr=1)):
        with pytest.raises(ParameterError, match="server's optimizer lacks"):
            made(one, optimizer=wrong)
    with pytest.raises(StepError, match="LBFGS"):
        made(one, optimizer=torch.optim.LBFGS(one.parameters()))
    private = fastdp.DPSGD(one, lr=0.1, noise_multiplier=1.0, expected_batch_size=4)
    with pytest.raises(StepError, match="detach"):
        made(one)
    private.detach()
    made(one)
    for numbers in ({"max_update_norm": 0.0}, {"noise_multiplier": -1.0}, {"clients": 0}, {"expected_clients": 2},
                    {"sample_rate": None}, {"sample_rate": None, "expected_clients": 9},
                    {"lr": 1.0, "optimizer": sgd(one.parameters(), lr=1)}):  # fmt: skip
        with pytest.raises(ValueError):
            made(one, **numbers)
    for numbers in ({"sample_rate": 1.5}, {"accountant": "moments"}):
        with pytest.raises(AccountingError):
            made(one, **numbers)


def test_the_proximal_term_and_ordinary_training_where_nothing_is_clipped() -> None:
    """FedProx by hand; one client, no noise and a large norm are ordinary training, with a private optimizer, too."""
    model = nn.Linear(4, 2).double()
    fed, plain = made(model, clients=1, max_update_norm=1e6), copy.deepcopy(model)
    with fed.client(0) as local:
        assert fed.proximal(local, 0.3).item() == 0.0
        train(local, 1, term=lambda: fed.proximal(local, 0.3))
        away = (flat(local) - flat(model)).square().sum()
        assert fed.proximal(local, 0.3).item() == pytest.approx(0.15 * float(away))
        local.zero_grad()
        fed.proximal(local, 0.3).backward()
        torch.testing.assert_close(local.weight.grad, 0.3 * (local.weight - model.weight).detach())
        assert model.weight.grad is None
    fed.step()
    start = copy.deepcopy(plain)
    pairs = list(zip(plain.parameters(), start.parameters(), strict=True))
    train(plain, 1, term=lambda: 0.15 * sum((p - q.detach()).square().sum() for p, q in pairs))
    torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=1e-12)
