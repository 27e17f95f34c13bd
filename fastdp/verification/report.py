"""What `verify` found, and what it examined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class VerifyReport:
    """The findings of `verify`. `print` shows them; `ok` says whether there is no problem. Errors are relative.

    Attributes:
        samples: the number of samples that were compared with one-sample backwards.
        norm_error: the largest error of a per-sample norm.
        sum_error: the largest error of a clipped sum.
        coupling: the largest dependence of a sample's gradient on other samples.
        tolerance: the largest error that passes.
        parameters: the largest error over the samples, by parameter.
        problem: what is wrong, or "".
    """

    samples: int
    norm_error: float
    sum_error: float
    coupling: float
    tolerance: float
    parameters: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    untested: list[str] = field(default_factory=list)  # parameters whose gradient is zero in every sample
    rounding: float | None = None  # of plain torch's float32, where float32 failed and float64 was asked
    looked_at: list[str] = field(default_factory=list)  # in words: the records, the batches' sizes, what was random
    not_looked_at: list[str] = field(default_factory=list)  # in words: what this says nothing of

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problem

    def worst(self) -> float:
        """The largest of all errors; it is infinite if an error is not a number."""
        return largest((self.coupling, self.norm_error, self.sum_error))

    def join(self, other: VerifyReport) -> None:
        """Add the findings of another examination of the same samples."""
        self.norm_error = largest((self.norm_error, other.norm_error))
        self.sum_error = largest((self.sum_error, other.sum_error))
        self.coupling = largest((self.coupling, other.coupling))
        for name, error in other.parameters.items():
            self.parameters[name] = largest((error, self.parameters.get(name, 0.0)))
        self.untested = [name for name in self.untested if name in other.untested]
        self.problem = self.problem or other.problem
        if other.rounding is not None:
            self.rounding = max(other.rounding, self.rounding or 0.0)
        self.looked_at += [words for words in other.looked_at if words not in self.looked_at]
        self.not_looked_at += [words for words in other.not_looked_at if words not in self.not_looked_at]

    def __str__(self) -> str:
        verdict = "exact" if self.ok else self.problem
        lines = [
            f"fastdp.verify: {verdict}",
            f"  samples {self.samples}, tolerance {self.tolerance:.0e}",
            f"  norms: relative error {self.norm_error:.1e}; clipped sum: {self.sum_error:.1e}",
            f"  dependence of one sample's gradient on the others: {self.coupling:.1e}",
        ]
        if self.rounding is not None:
            lines.append(
                f"  float32 cannot say more: plain one-sample gradients are {self.rounding:.1e} off float64's; in "
                "float64 all of this is within the tolerance"
            )
        worst = sorted(self.parameters.items(), key=lambda item: -item[1])[:3]
        lines += [f"  {name}: {error:.1e}" for name, error in worst]
        if self.untested:
            lines.append(
                f"  not tested: {len(self.untested)} of {len(self.parameters)} parameters have no gradient on these "
                f"samples ({self.untested[0]}, ...): they lie behind zeros, as LoRA's first factors do at the start, "
                "or have no part in the loss"
            )
        lines += [f"  looked at: {words}" for words in self.looked_at]
        lines += [f"  not looked at: {words}" for words in self.not_looked_at]
        return "\n".join(lines)


def largest(errors: Iterable[float]) -> float:
    """The largest error. An error that is not a number counts as infinite (Python's max would skip it)."""
    return max((error if error == error else float("inf") for error in errors), default=0.0)
