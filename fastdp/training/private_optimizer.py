"""A torch optimizer whose steps are private: what it adds to its class, and what it refuses of a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine import following
from ..errors import ParameterError, StepError
from . import fused, misuse
from .clipping import ClippingFunction
from .privacy import Privacy
from .verified import warn_unverified


class PrivateOptimizer(torch.optim.Optimizer):
    """What private optimizers have beside torch's: see `privatize` for the arguments.

    `step` on a physical batch that does not end its logical batch (of `fastdp.poisson_loader`) only
    accumulates. `zero_grad` after such a step keeps what the step took.
    """

    _privacy: Privacy
    _step_supports_amp_scaling = True  # makes a GradScaler come to step(), which refuses it

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Noise the clipped sum and update; with a closure, call it once before."""
        following.sweep()
        privacy = self._attached()
        self._refuse_scaler(privacy)
        misuse.refuse_division()
        loss, early = None, privacy.pending()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if early and len(privacy.pending()) > len(early) and privacy.pending()[0] == early[0]:
                raise StepError(misuse.BEFORE_CLOSURE)
        self._stepped = privacy.ready()
        if not self._stepped:
            return loss
        self._check_parameters(privacy)
        base = _base(self)
        kind = fused.kind_of(base)
        with torch.no_grad():
            release = privacy.release()
            try:
                if kind is not None and fused.can_fuse(kind, self.param_groups, self.state):
                    fused.step(kind, self.param_groups, self.state, *release)
                    return loss
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = release.gradient(parameter)
                with torch.enable_grad():
                    _unhooked(base.step)(self)
            finally:  # the noise is drawn: it counts, and must not be drawn again, even where the update fails
                privacy.finish()
        return loss

    def _refuse_scaler(self, privacy: Privacy) -> None:
        """A GradScaler leaves its scale on optimizers that say they can take it."""
        marks = [self.__dict__.pop(name, self) is not self for name in ("grad_scale", "found_inf")]
        if any(marks):
            privacy.zero_grad()
            raise StepError(misuse.SCALED)

    def _check_parameters(self, privacy: Privacy) -> None:
        """The optimizer's parameters must still be the model's: another in the place of one would never be trained."""
        current = privacy.engine.present()
        lost = [p for group in self.param_groups for p in group["params"] if p.requires_grad and id(p) not in current]
        if lost:
            shapes = ", ".join(str(tuple(p.shape)) for p in lost[:3])
            raise ParameterError(
                f"{len(lost)} parameter(s) of the optimizer, of shape {shapes}, are no longer the model's: they were "
                "replaced since the optimizer was made. detach() it and make a new one."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has taken."""
        following.sweep()
        privacy = self._privacy_or_none()
        if privacy is not None:
            privacy.zero_grad()
        super().zero_grad(set_to_none=True)  # zeros would look like a gradient of autograd

    def _attached(self) -> Privacy:
        privacy = self._privacy_or_none()
        if privacy is None or privacy.detached:
            raise StepError("this optimizer was detached from its model: make a new one to train on")
        return privacy

    def _accounted(self) -> Privacy:
        """The run, also after detach."""
        return self._privacy_or_none() or self._attached()

    def _privacy_or_none(self) -> Privacy | None:
        """None while the optimizer is made. Also that of an optimizer which this one passes unknown names on to."""
        return getattr(self, "_privacy", None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParameterError(
            "a private optimizer is tied to its model and cannot be copied or pickled: copy the model, make a new "
            "optimizer for it, and load state_dict()"
        )

    # ------------------------------------------------------------------ privacy

    @property
    def norms(self) -> Tensor | dict[str, Tensor]:
        """Per-sample gradient norms [B] of the last backward (flat), or {group: [B]}; float32."""
        norms = self._attached().norms
        if norms is None:
            raise StepError("no norms yet: call loss.backward() first")
        return norms

    @property
    def stepped(self) -> bool:
        """Whether the last step() ended its logical batch, so was a noised one: a scheduler steps when it did."""
        return bool(getattr(self, "_stepped", False))

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity; may change between steps."""
        return self._attached().noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if not 0 <= value < float("inf"):
            raise ValueError(f"noise_multiplier must be 0 or larger and finite, not {value!r}")
        self._attached().noise_multiplier = float(value)

    @property
    def max_grad_norm(self) -> float:
        """The clipping norm of the whole gradient: R, or sqrt(sum R^2) of custom groups."""
        clipping = self._attached().clipping
        return clipping.max_grad_norm if isinstance(clipping.style, str) else clipping.sensitivity

    @property
    def expected_batch_size(self) -> float | None:
        return self._attached().expected_batch_size

    @property
    def nonfinite_samples(self) -> int:
        """Samples left out so far because their gradient was NaN or infinite."""
        return self._attached().nonfinite_samples

    @property
    def history(self) -> list[tuple[float, float | None, int]]:
        """(noise multiplier, sample rate, steps) of all noised steps, from the state on that was loaded last."""
        return list(self._accounted().ledger.history)

    def epsilon(self, delta: float) -> float:
        """epsilon at delta of the steps so far, by the accountant; warns where a seed voids the guarantee.

        It is of one `unit` added or removed: of a person with all of its records, where records are grouped.
        """
        privacy = self._accounted()
        if not privacy.noise.secure:
            warnings.warn(
                "the noise comes from seed=, which is for experiments: whoever knows it can take the noise off. "
                "The epsilon holds for a run without seed=.",
                stacklevel=2,
            )
        warn_unverified(privacy.engine.model)
        privacy.missed.asked = True
        privacy.missed.warn()
        privacy.ledger.warn()
        return privacy.epsilon(delta)

    def set_clipping(
        self,
        clipping: ClippingFunction | None = None,
        max_grad_norm: float | None = None,
        *,
        style: str | Sequence[Any] | None = None,
        gamma: float | None = None,
    ) -> None:
        """Change the clipping between steps (mix-up training); what is not given stays.

        The accounting does not change: noise follows the new sensitivity.
        """
        self._attached().set_clipping(clipping, max_grad_norm, style, gamma)

    def group_by(self, keys: Any) -> None:
        """Say whose the records of the coming batch are: a person's are clipped as one sample, whose gradient is the
        sum of theirs.

        keys: a number or string for each record; None: samples are records again. To be said of every batch, before
        the forward; all records of a person must be in one batch. sample_rate and expected_batch_size are then those
        of persons. Where a loader tells (`fastdp.poisson_loader(group_by=)`), leave it out.
        """
        self._attached().engine.group_by(keys)

    @property
    def unit(self) -> str:
        """What a sample is, one of which the epsilon is of: "record", or "group" of records (a person's)."""
        return "group" if self._accounted().unit.grouped else "record"

    def noise_state(self) -> dict[str, Any]:
        """{"key", "step"}: what the noise of the coming steps is a function of, to take up a run exactly.

        Whoever has the key can take the noise off every released step: keep it as secret as the data, apart from the
        model's checkpoints, and delete it when the run is over.
        """
        noise = self._attached().noise
        return {"key": noise.key, "step": noise.step}

    def load_noise_state(self, state: dict[str, Any]) -> None:
        """Draw the noise of the run that the state was taken of, from its step on.

        Only to repeat the same steps on the same data: the same noise on two different sums shows their difference.
        """
        if not isinstance(state, dict) or not {"key", "step"} <= state.keys():
            raise StepError("this is no noise_state() of a fastdp optimizer")
        self._attached().noise.restore(state["key"], state["step"])

    def explain(self, profile: bool = False) -> str:
        """The plan of the last backward: per use, shape, route, units of work, bytes, predicted milliseconds.

        profile: also the measured ones (on a device from the next backward on).
        """
        return self._attached().explain(profile)

    def detach(self) -> None:
        """Take the engine off the model, which is then exactly what it was (with the trained weights)."""
        privacy = self._privacy_or_none()
        if privacy is not None:  # it stays: what was spent stays spent
            privacy.engine.detach()
            privacy.discard()
            privacy.detached = True
            privacy.missed.end()

    # ------------------------------------------------------------------ torch's own

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also train these parameters of the model; flat and layerwise clipping include them from now on."""
        privacy = self._privacy_or_none()
        if privacy is None or privacy.detached:
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        new = [params] if isinstance(params, Tensor) else list(params)
        old = [p for group in self.param_groups for p in group["params"]]
        privacy.retrack([*old, *new])
        super().add_param_group({**param_group, "params": new})

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        privacy = self._privacy_or_none()
        if privacy is not None:
            state["fastdp"] = privacy.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "fastdp" in state_dict:
            self._attached().load_state_dict(state_dict["fastdp"])
        else:
            warnings.warn(
                "this state was saved by an optimizer without privacy: the accountant's history stays as it is",
                stacklevel=2,
            )


def _base(optimizer: PrivateOptimizer) -> Any:
    """The optimizer's class but for privacy."""
    classes = type(optimizer).__mro__
    return classes[classes.index(PrivateOptimizer) + 1]


def _unhooked(step: Any) -> Callable[..., Any]:
    """A class's step, without the hooks that torch has put around it (ours has them)."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]
