"""Checks that a custom clipping function makes each factor of its own sample's norm only.

Whatever else it looks at (the median of the batch, a rank, the batch's length, a sample's place, norms of batches
before) couples samples: leaving one out changes the factors of others, and the sum moves by more than max_grad_norm.

So the factors that are used come from calls with one norm each (under torch.vmap, else one by one): what a function
does with other norms cannot enter. A function that gives others to the whole batch is refused all the same, as it means
something else than it would get; and so is one that gives norms seen before other factors than it gave them then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ClippingError

SAME = 1e-3  # of max_grad_norm: two contributions of one norm that differ by less agree (rounding of either way)
KEPT = 256  # norms of the batch before that are asked again; of the first batch, a quarter of it for good
ONE_BY_ONE = 8  # the same where every norm is a call of Python


class OwnFunction:
    """Factors by a function from norms [B] to factors [B]; see the module."""

    def __init__(self, function: Callable[[Tensor], Tensor], radius: float) -> None:
        self.function = function
        self._radius = radius
        self._mapped = True  # whether torch.vmap can run it
        self._seen: list[tuple[Tensor, Tensor]] = []  # (norms, factors): fixed ones, the first batch's, the last one's

    def factors(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Factors [B], float64, of each group's norms [B] (finite, float32).

        Raises ClippingError where they depend on more than the sample's own norm.
        """
        flat = torch.cat([n.to(norms[0].device) for n in norms])
        if not len(flat):
            return [torch.zeros_like(n, dtype=torch.float64) for n in norms]
        with torch.no_grad():
            if not self._seen:
                self._begin(flat.device)
            seen, known = (torch.cat([each[k].to(flat.device) for each in self._seen]) for k in (0, 1))
            again, alone = self._each(torch.cat([seen, flat])).split([len(seen), len(flat)])
            whole = torch.cat([self._call(n) for n in norms])
            self._refuse_others(seen, known, again, _CHANGED)  # looks at values: the price of a custom function
            self._refuse_others(flat, alone, whole, _COUPLED)
            kept = KEPT if self._mapped else ONE_BY_ONE
            last = flat[:kept].clone(), alone[:kept].clone()
            first = self._seen[1] if len(self._seen) > 1 else (last[0][: kept // 4], last[1][: kept // 4])
            self._seen = [self._seen[0], first, last]
        return list(alone.split([len(n) for n in norms]))

    def _begin(self, device: torch.device) -> None:
        """Ask for norms that are nobody's, first of all one far above max_grad_norm: a function that makes up its
        threshold from the first norms that it sees exceeds the bound by it, and knows nothing of the data."""
        self._call(torch.full((1,), 2.0**20 * self._radius, device=device))
        fixed = self._radius * torch.exp2(torch.arange(-8.0, 9.0, device=device))
        self._seen = [(fixed, self._each(fixed))]

    def _each(self, norms: Tensor) -> Tensor:
        """The factor of each norm alone, float64."""
        if self._mapped:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of speed, where torch has no rule for a batch of an operation
                    found = torch.vmap(self.function)(norms[:, None].clone())
            except Exception:  # noqa: BLE001  (values read by Python, numpy, random numbers: so without it)
                self._mapped = False
            else:
                return self._checked(found, (len(norms), 1)).double()[:, 0]
        return torch.cat([self._call(norms[i : i + 1]) for i in range(len(norms))])

    def _call(self, norms: Tensor) -> Tensor:
        """The factors of these norms together, float64."""
        try:
            found = self.function(norms.clone())  # a copy: what it writes into must not be the norms that bound it
        except Exception as problem:
            raise ClippingError(
                f"the clipping function {self.name} fails for the norms of {len(norms)} sample(s) "
                f"({type(problem).__name__}: {str(problem)[:200]}). {_REMEDY}"
            ) from problem
        return self._checked(found, tuple(norms.shape)).double().to(norms.device)

    def _checked(self, found: Any, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(found, Tensor) or found.shape != shape:
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ClippingError(
                f"the clipping function {self.name} must return one factor a sample: [{shape[-1]}] for norms of shape "
                f"[{shape[-1]}], not {got}"
            )
        return found.detach()

    def _refuse_others(self, norms: Tensor, one: Tensor, other: Tensor, text: str) -> None:
        """Raises ClippingError where two factors of a norm make contributions that differ."""
        size = norms.double()
        near = (one - other).abs() * size <= SAME * torch.clamp(one.abs() * size, min=self._radius)
        bad = torch.nonzero(~(near | (one == other) | (one.isnan() & other.isnan())))
        if len(bad):
            n, a, b = (float(each[bad[0, 0]]) for each in (norms, one, other))
            raise ClippingError(f"the clipping function {self.name} {text.format(n=n, a=a, b=b)} {_REMEDY}")

    @property
    def name(self) -> str:
        """What it is called, and where it was written."""
        code = getattr(self.function, "__code__", None)
        name = getattr(self.function, "__qualname__", None) or type(self.function).__qualname__
        return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


_CHANGED = (
    "gave a norm of {n:.6g} the factor {a:.6g} before, and gives it {b:.6g} now: it draws at random or keeps state (of "
    "norms that it has seen, perhaps, which couples samples)."
)
_COUPLED = (
    "gives a sample of norm {n:.6g} the factor {b:.6g} in its batch, and {a:.6g} alone: it couples samples (or draws "
    "at random), so that leaving one out would change the contributions of others, which the noise does not cover."
)
_REMEDY = (
    "A factor may depend on its own sample's norm and on constants only (no median, maximum, mean, rank, length or "
    "place of the batch, no state): write it so. A threshold is chosen beforehand, and changed between steps by "
    "set_clipping() with another function, or by fastdp.schedule.Schedule."
)
