"""Uses of parameters: how a torch function's input and output gradient give per-sample gradients.

Importing this package registers every rule; `fastdp.uses.base` defines what a use and a rule are.
"""

from . import attention, broadcast, conv, embedding, experts, generic, linear, norm, recurrent  # noqa: F401
from .base import Use

__all__ = ["Use"]
