"""What DP-FTRL's trees cost: closed forms, another library's accountant, and runs that stop and go on."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import fastdp
from fastdp.accounting import epsilon_of
from fastdp.errors import AccountingError, StepError
from fastdp.mechanisms import ftrl_loader, tree_epsilon, tree_noise_multiplier
from fastdp.mechanisms.participation import runs_of

from .test_ftrl import BATCH, data, made, network, train

pytestmark = pytest.mark.filterwarnings("ignore:the model was never verified", "ignore:the noise comes from seed")


def exact(mu: float, epsilon: float) -> float:
    """delta of a Gaussian mechanism of sensitivity mu and unit noise (Balle and Wang 2018)."""
    normal = torch.distributions.Normal(0.0, 1.0)

    def below(x: float) -> float:
        return float(normal.cdf(torch.tensor(x, dtype=torch.float64)))

    return below(mu / 2 - epsilon / mu) - math.exp(epsilon) * below(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("sigma", "steps", "epochs"), [(8.0, 100, 1), (20.0, 255, 5), (20.0, 256, 5), (3.0, 1, 2)])
def test_epsilon_is_that_of_the_nodes_over_a_record(sigma: float, steps: int, epochs: int) -> None:
    """Trees compose to one Gaussian mechanism: PRV gives it to its 0.01, RDP bounds it."""
    mu = math.sqrt(epochs * (math.floor(math.log2(steps)) + 1)) / sigma
    prv, rdp = (
        tree_epsilon(noise_multiplier=sigma, steps_per_epoch=steps, epochs=epochs, delta=1e-5, accountant=name)
        for name in ("prv", "rdp")
    )
    assert exact(mu, prv) <= 1e-5 < exact(mu, prv - 0.03)
    assert prv <= rdp < 1.15 * prv + 0.1
    found = tree_noise_multiplier(target_epsilon=prv, delta=1e-5, steps_per_epoch=steps, epochs=epochs)
    assert found == pytest.approx(sigma, rel=0.01)


def test_epsilon_of_a_run_is_that_of_its_trees() -> None:
    model = network()
    optimizer = made(model, noise_multiplier=6.0)
    loader = ftrl_loader(data(), batch_size=BATCH)
    assert optimizer.epsilon(1e-3) == 0
    for epoch in range(1, 4):
        train(optimizer, model, loader)
        expected = tree_epsilon(noise_multiplier=6.0, steps_per_epoch=6, epochs=epoch, delta=1e-3)
        assert optimizer.epsilon(1e-3) == pytest.approx(expected)
    assert optimizer.history == [(6.0, None, 18)]
    with pytest.raises(AccountingError, match="sample rate"):  # nobody takes it for a sampled run
        epsilon_of(optimizer.history, 1e-3)


def test_a_run_that_resumes_begins_a_tree_where_it_stopped_and_pays_no_more() -> None:
    """The noise of the first part is not saved, so nothing can be reused; its batches are not those of the rest."""
    model, loader = network(), ftrl_loader(data(), batch_size=BATCH)
    optimizer = made(model, seed=None)
    train(optimizer, model, loader)
    train(optimizer, model, loader, steps=2)
    saved, place = copy.deepcopy(optimizer.state_dict()), loader.state_dict()
    assert "key" not in str(saved)
    optimizer.detach()
    again, other = made(model, seed=None), ftrl_loader(data(), batch_size=BATCH)
    again.load_state_dict(saved)
    other.load_state_dict(place)
    train(again, model, other)
    assert [(tree.first, tree.steps) for tree in again.trees] == [(0, 6), (0, 2), (2, 4)]
    assert again.epsilon(1e-3) == pytest.approx(epsilon_of([(0.7, 1.0, 3 + 3)], 1e-3))  # as of two passes of 3 digits
    with pytest.raises(StepError, match="another order, batch size"):
        train(again, model, ftrl_loader(data(), batch_size=BATCH, order=list(range(24))[::-1]))


def test_another_loader_of_the_same_order_draws_no_batch_again() -> None:
    model, optimizers = network(), []
    for _ in range(2):
        optimizer = made(model, seed=None)
        for _ in range(2):
            train(optimizer, model, ftrl_loader(data(), batch_size=BATCH))
        assert "repeated" not in optimizer._privacy.warned and not optimizer._privacy.ledger.draws
        optimizers.append(optimizer)
        optimizer.detach()
    order = optimizers[0].state_dict()["fastdp"]["mechanism"]["order"]
    assert order == "4b47a3b2bdc1fc7f"  # as in states that were saved by earlier builds
    assert optimizers[0].epsilon(1e-3) == pytest.approx(epsilon_of([(0.7, 1.0, 6)], 1e-3))


def test_steps_that_a_loaded_state_does_not_hold_stay_counted() -> None:
    model, loader = network(), ftrl_loader(data(), batch_size=BATCH)
    optimizer = made(model, seed=None)
    train(optimizer, model, loader)
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, model, loader)
    with pytest.warns(UserWarning, match="6 noised step"):
        optimizer.load_state_dict(saved)
    train(optimizer, model, loader)
    assert runs_of(optimizer.trees) == [(0.7, 1.0, 9)]
    assert optimizer.epsilon(1e-3) == pytest.approx(epsilon_of([(0.7, 1.0, 9)], 1e-3))


def test_states_of_other_mechanisms_are_refused() -> None:
    model = network()
    tree, plain = made(model), fastdp.DPSGD(network(), lr=0.1, noise_multiplier=1.0)
    train(tree, model, ftrl_loader(data(), batch_size=BATCH))
    with pytest.raises(StepError, match="mechanism is DP-FTRL"):
        plain.load_state_dict(tree.state_dict())
    with pytest.raises(StepError, match="mechanism is none"):
        tree.load_state_dict(plain.state_dict())
    broken = tree.state_dict()
    broken["fastdp"]["mechanism"]["trees"] = [("a", 1.0, 0, 0)]
    with pytest.raises(StepError, match="without steps"):
        tree.load_state_dict(broken)
    assert len(tree.trees) == 1


def test_after_a_step_that_fails_a_tree_begins_and_no_noise_is_drawn_twice() -> None:
    model, loader = network(), ftrl_loader(data(), batch_size=BATCH)
    optimizer = made(model, noise_multiplier=1.0)
    drawn: list[tuple[int, int]] = []
    source = optimizer._privacy.noise
    whole = source._draw

    def watched(like, std, end, height, offset):
        if (end, height, offset) in drawn or (end == 4 and offset and not broken):
            broken.append(True)
            raise MemoryError("no room")
        drawn.append((end, height, offset))
        return whole(like, std, end, height, offset)

    broken: list[bool] = []
    source._draw = watched
    with pytest.raises(MemoryError):
        train(optimizer, model, loader)
    loader.load_state_dict({"pass": 0, "step": 3})
    train(optimizer, model, loader)
    assert len(broken) == 1 and [(t.first, t.steps) for t in optimizer.trees] == [(0, 3), (3, 3)]
