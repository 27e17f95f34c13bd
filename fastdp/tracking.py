"""What a private run is watched by, in TensorBoard, Weights & Biases or a function of one's own.

>>> from torch import nn
>>> from fastdp import DPSGD
>>> optimizer = DPSGD(nn.Linear(3, 2), noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=8, sample_rate=0.1)
>>> rows = []
>>> tracker = Tracker(optimizer, lambda values, step: rows.append((step, sorted(values)[:3])), prefix="")
>>> optimizer._attached().engine.model(torch.ones(8, 3)).square().sum(1).mean().backward()
>>> optimizer.step(); tracker.step()
>>> rows
[(1, ['clipped_norm_not_private', 'clipped_not_private', 'cosine_not_private'])]
>>> tracker.close(); optimizer.detach()

Epsilon and the noise multiplier may be shown to anybody. Names that end in _not_private are of what comes from the raw
gradients: the guarantee does not cover it, so keep it from those whom the model is protected against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .diagnostics import GradientDiagnostics, NormHistogram
from .errors import StepError
from .optim.optimizers import PrivateOptimizer

Write = Callable[[Mapping[str, Any], int], object]
_SHOWN = ("clipped", "nonfinite", "norm_p10", "norm_median", "norm_p90", "clipped_norm", "cosine")


class Tracker:
    """Logs epsilon, norms with their histogram, the share clipped, and the noise against the signal, every few steps.

    Call `step()` after each optimizer.step(), and `close()` at the end.

    Args:
        optimizer: a fastdp optimizer that is not detached.
        writer: a torch.utils.tensorboard.SummaryWriter (or what has its add_scalar and add_histogram), a wandb run (or
            what has its log), or a function of (values by name, step).
        delta: of the epsilon. None: no epsilon is logged.
        every: log each n-th step, of which each costs about as much as another clipped sum.
        prefix: of the names.

    Raises:
        ValueError: if an argument is invalid, or the writer is none of these.
        StepError: if the optimizer is detached, or watched by GradientDiagnostics already.
    """

    def __init__(
        self,
        optimizer: PrivateOptimizer,
        writer: Any,
        delta: float | None = None,
        *,
        every: int = 50,
        prefix: str = "privacy/",
    ) -> None:
        if delta is not None and not 0 < delta < 1:
            raise ValueError(f"delta must lie in (0, 1), not {delta!r}")
        self._write = _writes_to(writer)
        self._optimizer, self._delta, self._prefix, self._steps = optimizer, delta, prefix, 0
        self._watch = GradientDiagnostics(optimizer, layers=[], every=every)
        self._size = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)

    def step(self) -> None:
        """Count a step, if the last optimizer.step() added noise, and log it if it is one that is looked at."""
        if not self._optimizer.stepped:
            return
        self._steps += 1
        if not self._watch.looking:
            return
        try:
            report = self._watch.report()
        except StepError:
            return  # an empty batch, of noise alone
        found = report.values()
        raw: dict[str, Any] = {name: found[name] for name in _SHOWN}
        noise = self._optimizer._attached().noise_std * math.sqrt(self._size)
        raw["noise_over_signal"] = noise / report.clipped_norm if report.clipped_norm > 0 else math.inf
        raw["norms"] = report.histogram()
        values = {f"{name}_not_private": value for name, value in raw.items()}
        values["noise_multiplier"] = self._optimizer.noise_multiplier
        if self._delta is not None:
            values["epsilon"] = self._optimizer.epsilon(self._delta)
        self._write({f"{self._prefix}{name}": value for name, value in values.items()}, self._steps)

    def close(self) -> None:
        """Stop watching. The writer stays open: it is the user's."""
        self._watch.remove()


def _writes_to(writer: Any) -> Write:
    if hasattr(writer, "add_scalar") and hasattr(writer, "add_histogram"):
        return lambda values, step: _to_tensorboard(writer, values, step)
    if hasattr(writer, "log") and not isinstance(writer, type):
        return lambda values, step: writer.log(_for_wandb(values), step=step)
    if callable(writer):
        return writer  # type: ignore[no-any-return]
    raise ValueError(
        f"{type(writer).__name__} is no SummaryWriter, no wandb run, and no function of (values by name, step)"
    )


def _to_tensorboard(writer: Any, values: Mapping[str, Any], step: int) -> None:
    for name, value in values.items():
        if isinstance(value, NormHistogram):
            if not int(value.counts.sum()):
                continue  # no norm is finite and above 0, and a SummaryWriter takes no empty histogram
            middles = (value.edges[:-1] * value.edges[1:]).clamp(min=0).sqrt()
            writer.add_histogram(name, torch.repeat_interleave(middles, value.counts), step)
        else:
            writer.add_scalar(name, value, step)


def _for_wandb(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with histograms as wandb has them; where it is not installed, as counts and edges."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(value, NormHistogram):
            found[name] = value
            continue
        pair = value.counts.tolist(), value.edges.tolist()
        try:
            import wandb

            found[name] = wandb.Histogram(np_histogram=pair)
        except ImportError:
            found[name] = {"counts": pair[0], "edges": pair[1]}
    return found
