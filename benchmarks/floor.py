"""The least that an exact private step can cost over an ordinary one, from the shapes of a model's products.

For every product with a trained weight, ordinary training takes three units of 2 B T I O operations (forward, input
gradient, weight gradient); an exact flat-clipped step takes the same three (the last for the clipped sum) plus

    min(T (I + O) / (2 I O), 1, traffic)

units: norms by the symmetric gram matrix, directly, or by storing per-sample gradients (their bytes, written and read
once, at the machine's copy rate), all at the speed of torch's products. Products with frozen weights and attention
count the same in both. What the model spends elsewhere is ignored (look-ups, norm layers, the order of a recurrence,
activations, the loss, noise, the optimizer, cross terms of tied weights), so a step that spends much there can come out
below its floor, or above it, for reasons that are no product's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .models import Workload


class Product(NamedTuple):
    """Data [B,T,I] times a weight [O,I]."""

    batch: int
    t: int
    i: int
    o: int
    trained: bool
    input_gradient: bool
    groups: int = 1  # of a convolution: data and weight of each, [T,I] and [O/groups,I]

    def unit(self) -> float:
        """Operations of one product."""
        return 2.0 * self.batch * self.t * self.i * self.o

    def norm_units(self, roof: tuple[float, float]) -> float:
        """The cheapest exact norm, in units; roof: operations and bytes a second."""
        width = self.o / self.groups
        gram = self.t * (self.i + width) / (2 * self.i * width)
        traffic = 8.0 * self.batch * self.i * self.o / roof[1] / (self.unit() / roof[0])
        return min(gram, 1.0, traffic)


class Shapes(TorchFunctionMode):
    """Collects the products and the operations of attention of a forward of `batch` samples."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.products, self.attention = batch, [], 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.linear:
            self.add(args[0], args[1], args[0].numel() // args[0].size(-1))
        elif func in (F.conv1d, F.conv2d, F.conv3d):
            groups = args[6] if len(args) > 6 else (kwargs or {}).get("groups", 1)
            self.add(args[0], args[1], out.numel() // out.size(1), groups)
        elif func in (torch.lstm, torch.gru):  # data, states, weights, biases, layers, ..., both ways, batch first
            self.add_recurrent(args[0], args[2], 4 if args[3] else 2, 2 if args[7] else 1)
        elif func is F.scaled_dot_product_attention:
            q, k = args[:2]
            forward = 4.0 * q.numel() * k.size(-2) * (0.5 if (kwargs or {}).get("is_causal") else 1.0)
            self.attention += forward * (3.5 if out.requires_grad else 1.0)  # five products in backward, two in forward
        return out

    def add(self, data: Tensor, weight: Tensor, rows: int, groups: int = 1) -> None:
        i, o = math.prod(weight.shape[1:]), weight.size(0)
        product = Product(self.batch, rows // self.batch, i, o, weight.requires_grad, data.requires_grad, groups)
        self.products.append(product)

    def add_recurrent(self, data: Tensor, weights: list[Tensor], each: int, ways: int) -> None:
        """Of each layer and way the products with the data [4H, I] and with the state [4H, H] of the step before."""
        t = data.size(0) * data.size(1) // self.batch
        for number in range(0, len(weights), each):
            first = number < each * ways and not data.requires_grad
            for k, weight in enumerate(weights[number : number + 2]):
                o, i = weight.shape
                self.products.append(Product(self.batch, t, i, o, weight.requires_grad, k == 1 or not first))


def shapes(work: Workload) -> Shapes:
    """The products of a workload's forward, on the meta device: no memory, no time."""
    x, _ = work.batch(work.batch_size)
    with torch.device("meta"):
        model, x = work.build(), x.to("meta")
    with Shapes(work.batch_size) as found:
        model(x)
    return found


def floor(work: Workload, roof: tuple[float, float]) -> float:
    """Time of an exact private step over an ordinary one, at least; roof as `timing.roofs` measures it."""
    found = shapes(work)
    ordinary = found.attention + sum(p.unit() * (1 + p.input_gradient + p.trained) for p in found.products)
    norms = sum(p.unit() * p.norm_units(roof) for p in found.products if p.trained)
    return (ordinary + norms) / ordinary
