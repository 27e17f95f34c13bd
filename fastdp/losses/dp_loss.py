"""A loss for training with clipped gradients: squared error early, focal loss late, small pre-activations.

Source: Shamsabadi and Papernot, Losing less: a loss for differentially private deep learning, PoPETs 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import GraphError
from ..graphs import recording
from .preactivations import PreActivations
from .reductions import reduce

ERRORS = ("sse", "sae", "huber")


class DPLoss:
    """L = alpha L_focal + (1 - alpha) L_SSE + (1 - alpha) / beta L_reg, alpha = sigmoid(epoch - threshold).

    This is the published loss (equations 5 to 8, 10 and 11). It is a mean over samples of their own losses, so clipping
    by sample bounds its gradient. With the logits z and the label y as a one-hot vector, its parts are:

    - L_focal = -(1 - p_t)^focal log p_t, with the softmax probability p_t of the label;
    - L_SSE = |z - y|^2 / 2. With error="sae", it is sum_c |z_c - y_c|. With error="huber", it is the sum over c, with e
      = z_c - y_c, of e^2 / (2 huber_delta) if |e| < huber_delta, else |e| - huber_delta / 2;
    - L_reg = the sum of |h|^2 / d over all layers but the last, where h is the input of the layer's activation function
      (its pre-activation) and d is its number of elements per sample. The last layer's pre-activations are the logits,
      which are left out.

    The training loop sets `epoch`, a number that may have a fraction, and `alpha` follows it. `terms` are the means of
    the last call, which are not private. `remove()` removes the hooks.

    Args:
        model: the model that computes the logits. The loss adds forward hooks to it and changes nothing else; a copy or
            pickle of the model has none. It may have a fastdp optimizer, or be wrapped in Opacus's GradSampleModule,
            before or after. A torch.compile'd model leaves compiled code at each hook.
        threshold: e_t, the epoch at which both halves have the same weight. The paper uses 0 for MNIST and
            Fashion-MNIST, and 7 for CIFAR-10.
        beta: positive. The larger it is, the less the pre-activations matter; math.inf removes them and adds no hooks.
            The paper uses 1 and 11.
        focal: gamma >= 0 of the focal loss; 0 makes it cross-entropy. The default is the paper's for networks that are
            trained from end to end (2 or 10 on ScatterNet features).
        error: "sse", "sae" or "huber".
        layers: the names of modules. For an activation function the input counts, and for any other module the output.
            None selects the inputs of all activation functions of `torch.nn` that are modules of the model. The loss
            refuses None if these would not be all: for a model with recurrent layers (which contain their gates), for
            activation functions that are only called (`torch.tanh(self.conv(x))`; a compiled model hides them), and for
            a model that ends in one. A module that runs several times counts as several layers.
        huber_delta: positive, for error="huber". It is the paper's beta of equation 11, 0.1 to 1.

    Raises:
        ValueError: if an argument is invalid.
        StepError: if the logits are not those of the model's last forward, or a layer was not seen in it.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> loss = DPLoss(model, threshold=5.0, beta=100.0)
    >>> loss.epoch = 1.0
    >>> loss(model(torch.ones(2, 4)), torch.tensor([0, 2])).backward()
    >>> round(loss.alpha, 4)
    0.018
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: float,
        beta: float,
        focal: float = 5.0,
        error: str = "sse",
        layers: Iterable[str] | None = None,
        huber_delta: float = 0.5,
    ) -> None:
        for name, value, good in (
            ("threshold", threshold, lambda v: not math.isnan(v)),
            ("beta", beta, lambda v: v > 0),
            ("focal", focal, lambda v: 0 <= v < math.inf),
            ("huber_delta", huber_delta, lambda v: 0 < v < math.inf),
        ):
            _check(name, value, good)
        if error not in ERRORS:
            raise ValueError(f"error is one of {ERRORS}, not {error!r}")
        self.threshold, self.beta, self.focal, self.error = float(threshold), float(beta), float(focal), error
        self.huber_delta = float(huber_delta)
        self._epoch = 0.0
        self._terms: dict[str, Tensor] = {}
        self.inputs = None if math.isinf(beta) else PreActivations(model, layers)

    @property
    def epoch(self) -> float:
        """e_c, the current epoch, which the training loop sets."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: float) -> None:
        _check("epoch", value, math.isfinite)
        self._epoch = float(value)

    @property
    def alpha(self) -> float:
        """sigmoid(epoch - threshold), the weight of the focal loss."""
        x = self._epoch - self.threshold
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

    @property
    def terms(self) -> dict[str, float]:
        """The unweighted means over the last call's samples: "focal", the name of the error, "reg"; and "alpha"."""
        return {name: float(value) for name, value in self._terms.items()}

    def __call__(self, logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Compute the loss, in float32 or better.

        Args:
            logits: [B, C], of two or more classes.
            labels: [B], whole numbers from 0 to C - 1.
            reduction: "mean" over samples, "sum", or "none" for [B].

        Raises:
            ValueError: if a shape, a type, a label or the reduction is wrong.
            StepError: if the logits are not those of the model's last forward.
        """
        if recording():
            raise GraphError(
                "a DPLoss weighs its terms by its epoch, which the training loop sets in Python: a replay would keep "
                "the weights of one epoch. Train with it without graphed()"
            )
        if logits.dim() != 2 or labels.shape != logits.shape[:1] or logits.shape[1] < 2:
            raise ValueError(
                f"logits [B, C] of two or more classes and labels [B], not {tuple(logits.shape)} and "
                f"{tuple(labels.shape)}"
            )
        if labels.is_floating_point() or labels.is_complex():
            raise ValueError(f"labels are whole numbers, not {labels.dtype}")
        reduce(logits.new_zeros(1), reduction)  # checked before the pre-activations are taken
        if labels.device.type == "cpu" and len(
            labels
        ):  # elsewhere a look would wait for the device, whose kernels check
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= logits.shape[1]:
                raise ValueError(f"labels lie from 0 to {logits.shape[1] - 1}; got {low} to {high}: leave others out")
        wide = logits if logits.dtype == torch.float64 else logits.float()
        labels, alpha = labels.long(), self.alpha
        parts = {"focal": focal_loss(wide, labels, self.focal), self.error: self._error(wide, labels)}
        each = alpha * parts["focal"] + (1 - alpha) * parts[self.error]
        if self.inputs is not None:
            parts["reg"] = self.inputs.take(logits).to(wide.device, wide.dtype)
            each = each + (1 - alpha) / self.beta * parts["reg"]
        self._terms = {name: reduce(part.detach(), "mean") for name, part in parts.items()}
        self._terms["alpha"] = torch.tensor(alpha, dtype=torch.float64)
        return reduce(each, reduction)

    def _error(self, logits: Tensor, labels: Tensor) -> Tensor:
        off = logits - F.one_hot(labels, logits.shape[1]).to(logits.dtype)
        if self.error == "sse":
            return off.square().sum(1) / 2
        if self.error == "sae":
            return off.abs().sum(1)
        huber = F.huber_loss(off, torch.zeros_like(off), reduction="none", delta=self.huber_delta).sum(1)
        return huber / self.huber_delta  # torch's is huber_delta times equation 11

    def remove(self) -> None:
        """Remove the hooks from the model."""
        if self.inputs is not None:
            self.inputs.remove()

    def __deepcopy__(self, memo: Any) -> DPLoss:
        raise TypeError("a DPLoss is tied to its model: copy the model, and make a new DPLoss for the copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DPLoss is tied to its model and cannot be pickled: make a new one for the loaded model")


def focal_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """Compute -(1 - p)^gamma log p for the probability p of the label, per sample: [B].

    The gradient is finite also at p = 1.

    Args:
        logits: [B, C], of two or more classes.
        labels: [B], int64.
        gamma: 0 or larger; 0 gives cross-entropy.

    Source: Lin et al., Focal loss for dense object detection, 2017 (arXiv 1708.02002).
    """
    total, of_label = logits.logsumexp(1), logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf).logsumexp(1)
    surprise = total - of_label[:, 0]  # -log p
    return surprise if gamma == 0 else (gamma * (others - total)).exp() * surprise


def _check(name: str, value: Any, good: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not good(float(value)):
        raise ValueError(f"{name} makes no sense as {value!r}")
