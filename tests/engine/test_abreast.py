"""Small products and convolutions of equal shape taken together: the same numbers as one by one, and float64's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.engine import foreach

from ..routes import forced

B = 5


class Layers(nn.Module):
    """Layers of equal shape, of which each sees other numbers."""

    def __init__(self, make, count: int, by=torch.tanh) -> None:
        super().__init__()
        self.layers, self.by = nn.ModuleList(make() for _ in range(count)), by

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.by(layer(x))
        return x


def thin() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8), nn.Linear(8, 4))


def normed() -> nn.Module:
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))])


def dilated() -> nn.Module:
    """Equal shapes, other geometries."""
    return nn.Sequential(*[nn.Conv1d(4, 4, 3, padding=d, dilation=d) for d in (1, 2, 1, 2)])


MODELS = {
    "linear": (lambda: Layers(lambda: nn.Linear(6, 6), 4), (6,)),
    "linear of tokens": (lambda: Layers(lambda: nn.Linear(6, 6), 4), (9, 6)),
    "wide and thin": (thin, (3, 4)),
    "convolutions": (lambda: Layers(lambda: nn.Conv2d(4, 4, 3, padding=1), 3), (4, 5, 6)),
    "dilated and grouped": (lambda: Layers(lambda: nn.Conv1d(4, 4, 3, padding=2, dilation=2, groups=2), 3), (4, 9)),
    "of several dilations": (dilated, (4, 9)),
    "with GroupNorm": (normed, (4, 3, 3)),
}


def losses(out: Tensor) -> Tensor:
    return out.flatten(1).sin().sum(1) + out.flatten(1).square().sum(1) / 7


def one_by_one(model: nn.Module, x: Tensor, factors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Norms and clipped sums of float64, one sample at a time."""
    model, x = copy.deepcopy(model).double(), x.double()
    params, norms = list(model.parameters()), []
    sums = [torch.zeros_like(p) for p in params]
    for row, factor in zip(x.split(1), factors.tolist(), strict=True):
        grads = torch.autograd.grad(losses(model(row)).sum(), params)
        norms.append(sum(g.square().sum() for g in grads).sqrt())
        for total, g in zip(sums, grads, strict=True):
            total.add_(g, alpha=factor)
    return torch.stack(norms), sums


def found(model: nn.Module, x: Tensor, factors: Tensor) -> tuple[Tensor, list[Tensor]]:
    engine = fastdp.PerSampleGradients(model, loss_reduction="sum")
    losses(model(x)).sum().backward()
    norms, sums = engine.norms(), engine.clipped_sum(factors)
    engine.detach()
    named = dict(model.named_parameters())
    return norms, [sums[name] for name in named]


@pytest.mark.parametrize("route", ["gram", "direct"])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_together_is_exact(name: str, dropped: bool, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x, factors = build(), torch.randn(B, *shape), torch.rand(B)
    if dropped:
        factors[1] = 0.0
    made: list[foreach.Abreast] = []
    own = foreach.Abreast.__init__
    with monkeypatch.context() as patch:
        patch.setattr(foreach.Abreast, "__init__", lambda self, *given: made.append(self) or own(self, *given))
        with forced(route):
            together = found(model, x, factors)
    assert made and min(len(joined.members) for joined in made) >= 2
    assert all(joined.one.route != "auto" for joined in made)  # that of its members
    with monkeypatch.context() as patch:
        patch.setattr("fastdp.engine.gradients.arrangement", lambda members: [])
        with forced(route):
            alone = found(model, x, factors)
    truth = one_by_one(model, x, factors)
    for norms, sums in (together, alone):
        torch.testing.assert_close(norms.double(), truth[0], rtol=1e-5, atol=1e-7)
        for a, b in zip(sums, truth[1], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_samples_that_are_no_numbers_are_left_out(name: str) -> None:
    """A sample with NaN has the factor 0 and is not read, in any of the sums."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(B, *shape)
    x.view(B, -1)[2, 0] = float("nan")
    kept, sums = x[[0, 1, 3, 4]], []
    for batch in (x, kept):
        with forced("gram"):
            optimizer = fastdp.DPSGD(model, lr=0.0, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=B,
                                     loss_reduction="sum")  # fmt: skip
            losses(model(batch)).sum().backward()
            optimizer.step()
        assert optimizer.nonfinite_samples == (batch is x)
        sums.append([p.grad.clone() for p in model.parameters()])
        optimizer.detach()
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_layers_that_are_not_alike_stay_apart() -> None:
    """Shared weights, other shapes, other geometries: none is taken for another's."""
    torch.manual_seed(0)
    same, other = nn.Linear(6, 6), nn.Linear(6, 6)
    model = nn.Sequential(same, nn.Tanh(), other, nn.Tanh(), same, nn.Linear(6, 5), nn.Linear(5, 6))
    x, factors = torch.randn(B, 2, 6), torch.rand(B)
    truth, (norms, sums) = one_by_one(model, x, factors), found(model, x, factors)
    torch.testing.assert_close(norms.double(), truth[0], rtol=1e-5, atol=1e-7)
    for a, b in zip(sums, truth[1], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv1d(3, 3, 3, padding=1), nn.Conv1d(3, 3, 3, padding=2, dilation=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(F.relu(self.one(x)))

    model, x = Two(), torch.randn(B, 3, 8)
    truth, (norms, sums) = one_by_one(model, x, factors), found(model, x, factors)
    torch.testing.assert_close(norms.double(), truth[0], rtol=1e-5, atol=1e-7)
    for a, b in zip(sums, truth[1], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("style", ["flat", "layerwise"])
def test_physical_batches_add_up(style: str) -> None:
    torch.manual_seed(0)
    model = Layers(lambda: nn.Linear(6, 6), 3)
    start, x, grads = copy.deepcopy(model.state_dict()), torch.randn(2 * B, 6), []
    for parts in (1, 2):
        model.load_state_dict(start)
        optimizer = fastdp.DPSGD(model, lr=1.0, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=2 * B,
                                 style=style, loss_reduction="sum")  # fmt: skip
        for part in x.chunk(parts):
            losses(model(part)).sum().backward()
        optimizer.step()
        grads.append([p.grad.clone() for p in model.parameters()])
        optimizer.detach()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
