"""Clipping functions that couple samples are refused, whatever they look at; those of one norm each are not."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

import fastdp
from fastdp.errors import ClippingError

from ..runs import backward, data, model_of

R = 1.0


def local(n):
    return (R / n).clamp(max=1)


class Remembers:
    """Clips at what it saw before: the state of a function is of earlier samples."""

    def __init__(self, how):
        self.how, self.threshold, self.calls, self.seen = how, None, 0, []

    def __call__(self, n):
        self.calls += 1
        if self.how == "logs":
            self.seen.append(n)
            return local(n)
        if self.how == "counts":
            return local(n) * (0.9**self.calls)
        if self.how == "adapts before":
            self.threshold = min(R, float(n.median()))
        if self.how == "gathers":
            self.seen += n.tolist()
            if self.calls % 200 == 0:
                self.threshold = min(R, float(np.median(self.seen)))
        threshold = R if self.threshold is None else self.threshold
        found = (threshold / n).clamp(max=1)
        if self.how == "adapts after":
            self.threshold = min(R, 0.5 * threshold + 0.5 * float(n.median()))
        if self.how == "adapts after a batch" and len(n) > 1:
            self.threshold = min(R, float(n.median()))
        if self.how == "first" and self.threshold is None:
            self.threshold = n.median()
        return found


COUPLES = {
    "median": lambda n: (n <= n.median()) * (R / n).clamp(max=1),
    "maximum": lambda n: (R / n.max()).expand_as(n),
    "mean": lambda n: (R / n).clamp(max=1) * (n <= 2 * n.mean()),
    "rank": lambda n: (R / n) * (n.argsort().argsort() < len(n) // 2),
    "rank from below": lambda n: (R / n) * (n.argsort(descending=True).argsort() < 3),
    "softmax": lambda n: R / n * n.softmax(0),
    "sum of all": lambda n: R / n.sum().expand_as(n),
    "quantile": lambda n: (R / n) * (n < torch.quantile(n, 0.8)),
    "length": lambda n: (R / n).clamp(max=1) / len(n),
    "one of many": lambda n: (n <= n.median()) * (R / n) if len(n) > 8 else local(n),
    "few large": lambda n: local(n) * (1.0 if (n > R).sum() < 2 else 0.5),
    "place": lambda n: local(n) * torch.linspace(0.1, 1, len(n)),
    "every other": lambda n: local(n) * (torch.arange(len(n)) % 2),
    "last": lambda n: torch.cat([local(n[:-1]), 0 * n[-1:]]),
    "cumulative": lambda n: R / n.cumsum(0),
    "numpy": lambda n: torch.from_numpy(np.minimum(1, R / n.numpy()) * (n.numpy() <= np.median(n.numpy()))),
    "python": lambda n: torch.tensor([R / max(n.tolist())] * len(n)),
    "norm of norms": lambda n: R / (n + n.norm()),
    "random": lambda n: local(n) * torch.rand_like(n),
    "random, of one": lambda n: local(n) * (np.random.rand() < 0.5),
    "top": lambda n: (R / n) * (n < n.topk(3).values[-1]),
    **{how: Remembers(how) for how in ("counts", "adapts before", "adapts after", "adapts after a batch", "gathers")},
}


def run(clipping, batches=6, size=16, style="flat"):
    """style "layerwise": two layers, each with a bound above R."""
    torch.manual_seed(0)
    model, radius = model_of(), R if style == "flat" else 2 * R
    optimizer = fastdp.DPSGD(
        model, lr=0.0, noise_multiplier=0.0, max_grad_norm=radius, loss_reduction="sum", clipping=clipping, style=style
    )
    for _ in range(batches):
        backward(model, data(size) * torch.rand(size, 1) * 6)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("style", ["flat", "layerwise"])
@pytest.mark.parametrize("name", COUPLES)
def test_a_function_that_couples_samples_is_refused(name, style):
    function = COUPLES[name]
    if isinstance(function, Remembers):
        function = Remembers(function.how)
        named = "Remembers"
    else:
        named = "lambda"
    with pytest.raises(ClippingError, match=f"(?s){named}.*own sample's norm"):
        run(function, batches=30 if name == "gathers" else 6, style=style)


def compiled_scale(n, power):
    return R / (n + 1) ** power


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, n):
        return R / (n + self.weight.abs())


RIGHT = {
    "local": local,
    "constant": lambda n: torch.full_like(n, 1e-6),
    "steps": lambda n: torch.where(n > 3 * R, torch.zeros_like(n), (R / n).clamp(max=1)),
    "numpy": lambda n: torch.from_numpy(np.minimum(1, R / n.numpy())),
    "python": lambda n: torch.tensor([min(1.0, R / max(v, 1e-9)) for v in n.tolist()]),
    "flow": lambda n: local(n) if (n > 0).all() else local(n),
    "in place": lambda n: n.clamp_(min=R).reciprocal_().mul_(R),
    "logs": Remembers("logs"),
    "partial": functools.partial(compiled_scale, power=1.0),
    "module": Layer(),
    "half": lambda n: (0.99 * R / n.half()).clamp(max=1),
    "double": lambda n: (R / n.double()).clamp(max=1),
    "vmapped": torch.vmap(local),
    "derivative": lambda n: torch.vmap(torch.func.grad(lambda x: R * torch.log(x + 1)))(n),
}


@pytest.mark.parametrize("style", ["flat", "layerwise"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_function_of_each_norm_is_taken(name, style):
    assert run(RIGHT[name], style=style).history[0][2] == 6
    run(RIGHT[name], size=1, style=style)


def test_a_threshold_of_the_first_batch_is_never_of_the_data():
    """The first norm that a function sees is no sample's, and too large for a threshold."""
    with pytest.raises(ClippingError, match="exceed"):
        run(Remembers("first"))


def test_a_changed_function_is_given_by_set_clipping():
    """A threshold that moves within the function is refused; another function, chosen beforehand, is not."""

    class Threshold:
        radius = R

        def __call__(self, n):
            return (self.radius / n).clamp(max=1)

    model, function = model_of(), Threshold()
    optimizer = fastdp.DPSGD(
        model, lr=0.0, noise_multiplier=0.0, max_grad_norm=R, loss_reduction="sum", clipping=function
    )
    backward(model, data(8))
    optimizer.step()
    function.radius = 0.5
    for again in (lambda: None, lambda: optimizer.set_clipping(function, max_grad_norm=2 * R)):
        again()
        with pytest.raises(ClippingError, match="keeps state"):
            backward(model, data(8))
        optimizer.zero_grad()
    optimizer.set_clipping(Threshold())
    backward(model, data(8))
    optimizer.step()


def test_a_clipping_norm_that_is_a_tensor_is_refused():
    model = model_of()
    optimizer = fastdp.DPSGD(model, lr=0.0, noise_multiplier=0.0, max_grad_norm=R, loss_reduction="sum")
    backward(model, data(8))
    optimizer.step()
    with pytest.raises(ClippingError, match="tensor"):
        optimizer.set_clipping(max_grad_norm=optimizer.norms.median())
    assert optimizer.max_grad_norm == R
