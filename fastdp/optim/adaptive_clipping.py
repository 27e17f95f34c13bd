"""Adaptive clipping: the clipping norm follows a quantile of the samples' norms, which is learnt with privacy.

A step releases two things of its logical batch: the sum of the clipped gradients, and a count to which a sample adds
1/2 where its norm is at most the clipping norm R, and -1/2 where it is longer. With noise of deviation z_g R on
the first and s on the second, divide both by their noise: one sample then adds a vector that is at most
sqrt(1 / z_g^2 + 1 / (2 s)^2) long. So the pair is one Gaussian mechanism of the noise multiplier

    z = (z_g^-2 + (2 s)^-2)^(-1/2),

which is what the optimizer is given, what the ledger holds, and what every accountant composes. The gradients get the
larger z_g that follows from z and s. After the step,

    R <- R exp(-rate (share - target)),    share = noisy count / expected batch size + 1/2,

and R may be shown: it is computed from what was released. The number of samples in a batch, which is private, enters
nowhere else. A sample whose gradient is not finite counts 0.

Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, Differentially private learning with adaptive clipping (arXiv
1905.03871): algorithm 1 and theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.reduce import riding
from ..engine.gradients import Gradients
from ..errors import ClippingError, StepError
from .correlated_noise import CorrelatedStep
from .fused_update import Release
from .private_step import PrivateStep

COUNT = -1  # among the sums, which are by ids: the count of the samples
PLACE = 1 << 60  # the global index of the count's noise, far behind that of any parameter
OPTIONS = ("target_quantile", "quantile_rate", "count_noise")
_LEAST, _MOST = 1e-15, 1e15  # between which a clipping norm must lie


class Quantile:
    """What the clipping norm follows.

    Args:
        target: the share of samples whose gradients should not be clipped, in (0, 1).
        rate: how fast the norm moves: by a factor of exp(rate) at most, or nearly so, for each step.
        count_noise: the standard deviation of the noise on the count. None: a twentieth of the expected batch size.

    Raises:
        ValueError: if one is out of range.
    """

    def __init__(self, target: float = 0.5, rate: float = 0.2, count_noise: float | None = None) -> None:
        self.target, self.rate = _number("target_quantile", target), _number("quantile_rate", rate)
        self.count_noise = None if count_noise is None else _number("count_noise", count_noise)
        if self.target >= 1:
            raise ValueError(f"target_quantile must lie between 0 and 1, not {target!r}")

    def noise_of(self, expected: float) -> float:
        """The standard deviation of the noise on the count."""
        return expected / 20 if self.count_noise is None else self.count_noise

    def of_gradients(self, noise_multiplier: float, expected: float) -> float:
        """The noise multiplier z_g of the gradients alone, so that both together have the one that is given.

        Raises ClippingError if the count alone would spend more than that.
        """
        if noise_multiplier == 0:
            return 0.0
        both, count = noise_multiplier**-2, (2 * self.noise_of(expected)) ** -2
        if count >= both:
            raise ClippingError(
                f"adaptive clipping counts with noise of standard deviation {self.noise_of(expected):g}, which alone "
                f"spends as much as a noise multiplier of {2 * self.noise_of(expected):g}; the whole step is to have "
                f"noise_multiplier={noise_multiplier:g}. Give count_noise= above {noise_multiplier / 2:g} (at "
                f"{noise_multiplier:g} the gradients get 1.155 times the noise; the default is a twentieth of the "
                "expected batch size), or take a larger batch."
            )
        return float((both - count) ** -0.5)

    def moved(self, norm: float, count: float, expected: float) -> float:
        """The next clipping norm, after a noisy count."""
        exponent = -self.rate * (count / expected + 0.5 - self.target)
        return norm * math.exp(max(min(exponent, 700.0), -700.0))  # what is out of range is refused then

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the norm."""
        return {"target": self.target, "rate": self.rate, "count_noise": self.count_noise}

    def read(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Read a `state`; the result takes it up. Raises ValueError and the like if it is none."""
        new = Quantile(state["target"], state["rate"], state["count_noise"])

        def take_up() -> None:
            self.target, self.rate, self.count_noise = new.target, new.rate, new.count_noise

        return take_up


class AdaptiveStep(PrivateStep):
    """The privacy state of a run with adaptive clipping; `privatize` says what the options are."""

    reads_later = False  # the count of norms is released, too

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Tensor],
        *,
        target_quantile: float = 0.5,
        quantile_rate: float = 0.2,
        count_noise: float | None = None,
        **options: Any,
    ) -> None:
        if options.get("style", "flat") != "flat":
            raise ClippingError(
                'clipping="adaptive" follows one clipping norm, that of the whole gradient: leave style="flat", or '
                "clip the groups by norms of your own"
            )
        self.quantile = Quantile(target_quantile, quantile_rate, count_noise)
        expected, sigma = options.get("expected_batch_size"), options["noise_multiplier"]
        numbers = all(isinstance(value, int | float) and 0 <= value < math.inf for value in (expected, sigma))
        if numbers and expected:
            self.quantile.of_gradients(sigma, expected)
        self._count = torch.zeros(1, dtype=torch.float64)
        self._next: float | None = None  # the clipping norm that this step has found
        self._out = ""  # why there is none
        super().__init__(model, params, **{**options, "clipping": "local"})

    def clip(self, gradients: Gradients) -> None:
        if self._out:
            raise ClippingError(self._out)
        super().clip(gradients)

    def _numbers(self, norm_sq: Sequence[Tensor]) -> dict[int, Tensor]:
        assert isinstance(self.norms, Tensor)  # of flat clipping; [0] where a record stands in for none
        within = self.norms.double() <= self.clipping.max_grad_norm
        count = torch.where(within, 0.5, -0.5).double()
        count = torch.where(torch.isfinite(self.norms), count, torch.zeros_like(count))
        return {**super()._numbers(norm_sq), COUNT: count.sum().view(1)}

    def ready(self) -> bool:
        current, expected = self.loader_batch.current(), self.expected_batch_size
        if expected is None and current is None:
            raise StepError(
                "adaptive clipping takes shares of the expected batch size, as the number of samples in a batch is "
                "private: give expected_batch_size=, or train with fastdp.poisson_loader, which tells it"
            )
        expected = current.expected_batch_size if current is not None and expected is None else expected
        assert expected is not None
        self.quantile.of_gradients(self.noise_multiplier, expected)  # before anything is taken: no batch is lost
        return super().ready()

    def release(self) -> Release:
        """The clipped sums, with the noise that is theirs; and the next clipping norm, of the noisy count."""
        expected = self._expected
        assert expected is not None  # checked in ready()
        found = self._sums.get(COUNT)
        self._count = self._count.new_zeros(1) if found is None else found.clone()
        release = super().release()
        count = self._count.detach().double().cpu()  # on the CPU, so that all processes draw the same bits
        std = self.quantile.noise_of(expected) if self.noise_multiplier > 0 else 0.0
        self.noise.add_scaled_(count, std, 1.0, PLACE)
        self._next = self.quantile.moved(self.clipping.max_grad_norm, float(count), expected)
        return release

    def _gradient_noise(self) -> float:
        assert self._expected is not None
        return self.quantile.of_gradients(self.noise_multiplier, self._expected)  # type: ignore[no-any-return]

    def _summed(self, sums: dict[int, Tensor]) -> dict[int, Tensor]:
        found = super()._summed({**sums, COUNT: riding(self._count, next(iter(sums.values())))})
        self._count = found.pop(COUNT)
        return found

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "adaptive clipping": tuple(self.quantile.state().values())}

    def finish(self) -> None:
        """The noised step was made: count it, and clip the next one by the norm that it has found."""
        super().finish()
        norm, self._next = self._next, None
        if norm is not None and _LEAST <= norm <= _MOST:
            self.clipping = self.clipping.changed(self.engine.named_parameters(), max_grad_norm=norm)
        elif norm is not None:
            self._out = (
                f"the adaptive clipping norm has come to {norm:.3g}, which no clipping norm can be: nearly all norms "
                "are 0, or beyond any number, or quantile_rate is too large for this batch. Look at optimizer.norms. "
                "All steps so far were made and are counted; make a new optimizer with other settings, and add up both "
                "histories (accounting.epsilon_of)."
            )

    def set_clipping(self, *changes: Any) -> None:
        raise ClippingError(
            "set_clipping (or a Schedule of clipping) with adaptive clipping: the norm follows its quantile. To clip "
            "otherwise from here on, make a new optimizer, and add up both histories (accounting.epsilon_of)"
        )


def step_class_for(kept_by: type[PrivateStep], options: dict[str, Any]) -> type[PrivateStep]:
    """The class that keeps a run with these options, of which those that are None are taken out.

    Raises ClippingError if they do not fit together.
    """
    for name in OPTIONS:
        if options.get(name, name) is None:
            del options[name]
    adaptive = isinstance(options.get("clipping"), str) and options["clipping"] == "adaptive"
    if options.get("noise", kept_by) is None:
        del options["noise"]
    if "noise" in options and adaptive:
        raise ClippingError('clipping="adaptive" with noise=: correlated noise needs one clipping norm for many steps')
    given = [name for name in OPTIONS if name in options]
    if given and not adaptive:
        raise ClippingError(f'{", ".join(given)}: of adaptive clipping, which is clipping="adaptive"')
    if adaptive and kept_by is not PrivateStep:
        raise ClippingError('clipping="adaptive" is not for this optimizer: its noise needs one norm for many steps')
    return AdaptiveStep if adaptive else CorrelatedStep if "noise" in options else kept_by


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, and finite, not {value!r}")
    return float(value)
