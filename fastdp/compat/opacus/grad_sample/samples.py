"""`p.grad_sample`, computed when somebody looks at it.

A backward leaves a `Record` of it (the uses of parameters: inputs and output gradients), and on each parameter a
`Pending` in place of its per-sample gradients. Clipping asks the record for norms and sums, which costs a fraction of
the gradients themselves. Who reads `p.grad_sample` gets tensors, and what was read (it may have been edited) or
written there is what is clipped.

For that `grad_sample` becomes a descriptor of torch.nn.Parameter. For all else, Opacus in the same process included,
it is the plain attribute that it was: kept in the parameter's `__dict__`, absent until set.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....engine.gradients import Gradients
from ....errors import StepError
from ....grad_sample.conv import Conv
from ....grad_sample.cross_terms import isometric
from ....grad_sample.embedding import Lookup
from ....grad_sample.linear import Matmul
from ....grad_sample.parameter_use import Stored
from ....grad_sample.routed_rows import Routed
from ....ops.common import exactly
from ....ops.rows import square_sum, weighted_sum

NAME = "grad_sample"
_OF_DATA = (Conv, Stored, Lookup, Matmul, Routed)  # hold inputs and output gradients, no weights
Parts = list[tuple[nn.Parameter, Any]]  # of one backward: parameters, with the Pending or tensor of each


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Numbers without a graph, at full precision, which no mode takes for the user's."""
    with torch.no_grad(), exactly(), torch._C.DisableTorchFunction():
        yield


class Record:
    """One backward: norms and sums of its per-sample gradients."""

    def __init__(self, gradients: Gradients, parameters: list[Tensor]) -> None:
        self.gradients, self.parameters = gradients, parameters
        self._versions = {id(p): p._version for p in parameters if not p.is_inference()}

    def check(self, parameters: list[Tensor]) -> None:
        """Raises StepError where what these parameters' gradients are computed of was written to since."""
        self.gradients.check_unwritten()
        if not any(p._version != self._versions.get(id(p), p._version) for p in self.parameters):
            return
        for p in parameters:
            of_weights = (
                u for u in self.gradients.uses_of(p) if not (isinstance(u, _OF_DATA) and isometric(u.operand))
            )
            bad = next(of_weights, None)
            if bad is not None:
                raise StepError(
                    f"grad_sample of a parameter of shape {tuple(p.shape)} was not looked at before the weights were "
                    f"changed, and {bad.name}() needs the weights of its forward: look at it, or call "
                    "optimizer.step(), before anything writes to the weights"
                )

    def norms(self) -> Tensor:
        """Of all parameters together [B]."""
        self.check(self.parameters)
        with outside():
            return self.gradients.norm_sq(self.parameters).sqrt().float()


class Pending:
    """The per-sample gradients of one parameter in one backward, not computed yet."""

    def __init__(self, record: Record, parameter: Tensor) -> None:
        self.record = record
        self._parameter = weakref.ref(parameter)

    def tensor(self) -> Tensor:
        """[B, *shape], in float32 or better."""
        parameter = self._parameter()
        assert parameter is not None
        self.record.check([parameter])
        with outside():
            found = self.record.gradients.per_sample(parameter)
        if is_processed(self):
            mark_processed(found)
        return found

    def __reduce__(self) -> Any:
        return type(None), ()  # parameters are pickled with their attributes, and gradients of samples are private


class _GradSample:
    """The descriptor."""

    def __get__(self, parameter: Any, owner: Any = None) -> Any:
        held = {} if parameter is None else parameter.__dict__
        if NAME not in held:
            raise AttributeError(f"'{owner.__name__}' object has no attribute '{NAME}'")
        value = held[NAME]
        if isinstance(value, Pending):
            held[NAME] = value.tensor()
        elif isinstance(value, list) and any(isinstance(entry, Pending) for entry in value):
            held[NAME] = [entry.tensor() if isinstance(entry, Pending) else entry for entry in value]
        return held[NAME]

    def __set__(self, parameter: Any, value: Any) -> None:
        parameter.__dict__[NAME] = value

    def __delete__(self, parameter: Any) -> None:
        try:
            del parameter.__dict__[NAME]
        except KeyError:
            raise AttributeError(NAME) from None


def install() -> None:
    """Make `grad_sample` of parameters one that can wait. Again does nothing."""
    if not isinstance(nn.Parameter.__dict__.get(NAME), _GradSample):
        setattr(nn.Parameter, NAME, _GradSample())


def push(parameter: Tensor, record: Record) -> int:
    """A backward left these gradients; returns how many backwards' now wait."""
    before, new = peek(parameter), Pending(record, parameter)
    if before is None:
        parameter.__dict__[NAME] = new
        return 1
    waiting = [*before, new] if isinstance(before, list) else [before, new]
    parameter.__dict__[NAME] = waiting
    return len(waiting)


def peek(parameter: Tensor) -> Any:
    """What lies there, not computed yet: a Pending, a tensor, a list of these, or None."""
    return parameter.__dict__.get(NAME)


def mark_processed(held: Any) -> None:
    """The optimizer has taken this gradient (or all in a list)."""
    for entry in held if isinstance(held, list) else [held]:
        entry._processed = True


def is_processed(held: Any) -> bool:
    """Whether the optimizer has taken this gradient, or any in a list."""
    return any(hasattr(entry, "_processed") for entry in (held if isinstance(held, list) else [held]))


# ---------------------------------------------------------------------- norms and clipped sums of one backward


def norm_sq(parts: Parts) -> Tensor:
    """Squared norms [B] of one backward's samples, all parameters together."""
    found = [square_sum(entry.detach()) for _, entry in parts if isinstance(entry, Tensor)]
    for record, parameters in _by_record(parts):
        record.check(parameters)
        found.append(record.gradients.norm_sq(parameters))
    total = found[0]
    for more in found[1:]:
        if total.shape != more.shape:
            raise ValueError(
                f"grad_sample of {total.numel()} samples on some parameters and of {more.numel()} on others"
            )
        total = total + more.to(total.device)
    return total


def sums(parts: Parts, factors: Tensor) -> dict[int, Tensor]:
    """sum_b factors_b gradient_b by id of the parameter, float32 or better."""
    found: dict[int, Tensor] = {}
    for record, parameters in _by_record(parts):
        record.check(parameters)
        found.update(record.gradients.clipped_sum(factors, parameters))
    for p, entry in parts:
        kind = torch.promote_types(p.dtype, torch.float32)
        if isinstance(entry, Tensor):
            rows = entry.detach().to(torch.promote_types(entry.dtype, kind))
            found[id(p)] = weighted_sum(rows, factors.to(rows.device)).reshape(p.shape)
        elif id(p) not in found:  # not used: its gradients are zero
            found[id(p)] = torch.zeros(p.shape, dtype=kind, device=p.device)
    return found


def _by_record(parts: Parts) -> list[tuple[Record, list[Tensor]]]:
    found: dict[int, tuple[Record, list[Tensor]]] = {}
    for p, entry in parts:
        if isinstance(entry, Pending):
            found.setdefault(id(entry.record), (entry.record, []))[1].append(p)
    return list(found.values())
