"""`graphed=True`: forwards and backwards replayed in a loop of the user's own make the steps that Python makes."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fastdp
import fastdp.optim.graphed_forwards
from fastdp.errors import SampleMixingError, StepError

from ..graphs.fake_cuda import FakeCuda
from ..truth import norms_of, truth

B, D, T, CLASSES = 8, 6, 5, 3


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record as soon as a shape is met again, whether that pays or not."""
    monkeypatch.setattr(fastdp.optim.graphed_forwards, "PAYS", 0)


class Net(nn.Module):
    """An encoder of tokens [B, T, D], with dropout, that gives logits, the rows before them, and a word."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.head = nn.Linear(D, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        h = self.dropout(F.gelu(self.norm(self.up(x)))).mean(1) * scale
        return {"logits": self.head(h), "hidden": h, "word": "of the model"}


def batch(seed: int, size: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, T, D, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)["logits"], y)


class Run(NamedTuple):
    model: nn.Module
    optimizer: Any
    norms: list[Tensor]

    @property
    def told(self) -> Any:
        return self.optimizer._privacy.graphs


def trained(
    make: Callable[[], nn.Module],
    losses: Iterator[Callable[[nn.Module], Tensor]],
    graphed: bool,
    base: str = "DPAdamW",
    **options: Any,
) -> Run:
    """A run of one step for each loss."""
    settings = dict(lr=0.02, noise_multiplier=0.6, max_grad_norm=0.4, expected_batch_size=B, sample_rate=0.1, seed=3)
    model = make()
    run = Run(model, getattr(fastdp, base)(model, **(settings | options), graphed=graphed), [])
    torch.manual_seed(1)
    for loss in losses:
        loss(model).backward()
        run.norms.append(run.optimizer.norms)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


def both(make: Callable[[], nn.Module], losses: Callable[[], Any], exactly: bool = True, **options: Any) -> Run:
    """The same run by Python and with replays, compared; the latter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, graphed = (trained(make, losses(), graphed, **options) for graphed in (False, True))
    close = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-3, "atol": 1e-5}
    for a, b in zip(plain.norms, graphed.norms, strict=True):
        torch.testing.assert_close(a, b, **close)
    for a, b in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, **close)
    assert plain.optimizer.history == graphed.optimizer.history
    return graphed


def of_batches(sizes: list[int], loss: Any = loss_of) -> Callable[[], Any]:
    return lambda: ((lambda model, k=k, n=n: loss(model, *batch(k, n))) for k, n in enumerate(sizes))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A stand-in for CUDA graphs."""
    found = FakeCuda()
    monkeypatch.setattr(fastdp.optim.graphed_forwards, "device_of", lambda device: found)
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_plain_loop_is_replayed_bit_by_bit(dropout: float) -> None:
    run = both(lambda: Net(dropout), of_batches([B] * 6))
    assert (run.told.replayed, run.told.eager) == (4, 2)
    assert "replayed: 4 forwards of 6" in run.optimizer.explain()


def test_recordings_are_made_as_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One costs as much as many forwards: of many shapes only the first is recorded at once."""
    monkeypatch.setattr(fastdp.optim.graphed_forwards, "PAYS", 10)
    run = both(Net, of_batches([B, B, B, 20, 20, 20, B, 20, B, B, 20, 20, 20]), exactly=False)
    sizes = [program.batch.size for shape in run.told._shapes.values() for program in shape.programs]
    assert sorted(sizes) == [8, 20] and run.told.replayed == 7  # the larger from the tenth forward on


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_both_halves_become_cuda_graphs(cuda: FakeCuda, dropout: float) -> None:
    run = both(lambda: Net(dropout), of_batches([B] * 3 + [B - (not dropout), B, B]), exactly=False)
    assert run.told.replayed == 4 and cuda.calls.count("capture") == 2
    checks = 2 * 3  # a forward and a backward of each recorded example
    assert cuda.calls.count("launch") == 1 + checks + 2 * 4  # one before the backward is captured


def test_a_spoilt_cuda_graph_is_not_used(cuda: FakeCuda) -> None:
    cuda.spoil = True
    run = both(Net, of_batches([B] * 5))
    program = next(program for shape in run.told._shapes.values() for program in shape.programs)
    assert run.told.replayed == 3 and program.captured is None


def test_norms_of_replays_are_those_of_single_samples() -> None:
    model, data = Net(), batch(7)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B, sample_rate=0.1, graphed=True)
    for k in range(4):
        loss_of(model, *(data if k == 3 else batch(k))).backward()
        if k < 3:
            optimizer.step()
        optimizer.zero_grad() if k < 3 else None
    exact = norms_of(truth(model, data, lambda m, b: F.cross_entropy(m(b[0])["logits"], b[1], reduction="none")))
    torch.testing.assert_close(optimizer.norms.double(), exact, rtol=1e-5, atol=1e-7)
    assert optimizer._privacy.graphs.replayed == 2


@pytest.mark.parametrize("options", [
    {"clipping": "global"}, {"style": "layerwise"}, {"base": "DPSGD", "momentum": 0.9}, {"clipping": "adaptive"},
    {"loss_reduction": "sum"},
], ids=str)  # fmt: skip
def test_options_of_a_step(options: dict[str, Any]) -> None:
    total = options.get("loss_reduction") == "sum"
    reduction = "sum" if total else "mean"
    losses = of_batches([B] * 5, lambda m, x, y: F.cross_entropy(m(x)["logits"], y, reduction=reduction))
    assert both(Net, losses, exactly=False, **options).told.replayed == 3


def test_batches_of_other_sizes_are_padded() -> None:
    run = both(Net, of_batches([B, B, B, 7, 6, 5, 1, B, 5, 5, 20, 20, 20, 19]), exactly=False)
    assert (run.told.replayed, run.told.eager) == (9, 5)  # 5 and 20 are recorded when they come again
    assert sorted(p.batch.size for shape in run.told._shapes.values() for p in shape.programs) == [5, 8, 20]


def test_a_recording_for_one_size_alone_serves_no_other() -> None:
    """Of sizes at random the largest is recorded: what it is recorded at is another step than that of this batch."""

    class Branching(Net):
        def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
            return super().forward(x, 2.0 if len(x) > 10 else 1.0)

    run = both(Branching, of_batches([9, 10, 12, 9, 9, 10, 12, 12, 12]))
    assert run.told.replayed > 0


def test_batches_of_other_sizes_draw_their_own_random_numbers() -> None:
    run = both(lambda: Net(0.3), of_batches([B, B, B, 7, 6, B]))
    assert (run.told.replayed, run.told.eager) == (2, 4)


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_a_loss_may_take_other_outputs_later(cast: bool) -> None:
    """The forward is then run again, with the random numbers that it drew, and its autocast."""

    def losses() -> Any:
        for k in range(10):

            def loss(model: nn.Module, k: int = k) -> Tensor:
                x, y = batch(k)
                with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    out = {name: each for name, each in model(x).items() if name != "word"}
                out = {name: each.float() for name, each in out.items()}
                found = F.cross_entropy(out["logits"], y, reduction="none")
                return (found + out["hidden"].square().sum(1) if 4 <= k < 8 else found).mean()

            yield loss

    run = both(lambda: Net(0.3), losses)
    assert (run.told.replayed, run.told.eager) == (4, 6)  # recorded at steps 2, 6 and 9


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_a_loss_that_uses_parameters_too(style: str) -> None:
    """These have uses in the replay and beside it."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.cross_entropy(out["logits"] + out["hidden"] @ model.head.weight.T, y)

    assert both(Net, of_batches([B] * 6, loss), exactly=False, style=style).told.replayed == 4


@pytest.mark.parametrize("graphs", [False, True], ids=["functions", "cuda graphs"])
def test_two_forwards_before_one_backward(graphs: bool, request: pytest.FixtureRequest) -> None:
    """The second has no use of the graphs' memory before the first one's backward."""
    if graphs:
        request.getfixturevalue("cuda")

    def distance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a, b = model(x)["hidden"], model(x.flip(1), scale=0.5)["hidden"]
        return (a - b).square().sum(1).mean()

    run = both(Net, of_batches([B] * 5, distance), exactly=False)
    assert run.told.replayed >= 5


def test_parts_of_a_model_called_on_their_own() -> None:
    """As a LightningModule does, whose forward is not called."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.body(x)["logits"], y)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net()

    assert both(Holder, of_batches([B] * 5, loss)).told.replayed == 3


def test_autocast() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)["logits"]
        return F.cross_entropy(out.float(), y)

    assert both(Net, of_batches([B] * 6, loss), exactly=False).told.replayed == 4


def test_a_poisson_loader() -> None:
    data = TensorDataset(*batch(0, 40))

    def run(graphed: bool) -> Run:
        model = Net()
        optimizer = fastdp.DPAdamW(model, lr=0.02, noise_multiplier=0.6, max_grad_norm=0.4, seed=3, graphed=graphed)
        loader = fastdp.poisson_loader(data, expected_batch_size=10, max_physical_batch_size=4, seed=2)
        norms = []
        for _ in range(3):
            for x, y in loader:
                loss_of(model, x, y).backward()
                norms.append(optimizer.norms)
                optimizer.step()
                optimizer.zero_grad()
        return Run(model, optimizer, norms)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, graphed = run(False), run(True)
    for a, b in zip(
        [*plain.norms, *plain.model.parameters()], [*graphed.norms, *graphed.model.parameters()], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert plain.optimizer.history == graphed.optimizer.history
    assert graphed.told.replayed > graphed.told.eager


def test_the_model_changes() -> None:
    """Frozen, unfrozen, in evaluation mode and back: each is recorded on its own."""

    def losses() -> Any:
        for k in range(16):

            def loss(model: nn.Module, k: int = k) -> Tensor:
                model.train(k not in (4, 5, 6))
                model.head.requires_grad_(k < 8)
                return loss_of(model, *batch(k))

            yield loss

    run = both(lambda: Net(0.3), losses)
    assert run.told.replayed == 16 - 2 - 3 or run.told.replayed >= 10


def test_what_a_replay_would_leave_out_goes_through_python() -> None:
    calls = []

    def hooked() -> nn.Module:
        model = Net()
        model.norm.register_forward_hook(lambda module, args, out: calls.append(1))
        return model

    run = both(hooked, of_batches([B] * 4))
    assert run.told.replayed == 0 and "has a hook" in run.optimizer.explain()
    assert len(calls) == 8  # 4 of each run


def test_other_samples_in_the_loss_are_refused_after_a_replay() -> None:
    model = Net()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B, sample_rate=0.1, graphed=True)
    for k in range(4):
        x, y = batch(k)
        out = model(x)["logits"]
        if k == 3:
            with pytest.raises(SampleMixingError):
                (out - out.mean(0)).square().sum(1).mean().backward()
            break
        F.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer._privacy.graphs.replayed == 2
    optimizer.zero_grad()
    loss_of(model, *batch(5)).backward()  # nothing is left of what was refused
    optimizer.step()


@pytest.mark.parametrize("what", ["weight", "batch"])
def test_what_the_backward_takes_must_not_be_written_to(what: str) -> None:
    model = Net()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B, sample_rate=0.1, graphed=True)
    for k in range(4):
        x, y = batch(k)
        loss = loss_of(model, x, y)
        if k == 3:
            with torch.no_grad():
                (model.head.weight if what == "weight" else x).add_(1)
            with pytest.raises(StepError, match="written to between a replayed forward and its backward"):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


def test_outputs_are_the_users_own() -> None:
    """They may be kept, and written to: the next replay leaves them alone, and a backward does not take them."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        kept.append((out["hidden"].detach(), out["hidden"].detach().clone()))
        logits = out["logits"]
        logits[:, 0] = -1.0
        return F.cross_entropy(logits / 2, y)

    kept: list[tuple[Tensor, Tensor]] = []
    assert both(Net, of_batches([B] * 6, loss)).told.replayed == 4
    assert all(torch.equal(a, b) for a, b in kept)


def test_a_model_is_left_as_it_was() -> None:
    model = Net()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, expected_batch_size=B, sample_rate=0.1, graphed=True)
    for k in range(3):
        loss_of(model, *batch(k)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward.__self__ is other
        assert torch.equal(other(batch(1)[0])["logits"], model(batch(1)[0])["logits"])
    with torch.no_grad():
        assert model(batch(1, 3)[0])["word"] == "of the model"
    optimizer.detach()
    assert "forward" not in model.__dict__
