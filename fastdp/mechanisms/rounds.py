"""One round of DP-FedAvg: the weights at its beginning, the clipped updates of its clients, and what fits neither."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ParameterError, StepError
from ..ops.clip import clip_factors
from ..ops.common import sum_type

REMEDY = "call step() to end the round, or discard() to drop its updates"


class Round:
    """A round that has begun.

    bound: R, for all of its clients.
    """

    def __init__(self, model: nn.Module, bound: float) -> None:
        self.model, self.bound = model, bound
        self.taken = set[int]()  # the clients whose updates it has
        self.start = {name: p.detach().clone() for name, p in trained(model).items()}
        self.sums = {n: torch.zeros(p.shape, dtype=sum_type(p), device=p.device) for n, p in self.start.items()}

    def check(self) -> None:
        """Raises StepError if the global model was changed since the round began. Its weights are then put back."""
        if trained(self.model).keys() != self.start.keys():
            raise StepError(f"parameters were frozen or unfrozen within a round: do so between rounds; {REMEDY}")
        if name := self.put_back():
            raise StepError(
                f"the global model was changed within a round ({name!r}), without clipping or noise, and its weights "
                "were put back. Train the copy that client() gives (its optimizer must be of local.parameters()), and "
                "load weights between step() and the next round's first client"
            )

    @torch.no_grad()
    def put_back(self) -> str:
        """Give the global model the weights of the beginning. Returns the first name that had others, or ""."""
        mine, changed = dict(self.model.named_parameters()), ""
        for name, start in self.start.items():
            if name in mine and not _same(mine[name], start):
                mine[name].copy_(start)
                changed = changed or name
        return changed

    @torch.no_grad()
    def add(self, client: int, weights: Mapping[str, Tensor]) -> bool:
        """Clip the update of a client by its whole norm, and add it. False if it is not finite, and adds nothing."""
        for name, start in self.start.items():
            if name not in weights or weights[name].shape != start.shape:
                raise ParameterError(
                    f"the client's weights have no {name!r} of shape {tuple(start.shape)}: it must train the modules "
                    "of the global model. Change the model (adapters, for example) before DPFedAvg is made of it"
                )
        updates = {n: weights[n].detach().to(total) - self.start[n].to(total) for n, total in self.sums.items()}
        norm = math.hypot(*(float(torch.linalg.vector_norm(u, dtype=torch.float64)) for u in updates.values()))
        factor = float(clip_factors(torch.tensor([norm * norm], dtype=torch.float64), self.bound))
        for name, update in updates.items() if factor else ():  # 0 times infinity is not 0
            self.sums[name].add_(update, alpha=factor)
        self.taken.add(client)
        return math.isfinite(norm)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require grad. Tied ones are there once, under their first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def has_statistics(module: nn.Module) -> bool:
    """Whether it is a norm with running statistics."""
    return getattr(module, "running_mean", None) is not None


def changed_buffers(local: nn.Module, model: nn.Module) -> list[str]:
    """Names of the buffers that local training has changed."""
    mine = dict(model.named_buffers())
    return [name for name, buffer in local.named_buffers() if name in mine and not _same(buffer, mine[name])]


def check_model(model: nn.Module) -> None:
    """Raises ParameterError if the model has what cannot be averaged."""
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ParameterError(f"{name!r} has no shape yet: run the model on a batch once, before DPFedAvg is made")
        if p.requires_grad and p.dtype.is_complex:
            raise ParameterError(f"{name!r} is complex: make it of a real and an imaginary parameter, or freeze it")
    found = [name for name, module in model.named_modules() if has_statistics(module) and module.training]
    if found:
        raise ParameterError(
            f"{', '.join(map(repr, found[:3]))}: running statistics (BatchNorm) follow the clients' data, and are not "
            "averaged. fastdp.make_compatible(model) puts GroupNorm in their place; or fix the statistics: eval() on "
            "these norms before DPFedAvg is made"
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises ParameterError unless it is of the trained parameters, and StepError if its step needs a closure."""
    if not trained(model):
        raise ParameterError("no parameter of the model requires grad, so clients have nothing to train")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StepError("LBFGS evaluates the loss, which the server does not have: take SGD or Adam as optimizer=")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in trained(model).items() if id(p) not in held]
    strange = len(held - {id(p) for p in model.parameters()})
    if missing or strange:
        raise ParameterError(
            f"the server's optimizer lacks {len(missing)} trained parameter(s) {missing[:3]}, and has {strange} that "
            "are not the model's: make it of model.parameters(), and DPFedAvg anew if the model was changed"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, nan included."""
    if one.shape != other.shape:
        return False
    one = one.detach().to(other)
    return bool(((one == other) | (one != one) & (other != other)).all())
