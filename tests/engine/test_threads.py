"""A model that is evaluated in one thread while another trains it; and data in formats other than dense."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import SampleMixingError, StepError

from ..truth import assert_refused, norms_of, truth


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Net(nn.Module):
    """Two layers, between which something happens: in the forward, or when the gradient comes back there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.within: Callable[[], Any] | None = None
        self.backward: Callable[[], Any] | None = None
        self.again = False

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        within, self.within = self.within, None
        backward, self.backward = self.backward, None
        if within is not None:
            within()
        if backward is not None:
            hidden.register_hook(lambda grad: backward() and None)
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.hidden, x, use_reentrant=False) if self.again else self.hidden(x))


def in_thread(work: Callable[[], Any], modes: int = 0) -> Any:
    """What the work returns or raises, in a thread of its own, which has at most so many function modes then."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), torch.overrides._len_torch_function_stack()))
        except Exception as problem:  # noqa: BLE001  (handed over)
            found.append((problem, torch.overrides._len_torch_function_stack()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, left = found[0]
    assert left <= modes, "function modes are left in the thread"
    return result


def batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))


def alone(x: Tensor) -> Tensor:
    """The norms of each sample, without an engine."""
    return norms_of(truth(Net(), x, square)).float()


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def assert_exact(engine: fastdp.PerSampleGradients) -> None:
    """Of the last backward, which was of `batch()`."""
    torch.testing.assert_close(engine.norms(), alone(batch()), rtol=1e-5, atol=0)


def evaluate(model: nn.Module, without: Callable[[], Any] = torch.no_grad) -> Callable[[], Tensor]:
    def work() -> Tensor:
        with without():
            return model(batch(4))

    return work


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum(1).mean().backward()
    assert torch.overrides._len_torch_function_stack() <= 1  # what follows a loss


@pytest.mark.parametrize("when", ["within", "backward"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_evaluation_in_another_thread(when: str, again: bool, without: Any) -> None:
    model = Net()
    engine = fastdp.PerSampleGradients(model)
    model.again = again
    plain = Net()(batch(4)).detach()

    for _ in range(3):
        found: list[Any] = []
        setattr(model, when, lambda found=found: found.append(in_thread(evaluate(model, without))))
        step(model, batch())
        torch.testing.assert_close(found[0], plain)
        assert_exact(engine)
    engine.detach()
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize("when", ["within", "backward"])
def test_a_forward_with_grad_in_another_thread_is_refused(when: str) -> None:
    model = Net()
    engine = fastdp.PerSampleGradients(model)
    for _ in range(2):
        found: list[Any] = []
        setattr(model, when, lambda found=found: found.append(in_thread(lambda: model(batch(4)))))
        step(model, batch())
        assert isinstance(found[0], StepError) and "no_grad" in str(found[0])
        assert_exact(engine)


def test_one_backward_through_forwards_of_two_threads_is_refused() -> None:
    model = Net()
    fastdp.PerSampleGradients(model)
    first = in_thread(lambda: model(batch()).square().sum(1).mean(), modes=1)
    second = model(batch()).square().sum(1).mean()
    with pytest.raises(StepError, match="two threads"):
        (first + second).backward()


def test_a_thread_that_died_in_its_forward_does_not_block_others() -> None:
    model = Net()
    engine = fastdp.PerSampleGradients(model)

    def fail() -> None:
        raise KeyError("lost")

    model.within = fail
    assert isinstance(in_thread(lambda: model(batch()), modes=1), KeyError)
    step(model, batch())
    assert_exact(engine)


# --------------------------------------------------------------------------- formats of data


class Kept(Net):
    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.change(self, self.first(x).tanh()))


def square_of(weight: Tensor) -> Tensor:
    return weight.t() @ weight


SAME: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sparse": lambda model, h: h.to_sparse().to_dense(),
    "rows": lambda model, h: h.to_sparse_csr().to_dense(),
    "other library": lambda model, h: h.to_mkldnn().to_dense(),
    "only looked at": lambda model, h: h if h.to_sparse() is not None else h,
    "product": lambda model, h: torch.sparse.mm(h.to_sparse(), torch.eye(7)),
}
REFUSED: dict[str, tuple[type[Exception], Callable[[Any, Tensor], Tensor]]] = {
    "values": (SampleMixingError, lambda model, h: h.to_sparse().values().view(h.shape)),
    "softmax": (SampleMixingError, lambda model, h: torch.sparse.softmax(h.to_sparse(), 0).to_dense()),
    "by largest": (
        SampleMixingError,
        lambda model, h: h + torch.quantize_per_tensor_dynamic(h, torch.qint8, False).dequantize(),
    ),
    "parameters": (
        StepError,
        lambda model, h: torch.sparse.mm(h.to_sparse_csr(), square_of(model.second.weight)),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_data_in_other_formats(name: str) -> None:
    engine = fastdp.PerSampleGradients(model := Kept(SAME[name]))
    step(model, batch())
    assert_exact(engine)


@pytest.mark.parametrize("name", REFUSED)
def test_data_in_other_formats_that_cannot_be_followed(name: str) -> None:
    kind, change = REFUSED[name]
    assert_refused(Kept(change), batch(), square, "dense|another's", kind)
