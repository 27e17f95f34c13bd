"""A hand-written Accelerate loop around a private optimizer."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import fastdp
from fastdp.errors import ParameterError, StepError

from ..by_hand import EXPECTED, RECORDS, Loop, R, network, records

accelerate = pytest.importorskip("accelerate")
Q = EXPECTED / RECORDS


@pytest.fixture
def accelerator(tmp_path):
    """Makes one; its state is the process's, so it is taken down again."""

    def make(**options):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        return accelerate.Accelerator(cpu=True, project_dir=str(tmp_path), **options)

    yield make
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def loader_of(limit=4, steps=4, seed=1):
    return fastdp.poisson_loader(
        records(), expected_batch_size=EXPECTED, max_physical_batch_size=limit, steps=steps, seed=seed
    )


def sgd(model, **options):
    return fastdp.DPSGD(model, **{"lr": 1.0, "noise_multiplier": 0.0, "max_grad_norm": R, **options})


def train(accelerator, model, optimizer, loader, schedule=None, truth=None, private=None):
    for x, y in loader:
        with accelerator.accumulate(model):
            logits = model(x)
            accelerator.backward(F.cross_entropy(logits, y))
            if accelerator.sync_gradients:
                assert float(accelerator.clip_grad_norm_(model.parameters(), 1e-9)) == 0  # finds nothing
            optimizer.step()
            if schedule is not None and private.stepped:
                schedule.step()
            optimizer.zero_grad()
        assert len(accelerator.gather_for_metrics(logits)) == len(x)
        if truth is not None:
            truth.see(x, y)
            if private.stepped:
                truth.step()


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("apart", [False, True])
def test_the_update_is_the_truth(accelerator, limit, apart):
    """Prepared together or one by one, in any order; with physical batches as without."""
    prepared, model = accelerator(), network()
    truth, private, loader = Loop(model), sgd(model), loader_of(limit)
    schedule = torch.optim.lr_scheduler.ConstantLR(private, 1.0)
    if apart:
        optimizer = prepared.prepare(private)
        model = prepared.prepare(model)
        schedule = prepared.prepare(schedule)
    else:
        model, optimizer, loader, schedule = prepared.prepare(model, private, loader, schedule)
    assert isinstance(loader, fastdp.sampling.PoissonLoader), "Poisson sampling stays in force"
    train(prepared, model, optimizer, loader, schedule, truth, private)
    assert private.history == [(0.0, Q, 4)] and private.epsilon(1e-5) == float("inf")
    truth.assert_equal(prepared.unwrap_model(model))


def test_made_private_after_prepare(accelerator):
    prepared, model = accelerator(), network()
    truth = Loop(model)
    model, optimizer = prepared.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ParameterError, match="AcceleratedOptimizer wraps another"):
        fastdp.privatize(optimizer, model, noise_multiplier=0.0)
    private = fastdp.privatize(optimizer.optimizer, model, noise_multiplier=0.0, max_grad_norm=R)
    train(prepared, model, optimizer, loader_of(), None, truth, private)
    truth.assert_equal(model)


def test_states_are_kept_and_taken_up(accelerator, tmp_path):
    """The optimizer's state brings the accountant along; the loader goes by register_for_checkpointing."""
    outcomes = []
    for resume in (False, True):
        prepared, model = accelerator(), network()
        private = fastdp.DPAdamW(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=R, seed=3)
        loader = loader_of(steps=4)
        model, optimizer, loader = prepared.prepare(model, private, loader)
        prepared.register_for_checkpointing(loader)
        if resume:
            prepared.load_state(str(tmp_path / "kept"))
            assert private.history == [(1.0, Q, 2)]
        for x, y in loader:
            prepared.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if not resume and private.stepped and private.history[0][2] == 2:
                prepared.save_state(str(tmp_path / "kept"))
        assert private.history == [(1.0, Q, 4)]
        outcomes.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*outcomes)


def test_accumulation_by_accelerate_is_refused(accelerator):
    """It divides every loss by its number, so also where each batch is stepped on."""
    for accumulates in (True, False):
        prepared, model = accelerator(gradient_accumulation_steps=2), network()
        private = sgd(model, expected_batch_size=EXPECTED)
        optimizer = prepared.prepare(private)
        x, y = records()[:EXPECTED]
        with pytest.raises(StepError, match="divides every loss by 2"):
            for _ in range(2):
                with prepared.accumulate(model) if accumulates else contextlib.nullcontext():
                    prepared.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
        assert private.history == []
