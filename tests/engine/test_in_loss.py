"""Parameters used by the loss, outside of the model's forward: exact, or refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import FastDPError, UncapturedUseError

from ..truth import assert_step

N, D, C = 6, 4, 3
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(D, D), nn.Parameter(torch.tensor(0.5))
        self.weights, self.centres = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(C, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


Loss = Callable[[Model, Tensor, Tensor], Tensor]


def _merged(m: Model, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    head = m.centres + m.scale
    return F.cross_entropy(F.linear(out, F.normalize(head, dim=1)) * m.scale.exp(), y)


EXACT: dict[str, Loss] = {
    "learned weights": lambda m, x, y: ((-m.weights).exp() * m(x).square() + m.weights).sum(1).mean(),
    "learned weights of a part": lambda m, x, y: (F.softplus(m.weights) * m.body(x).square()).sum(1).mean(),
    "logit scale": lambda m, x, y: F.cross_entropy(m.scale.exp() * m(x), y),
    "prototypes by distance": lambda m, x, y: torch.cdist(m(x), m.centres).logsumexp(1).mean(),
    "head by hand": lambda m, x, y: F.cross_entropy(F.linear(m(x), m.centres), y),
    "ArcFace by hand": lambda m, x, y: F.cross_entropy(8 * F.normalize(m(x)) @ F.normalize(m.centres).T, y),
    "centre loss": lambda m, x, y: (m(x) - m.centres[y]).square().sum(1).mean(),
    "detached centres": lambda m, x, y: (m(x) - m.centres.detach()[y]).square().sum(1).mean(),
    "a parameter twice": lambda m, x, y: F.linear(m(x), m.body.weight, m.body.bias).square().sum(1).mean(),
    "several, merged": _merged,
}
COUPLED: dict[str, Loss] = {
    "centres of all labels": lambda m, x, y: (m(x) @ m.centres[y].T).logsumexp(1).mean(),
    "centres of all labels, looked up": lambda m, x, y: (m(x) @ F.embedding(y, m.centres).T).logsumexp(1).mean(),
    "a mean times a parameter": lambda m, x, y: (m(x) * (m.weights * m(x).mean(0))).square().sum(1).mean(),
    "a parameter and data before the forward": lambda m, x, y: (F.linear(x, m.body.weight) * m(x)).sum(1).mean(),
    "a parameter times a number before it": lambda m, x, y: ((m.weights * x[0, 0]) * m(x)).sum(1).mean(),
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_in_the_loss_are_exact(name: str) -> None:
    torch.manual_seed(0)
    engine = fastdp.PerSampleGradients(Model())

    def losses(m: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
        return EXACT[name](m, *batch)[None]  # of the batch, whose mean it is

    for _ in range(3):  # repeated steps take shorter ways
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_step(engine, (torch.randn(N, D), LABELS.clone()), losses)


def _hooked(m: Model, x: Tensor, y: Tensor) -> Tensor:
    out, weights = m(x), m.weights.exp()
    weights.register_hook(lambda g: g / g.norm())
    return (weights * out).square().sum(1).mean()


def _hooked_before(m: Model, x: Tensor, y: Tensor) -> Tensor:
    inner = m.weights.exp()
    inner.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    weights = -inner
    del inner
    return (weights * m(x)).square().sum(1).mean()


def _hooked_node(m: Model, x: Tensor, y: Tensor) -> Tensor:
    out, weights = m(x), m.weights.exp()
    weights.grad_fn.register_hook(lambda grads, _: (grads[0] / grads[0].norm(),))
    return (weights * out).square().sum(1).mean()


def _written_after_use(m: Model, x: Tensor, y: Tensor) -> Tensor:
    out, weights = m(x), m.weights * 1
    loss = (weights * out).square().sum(1).mean()
    weights.mul_(2)
    return loss


def _moved_by_data(m: Model, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    m.centres.data[y] += 0.1 * out.detach()
    return (out - m.centres[y]).square().sum(1).mean()


def _written_last(m: Model, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    with torch.no_grad():
        m.centres.index_add_(0, y, out.detach())
    return out.square().sum(1).mean()


COUPLED |= {
    "a hook on what is made of a parameter": _hooked, "a hook on it before the forward": _hooked_before,
    "a hook on its node": _hooked_node, "written to after its use": _written_after_use,
    "moved by the data": _moved_by_data, "written to by the data at the end": _written_last,
}  # fmt: skip


@pytest.mark.parametrize("size", [0, 1])
def test_small_batches(size: int) -> None:
    model = Model()
    alone = copy.deepcopy(model)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, max_grad_norm=1e-3, expected_batch_size=2)
    x = torch.randn(size, D)
    loss = lambda m: ((-m.weights).exp() * m(x).square() + m.weights).sum(1).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(model).backward()
        optimizer.step()
    if size:
        loss(alone).backward()
        want = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(optimizer.norms, want[None], rtol=1e-4, atol=0)
    moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), alone.parameters(), strict=True)])
    assert float(moved.norm()) <= 0.1 * 1e-3 / 2 * 1.001


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_samples_are_refused(name: str) -> None:
    model = Model()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=N)
    with pytest.raises(FastDPError):
        COUPLED[name](model, torch.randn(N, D), LABELS.clone()).backward()
        optimizer.step()


def test_a_sum_over_the_samples_and_a_parameter() -> None:
    model = Model()
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=0.0, expected_batch_size=N)
    loss = model(torch.randn(N, D)).square().mean()
    with pytest.raises(UncapturedUseError, match="'scale'.*reduction=\"none\""):
        loss * model.scale.exp()
    with pytest.raises(UncapturedUseError, match=r"'centres'.*optimizer\.public\(\)"):
        loss + model.centres.square().sum()
    loss.backward()  # the remedy
    with optimizer.public():
        model.centres.square().sum().backward()
    before = model.centres.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - model.centres, 0.1 * 2 * before)
