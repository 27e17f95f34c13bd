"""Parameters that meet sparse data: by the generic rule, where torch supports it."""

from __future__ import annotations

from typing import Any

from ..batch_axis.operator_table import function_name
from ..errors import FastDPError, StepError
from .forward_pass import ForwardPass
from .generic import capture_generic


def capture_in_format(
    forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: str
) -> Any:
    """The generic rule on data that is kept in this format. Raises StepError where torch has no such function."""
    try:
        return capture_generic(forward_pass, func, args, kwargs)
    except FastDPError:
        raise
    except (RuntimeError, NotImplementedError) as problem:
        raise StepError(
            f"{forward_pass.place(function_name(func))}: combines parameters with data kept as {kept}, which torch "
            f"cannot do sample by sample ({str(problem).splitlines()[0][:100]}). Keep the data dense (to_dense())."
        ) from problem
