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

from .preactivations import PreActivations
from .reductions import reduce

ERRORS = ("sse", "sae", "huber")
SCORES = ("logits", "probabilities")


class DPLoss:
    """L = alpha L_focal + (1 - alpha) L_SSE + (1 - alpha) / beta L_reg, alpha = sigmoid(epoch - threshold).

    The published loss (equations 5 to 8, 10 and 11). A mean over samples of each one's own loss, so that clipping by
    sample bounds its gradient; z are the logits, y the label as a one-hot vector:

    - L_focal = -(1 - p_t)^focal log p_t of the softmax probability p_t of the label;
    - L_SSE = |z - y|^2 / 2; error="sae": sum_c |z_c - y_c|; error="huber": sum_c of e^2 / (2 huber_delta) where
      |e| < huber_delta, else |e| - huber_delta / 2, of e = z_c - y_c;
    - L_reg = sum over the layers but the last of |h|^2 / d, h what flows into the layer's activation function (its
      pre-activation) and d how many numbers a sample has there. The last layer's are the logits: they are left out.

    Two options give the reading that fastdp took before it had the paper's text, which some committed rows were made
    with: scores="probabilities" (the error is of softmax probabilities) and sums=True (L_SSE without the half, Huber's
    e^2 / 2 and huber_delta (|e| - huber_delta / 2), L_reg without 1 / d).

    Args:
        model: the model whose logits the loss will be given. Forward hooks are put on it, nothing else changes, and a
            copy or pickle of it has none. It may have a fastdp optimizer or Opacus's GradSampleModule around it, before
            or after. A torch.compile'd model is left by compiled code at each hook.
        threshold: e_t: the epoch at which both halves weigh the same; the paper's: 0 for MNIST and Fashion-MNIST, 7 for
            CIFAR-10.
        beta: > 0; the larger, the less pre-activations matter; math.inf: not at all, and no hooks are put. The paper's:
            1 and 11. With sums=True L_reg is in the thousands even for a small CNN.
        focal: gamma >= 0 of the focal loss; 0 makes it cross-entropy. The default is the paper's for networks that are
            trained from end to end (2 or 10 on ScatterNet features).
        error: "sse", "sae" or "huber".
        layers: names of modules: of an activation function the input counts, of any other module the output. None: the
            inputs of all activation functions of `torch.nn` that are modules of the model. That is refused where it
            would not be all of them: a model with recurrent layers (their gates lie inside), activation functions that
            are only called (`torch.tanh(self.conv(x))`; a compiled model hides them), a model that ends in one. A
            module that runs several times is as many layers.
        huber_delta: > 0, of error="huber": the paper's beta of equation 11, 0.1 to 1.
        scores: "logits" or "probabilities": what the error is of.
        sums: see above.

    `epoch` is set by the training loop, a number that may have a fraction; `alpha` follows it. `terms` are the means of
    the last call, which are not private. `remove()` takes the hooks off. Raises ValueError on arguments that make no
    sense, and StepError where the pre-activations of the given logits are not known.

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
        scores: str = "logits",
        sums: bool = False,
    ) -> None:
        for name, value, good in (
            ("threshold", threshold, lambda v: not math.isnan(v)),
            ("beta", beta, lambda v: v > 0),
            ("focal", focal, lambda v: 0 <= v < math.inf),
            ("huber_delta", huber_delta, lambda v: 0 < v < math.inf),
        ):
            _check(name, value, good)
        if error not in ERRORS or scores not in SCORES:
            raise ValueError(f"error is one of {ERRORS} and scores one of {SCORES}, not {error!r} and {scores!r}")
        self.threshold, self.beta, self.focal, self.error = float(threshold), float(beta), float(focal), error
        if not isinstance(sums, bool):
            raise ValueError(f"sums is True or False, not {sums!r}")
        self.huber_delta, self.scores, self.sums = float(huber_delta), scores, sums
        self._epoch = 0.0
        self._terms: dict[str, Tensor] = {}
        self.inputs = None if math.isinf(beta) else PreActivations(model, layers, mean=not sums)

    @property
    def epoch(self) -> float:
        """e_c, the current epoch: the training loop sets it."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: float) -> None:
        _check("epoch", value, math.isfinite)
        self._epoch = float(value)

    @property
    def alpha(self) -> float:
        """sigmoid(epoch - threshold): the weight of the focal loss."""
        x = self._epoch - self.threshold
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

    @property
    def terms(self) -> dict[str, float]:
        """Means over the last call's samples, unweighted: "focal", the error's name, "reg"; and "alpha"."""
        return {name: float(value) for name, value in self._terms.items()}

    def __call__(self, logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of logits [B, C] and whole numbers labels [B]; reduction "mean", "sum" or "none" for [B].

        Computed in float32 or better. Raises ValueError on other shapes, StepError (see the class).
        """
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
        scores = logits.softmax(1) if self.scores == "probabilities" else logits
        off = scores - F.one_hot(labels, logits.shape[1]).to(scores.dtype)
        if self.error == "sse":
            return off.square().sum(1) / (1 if self.sums else 2)
        if self.error == "sae":
            return off.abs().sum(1)
        huber = F.huber_loss(off, torch.zeros_like(off), reduction="none", delta=self.huber_delta).sum(1)
        return huber if self.sums else huber / self.huber_delta  # torch's is huber_delta times equation 11

    def remove(self) -> None:
        """Take the hooks off the model."""
        if self.inputs is not None:
            self.inputs.remove()

    def __deepcopy__(self, memo: Any) -> DPLoss:
        raise TypeError("a DPLoss is tied to its model: copy the model, and make a new DPLoss for the copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a DPLoss is tied to its model and cannot be pickled: make a new one for the loaded model")


def focal_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """-(1 - p)^gamma log p of the label's probability p, by sample.

    Args: logits [B, C] of two or more classes; labels [B], int64. The gradient is finite also at p = 1.

    Source: Lin et al., Focal loss for dense object detection, 2017.
    """
    total, of_label = logits.logsumexp(1), logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf).logsumexp(1)
    surprise = total - of_label[:, 0]  # -log p
    return surprise if gamma == 0 else (gamma * (others - total)).exp() * surprise


def _check(name: str, value: Any, good: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not good(float(value)):
        raise ValueError(f"{name} makes no sense as {value!r}")
