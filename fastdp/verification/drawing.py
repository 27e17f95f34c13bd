"""Pictures in characters, where there is no matplotlib."""

from __future__ import annotations

from collections.abc import Sequence


def bars(names: Sequence[str], values: Sequence[float], width: int = 40, shown: Sequence[str] | None = None) -> str:
    """A line for each name: the name, a bar as long as its value (the largest is `width` characters), the value.

    shown: what stands for the values.

    >>> print(bars(["a", "bb"], [1, 4], width=4))
     a |#    1
    bb |#### 4
    """
    most = max((v for v in values), default=0)
    texts = [f"{v:g}" for v in values] if shown is None else list(shown)
    longest, lines = max(map(len, names), default=0), []
    for name, value, text in zip(names, values, texts, strict=True):
        filled = "#" * (max(1, round(width * value / most)) if value > 0 else 0)
        lines.append(f"{name:>{longest}} |{filled:<{width}} {text}")
    return "\n".join(lines)
