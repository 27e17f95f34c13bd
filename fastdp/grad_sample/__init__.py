"""Per-sample gradients of each kind of parameter use, from its input and output gradient.

Importing this package registers every rule. `use` says what a use is, `captured` what a captured call does, `rules`
what a rule is.
"""

from . import attention, broadcast, conv, embedding, experts, generic, head_loss, linear, norm, recurrent  # noqa: F401
from .parameter_use import ParameterUse

__all__ = ["ParameterUse"]
