"""In which module samples come to depend on one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import nested_tensors
from .records import Records
from .runs import Drew, Runs

Outputs = list[tuple[str | None, list[Tensor]]]
BEFORE = "before the model, in what the loss function gives it"


def where_coupled(runs: Runs, records: Records) -> str:
    """The first module whose output for a sample changes with the others, in words, or ''."""
    try:
        first = _outputs(runs, records)
        batch = records.batch_of([0] * len(records.numbers))
        second = _outputs(runs, replace(records, batch=batch, names=[records.names[0]] * records.samples))
    except (RuntimeError, Drew):  # a loss that needs gradients: what is coupled is known, only not where
        return ""
    size = len(records.numbers)
    for (path, before), (_, after) in zip(first, second, strict=False):
        for a, b in zip(before, after, strict=False):
            if a.dim() and a.shape == b.shape and a.size(0) == size:
                scale = float(a[0].abs().max()) + 1e-12 if a[0].numel() else 1.0
                if a[0].numel() and not float((a[0] - b[0]).abs().max()) <= 1e-4 * scale:
                    return BEFORE if path is None else f"first in module '{path or type(runs.model).__name__}'"
    return ""


def _given(found: Outputs) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that notes what the model is called with, under no module's name."""
    return lambda _, args, kwargs: found.append(
        (None, [t.detach().clone() for t in nested_tensors((args, kwargs)) if t.is_floating_point()])
    )


def _outputs(runs: Runs, records: Records) -> Outputs:
    """What each call of a module returned, in their order."""
    found: Outputs = []
    handles = [runs.model.register_forward_pre_hook(_given(found), with_kwargs=True)]
    for path, module in runs.model.named_modules():

        def hook(_: nn.Module, __: Any, out: Any, path: str = path) -> None:
            found.append((path, [t.detach().clone() for t in nested_tensors(out) if t.is_floating_point()]))

        handles.append(module.register_forward_hook(hook))
    try:
        with runs.run(records.names), torch.no_grad():
            runs.loss_fn(runs.model, records.batch)
    finally:
        for handle in handles:
            handle.remove()
    return found
