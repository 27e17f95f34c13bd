"""Clipping: from the norms of per-sample gradients to factors, flat, layerwise or by groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ClippingError
from ..ops import bounds
from ..ops.clip import GAMMA, KINDS, MARGIN, clip_factors
from .custom_clipping import OwnFunction

ClippingFunction = str | Callable[[Tensor], Tensor]
_QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_STYLES = ("flat", "layerwise", "per_layer")  # which other libraries take for clipping=


class Group(NamedTuple):
    """Parameters that are clipped together, by name, and their clipping norm."""

    name: str
    parameters: tuple[str, ...]
    max_grad_norm: float


def refuse_own_norms(max_grad_norm: Any, norms: Tensor | Mapping[str, Tensor] | None) -> None:
    """Raises ClippingError if a clipping norm is one of the batch's own norms, or their mean, median or so."""
    if (
        not isinstance(max_grad_norm, int | float)
        or norms is None
        or float(f"{float(max_grad_norm):.5g}") == float(max_grad_norm)
    ):
        return  # (a number with few digits was written down)
    for found in norms.values() if isinstance(norms, Mapping) else (norms,):
        found = found.detach().double().flatten()
        known = [found, found.mean()[None], found.median()[None], found.quantile(found.new_tensor(_QUANTILES))]
        given = found.new_tensor(float(max_grad_norm))
        if len(found) > 1 and bool(torch.isclose(torch.cat(known), given, 1e-6, 0).any()):
            raise ClippingError(
                f"max_grad_norm={float(max_grad_norm):g} is made of the norms of this batch's own gradients, which "
                'are private: the clipping would tell of them without noise. clipping="adaptive" follows their '
                "median by noisy counts; or fix the norm beforehand, on public data."
            )


class Clipping:
    """A clipping function and the groups of parameters to which it applies.

    The sensitivity is sqrt(sum of the groups' R^2), which is R if the style is flat.

    Args:
        named: the trained parameters, by name.
        clipping: "local" for min(1, R / n), "global" for 1[n <= R], "automatic" for R / (n + gamma), or a function from
            norms [B] to factors [B] with factor * norm <= R. Each factor must depend on the norm of its own sample
            only. Both conditions are checked at every backward, for which the function is called several times, also
            with single norms; see `fastdp.optim.custom_clipping`.
        max_grad_norm: the clipping norm R, from 1e-15 to 1e15.
        style: "flat" (all parameters together), "layerwise" (by owning module, each with R / sqrt(layers), so that
            max_grad_norm stays the sensitivity of the whole gradient, as in Bu et al. and AWS's fastDP), or a list of
            groups, which are mappings with "params" (names or tensors), "max_grad_norm" and, optionally, "name".
        gamma: the constant of automatic clipping, 0 or larger.

    Raises:
        ClippingError: if an argument is invalid, a parameter is in two groups, or a parameter is in none.

    Source: automatic clipping, Bu et al. 2022 (arXiv 2206.07136); global clipping, Bu et al. 2023 (arXiv 2106.07830).
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        clipping: ClippingFunction = "local",
        max_grad_norm: float = 1.0,
        style: str | Sequence[Any] = "flat",
        gamma: float = GAMMA,
    ) -> None:
        if isinstance(clipping, str) and clipping == "adaptive":
            raise ClippingError(
                'clipping="adaptive" is chosen when the optimizer is made, as its count costs noise: make a new one'
            )
        if not callable(clipping) and clipping not in KINDS:
            what = "; style= says what is clipped together" if clipping in _STYLES else ""
            kinds = ", ".join([*KINDS, "adaptive"])
            raise ClippingError(f"clipping must be one of {kinds} or a callable, not {clipping!r}{what}")
        if not gamma >= 0:
            raise ClippingError(f"gamma must be 0 or larger, not {gamma}")
        self.clipping, self.style, self.gamma = clipping, style, gamma
        self.max_grad_norm = _positive(max_grad_norm, "max_grad_norm")
        self.groups = _groups(named, self.max_grad_norm, style)
        self._own = None if isinstance(clipping, str) else OwnFunction(clipping, self.sensitivity)

    @property
    def sensitivity(self) -> float:
        """The largest norm of one sample's contribution to the clipped sum."""
        return math.sqrt(sum(group.max_grad_norm**2 for group in self.groups))

    def sensitivity_of_sums(self, expected: float) -> float:
        """How far one sample moves a float32 sum over a batch of this expected size, rounding included."""
        return self.sensitivity * (1 + bounds.of_sums(expected))

    def changed(
        self,
        named: Mapping[str, Tensor],
        clipping: ClippingFunction | None = None,
        max_grad_norm: float | None = None,
        style: Any = None,
        gamma: float | None = None,
    ) -> Clipping:
        """Clipping of these parameters that differs in what is given."""
        if style is None and not isinstance(self.style, str) and max_grad_norm is not None:
            raise ValueError("groups have clipping norms of their own: give style= with the new ones")
        new = Clipping(
            named,
            self.clipping if clipping is None else clipping,
            self.max_grad_norm if max_grad_norm is None else max_grad_norm,
            self.style if style is None else style,
            self.gamma if gamma is None else gamma,
        )
        if self._own is not None and new.clipping == self.clipping:  # bound methods are equal, not identical
            new._own = self._own  # with what it has answered so far
        return new

    def by_names(self, renamed: Mapping[str, str] | None = None) -> Any:
        """The style, with names in the place of parameters. renamed: the new name of each."""
        if isinstance(self.style, str):
            return self.style
        new = renamed or {}
        return [
            {"params": [new.get(n, n) for n in g.parameters], "max_grad_norm": g.max_grad_norm, "name": g.name}
            for g in self.groups
        ]

    @property
    def apart(self) -> bool:
        """Whether the factors of a layer need the norms of no other."""
        return self.style == "layerwise" and self._own is None

    def hint(self, norms: Tensor | dict[str, Tensor] | None) -> str:
        """A line for a batch whose norms [B] (of each group) are all within R, and most of them a hundredth of it."""
        limits = {group.name: group.max_grad_norm for group in self.groups}
        every = norms if isinstance(norms, dict) else {"all": norms}
        parts = [n / limits[name] for name, n in every.items() if n is not None and name in limits]
        shares = torch.cat([part[part.isfinite()] for part in parts]) if parts else torch.zeros(0)
        if self.clipping not in ("local", "global") or not len(shares) or shares.max() > 1 or shares.median() >= 0.01:
            return ""
        return (
            f"\nno norm reaches max_grad_norm, and their median is {float(shares.median()):.2g} of it: the noise is "
            "for norms as large. If the loss is scaled down (divided by a number of batches), leave that; else lower "
            "max_grad_norm."
        )

    def factors(self, norm_sq: Sequence[Tensor], groups: Sequence[Group] | None = None) -> list[Tensor]:
        """Return the float32 factors [B] of each group.

        A factor is 0 if the sample's gradient is not finite in any of these groups, or is 0.

        Args:
            norm_sq: the squared norms [B] of each group, in the order of `groups`.
            groups: these groups only (default: all), if they are `apart`.

        Raises:
            ClippingError: if a custom function exceeds its clipping norm or looks at other samples.
        """
        squares = torch.stack(list(norm_sq)) if len(norm_sq) > 1 else norm_sq[0][None]  # [groups, B]
        keep = squares > 0  # a zero gradient contributes nothing: let no factor grow
        if self._own is not None:
            every = torch.stack(self._by_function(self._own, norm_sq))
            tiny = torch.finfo(torch.float32).tiny  # below it float32 rounds by more than any margin
            keep &= every.abs() >= tiny
        else:
            limits, kind = [group.max_grad_norm for group in groups or self.groups], str(self.clipping)
            if len(set(limits)) == 1:
                every = clip_factors(squares.flatten(), limits[0], kind, self.gamma).view_as(squares)
            else:
                every = torch.stack(
                    [clip_factors(own, limit, kind, self.gamma) for own, limit in zip(squares, limits, strict=True)]
                )
        if len(squares) > 1 or self._own is not None:
            keep &= (squares < math.inf).all(0)  # else `clip_factors` has seen to it
        return list(torch.where(keep, every, 0.0).float().unbind())

    def _by_function(self, own: OwnFunction, norm_sq: Sequence[Tensor]) -> list[Tensor]:
        every = [squares.sqrt() for squares in norm_sq]
        finite = [torch.isfinite(norms) for norms in every]
        every = [torch.where(real, norms, torch.zeros_like(norms)) for real, norms in zip(finite, every, strict=True)]
        factors = own.factors([norms.float() for norms in every])
        bounds = [group.max_grad_norm * (1 + MARGIN) for group in self.groups]
        bad = [
            ~(c.abs() * norms <= bound) & real
            for c, norms, bound, real in zip(factors, every, bounds, finite, strict=True)
        ]
        if bool(torch.stack(bad).any()):  # looks at values, like the function's own check
            g, b = (int(place) for place in torch.nonzero(torch.stack(bad))[0])
            raise ClippingError(
                f"the clipping function {own.name} returned {float(factors[g][b]):.6g} for a sample of norm "
                f"{float(every[g][b]):.6g}: its contribution would exceed max_grad_norm="
                f"{self.groups[g].max_grad_norm:g}. Return at most max_grad_norm / norm."
            )
        return [
            torch.where(real, c * (1 - MARGIN), torch.zeros_like(c)) for real, c in zip(finite, factors, strict=True)
        ]


def _positive(value: Any, name: str) -> float:
    if isinstance(value, Tensor):
        raise ClippingError(
            f"{name} is a tensor: one that is computed from a batch (its median norm, say) would tell of the samples "
            "in it, and the noise does not cover that. Give a number that was chosen beforehand."
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ClippingError(
            f"{name} must be a number (groups carry their own: style=[{{'params': [...], 'max_grad_norm': 1.0}}]), "
            f"not {value!r}"
        ) from None
    if not 1e-15 <= number <= 1e15:
        raise ClippingError(f"{name} must be positive and finite, between 1e-15 and 1e15, not {value!r}")
    return number


def _groups(named: Mapping[str, Tensor], max_grad_norm: float, style: str | Sequence[Any]) -> tuple[Group, ...]:
    if style == "flat":
        return (Group("all", tuple(named), max_grad_norm),)
    if style == "layerwise":
        layers: dict[str, list[str]] = {}
        for name in named:
            layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
        each = max_grad_norm / math.sqrt(len(layers))
        return tuple(Group(layer, tuple(names), each) for layer, names in layers.items())
    if isinstance(style, str) or not isinstance(style, Sequence):
        raise ClippingError(f"style must be 'flat', 'layerwise' or a list of groups, not {style!r}")
    by_id = {id(p): name for name, p in named.items()}
    groups, seen = [], set[str]()
    for number, item in enumerate(style):
        if not isinstance(item, Mapping) or "params" not in item or "max_grad_norm" not in item:
            raise ClippingError(
                f"group {number} must be a mapping with 'params' and 'max_grad_norm', not {type(item).__name__}"
            )
        label = str(item.get("name", f"group{number}"))
        if isinstance(item["params"], str | Tensor):
            raise ClippingError(f"group '{label}': params must be a list of names or tensors")
        item = {**item, "params": list(item["params"])}
        names = [p if isinstance(p, str) else by_id.get(id(p), "") for p in item["params"]]
        unknown = [str(p) for p, name in zip(item["params"], names, strict=True) if name not in named]
        twice = [name for name in names if name in seen] + [n for n in names if names.count(n) > 1]
        if unknown or twice:
            raise ClippingError(
                f"group '{label}': " + (f"not trained here: {unknown[:3]}" if unknown else f"twice: {twice[:3]}")
            )
        seen |= set(names)
        norm = _positive(item["max_grad_norm"], f"max_grad_norm of '{label}'")
        groups.append(Group(label, tuple(names), norm))
    left = [name for name in named if name not in seen]
    if left:
        raise ClippingError(f"{len(left)} trained parameter(s) are in no group: {left[:5]}. Add them, or freeze them.")
    if len({group.name for group in groups}) < len(groups):
        raise ClippingError("groups must have different names")
    return tuple(groups)
