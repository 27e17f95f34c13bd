"""What programs are made of: lines of Python with a label that says whether they couple samples.

In the lines, UU is a name of the piece's own, CC a drawn constant, KK a small number and RED `mean` or `sum`. The names
B, T, D, K and V are sizes; h is the tensor at hand, [B, D] ("vec") or [B, T, D] ("seq"); out is what the head made of
it. The arguments of a batch: x (data), x2 (another view of it), y (classes [B]), t (numbers [B]), w (positive weights
[B]), n (the samples' own numbers [B]), ids [B, T], m (a mask [B, T]), lens [B], lab (labels of tokens [B, T], -100
where m is False), eq (labels of tokens, equally many -100 in every sample), e (noise of each sample, like x).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

RIGHT = "right"  # each sample by itself: exact, or a false refusal
COUPLED = "coupled"  # refused or warned of, or its sensitivity must stay below R
EITHER = "either"  # right, but what looks like it is not: exact and refused are both good
ESCAPES = "escapes"  # couples samples where no engine sees it (docs/limits.md): counted, but no fault

ARGUMENTS = ("x", "x2", "y", "t", "w", "n", "ids", "m", "lens", "lab", "eq", "e")


@dataclass(frozen=True)
class Piece:
    """A few lines. place: in the model ("body"), before it ("first"), the head to the loss ("loss") or before the call
    of the model in the step ("before")."""

    name: str
    label: str
    place: str
    lines: str
    init: str = ""
    takes: str = "any"  # "vec", "seq"
    gives: str = ""  # the kind after it, where it changes
    steps: int = 1
    where: str = ""  # "inside" of the model or "outside": of a loss that can stand at one place only
    reduction: str = ""  # a loss that has only one
    loose: bool = False  # of 16 bits: results are equal to 1 % only
    last_only: bool = False  # draws in the order of the batch: only its last sample can be taken away
    clipping: str = ""  # a clipping function, for the optimizer

    def needs(self) -> list[str]:
        words = set(re.findall(r"\b\w+\b", self.lines))
        return [name for name in ARGUMENTS if name in words]

    @property
    def may_be_wrapped(self) -> bool:
        """Whether it means the same where it runs twice, or without a graph."""
        odd = ("hook", "_(", "] =", "retain_grad", "no_grad", "checkpoint", "+=", "autograd", "manual_seed", "class ")
        plain = not any(word in self.lines + self.init for word in odd)
        return plain and self.place == "body" and self.steps == 1 and not (self.last_only or self.clipping)


PIECES: dict[str, Piece] = {}

# How a piece may be run: PART is a function of h that holds its lines.
WRAPPERS = {
    "checkpoint": "h = torch.utils.checkpoint.checkpoint(PART, h, use_reentrant=False)",
    "reentrant": "h = torch.utils.checkpoint.checkpoint(PART, h, use_reentrant=True)",
    "detached": "h = h + PART(h.detach()).detach()",
    "no_grad": "with torch.no_grad():\n    z = PART(h)\nh = h * CC + z",
    "gate": "h = h * torch.sigmoid(PART(h))",
    "submodule": "h = self.call(PART, h)",
}


def add(name: str, label: str, place: str, lines: str, init: str = "", **options: object) -> None:
    """Put a piece on the list."""
    assert name not in PIECES, name
    PIECES[name] = Piece(name, label, place, lines, init, **options)  # type: ignore[arg-type]


def fill(text: str, number: int, rng: random.Random, reduction: str) -> list[str]:
    """The lines with their names and constants."""
    constant, small = round(rng.uniform(0.3, 3.0), 2), rng.choice([1, 2, 2, 3])
    for word, value in (("UU", f"u{number}"), ("CC", str(constant)), ("KK", str(small)), ("RED", reduction)):
        text = text.replace(word, value)
    return [line for line in text.split("\n") if line.strip()]
