"""Several forwards before one backward: whether their samples are the same (`engine.multiple_forwards`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import PairedForwardsWarning, SampleMixingError, StepError, UncapturedUseError

from ..cases import Net
from ..truth import compare

B, T, D = 6, 5, 4
Loss = Callable[[Any], Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.cell = nn.Linear(D, D), nn.Linear(D, D), nn.RNNCell(D, D)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        return self.decoder(self.encoder(x).tanh()) if state is None else self.cell(x, state)


torch.manual_seed(1)
X, Y, Z = (torch.randn(B, D) for _ in range(3))
VIDEO, STACKED, TIME_FIRST = torch.randn(B, T, D), torch.randn(2, B, D), torch.randn(T, B, D)


def total(out: Tensor) -> Tensor:
    return out.square().flatten(1).sum(1).mean()


def over_time(m: Model) -> Tensor:
    state, loss = torch.zeros(B, D), torch.zeros(())
    for t in range(T):
        state = m(VIDEO[:, t].clone(), state)
        loss = loss + total(state)
        state = state.detach()
    return loss


SAME: dict[str, Loss] = {
    "pairs": lambda m: total(m(X) - m(Y)),
    "triplets": lambda m: F.triplet_margin_loss(m(X), m(Y), m(Z)),
    "preferences": lambda m: -F.logsigmoid(m(X).sum(1) - m(Y).sum(1)).mean(),
    "a view made of the input": lambda m: total(m(X)) + total(m(X + 0.1)),
    "one input": lambda m: total(m(X)) + m(X).abs().sum(1).mean(),
    "frames": lambda m: sum(total(m(VIDEO[:, t])) for t in range(T)),  # type: ignore[misc, return-value]
    "frames, time first": lambda m: sum(total(m(frame).transpose(0, 1)) for frame in (TIME_FIRST[:-1], TIME_FIRST[1:])),  # type: ignore[misc, return-value]
    "states": over_time,
    "encoder and decoder": lambda m: total(m.decoder(m.encoder(X).tanh())),
    "two encoders, one sample": lambda m: total(m.encoder(X[:1].clone()) - m.decoder(Y[:1].clone())),
}
UNKNOWN: dict[str, Loss] = {
    "two data sets": lambda m: total(m(X)) + total(m(Y)),
    "copies of chunks": lambda m: total(m(X[:3].clone())) + total(m(X[3:].clone())),
}
APART: dict[str, Loss] = {
    "chunks": lambda m: sum(total(m(c)) for c in X.chunk(2)),  # type: ignore[misc, return-value]
    "chunks, joined": lambda m: total(torch.cat([m(X[:3]), m(X[3:])])),
    "a forward a sample": lambda m: torch.stack([m(row[None]).sum() for row in X]).mean(),
    "a forward a text of its own length": lambda m: sum(total(m(r[None].repeat(1, 2 + k, 1))) for k, r in enumerate(X)),  # type: ignore[misc, return-value]
    "a pair of single samples": lambda m: total(m(X[:1].clone()) - m(Y[:1].clone())),
}


def run(loss: Loss, model: Model, **options: Any) -> tuple[Tensor, set[str]]:
    optimizer = fastdp.DPSGD(
        model, lr=0.1, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B, sample_rate=0.1, **options
    )
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss(model).backward()
            optimizer.step()
        return optimizer.norms, {type(w.message).__name__ for w in caught}
    finally:
        optimizer.detach()


@pytest.mark.parametrize("name", SAME)
def test_the_same_samples(name: str) -> None:
    time_first = {"batch_first": False} if "time first" in name else {}
    norms, said = run(SAME[name], Model(), **time_first)
    assert norms.numel() == (1 if "one sample" in name else B) and PairedForwardsWarning.__name__ not in said


@pytest.mark.parametrize("moved", [lambda h: h.transpose(0, 1), lambda h: h.flatten(0, 1), lambda h: h.mean(1)[None]])
def test_modules_called_one_by_one_take_what_was_made_of_the_samples(moved: Callable[[Tensor], Tensor]) -> None:
    """As `model.encode_text(x)` does: how many samples there are, sizes of later arguments do not tell."""

    def losses(m: Model, x: Tensor) -> Tensor:
        back = m.decoder(moved(m.encoder(x).tanh()))
        return (back.transpose(0, 1) if back.dim() == 3 else back).reshape(len(x), -1).square().sum(1)

    assert compare(Model(), VIDEO, losses).worst < 1e-5


def test_what_nothing_shows_is_warned_of_and_refused_where_it_is_certain() -> None:
    for name, loss in UNKNOWN.items():
        assert PairedForwardsWarning.__name__ in run(loss, Model())[1], name
    for name, loss in APART.items():
        with pytest.raises(StepError, match="one backward goes through several forwards"):
            run(loss, Model())
            pytest.fail(name)


def test_remedies() -> None:
    alone = [float(run(lambda m, row=row: total(m(row[None])), Model())[0]) for row in X]
    model = Model()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B)
    before = [p.detach().clone() for p in model.parameters()]
    for row, norm in zip(X, alone, strict=True):
        total(model(row[None])).backward()
        assert float(optimizer.norms) == pytest.approx(norm)
    optimizer.step()
    one_by_one = [p.detach() - q for p, q in zip(model.parameters(), before, strict=True)]
    optimizer.detach()
    whole = Model()
    assert run(lambda m: total(m(X)), whole)[0].numel() == B
    for p, q, moved in zip(whole.parameters(), before, one_by_one, strict=True):
        torch.testing.assert_close(p.detach() - q, moved)
    assert run(APART["a pair of single samples"], Model(), batch_size=1)[0].numel() == 1


def test_batches_of_a_loader_are_not_joined() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, D))
    fastdp.DPSGD(model := Model(), lr=0.1, noise_multiplier=1.0)
    loss = torch.zeros(())
    for (x,) in fastdp.poisson_loader(data, sample_rate=1.0, steps=2):
        loss = loss + total(model(x)) + total(model(x + 1))
    with pytest.raises(StepError, match="several batches of the loader"):
        loss.backward()


def test_refusals_name_remedies_that_work() -> None:
    model = Net(lambda m, x, negatives: m.encoder(x) @ m.encoder(negatives).T, encoder=nn.Linear(D, D))
    loss = lambda out: out.logsumexp(1).mean()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B)
    with pytest.raises(SampleMixingError, match=r"mark_rows\(tensor, None\)"):
        loss(model(X, Y)).backward()
    loss(model(X, fastdp.mark_rows(Y, None))).backward()
    assert optimizer.norms.numel() == B
    optimizer.detach()
    plain = nn.Linear(D, 2)
    optimizer = fastdp.DPSGD(plain, lr=0.1, noise_multiplier=0.0, max_grad_norm=0.1, expected_batch_size=B)
    with pytest.raises(UncapturedUseError, match="term of the weights alone"):
        (total(plain(X)) + plain.weight.square().sum()).backward()
    optimizer.zero_grad()
    F.linear(X, plain.weight).square().mean().backward()
    with pytest.raises(StepError, match="went through a forward of the model"):
        optimizer.step()


def test_a_private_model_within_the_forward_of_another_is_exact_in_every_step() -> None:
    """What the inner one asks of tensors (their `_base`) is no call of the outer one's user."""
    inner = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D), nn.GELU())
    held = [inner]  # no submodule
    outer = Net(lambda m, x: m.b(held[0](m.a(x))), a=nn.Linear(D, D), b=nn.Linear(D, D))
    engines = [fastdp.PerSampleGradients(inner), fastdp.PerSampleGradients(outer)]
    for _ in range(4):
        x = torch.randn(B, T, D)
        outer(x).sin().flatten(1).sum(1).mean().backward()
        own = [engine.norms() for engine in engines]
        for engine, norms in zip(engines, own, strict=True):
            alone = [torch.autograd.grad(plain(outer, held, each), engine.model.parameters()) for each in x.split(1)]
            exact = torch.stack([torch.cat([g.flatten() for g in gradients]).norm() for gradients in alone])
            torch.testing.assert_close(norms, exact, rtol=1e-5, atol=0)


def plain(outer: Any, held: list[Any], x: Tensor) -> Tensor:
    """The loss of one sample, by the same parameters, out of the engines' sight."""
    layers = held[0]
    h = F.linear(x, outer.a.weight, outer.a.bias)
    for layer in (layers[0], layers[2]):
        h = F.gelu(F.linear(h, layer.weight, layer.bias))
    return F.linear(h, outer.b.weight, outer.b.bias).sin().sum()


def test_a_mode_that_the_forward_leaves_open_does_not_keep_the_forwards() -> None:
    """A generator that is suspended within a torch.device: the forward has ended all the same."""

    def ahead(m: Any, x: Tensor) -> Any:
        with torch.device("cpu"):
            yield m.a(x)

    def forward(m: Any, x: Tensor) -> Tensor:
        m.next = [ahead(m, x)]
        return next(m.next[0])

    before = torch.overrides._get_current_function_mode_stack()
    model = Net(forward, a=nn.Linear(D, D))
    engine = fastdp.PerSampleGradients(model)
    model(X)
    assert (torch.zeros(2) + 1).tolist() == [1, 1]
    model.next[0].close()
    engine.detach()
    assert torch.overrides._get_current_function_mode_stack() == before
