"""Models for the exactness tests: one for every kind of use, and the ways users write them."""

from . import heads, layers, parts, ways  # noqa: F401  (each adds its cases)
from .base import CASES, B, Built, D, Net, P, T, V, build, net, shake, square

__all__ = ["CASES", "B", "Built", "D", "Net", "P", "T", "V", "build", "net", "shake", "square"]
