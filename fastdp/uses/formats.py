"""Parameters that meet sparse data: by the generic rule, where torch can do it sample by sample."""

from __future__ import annotations

from typing import Any

from ..errors import FastDPError, StepError
from ..layouts.calls import function_name
from .forward_pass import Recorder
from .generic import capture_generic


def capture_in_format(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: str) -> Any:
    """The generic rule on data that is kept in this format. Raises StepError where torch has no such function."""
    try:
        return capture_generic(recorder, func, args, kwargs)
    except FastDPError:
        raise
    except (RuntimeError, NotImplementedError) as problem:
        raise StepError(
            f"{recorder.place(function_name(func))}: combines parameters with data kept as {kept}, which torch cannot "
            f"do sample by sample ({str(problem).splitlines()[0][:100]}). Keep the data dense (to_dense())."
        ) from problem
