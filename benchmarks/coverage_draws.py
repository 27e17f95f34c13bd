"""Random models made repeatable: without dropout, and what else a forward draws the same for every row.

Gumbel noise of a quantiser, the random masks of a masked autoencoder: with one seed for every forward the draws of a
batch of three are still others than those of each of its samples alone, so that there is no truth to compare with. A
draw that depends on the shape of a row alone is the same in both, whatever dimension the rows stand for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DROPOUT = re.compile(r"drop|stochastic|mask_time_prob|mask_feature_prob|jitter", re.IGNORECASE)
MADE = (torch.rand, torch.randn, torch.rand_like, torch.randn_like)
FILLED = (Tensor.exponential_, Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_)


class SameDraws(TorchFunctionMode):
    """Within it the functions above fill a tensor with one row, the same for every draw of its size: an engine may
    call a function again to see what it does."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.gumbel_softmax:  # torch looks at its inside no more
            return self.gumbel(*args, **(kwargs or {}))
        found = function(*args, **(kwargs or {}))
        if (function in MADE or function in FILLED) and found.dim():
            again = torch.empty(found.shape[1:], dtype=torch.float64)  # in every type the same
            row = torch.Generator().manual_seed(again.numel())
            with torch.no_grad():
                found.copy_(_drawn(function, again, args, kwargs or {}, row).expand_as(found))
        return found

    def gumbel(self, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 0, dim: int = -1) -> Tensor:
        row = torch.empty(logits.shape[1:], dtype=torch.float64)
        noise = -row.exponential_(generator=torch.Generator().manual_seed(row.numel())).log().to(logits.dtype)
        soft = ((logits + noise) / tau).softmax(dim)
        one = torch.zeros_like(soft).scatter(dim, soft.detach().argmax(dim, keepdim=True), 1.0)
        return one - soft.detach() + soft if hard else soft


def _drawn(function: Any, out: Tensor, args: Any, kwargs: Any, generator: torch.Generator) -> Tensor:
    if function in FILLED:
        return function(out, *args[1:], **{**kwargs, "generator": generator})
    return out.normal_(generator=generator) if "randn" in function.__name__ else out.uniform_(generator=generator)


def without_chance(case: Any) -> Any:
    """A `Case` whose losses are computed with the same draws for every sample."""

    def build(sizes: Any) -> Any:
        model, batch, losses = case.build(sizes)

        def found(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            with SameDraws():
                return losses(model, batch)

        return model, batch, found

    return case._replace(build=build)


def without_dropout(model: nn.Module) -> nn.Module:
    """In training mode, with every kind of dropout at zero."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (DROPOUT.search(name) or (name == "p" and _is_dropout(module))):
                setattr(module, name, 0.0)
    return model.train()


def _is_dropout(module: nn.Module) -> bool:
    return bool(DROPOUT.search(type(module).__name__))
