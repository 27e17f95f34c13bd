"""Steps that are right: what fastdp.audit must not call a bug. RIGHT maps a name to what makes the step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastdp.audit import TorchTrainable

from .audit_hand import CLASSES, FEATURES, LR, Hand, Job
from .audit_hand import make_batch as classified

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples" / "audit"))

import with_fastdp


class Summed(Hand):
    """A loss that is a sum: nothing is divided."""

    expected_batch_size = 1.0

    def divisor(self, size: int) -> float:
        return 1.0


class Expected(Hand):
    """Divided by the expected batch size, whatever the batch."""

    expected_batch_size = 16.0

    def divisor(self, size: int) -> float:
        return 16.0


class Momentum(Hand):
    def update(self, job: Job, gradient: Tensor) -> Tensor:
        job.m = 0.9 * job.m + gradient
        return job.flat - LR * job.m


class Averaged(Hand):
    def update(self, job: Job, gradient: Tensor) -> Tensor:
        job.m = 0.8 * job.m + 0.2 * gradient
        return job.flat - LR * job.m


class Decayed(Hand):
    """Weight decay, which is no contribution of a sample."""

    def update(self, job: Job, gradient: Tensor) -> Tensor:
        return super().update(job, gradient) - LR * 0.01 * job.flat


class Regression(Hand):
    loss_kind = "mse"

    def make_batch(self, seed: int, size: int) -> tuple[Any, Any]:
        x, y = classified(seed, size)
        return x, np.eye(CLASSES, dtype=np.float32)[y] * 2 - 0.5

    def loss(self, job: Job, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (self.logits(job, flat, x) - y).square().mean()


class Double(Hand):
    make_model = staticmethod(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double())

    def make_batch(self, seed: int, size: int) -> tuple[Any, Any]:
        x, y = classified(seed, size)
        return x.astype(float), y


class Global(Hand):
    def factors(self, norms: Tensor, c: float) -> Tensor:
        return (norms <= c).to(norms)


class Automatic(Hand):
    def factors(self, norms: Tensor, c: float) -> Tensor:
        return c / (norms + 0.01)


class Normalised(Hand):
    """Every gradient is scaled to the norm C, also what rounding leaves of none, another rest in each batch."""

    def gradients(self, job: Job, x: Tensor, y: Tensor) -> Tensor:
        found = super().gradients(job, x, y)
        return found + 1e-8 * torch.randn(found.shape, generator=torch.Generator().manual_seed(len(y)))

    def factors(self, norms: Tensor, c: float) -> Tensor:
        return c / norms.clamp(min=1e-12)


class Large(Hand):
    """Inputs of size 30: every gradient is far above the C that are tried."""

    scale = 30.0

    def make_batch(self, seed: int, size: int) -> tuple[Any, Any]:
        x, y = classified(seed, size)
        return x * np.float32(self.scale), y


class Small(Large):
    """Inputs of size 0.01."""

    scale = 0.01


class Tiny(Hand):
    make_model = staticmethod(lambda: nn.Linear(3, 2))

    def make_batch(self, seed: int, size: int) -> tuple[Any, Any]:
        x, y = classified(seed, size)
        return x[:, :3].copy(), y % 2


def own_loop(order: Callable[[Any], Any] = list) -> Any:
    """A PyTorch loop with a momentum of its own, begun anew in every run; batches of any size, divided by 8.

    It takes its batches as `order` gives them: all at once.
    """

    def train(model: nn.Module, batches: Any, *, clipping_norm: float, noise_multiplier: float, **_: Any) -> None:
        kept = [torch.zeros_like(p) for p in model.parameters()]
        for batch in order(batches):
            total = [torch.zeros_like(p) for p in model.parameters()]
            for x, y in zip(*batch, strict=True):
                found = torch.autograd.grad(nn.functional.cross_entropy(model(x[None]), y[None]), model.parameters())
                norm = torch.stack([g.norm() for g in found]).norm()
                if torch.isfinite(norm):
                    factor = (clipping_norm / (norm + 1e-30)).clamp(max=1)
                    total = [t + factor * g for t, g in zip(total, found, strict=True)]
            with torch.no_grad():
                for p, m, t in zip(model.parameters(), kept, total, strict=True):
                    m.mul_(0.5).add_(t + noise_multiplier * clipping_norm * torch.randn_like(t))
                    p -= LR * m / 8

    return TorchTrainable(lambda: nn.Linear(FEATURES, CLASSES), train=train, loss=nn.functional.cross_entropy,
                          make_batch=classified, loss_kind="cross_entropy", learning_rate=LR,
                          expected_batch_size=8)  # fmt: skip


def loop_of(
    inner_of: Callable[..., Any], schedule: Callable[..., Any] | None = None, divisor: float = 0.0,
    activation: type[nn.Module] = nn.Tanh, fading: float = 1.0, **said: Any,
) -> Any:  # fmt: skip
    """A loop around an optimizer of torch, made anew in every run. divisor: of the sums, in place of their size.
    fading: a bug, by which factor each step's noise is less than the last one's."""

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), activation(), nn.Linear(16, CLASSES))

    def train(model: nn.Module, batches: Any, *, clipping_norm: float, noise_multiplier: float, **_: Any) -> None:
        params = list(model.parameters())
        inner = inner_of(params)
        rates = schedule(inner) if schedule is not None else None
        for number, batch in enumerate(batches):
            total = [torch.zeros_like(p) for p in params]
            for x, y in zip(*batch, strict=True):
                found = torch.autograd.grad(nn.functional.cross_entropy(model(x[None]), y[None]), params)
                factor = (clipping_norm / (torch.stack([g.norm() for g in found]).norm() + 1e-30)).clamp(max=1)
                if torch.isfinite(factor):
                    total = [t + factor * g for t, g in zip(total, found, strict=True)]
            for p, t in zip(params, total, strict=True):
                noise = fading**number * noise_multiplier * clipping_norm * torch.randn_like(t)
                p.grad = (t + noise) / (divisor or max(len(batch[0]), 1))
            inner.step()
            if rates is not None:
                rates.step()

    return TorchTrainable(make_model, train=train, loss=nn.functional.cross_entropy, make_batch=classified,
                          loss_kind="cross_entropy", **{"learning_rate": LR, **said})  # fmt: skip


class Bare:
    """Nothing but build, run and make_batch."""

    def __init__(self) -> None:
        self.hand = Hand()
        self.build, self.run, self.make_batch = self.hand.build, self.hand.run, self.hand.make_batch


def opacus() -> Any:
    import with_opacus

    return with_opacus.make_step()


def by_hand() -> Any:
    import by_hand as script

    return script.make_step()


def ours(**options: Any) -> Callable[[], Any]:
    return lambda: with_fastdp.make_step(**options)


def secure() -> Any:
    """fastdp's noise from the operating system, which no seed repeats."""
    step = with_fastdp.make_step()
    make = step.make_optimizer
    step.make_optimizer = lambda model, **options: make(model, **{**options, "seed": None})
    return step


HAND: dict[str, Callable[[], Any]] = {
    "by hand": Hand,
    "by hand, Adam": lambda: Hand("adam"),
    "sum": Summed,
    "expected batch size": Expected,
    "momentum": Momentum,
    "averaged": Averaged,
    "weight decay": Decayed,
    "regression": Regression,
    "float64": Double,
    "global": Global,
    "automatic": Automatic,
    "normalised": Normalised,
    "large inputs": Large,
    "small inputs": Small,
    "a loop with a momentum of its own": own_loop,
    "eight parameters": Tiny,
    "bare": Bare,
    "examples/audit/by_hand.py": by_hand,
}
FASTDP: dict[str, Callable[[], Any]] = {
    "fastdp, local, flat": ours(),
    "fastdp, global, flat": ours(clipping="global"),
    "fastdp, automatic, layerwise": ours(clipping="automatic", style="layerwise"),
    "fastdp, Adam": ours(adam=True),
}
_SGD, _OPTIM = torch.optim.SGD, torch.optim.lr_scheduler
LOOPS: dict[str, Callable[[], Any]] = {
    "a long momentum": lambda: loop_of(lambda ps: _SGD(ps, LR, momentum=0.95)),
    "momentum and weight decay": lambda: loop_of(lambda ps: _SGD(ps, LR, momentum=0.9, weight_decay=1e-2)),
    "Nesterov and weight decay": lambda: loop_of(
        lambda ps: _SGD(ps, LR, momentum=0.9, weight_decay=1e-2, nesterov=True)
    ),
    "a rate that falls": lambda: loop_of(lambda ps: _SGD(ps, LR), lambda inner: _OPTIM.ExponentialLR(inner, 0.99)),
    "a rate that falls later": lambda: loop_of(
        lambda ps: _SGD(ps, LR), lambda inner: _OPTIM.CosineAnnealingLR(inner, 1000)
    ),
    "divided by 32": lambda: loop_of(lambda ps: _SGD(ps, LR), divisor=32),
    **{
        f"AdamW at {rate:g}": lambda rate=rate: loop_of(  # type: ignore[misc]
            lambda ps: torch.optim.AdamW(ps, rate), optimizer="adam", learning_rate=rate
        )
        for rate in (0.1, 0.01, 0.0001)
    },
    "Adam divided by 32": lambda: loop_of(
        lambda ps: torch.optim.Adam(ps, 1e-3), divisor=32, optimizer="adam", learning_rate=1e-3, expected_batch_size=32
    ),
    "Adam, weight decay in the gradient": lambda: loop_of(
        lambda ps: torch.optim.Adam(ps, 0.01, weight_decay=1e-2), optimizer="adam", learning_rate=0.01
    ),
}
RIGHT = {**HAND, **FASTDP}

__all__ = ["FASTDP", "HAND", "LOOPS", "RIGHT", "loop_of", "opacus", "secure", "torch"]
