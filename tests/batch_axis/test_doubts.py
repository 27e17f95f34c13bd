"""Questions that a device answers at the release: every engine hears of them, and of those of failed backwards none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fastdp
from fastdp.batch_axis import deferred_checks
from fastdp.compat.opacus import PrivacyEngine
from fastdp.errors import SampleMixingError

B, D = 4, 3


class Doubtful(torch.autograd.Function):
    """The identity; its backward asks whether samples were mixed, and fails perhaps."""

    answer, fails = True, False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        deferred_checks.doubt(torch.tensor(Doubtful.answer), "it was asked")
        if Doubtful.fails:
            raise ValueError("on purpose")
        return grad


def private(model: nn.Module) -> torch.optim.Optimizer:
    return fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=B)


def loss_of(model: nn.Module, doubtful: bool = False) -> Tensor:
    x = torch.randn(B, D)
    out = model(x)
    return (Doubtful.apply(out) if doubtful else out).square().sum(1).mean()


@pytest.mark.filterwarnings("ignore")
def test_one_backward_through_two_models_is_refused_by_both() -> None:
    first, second = nn.Linear(D, 1), nn.Linear(D, 1)
    optimizers = private(first), private(second)
    (loss_of(first, doubtful=True) + loss_of(second)).backward()
    for optimizer in optimizers:
        with pytest.raises(SampleMixingError, match="it was asked"):
            optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.filterwarnings("ignore")
def test_modules_of_opacus_names_ask_too(mode: str) -> None:
    model = nn.Linear(D, 1)
    engine = PrivacyEngine(accountant="rdp")
    data = DataLoader(TensorDataset(torch.randn(B, D)), batch_size=B)
    module, *_ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, criterion=nn.MSELoss(),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode,
    )  # fmt: skip
    with pytest.raises(SampleMixingError, match="it was asked"):
        loss_of(module, doubtful=True).backward()


def test_harmless_questions_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_checks, "MOST", 5)
    inbox = deferred_checks.Inbox()
    for number in range(20):
        deferred_checks.doubt(torch.tensor(number == 3), f"number {number}")
    found = inbox.take()
    assert len(found) <= 6 and [one.why for one in found if bool(one.flag)] == ["number 3"]


@pytest.mark.filterwarnings("ignore")
def test_a_question_of_a_failed_backward_is_not_asked_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(D, 1)
    optimizer = private(model)
    monkeypatch.setattr(Doubtful, "fails", True)
    with pytest.raises(ValueError, match="on purpose"):
        (loss_of(model, doubtful=True) + loss_of(model)).backward()
    loss_of(model).backward()
    optimizer.step()
