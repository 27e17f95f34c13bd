"""The head and the loss of a causal language model of transformers as one function, without its logits.

The model's forward runs as it is, but for its head: that computes the losses of the samples, by
`fastdp.losses.linear_cross_entropy`, and hands on zeros in place of logits. What the model does to logits behind the
head must therefore be known: scales and soft caps by its configuration, and `FusedHead.check` finds out whether that is
all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StepError
from ..grad_sample.head_loss import linear_cross_entropy
from ..ops.head import Head, Terms

REFUSED = "the fused loss is refused: "
REMEDY = ". Leave the option out: the losses are then computed from stored logits"
REACH = 60.0  # logits of this size show a soft cap, or a power, that small ones would hide


class FusedHead:
    """The fused loss of a causal language model (which peft may have wrapped).

    Raises StepError, with the reason, if the model has no head that is an ordinary linear layer.
    """

    def __init__(self, model: nn.Module) -> None:
        inner: Any = model
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        self.kind, head = type(inner).__name__, _head_of(model)
        if type(head) is not nn.Linear:
            what = "no output embeddings" if head is None else f"a head of the kind {type(head).__name__}"
            raise StepError(f"{REFUSED}{self.kind} has {what}, not an ordinary linear layer{REMEDY}")
        self.head: nn.Linear = head
        config: Any = getattr(inner, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.softcap, self.scale = _softcap(text), _scale(text)

    def is_of(self, model: nn.Module) -> bool:
        """Whether this is the head of such a model, which it may not be once another has taken its place."""
        return _head_of(model) is self.head

    def losses(
        self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor, label_smoothing: float = 0.0
    ) -> Tensor:
        """The loss of each sample [B], as `causal_lm_loss` of the model's logits; labels [B,T] are not shifted yet."""
        found: list[Tensor] = []

        def forward(hidden: Tensor) -> Tensor:
            if found or hidden.dim() != 3 or hidden.shape[:2] != labels.shape:
                raise StepError(
                    f"{REFUSED}the head of {self.kind} takes {tuple(hidden.shape)} beside labels "
                    f"{tuple(labels.shape)}{' a second time' if found else ''}{REMEDY}"
                )
            found.append(
                linear_cross_entropy(
                    hidden, self.head.weight, labels, self.head.bias, label_smoothing=label_smoothing,
                    softcap=self.softcap, logit_scale=self.scale, shift=True,
                )
            )  # fmt: skip
            return hidden.new_zeros(*hidden.shape[:2], 1)

        with self._instead(forward):
            model(**inputs)
        if not found:
            raise StepError(f"{REFUSED}the forward of {self.kind} does not call its head{REMEDY}")
        return found[0]

    def evaluated(self, model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        """For evaluation: the sum of the losses of all labelled tokens, each counting alike, and their number."""
        counts = (labels[:, 1:] != Terms().ignore_index).sum(1)
        losses = self.losses(model, inputs, labels)
        return (losses.double() * counts.to(losses.device)).sum(), counts.sum()

    def check(self, model: nn.Module, inputs: Mapping[str, Any], tolerance: float = 1e-4) -> None:
        """Compare the logits that the fused loss would be of with the model's own, on these inputs (a few samples).

        Hidden states are made so large that logits reach to 60, where a cap or another function of them shows.
        tolerance: relative to the largest logit. Raises StepError if they differ.
        """
        expected: list[Tensor] = []
        terms = Terms(softcap=self.softcap, logit_scale=self.scale)

        def forward(hidden: Tensor) -> Tensor:
            raw = nn.functional.linear(hidden, self.head.weight, self.head.bias)
            gain = (REACH / raw.abs().amax().clamp(min=1e-6)).to(hidden.dtype)
            raw = nn.functional.linear(hidden * gain, self.head.weight, self.head.bias)
            wide = raw.double()
            Head(self.head.weight, None, terms).scores(wide)
            expected.append(wide)
            return raw

        with torch.no_grad(), self._instead(forward):
            outputs = model(**inputs)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if len(expected) != 1 or not isinstance(logits, Tensor) or logits.shape != expected[0].shape:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else "no logits"
            raise StepError(f"{REFUSED}{self.kind} makes {shape} of what its head gives{REMEDY}")
        error = float((logits.double() - expected[0]).abs().max() / expected[0].abs().max().clamp(min=1e-30))
        if not error <= tolerance:
            raise StepError(
                f"{REFUSED}{self.kind} changes its logits behind the head in a way that its configuration does not "
                f"say (softcap {self.softcap}, scale {self.scale:g}): they differ by {error:.1e} of the largest one"
                f"{REMEDY}"
            )

    @contextlib.contextmanager
    def _instead(self, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within it the head's forward is this one."""
        own = self.head.__dict__  # where a forward of this one module stands
        before = own.get("forward")
        own["forward"] = forward
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before


def _head_of(model: Any) -> Any:
    """The head, of the model within adapters; None: it has none."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    find = getattr(inner, "get_output_embeddings", None)
    return find() if callable(find) else None


def _softcap(config: Any) -> float | None:
    """The soft cap of the final logits (Gemma)."""
    found = getattr(config, "final_logit_softcapping", None)
    return float(found) if found else None


def _scale(config: Any) -> float:
    """By how much logits are multiplied behind the head (Cohere), or one over what divides them (Granite)."""
    scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return float(scale or 1.0) / float(divisor or 1.0)
