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
from ....grad_sample.embedding import Lookup
from ....grad_sample.linear import Matmul
from ....grad_sample.parameter_links import link_of
from ....grad_sample.parameter_use import ParameterUse, Stored
from ....grad_sample.routed_rows import Routed
from ....ops.common import exactly

NAME = "grad_sample"
_OF_DATA = (Conv, Stored, Lookup, Matmul, Routed)  # hold inputs and output gradients, no weights


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Numbers without a graph, at full precision."""
    with torch.no_grad(), exactly():
        yield


class Record:
    """One backward: norms and sums of its per-sample gradients."""

    def __init__(self, gradients: Gradients, parameters: list[Tensor]) -> None:
        self.gradients = gradients
        self._versions = {id(p): p._version for p in parameters if not p.is_inference()}
        self._parameters = parameters

    @property
    def batch(self) -> int:
        return self.gradients.batch

    def check(self, parameters: list[Tensor]) -> None:
        """Raises StepError where what these parameters' gradients are computed of was written to since."""
        self.gradients.check_unwritten()
        if not any(p._version != self._versions.get(id(p), p._version) for p in self._parameters):
            return
        for p in parameters:
            bad = next((use for use in self.gradients.uses_of(p) if not _of_data(use)), None)
            if bad is not None:
                raise StepError(
                    f"grad_sample of a parameter of shape {tuple(p.shape)} was not looked at before the weights were "
                    f"changed, and {bad.name}() needs the weights of its forward: look at it, or call "
                    "optimizer.step(), before anything writes to the weights"
                )

    def per_sample(self, parameter: Tensor) -> Tensor:
        """[B, *shape], in float32 or better."""
        self.check([parameter])
        with outside():
            return self.gradients.per_sample(parameter)


def _of_data(use: ParameterUse) -> bool:
    link = link_of(use.operand)
    return isinstance(use, _OF_DATA) and (link is None or (link.isometric and len(link.leaves) == 1))


class Pending:
    """The per-sample gradients of one parameter in one backward, not computed yet."""

    def __init__(self, record: Record, parameter: Tensor) -> None:
        self.record, self.processed = record, False
        self._parameter = weakref.ref(parameter)

    def tensor(self) -> Tensor:
        parameter = self._parameter()
        assert parameter is not None
        found = self.record.per_sample(parameter)
        if self.processed:
            mark_processed(found)
        return found

    def __reduce__(self) -> Any:  # parameters are pickled with their attributes
        return _as_is, (self.tensor(),)


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


class Stack(list[Any]):
    """Those of several backwards since they were last cleared: a Pending or a tensor each. Nobody outside sees it."""

    def __reduce__(self) -> Any:
        return list, ([e.tensor() if isinstance(e, Pending) else e for e in self],)


class _GradSample:
    """The descriptor."""

    def __get__(self, parameter: Any, owner: Any = None) -> Any:
        if parameter is None:
            raise AttributeError(f"type object 'Parameter' has no attribute '{NAME}'")
        held = parameter.__dict__
        if NAME not in held:
            raise AttributeError(f"'{type(parameter).__name__}' object has no attribute '{NAME}'")
        value = held[NAME]
        if isinstance(value, Pending):
            value = held[NAME] = value.tensor()
        elif isinstance(value, Stack):
            value = held[NAME] = [e.tensor() if isinstance(e, Pending) else e for e in value]
        return value

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
    held = parameter.__dict__
    before, new = held.get(NAME), Pending(record, parameter)
    if before is None:
        held[NAME] = new
        return 1
    held[NAME] = Stack([*before, new] if isinstance(before, list) else [before, new])
    return len(held[NAME])


def peek(parameter: Tensor) -> Any:
    """What lies there, without a look: None, Pending, Tensor, Stack or list. Raises AttributeError if nothing does."""
    if NAME not in parameter.__dict__:
        raise AttributeError(NAME)
    return parameter.__dict__[NAME]


# ---------------------------------------------------------------------- marks of what a step has taken


def mark_processed(entry: Any) -> None:
    """The optimizer has taken this gradient (or all in a list)."""
    if isinstance(entry, Pending):
        entry.processed = True
    elif isinstance(entry, Tensor):
        entry._processed = True  # type: ignore[attr-defined]
    elif isinstance(entry, list):
        for each in entry:
            mark_processed(each)


def is_processed(entry: Any) -> bool:
    """Whether the optimizer has taken this gradient, or any in a list."""
    if isinstance(entry, Pending):
        return entry.processed
    if isinstance(entry, list):
        return any(is_processed(each) for each in entry)
    return hasattr(entry, "_processed")
