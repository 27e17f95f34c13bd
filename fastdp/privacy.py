"""One private training run: sums of clipped gradients, when to step, noise, and the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import sampling
from .accounting import Ledger, check_accountant
from .clipping import Clipping, ClippingFunction
from .engine import PerSampleGradients
from .errors import AccountingError, StepError
from .gradients import Gradients
from .ops.clip import GAMMA
from .ops.noise import Noise
from .planner import PlanRow, describe, table


class Privacy:
    """What an optimizer adds to its own update rule. The arguments are those of `fastdp.privatize`."""

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Tensor],
        *,
        noise_multiplier: float,
        max_grad_norm: float = 1.0,
        expected_batch_size: float | None = None,
        clipping: ClippingFunction = "local",
        style: str | Sequence[Any] = "flat",
        loss_reduction: str = "mean",
        sample_rate: float | None = None,
        accountant: str = "prv",
        gamma: float = GAMMA,
        batch_first: bool = True,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> None:
        if not 0 <= noise_multiplier < float("inf"):
            raise ValueError(f"noise_multiplier must be 0 or larger and finite, not {noise_multiplier!r}")
        if expected_batch_size is not None and not 0 < expected_batch_size < float("inf"):
            raise ValueError(f"expected_batch_size must be positive, not {expected_batch_size!r}")
        if sample_rate is not None and not 0 < sample_rate <= 1:
            raise AccountingError(f"sample_rate must lie in (0, 1], not {sample_rate!r}")
        self.noise_multiplier, self.accountant = float(noise_multiplier), check_accountant(accountant)
        self.expected_batch_size, self.sample_rate = expected_batch_size, sample_rate
        self.loss_reduction = loss_reduction
        self.noise, self.ledger = Noise(seed), Ledger()
        self.engine = PerSampleGradients(
            model, params, loss_reduction=loss_reduction, batch_first=batch_first, batch_size=batch_size,
            on_backward=self._clip,
        )  # fmt: skip
        try:
            self.clipping = Clipping(self.engine.named_parameters(), clipping, max_grad_norm, style, gamma)
        except Exception:
            self.engine.detach()
            raise
        self.norms: Tensor | dict[str, Tensor] | None = None
        self._plan: list[PlanRow] = []
        self._dropped: Tensor | None = None
        self._rate: float | None = None
        self._expected: float | None = None
        self.discard()

    def discard(self) -> None:
        """Forget everything since the last step."""
        self._pending: dict[int, Tensor] = {}  # of backwards since the last call of step
        self._sums: dict[int, Tensor] = {}  # of the logical batch's steps so far
        self._has_pending = self._has_sums = False

    # ------------------------------------------------------------------ backward

    def _clip(self, gradients: Gradients) -> None:
        self._check_batch(gradients.batch)
        named = self.engine.named_parameters()
        self._check_groups(named)
        members = [[named[name] for name in group.parameters if name in named] for group in self.clipping.groups]
        norm_sq = [gradients.norm_sq(parameters) for parameters in members]
        factors = self.clipping.factors(norm_sq)
        norms = [squares.sqrt().float() for squares in norm_sq]
        flat = self.clipping.style == "flat"
        self.norms = norms[0] if flat else dict(zip([g.name for g in self.clipping.groups], norms, strict=True))
        dropped = (~torch.isfinite(torch.stack(norm_sq))).any(0).sum()
        self._dropped = dropped if self._dropped is None else self._dropped + dropped
        for parameters, c in zip(members, factors, strict=True):
            _add(self._pending, gradients.clipped_sum(c, parameters))
        self._has_pending = True
        self._plan = describe(gradients, named)

    def _check_batch(self, batch: int) -> None:
        current = sampling.current()
        if current is not None and batch != current.size:
            raise StepError(
                f"the loader handed out {current.size} samples, the model was given a batch of {batch}. One sample "
                "must be one row (give batch_size= where a sample has several rows), and the whole batch must pass."
            )

    def _check_groups(self, named: dict[str, Tensor]) -> None:
        known = {name for group in self.clipping.groups for name in group.parameters}
        new = [name for name in named if name not in known]
        if new:
            raise StepError(
                f"parameters changed since the optimizer was made: {new[:5]} now require grad but belong to no "
                "clipping group. Add them with add_param_group, or freeze them."
            )

    @property
    def nonfinite_samples(self) -> int:
        """Samples dropped so far because their gradient was not finite."""
        return 0 if self._dropped is None else int(self._dropped)

    # ------------------------------------------------------------------ step

    def ready(self) -> bool:
        """Take the gradients at hand; True where the logical batch is complete."""
        current = sampling.current()
        if not self._has_pending and not (self._has_sums and current is None):
            raise StepError(
                "step() without a backward since the last one. Call loss.backward() first, also for an empty batch: "
                "a loader of fastdp.poisson_loader hands out a batch with no rows that any model takes"
            )
        _add(self._sums, self._pending)
        self._pending, self._has_pending, self._has_sums = {}, False, True
        if current is None:
            self._rate, self._expected = self.sample_rate, self.expected_batch_size
            return True
        if self.sample_rate is not None and abs(self.sample_rate - current.sample_rate) > 1e-9:
            raise AccountingError(
                f"sample_rate={self.sample_rate} was given, but the loader samples at {current.sample_rate}"
            )
        self._rate = current.sample_rate
        expected = self.expected_batch_size
        self._expected = current.expected_batch_size if expected is None else expected
        return current.final

    def zero_grad(self) -> None:
        """Drop the gradients of backwards that no step has taken."""
        self._pending, self._has_pending = {}, False

    def gradient(self) -> dict[int, Tensor]:
        """The private gradient of every tracked parameter: (sum + noise) / expected batch size, by id.

        Noise has the standard deviation noise_multiplier * sensitivity, once for the logical batch.
        """
        named = self.engine.named_parameters()
        divisor = 1.0
        if self.loss_reduction == "mean":
            if self._expected is None:
                raise StepError(
                    "expected_batch_size is not known: give it to the optimizer (with a mean loss the noisy sum is "
                    "divided by it), or train with fastdp.poisson_loader, which tells it"
                )
            divisor = float(self._expected)
        std = self.noise_multiplier * self.clipping.sensitivity
        found: dict[int, Tensor] = {}
        offsets = self.engine.offsets()
        for name, parameter in named.items():
            total = self._sums.get(id(parameter))
            if total is None:
                kind = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                total = torch.zeros(parameter.shape, dtype=kind, device=parameter.device)
            elif not total.is_contiguous():
                total = total.contiguous()
            found[id(parameter)] = self.noise.add_scaled_(total, std, 1 / divisor, offsets[name]).to(parameter.dtype)
        return found

    def finish(self) -> None:
        """The noised step was made: count it."""
        self.ledger.add(self.noise_multiplier, self._rate)
        self.noise.step += 1
        self.discard()

    def epsilon(self, delta: float) -> float:
        """epsilon at delta of the steps so far."""
        return self.ledger.epsilon(delta, self.accountant)

    def explain(self) -> str:
        """The plan of the last backward, a row a use."""
        if not self._plan:
            raise StepError("no plan yet: call loss.backward() first")
        return table(self._plan)

    # ------------------------------------------------------------------ state

    def retrack(self, params: list[Tensor]) -> None:
        """Train these parameters from now on."""
        if self._has_pending or self._has_sums:
            raise StepError("parameters cannot be added between backward and step")
        old = self.clipping
        if not isinstance(old.style, str):
            raise StepError("with groups of one's own, make a new optimizer whose groups hold the new parameters")
        self.engine.track(params)
        named = self.engine.named_parameters()
        self.clipping = Clipping(named, old.clipping, old.max_grad_norm, old.style, old.gamma)

    def set_clipping(
        self, clipping: ClippingFunction | None, max_grad_norm: float | None, style: Any, gamma: float | None
    ) -> None:
        if self._has_pending or self._has_sums:
            raise StepError("set_clipping between backward and step: change the clipping between steps")
        old = self.clipping
        if style is None and not isinstance(old.style, str) and max_grad_norm is not None:
            raise ValueError("groups have clipping norms of their own: give style= with the new ones")
        self.clipping = Clipping(
            self.engine.named_parameters(),
            old.clipping if clipping is None else clipping,
            old.max_grad_norm if max_grad_norm is None else max_grad_norm,
            old.style if style is None else style,
            old.gamma if gamma is None else gamma,
        )

    def state_dict(self) -> dict[str, Any]:
        """History and, under a seed, the noise's position. The secret key of the noise is not saved."""
        return {
            "history": [tuple(run) for run in self.ledger.history],
            "noise_step": self.noise.step,
            "seed": self.noise.seed,
            "noise_multiplier": self.noise_multiplier,
            "clipping": self.clipping.clipping if isinstance(self.clipping.clipping, str) else None,
            "max_grad_norm": self.clipping.max_grad_norm,
            "dropped": self.nonfinite_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.history = [(float(s), None if q is None else float(q), int(n)) for s, q, n in state["history"]]
        self.noise_multiplier = float(state["noise_multiplier"])
        if isinstance(self.clipping.style, str) and state["clipping"] is not None:
            self.discard()
            self.set_clipping(state["clipping"], float(state["max_grad_norm"]), None, None)
        if state["seed"] is not None and state["seed"] == self.noise.seed:
            self.noise.step = int(state["noise_step"])
        self._dropped = torch.tensor(int(state.get("dropped", 0)))
        self.discard()


def _add(total: dict[int, Tensor], more: dict[int, Tensor]) -> None:
    for key, value in more.items():
        total[key] = total[key].add_(value) if key in total else value
