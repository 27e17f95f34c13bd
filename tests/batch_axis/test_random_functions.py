"""Functions that draw for each element, or for each sample, are followed and exact at the numbers that they drew."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import NotVerifiedWarning

B, D = 6, 4


class Drawing(nn.Module):
    def __init__(self, draw: Callable[..., Tensor]) -> None:
        super().__init__()
        self.lin, self.table, self.draw = nn.Linear(D, D), nn.Parameter(torch.randn(20, D)), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self, self.lin(x))


OF_DATA = {
    "rrelu": lambda m, h: F.rrelu(h, training=True),
    "poisson": lambda m, h: h * torch.poisson(h.detach().abs()),
    "normal": lambda m, h: h * torch.normal(h.detach(), 1.0),
    "binomial": lambda m, h: h * torch.binomial(torch.full_like(h, 5.0), h.detach().sigmoid()),
    "geometric": lambda m, h: h * torch.empty_like(h).geometric_(0.5),
    "gamma": lambda m, h: h * torch.distributions.Gamma(h.abs() + 1, 1.0).sample(),
    "gamma with gradient": lambda m, h: torch.distributions.Gamma(h.abs() + 1, 1.0).rsample(),
    "dirichlet": lambda m, h: h * torch.distributions.Dirichlet(h.abs() + 1).sample(),
    "gumbel": lambda m, h: h * F.gumbel_softmax(h),
}
OF_NOTHING = {
    "time of diffusion": lambda m, h: h + m.table[torch.randint(0, 20, (len(h),))],
    "embedding of it": lambda m, h: h + F.embedding(torch.randint(0, 20, (len(h),)), m.table),
    "a network of it": lambda m, h: h + m.lin(torch.randn(len(h), D)).tanh(),
    "mask token": lambda m, h: (lambda w: h * w + m.table[0] * (1 - w))((torch.rand(len(h), 1) < 0.5).float()),
    "noise of style": lambda m, h: h + m.table[0] * torch.randn(len(h), 1),
}


@pytest.mark.parametrize("name", [*OF_DATA, *OF_NOTHING])
def test_draws_are_exact(name: str) -> None:
    torch.manual_seed(0)
    model, x = Drawing({**OF_DATA, **OF_NOTHING}[name]), torch.randn(B, D)
    torch.manual_seed(1)
    losses = model(x).square().sum(1)
    parameters = list(model.parameters())
    truth = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]
    norms = torch.stack([sum(g.double().square().sum() for g in one if g is not None) for one in truth]).sqrt()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", NotVerifiedWarning)
        grads = fastdp.PerSampleGradients(model)
        torch.manual_seed(1)
        model(x).square().sum(1).mean().backward()
    assert torch.allclose(grads.norms().double(), norms, rtol=1e-5)
    grads.detach()


def test_draws_along_the_batch_are_refused() -> None:
    model = Drawing(lambda m, h: h * torch.distributions.Dirichlet(h.abs().T + 1).sample().T)
    optimizer = fastdp.DPSGD(model, lr=0.1, noise_multiplier=1.0, max_grad_norm=1.0)
    with pytest.raises(fastdp.errors.SampleMixingError, match="_sample_dirichlet"):
        model(torch.randn(B, D)).square().sum(1).mean().backward()
    optimizer.detach()
