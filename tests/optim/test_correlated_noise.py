"""noise=: what a step releases has the strategy's noise, whatever makes the step, and blocks begin where they must."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp import mechanisms
from fastdp.errors import AccountingError, ClippingError, StepError
from fastdp.mechanisms import Bisr, Lambda, Matrix, TreeAggregation
from fastdp.ops.noise_reference import reference_noise

RECORDS, BATCH, SIGMA = 60, 20, 4.0
STRATEGIES = (Lambda(0.7), Bisr(4), TreeAggregation(), Matrix(np.tril(np.full((9, 9), 0.25)) + np.eye(9)))


def data() -> TensorDataset:
    source = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(RECORDS, 5, generator=source), torch.arange(RECORDS) % 3)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def make(model: nn.Module, noise: Any, kind: str = "SGD", **options: Any) -> Any:
    options = {"noise_multiplier": SIGMA, "max_grad_norm": 1.0, "seed": 1, "noise": noise, **options}
    if kind in ("SGD", "AdamW"):
        return getattr(fastdp, f"DP{kind}")(model, lr=0.0, **options)
    return fastdp.privatize(getattr(torch.optim, kind)(model.parameters(), lr=0.0), model, **options)


def train(optimizer: Any, model: nn.Module, loader: Any, passes: int = 1) -> list[Tensor]:
    """What each step releases, as one vector."""
    released = []
    for _ in range(passes):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            released.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    return released


def blocks_of(optimizer: Any) -> list[int]:
    return [block.steps for block in optimizer._privacy.mechanism.all.values()]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
def test_the_noise_is_that_of_the_strategy(strategy: Any, kind: str) -> None:
    """At lr = 0 a fixed order has the same clipped sums in each pass, which a run without noise tells."""
    model = make_model()
    loader = mechanisms.fixed_order_loader(data(), batch_size=BATCH)
    optimizer = make(model, strategy, kind)
    released = train(optimizer, model, loader, 3)
    key, offsets = optimizer._privacy.noise.key, optimizer._privacy.engine.offsets()
    optimizer.detach()
    sums = train(make(model, strategy, kind, noise_multiplier=0.0), model, loader, 3)
    for step, (noisy, clean) in enumerate(zip(released, sums, strict=True)):
        own, earlier = strategy.noise_row(step)
        truth = torch.zeros_like(clean)
        for number, weight in [(step, own), *((step - lag, weight) for lag, weight in earlier)]:
            drawn = [reference_noise(p.numel(), key, number, offsets[name]) for name, p in model.named_parameters()]
            truth += weight * torch.cat(drawn)
        error = ((noisy - clean) * BATCH / SIGMA - truth).abs().max()
        assert error <= own / 64  # the grid is a 64th of the step's own noise at most: half of that, and rounding
    assert blocks_of(optimizer) == [9]


def test_what_is_released_does_not_depend_on_the_physical_batches_or_on_replay() -> None:
    def run(limit: int | None, graphed: bool) -> list[Tensor]:
        model = make_model()
        loader = mechanisms.fixed_order_loader(data(), batch_size=BATCH, max_physical_batch_size=limit)
        optimizer = make(model, Bisr(3), graphed=graphed)
        released = []
        for _ in range(4):
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if optimizer.stepped:
                    released.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert blocks_of(optimizer) == [12]
        return released

    whole = run(None, False)
    for other in (run(7, False), run(None, True)):
        torch.testing.assert_close(torch.stack(other), torch.stack(whole))


def test_a_run_goes_on_with_its_noise_or_begins_a_block() -> None:
    def begin() -> tuple[Any, nn.Module, Any]:
        model = make_model()
        return make(model, Bisr(4), seed=None), model, mechanisms.fixed_order_loader(data(), batch_size=BATCH)

    optimizer, model, loader = begin()
    train(optimizer, model, loader)
    saved, noise, place = optimizer.state_dict(), optimizer.noise_state(), loader.state_dict()
    rest = train(optimizer, model, loader, 2)
    whole = optimizer.epsilon(1e-3)
    for secret in (True, False):
        other, model, loader = begin()
        other.load_state_dict(saved)
        loader.load_state_dict(place)
        if secret:
            other.load_noise_state(noise)
        planned = other._privacy.blocks_after(6, loader.participation, loader.state_dict()["step"])
        again = train(other, model, loader, 2)
        assert all(map(torch.equal, again, rest)) == secret
        made = other._privacy.mechanism.all.values()
        assert [block[1:] for block in planned] == [block[1:] for block in made]
        assert blocks_of(other) == ([9] if secret else [3, 6])
        if secret:
            assert other.epsilon(1e-3) == pytest.approx(whole)
        assert not math.isnan(other.epsilon(1e-3))


@pytest.mark.parametrize("change", ["pass", "sigma", "norm", "draw", "key"])
def test_another_block_begins_where_steps_are_not_consecutive_or_the_noise_is_another(change: str) -> None:
    model, loader = make_model(), mechanisms.fixed_order_loader(data(), batch_size=BATCH)
    optimizer = make(model, Bisr(4))
    if change == "pass":
        for x, y in loader:  # broken off: the first records come again after one step
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            break
    else:
        train(optimizer, model, loader)
    if change == "sigma":
        optimizer.noise_multiplier = 5.0
    elif change == "norm":
        optimizer.set_clipping(max_grad_norm=0.5)
    elif change == "key":
        optimizer._privacy.noise.restore(bytes(32), 3)
    elif change == "draw":
        optimizer._privacy.noise.step += 1
    told = pytest.warns(UserWarning, match="begun anew") if change in ("sigma", "norm") else contextlib.nullcontext()
    with told:
        train(optimizer, model, loader)
    assert blocks_of(optimizer) == ([1, 3] if change == "pass" else [3, 3])
    assert optimizer.epsilon(1e-3) > mechanisms.Bisr(4).epsilon(
        list(optimizer._privacy.mechanism.all.values())[1:], 1e-3
    )


def test_a_budget_is_that_of_one_block() -> None:
    model, loader = make_model(), mechanisms.fixed_order_loader(data(), batch_size=BATCH)
    budget = {"noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3, "epochs": 2, "loader": loader}
    optimizer = make(model, Bisr(4), **budget)
    train(optimizer, model, loader, 2)
    assert optimizer.epsilon(1e-3) == pytest.approx(2.0, rel=3e-3)
    assert optimizer.epsilon(1e-3) <= 2.0
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(StepError, match="budget is spent"):
        train(optimizer, model, loader)
    assert all(map(torch.equal, before, model.parameters()))
    assert blocks_of(optimizer) == [6]


@pytest.mark.filterwarnings("ignore::fastdp.errors.NotVerifiedWarning")
def test_a_ledger_counts_steps_after_a_checkpoint_in_their_blocks(tmp_path: Path) -> None:
    path, loader = str(tmp_path / "ledger"), mechanisms.fixed_order_loader(data(), batch_size=BATCH)

    def begin(noise: Any = STRATEGIES[1], **options: Any) -> tuple[Any, nn.Module]:
        model = make_model()
        return make(model, noise, seed=None, ledger=path, **options), model

    def epsilon(*blocks: tuple[int, int], mark: str = loader.participation.mark) -> float:
        part = loader.participation._replace(mark=mark)
        return Bisr(4).epsilon([mechanisms.Block("", SIGMA, steps, part, first) for steps, first in blocks], 1e-3)

    first, model = begin()
    train(first, model, loader)
    state = first.state_dict()
    train(first, model, loader)
    first.detach()
    second, model = begin()
    assert blocks_of(second) == [6]
    with pytest.warns(UserWarning, match="3 noised"):
        second.load_state_dict(state)
    assert second.epsilon(1e-3) == pytest.approx(epsilon((6, 0)))
    second._privacy.release_hook = lambda release: 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(second, model, loader)
    second._privacy.release_hook = None
    loader.load_state_dict({**loader.state_dict(), "step": 1})
    train(second, model, loader)  # with most at another place of a pass than before
    assert blocks_of(second) == [6, 2] and second.epsilon(1e-3) == pytest.approx(epsilon((6, 0), (2, 1)))
    second.detach()
    written = Path(path).read_text()
    assert loader.participation.mark.split()[-1] not in written
    Path(path).write_text(written + written.splitlines(keepends=True)[-1])
    third, model = begin()
    assert blocks_of(third) == [6, 1, 3]  # steps that failed after they were written count
    assert third.epsilon(1e-3) == pytest.approx(epsilon((6, 0), (1, 0), (3, 1), mark=""))
    with pytest.raises(StepError, match="ledger= with balls in bins"):
        train(third, model, mechanisms.balls_in_bins_loader(data(), batch_size=BATCH))
    third.detach()
    with pytest.raises(AccountingError, match="file of its own"):
        begin(Lambda(0.5))
    fourth, model = begin(None, sample_rate=0.1, expected_batch_size=BATCH)
    for refused in (lambda: fourth.epsilon(1e-3), lambda: train(fourth, model, [tuple(data()[:4])])):
        with pytest.raises(AccountingError, match="holds steps with correlated noise"):
            refused()


def test_what_does_not_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with pytest.raises(TypeError, match="strategy of fastdp.mechanisms"):
        make(model, "bisr")
    with pytest.raises(ClippingError, match="one clipping norm"):
        make(model, Bisr(4), clipping="adaptive")
    with pytest.raises(AccountingError, match="sample_rate="):
        make(model, Bisr(4), sample_rate=0.1)
    optimizer = make(model, Bisr(4))
    with pytest.raises(StepError, match="poisson_loader draws each step"):
        train(optimizer, model, fastdp.poisson_loader(data(), expected_batch_size=BATCH))
    with pytest.raises(StepError, match="no batch of a loader"):
        model(torch.randn(3, 5)).square().mean(1).mean().backward()
    with pytest.raises(AccountingError, match="sample_rate="):
        optimizer.epsilon(1e-3, sample_rate=0.1)
    state = optimizer.state_dict()
    optimizer.detach()
    for other in (Lambda(0.5), None):
        with pytest.raises(StepError, match="correlated noise"):
            make(make_model(), other).load_state_dict(state)
    monkeypatch.setattr("fastdp.optim.checkpoint.STREAM", 3)
    with pytest.raises(StepError, match="other normals by the same key. Make the optimizer with another seed="):
        make(make_model(), Bisr(4)).load_state_dict(state)


def test_an_ordinary_optimizer_names_the_remedy() -> None:
    model = make_model()
    with pytest.raises(StepError, match="noise="):
        train(make(model, None), model, mechanisms.fixed_order_loader(data(), batch_size=BATCH))


def test_cyclic_samples_want_a_banded_encoder() -> None:
    model = make_model()
    loader = mechanisms.cyclic_poisson_loader(data(), batch_size=5, cycle=3, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(AccountingError, match="band"):
            train(make(model, Bisr(4)), model, loader)
        optimizer = make(model, mechanisms.Independent())
        released = train(optimizer, model, loader, 2)
    assert blocks_of(optimizer) == [len(released)]
    assert 0 < optimizer.epsilon(1e-3) < math.inf


def test_a_sample_drawn_before_is_no_new_one() -> None:
    model = make_model()
    loader = mechanisms.cyclic_poisson_loader(data(), batch_size=5, cycle=3)
    optimizer = make(model, mechanisms.Independent())
    place = loader.state_dict()
    steps = len(train(optimizer, model, loader))
    loader.load_state_dict(place)
    with pytest.raises(StepError, match="very sample"):
        train(optimizer, model, loader)
    assert blocks_of(optimizer) == [steps]
    train(optimizer, model, mechanisms.cyclic_poisson_loader(data(), batch_size=5, cycle=3))  # the remedy
    assert blocks_of(optimizer) == [2 * steps]


def test_another_deal_within_a_cycle_begins_a_block() -> None:
    """A record dealt to a late step of one pass may be at an early one of the next, so the passes must not be mixed."""
    model = make_model()
    optimizer = make(model, Bisr(4))
    loader = mechanisms.fixed_order_loader(data(), batch_size=10, shuffle_within=6)
    for number, (x, y) in enumerate(loader):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 2:
            break
    loader.load_state_dict({**loader.state_dict(), "pass": 1})
    train(optimizer, model, loader)
    assert blocks_of(optimizer) == [3, 3]
    train(optimizer, model, loader)  # from its beginning on, the next pass keeps the distance
    assert blocks_of(optimizer) == [3, 9]


def test_other_parameters_begin_a_block() -> None:
    model = make_model()
    optimizer = make(model, Bisr(4))
    loader = mechanisms.fixed_order_loader(data(), batch_size=BATCH)
    for requires in (True, False):
        model[0].bias.requires_grad_(requires)
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert blocks_of(optimizer) == [3, 3]


@pytest.mark.parametrize("kind", ["subset", "swapped", "other", "list"])
def test_other_records_under_the_same_numbers_begin_a_block(kind: str) -> None:
    """A record would come again at another place of the cycle, and sooner than the loader promises."""
    model = make_model()
    optimizer = make(model, Bisr(4))
    for number in range(2):
        records: Any = data()
        if kind == "subset":
            records = torch.utils.data.Subset(records, torch.randperm(RECORDS).tolist())
        elif kind == "swapped":  # at places that nobody reads to tell datasets apart
            order = list(range(RECORDS))
            order[1], order[2] = order[1 + number], order[2 - number]
            records = torch.utils.data.Subset(records, order)
        elif kind == "other":
            records = TensorDataset(torch.randn(RECORDS, 5), torch.arange(RECORDS) % 3)
        else:
            records = [(torch.randn(5), n % 3) for n in range(RECORDS)]
        train(optimizer, model, mechanisms.fixed_order_loader(records, batch_size=BATCH))
        assert blocks_of(optimizer) == [3] * (number + 1)
    promises = [block.participation for block in optimizer._privacy.mechanism.all.values()]
    assert promises[0] != promises[1]


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, place: int) -> Any:
        return torch.as_tensor(np.random.default_rng().standard_normal(5), dtype=torch.float32), place % 3


def test_records_that_are_read_differently_each_time_are_of_one_loader() -> None:
    model = make_model()
    optimizer = make(model, Bisr(4))
    loader = mechanisms.fixed_order_loader(Noisy(), batch_size=BATCH)
    train(optimizer, model, loader, 2)
    assert blocks_of(optimizer) == [6]
    again = mechanisms.fixed_order_loader(Noisy(), batch_size=BATCH)
    again.load_state_dict(loader.state_dict())  # of a run that goes on
    train(optimizer, model, again)
    assert blocks_of(optimizer) == [6, 3]


def test_what_a_strategy_is_stays_as_it_was_made() -> None:
    for strategy in (Lambda(0.9), mechanisms.Banded(2, coefficients=[1.0, 0.3])):
        with pytest.raises(ValueError, match="read-only"):
            strategy.weights[1] = 0.0


def test_a_budget_of_a_run_that_begins_within_a_pass() -> None:
    model = make_model()
    loader = mechanisms.fixed_order_loader(data(), batch_size=10, shuffle_within=6)
    budget = {"noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3, "steps": 7, "loader": loader}
    optimizer = make(model, Lambda(0.9), **budget)
    loader.load_state_dict({"pass": 0, "step": 4})
    with pytest.raises(StepError, match="budget is spent"):
        train(optimizer, model, loader, 3)
    assert blocks_of(optimizer)[0] < 7
    assert optimizer.epsilon(1e-3) <= 2.0


def test_a_budget_looks_ahead_of_many_steps_and_no_further_than_a_matrix() -> None:
    loader = mechanisms.fixed_order_loader(data(), batch_size=BATCH)
    strategy = Matrix(np.eye(9))
    budget = {"noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3, "epochs": 3, "loader": loader}
    model = make_model()
    first = make(model, strategy, seed=None, **budget)
    train(first, model, loader)
    state = first.state_dict()
    first.detach()
    second = make(model, strategy, seed=None, **budget)
    second.load_state_dict(state)  # without the key: another block
    asked, spent = [], second._privacy._spent
    second._privacy._spent = lambda blocks, delta: asked.append(blocks) or spent(blocks, delta)
    train(second, model, loader, 2)
    assert blocks_of(second) == [3, 6] and len(asked) <= 8
    assert second.epsilon(1e-3) == pytest.approx(2.0, rel=3e-3)


def test_what_has_no_accounting_is_refused_before_a_step() -> None:
    model = make_model()
    optimizer = make(model, mechanisms.Independent())
    steps = len(train(optimizer, model, mechanisms.cyclic_poisson_loader(data(), batch_size=5, cycle=3)))
    with pytest.raises(AccountingError, match="one run"):
        train(optimizer, model, mechanisms.balls_in_bins_loader(data(), batch_size=10))
    assert blocks_of(optimizer) == [steps]
    optimizer.detach()
    with pytest.raises(AccountingError, match="negative"):
        later = mechanisms.Banded(3, coefficients=[1, 0.3, -0.05])
        train(make(model, later), model, mechanisms.balls_in_bins_loader(data(), batch_size=10))
    with pytest.raises(TypeError, match="strategy of fastdp.mechanisms"):
        make(model, Bisr)
