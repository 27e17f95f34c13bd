"""Per-sample gradients of each kind of parameter use, from its input and output gradient.

Importing this package registers every rule. `parameter_use` says what a use is, `captured_call` what a captured
call does, `rules` what a rule is.
"""

from . import (  # noqa: F401
    attention,
    broadcast,
    conv,
    embedding,
    generic,
    head_loss,
    linear,
    norm,
    recurrent,
    routed_rows,
)  # fmt: skip
from .parameter_use import ParameterUse

__all__ = ["ParameterUse"]
