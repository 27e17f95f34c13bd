"""Functions that no rule knows are asked by value: with numbers of several sizes, in another order, at any length."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from fastdp.errors import NotVerifiedWarning, SampleMixingError

from ..cases import Net
from ..programs_by_hand import C, D, Program, run, truth

Forward = Callable[[Program, Tensor], Tensor]


@torch.library.custom_op("fastdp_tests::bounded", mutates_args=())
def bounded(x: Tensor, largest: float, smallest: float) -> Tensor:
    """Scales all rows by their common size, where it is out of bounds."""
    size = x.abs().amax()
    return x / size if size > largest or size < smallest else x.clone()


@torch.library.custom_op("fastdp_tests::tied", mutates_args=())
def tied(x: Tensor) -> Tensor:
    """The number of zeros in a column, where there is one."""
    return x + (x == 0).sum(0).to(x.dtype)


@torch.library.custom_op("fastdp_tests::next_if_long", mutates_args=())
def next_if_long(x: Tensor) -> Tensor:
    return x.roll(1, 0) if x.size(-1) > 1000 else x.clone()


for operator in (bounded, tied, next_if_long):
    operator.register_fake(lambda x, *_: torch.empty_like(x))
    operator.register_autograd(lambda ctx, grad: (grad, None, None) if len(ctx.needs_input_grad) > 1 else grad)


def attended(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.5)


def beside(h: Tensor, keys: Any = None, values: Any = None, mask: Any = None) -> Tensor:
    """Attention [B, 1, 2, 2] of each sample's two halves, beside constants."""
    q = h.unflatten(1, (1, 2, 2))
    return F.scaled_dot_product_attention(
        q, q if keys is None else keys.to(h), q if values is None else values.to(h), mask
    ).flatten(1)


def numbered(h: Tensor) -> Tensor:
    """1, 2, 3 ... of the samples."""
    return torch.arange(1.0, len(h) + 1).to(h).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)


TABLE = torch.randn(20, 1, 1, 2)
COUPLED: dict[str, Forward] = {
    "renorm of large numbers": lambda m, h: torch.renorm(h * 50, 2, 1, 10.0),
    "renorm by keyword": lambda m, h: torch.renorm(h * 50, p=2, dim=1, maxnorm=10.0),
    "renorm in place": lambda m, h: (h * 50).renorm_(2, 1, 10.0),
    "a largest size": lambda m, h: bounded(h * 500, 100.0, 0.0),
    "a smallest size": lambda m, h: bounded(h / 500, 1e9, 0.1),
    "ties": lambda m, h: tied(h.relu()),
    "quantile": lambda m, h: h - torch.quantile(h, 0.5, dim=0, keepdim=True),
    "kthvalue": lambda m, h: h - h.kthvalue(2, 0, keepdim=True).values,
    "histogram": lambda m, h: h * torch.histogram(h.detach(), C).hist,
    "msort": lambda m, h: torch.msort(h),
    "draws along the batch": lambda m, h: h * torch.distributions.Dirichlet(h.abs().T + 1).sample().T,
}
BY_PLACE: dict[str, Forward] = {
    "a bias of attention": lambda m, h: beside(h, mask=numbered(h) * torch.arange(2)),
    "a mask of attention": lambda m, h: beside(h, mask=numbered(h) > torch.tensor([0, 3])),
    "a table's part as a bias": lambda m, h: beside(h, mask=TABLE[: len(h)].to(h)),
    "values of attention": lambda m, h: beside(h, values=numbered(h)),
    "keys of attention": lambda m, h: beside(h, numbered(h) * torch.arange(2)[:, None]),
    "the lower triangle": lambda m, h: h.tril(),
    "the upper triangle": lambda m, h: torch.triu(h, -2),
    "a triangle beside the samples": lambda m, h: h.T.triu(1).T,
    "a triangle in place": lambda m, h: h.clone().tril_(),
    "a diagonal filled": lambda m, h: (h * 1.0).fill_diagonal_(0.0),
    "a triangle of tokens": lambda m, h: h.unflatten(1, (2, 2)).transpose(0, 1).tril().transpose(0, 1).flatten(1),
    "a triangle of positions": lambda m, h: h * (torch.zeros_like(h) + 1).tril(),
}
ALIKE: dict[str, Forward] = {
    "the triangle of each sample": lambda m, h: h.unflatten(1, (2, 2)).tril().flatten(1),
    "attention beside constants": lambda m, h: beside(
        h, torch.tensor([[1.0, 2], [3, 4]]).expand(len(h), 1, 2, 2), mask=torch.ones(2, 2).tril() > 0
    ),
    "its own diagonal": lambda m, h: h.diag_embed().triu().sum(1),
    "draws of each": lambda m, h: F.gumbel_softmax(h, dim=1) * 0 + h,
    "attention that draws": lambda m, h: h + 0 * attended(h.unflatten(1, (2, 2))).flatten(1),
    "a Fourier transform of each": lambda m, h: torch.fft.rfft(h, dim=1).abs(),
    "renorm of each": lambda m, h: torch.renorm(h * 50, 2, 0, 10.0) + h.renorm(1, 0, 0.1),
    "thresholds": lambda m, h: F.threshold(h, 0.5, 0.0) + F.hardtanh(h * 30) + h.topk(C, 1).values,
}


@pytest.mark.parametrize("name", [*COUPLED, *BY_PLACE])
def test_functions_that_couple_samples_are_refused(name: str) -> None:
    why = "by their place|by place|positions" if name in BY_PLACE else ""
    for _ in range(2):  # an answer that is no is given again
        with pytest.raises(SampleMixingError, match=why):
            run({**COUPLED, **BY_PLACE}[name])


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("name", ALIKE)
def test_functions_of_each_sample_are_exact(name: str, size: int) -> None:
    (found,) = run(ALIKE[name], sizes=(size,))
    torch.testing.assert_close(found.double(), truth(ALIKE[name], size=size).double(), rtol=1e-4, atol=1e-6)


OF_LENGTHS = {"mT": lambda h: h + h.mT.mT, "tril": lambda h: h.tril(-1), "norm": lambda h: F.normalize(h, dim=1)}


@pytest.mark.parametrize("name", OF_LENGTHS)
def test_rows_of_samples_of_different_lengths_are_asked_too(name: str) -> None:
    x, owner = torch.randn(6, D), torch.tensor([0, 0, 1, 2, 2, 2])
    model = Program(lambda m, h: OF_LENGTHS[name](h))
    engine = fastdp.PerSampleGradients(model)
    out = torch.zeros(3, C).index_add(0, owner, model(fastdp.mark_rows(x, owner, samples=3)))
    if name == "tril":
        with pytest.raises(SampleMixingError, match="by their position in the batch"):
            out.square().sum(1).mean().backward()
    else:
        out.square().sum(1).mean().backward()
        assert engine.norms().shape == (3,)
    engine.detach()


# --------------------------------------------------------------------------- with few numbers, whatever the length

AT_LENGTH: dict[str, Callable[[Tensor], Tensor]] = {
    "the batch is rolled": lambda h: torch.cat([h, h.roll(1, 0)], -1),
    "samples are sorted": lambda h: h.sort(0).values,
    "the largest of the batch": lambda h: h - h.amax(0, keepdim=True),
    "norms over the batch": lambda h: h / h.norm(dim=0, keepdim=True),
    "a mirror": lambda h: F.pad(h.movedim(0, -1), (1, 1), mode="circular")[..., 2:].movedim(-1, 0),
    "by place": lambda h: torch.einsum("btv,b->btv", h, torch.arange(float(len(h)))),
    "a triangle from the middle on": lambda h: h[:, 0].triu(h.size(-1) // 2),
    "a triangle up to the middle": lambda h: torch.tril(h[:, 0], h.size(-1) // 2),
    "einsum over samples": lambda h: torch.einsum("btv,ctv->btv", h, h),
    "a user's operator, asked at its own size": next_if_long,
}


@pytest.mark.parametrize("name", AT_LENGTH)
@pytest.mark.parametrize("long", [7, 9_001])
def test_what_couples_samples_is_refused_at_any_length(name: str, long: int) -> None:
    model = Net(lambda m, x: AT_LENGTH[name](m.layer(x)), layer=nn.Linear(3, long))
    fastdp.PerSampleGradients(model)
    if long == 7 and AT_LENGTH[name] is next_if_long:
        model(torch.randn(8, 2, 3)).square().flatten(1).mean(1).mean().backward()
        return
    with pytest.raises(SampleMixingError):
        model(torch.randn(8, 2, 3)).square().flatten(1).mean(1).mean().backward()


# --------------------------------------------------------------------------- random numbers

DRAWS: dict[str, Forward] = {
    "rrelu": lambda m, h: F.rrelu(h, training=True),
    "poisson": lambda m, h: h * torch.poisson(h.detach().abs()),
    "normal": lambda m, h: h * torch.normal(h.detach(), 1.0),
    "binomial": lambda m, h: h * torch.binomial(torch.full_like(h, 5.0), h.detach().sigmoid()),
    "geometric": lambda m, h: h * torch.empty_like(h).geometric_(0.5),
    "gamma": lambda m, h: h * torch.distributions.Gamma(h.abs() + 1, 1.0).sample(),
    "gamma with gradient": lambda m, h: torch.distributions.Gamma(h.abs() + 1, 1.0).rsample(),
    "dirichlet": lambda m, h: h * torch.distributions.Dirichlet(h.abs() + 1).sample(),
    "gumbel": lambda m, h: h * F.gumbel_softmax(h),
    "time of diffusion": lambda m, h: h + m.w[torch.randint(0, 20, (len(h),))],
    "embedding of it": lambda m, h: h + F.embedding(torch.randint(0, 20, (len(h),)), m.w),
    "a network of it": lambda m, h: h + m.layer(torch.randn(len(h), D)).tanh(),
    "mask token": lambda m, h: (lambda w: h * w + m.w[0] * (1 - w))((torch.rand(len(h), 1) < 0.5).float()),
    "noise of style": lambda m, h: h + m.w[0] * torch.randn(len(h), 1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_exact_at_the_numbers_drawn(name: str) -> None:
    model, x = Program(DRAWS[name]), torch.randn(6, D)
    torch.manual_seed(1)
    losses, parameters = model(x).square().sum(1), list(model.parameters())
    alone = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]
    norms = torch.stack([sum(g.double().square().sum() for g in one if g is not None) for one in alone]).sqrt()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", NotVerifiedWarning)
        engine = fastdp.PerSampleGradients(model)
        torch.manual_seed(1)
        model(x).square().sum(1).mean().backward()
    torch.testing.assert_close(engine.norms().double(), norms, rtol=1e-5, atol=0)
    engine.detach()
