"""From the model's output to the loss: the calls between a forward and its backward are followed too.

In practice it is the loss that couples samples: contrastive losses over the batch, means over the tokens of the batch,
class weights, shapes that broadcast to [B, B]. So after a forward (and, of batches that a `fastdp.poisson_loader` hands
out, before it) a function mode stays on until `backward()`. It changes nothing; it carries layouts on, and looks at
what backward is called on: that must be a total over the samples (`layouts.totals`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import sampling
from .activation_hooks import HOOKING, guard_graph, hooked
from .arguments import nested_tensors
from .backward import mixing_error
from .errors import LossNotFollowedWarning, LossReductionWarning, SampleMixingError
from .layouts import ctc as _ctc  # noqa: F401  (registers its rule)
from .layouts.calls import Call, map_tensors, tensors_in
from .layouts.held import is_of_model, note_parameter
from .layouts.layout import INPUT, LOADERS, Layout, Moment, set_moment, tag, tag_of
from .layouts.pieces import BY_POSITION, NOTED, stamp
from .layouts.positions import note_made
from .layouts.propagate import propagate
from .layouts.sizes import TELLING, Sizes
from .layouts.totals import by_size
from .layouts.trial import target_as_it_is
from .marks import mark_of
from .memo import CONSTANT, Memo, inquires
from .presumed import TWO_ORDERS, UNKNOWN_ORDER, Labels
from .reads import Reads
from .stance import PLAINLY

_HERE = threading.local()


class Following(TorchFunctionMode):
    """Follows one batch outside of forwards.

    batch: its size; moment: its identity; mixed: layouts of the model's outputs that several samples made.
    """

    def __init__(self, batch: int, moment: Moment, engine: Engine, mixed: list[Layout]) -> None:
        super().__init__()
        self.batch, self.moment, self.engine, self.mixed = batch, moment, engine, mixed
        self.memo, self.sizes = engine.memo, engine.sizes
        self.labels = Labels(batch, moment.number)
        self.over = False  # backward has begun
        PLAINLY.begin()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.over or func is torch.autograd.grad:
            return func(*args, **kwargs)
        if args and isinstance(args[0], nn.Parameter):
            note_parameter(args[0])
        if inquires(func):
            out = func(*args, **kwargs)
            if func in TELLING:
                self.sizes.asked(args[0], out, self.batch)
            return out
        if func is Tensor.backward or func is torch.autograd.backward:
            roots = args[0] if args else kwargs.get("tensors", ())
            given = args[1] if len(args) > 1 else kwargs.get("gradient", kwargs.get("grad_tensors"))
            problem = self._problem_of(self._weighted(roots, given))
            guard_graph(self.moment.owner, roots, self.batch)
            engines = list(ENGINES)
            for engine in engines:
                engine.backward_begins(problem, tensors_in(roots), self.batch)
            try:
                return func(*args, **kwargs)
            finally:
                if any([engine.backward_was_reached() for engine in engines]):
                    self.finish()  # else it was of something else
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        if func in HOOKING and not (args[0].is_leaf and args[0].requires_grad):
            return hooked(self.moment.owner, self.batch, "", func, args, kwargs)
        return self._call(func, args, kwargs)

    def finish(self) -> None:
        """Follow no longer, though the mode may still be on the stack: torch puts it back after a call that it saw."""
        if not self.over:
            self.over = True
            PLAINLY.end()

    def __del__(self) -> None:
        self.finish()  # its thread has ended without a backward

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_in((args, kwargs))
        self.labels.presume(func, args, kwargs, given)
        origin = self.labels.before(func, args, given)
        out = self._followed(func, args, kwargs, given)
        if origin is not None:
            self.labels.after(origin, func, args, out)
        return out

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
        if not any(tag_of(tensor, self.batch) is not None for tensor in given):
            of_model = bool(given) and all(is_of_model(tensor) for tensor in given)
            out = func(*args, **kwargs)
            if of_model:
                for tensor in tensors_in(out):
                    note_parameter(tensor)
            note_made(func, args, kwargs, out, self.batch, _is_parameter, of_loss=True)
            return out
        signature = self.memo.signature(func, args, kwargs, self.batch, {})
        known = self.memo.layouts(signature)
        overwritten = target_as_it_is(func, args) if known is None else None
        out = func(*args, **kwargs)
        if known is not None:
            for tensor, layout in zip(tensors_in(out), known, strict=True):
                tag(tensor, None if layout is CONSTANT else layout)
            return out
        call = Call(func, args, kwargs, out, self.batch, "", overwritten)
        try:
            propagate(call)
            by_size(call, self.sizes.has_told)
        except SampleMixingError as problem:  # of another network's layers: it matters if a gradient goes through it
            why = problem.mixed or str(problem)
            map_tensors(out, lambda tensor: tag(tensor, Layout(self.batch, mixed=why)))
        note_made(func, args, kwargs, out, self.batch, _is_parameter, of_loss=True)
        stamp(func, args, kwargs, out, self.batch)
        if NOTED:
            self.engine.reads.note(NOTED.pop(), None)
            NOTED.clear()
        if signature is not None:
            self.memo.learn(signature, out, self.batch)
        return out

    def _weighted(self, roots: Any, weights: Any) -> list[Tensor]:
        """What backward from these tensors, with these gradients, is the gradient of."""
        found = []
        given = list(weights) if isinstance(weights, tuple | list) else [weights]
        for number, root in enumerate(tensors_in(roots)):
            weight = given[number] if number < len(given) else None
            if isinstance(weight, Tensor) and root.dim():
                even = not weight.requires_grad and bool((weight * self.batch == 1).all())
                root = self._call(Tensor.sum, (self._call(Tensor.__mul__, (root, weight), {}),), {})
                if even and (layout := tag_of(root, self.batch)) is not None and layout.total:
                    tag(root, layout._replace(total="mean"))
            found.append(root)
        return found

    def _problem_of(self, roots: list[Tensor]) -> SampleMixingError | Warning | None:
        """What backward is called on must be a sum over the samples, or each sample's own: what is wrong with it."""
        for root in roots:
            if not root.requires_grad:
                continue
            layout = tag_of(root, self.batch)
            own = isinstance(root.grad_fn, torch.autograd.function.BackwardCFunction)  # its backward is the user's
            if own or (layout is None and not root.is_leaf):
                return LossNotFollowedWarning(_LOST)
            if layout is None:
                continue
            if layout.mixed and not layout.total:
                of_model = next((known for known in self.mixed if known.mixed == layout.mixed), None)
                if of_model is not None:
                    return mixing_error(of_model)
                if self.engine.grouped:  # of one person's records, perhaps
                    return LossNotFollowedWarning(_LOST)
                return SampleMixingError(_REFUSED.format(layout.mixed), layout.mixed)
            if layout.piece is not None:
                return SampleMixingError(_REFUSED.format(f"it {BY_POSITION}"), BY_POSITION)
            if layout.total not in ("", "either", "mean" if self.engine.mean else "sum"):
                return LossReductionWarning(_REDUCTION[layout.total])
            if self.labels.two_orders:
                return SampleMixingError(_REFUSED.format(TWO_ORDERS), TWO_ORDERS)
            if self.labels.unknown_order:
                return LossNotFollowedWarning(UNKNOWN_ORDER)
        return None


_LOST = (
    "the loss was made where fastdp could not follow it (a custom autograd function, numpy, a function of torch.func): "
    "whether it is a sum or mean of each sample's own loss is not known. Run fastdp.verify."
)
_REDUCTION = {
    "sum": (
        "the loss is a sum over the samples, but loss_reduction is 'mean' (the default): each sample's gradient is "
        "then taken times the number of samples in the batch, and its clipping depends on how many others there are. "
        "Give loss_reduction='sum' to the optimizer, or take the loss's mean over the samples."
    ),
    "mean": (
        "the loss is a mean over the samples, but loss_reduction='sum' was given: each sample's gradient is then taken "
        "by the number of samples in the batch, and its clipping depends on how many others there are. Leave "
        "loss_reduction='mean', or take the loss's sum over the samples."
    ),
    "other": (
        "the loss is divided or multiplied by the number of samples once too often: how much a sample counts depends "
        "on how many others there are. Take the mean over the samples, or their sum, as loss_reduction says."
    ),
    "both": (
        "the loss adds a sum over the samples to a mean over them: how much each part counts depends on how many "
        "samples are in the batch. Take the mean (or the sum) of both."
    ),
}

_REFUSED = (
    "the loss is no sum or mean of each sample's own loss: {}. One sample then changes the gradients of others, and "
    "clipping does not bound that. Make it a sum or mean over the samples of losses that take one sample each; what "
    "several samples must share, make a constant."
)


def current() -> Following | None:
    """What is followed in this thread."""
    found: Following | None = getattr(_HERE, "following", None)
    return found


def start(batch: int, moment: Moment, engine: Engine, outputs: list[Layout]) -> None:
    """Follow a batch from here on, in this thread, until `stop` or its backward."""
    stop()
    if batch > 1 and PLAINLY.possible():
        set_moment(moment)
        mixed = [layout for layout in outputs if layout.mixed and not layout.total]
        _HERE.following = Following(batch, moment, engine, mixed)
        _insert(_HERE.following)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


class Engine(Protocol):
    """What following needs of an engine (`fastdp.forward.Forward`)."""

    memo: Memo
    sizes: Sizes
    reads: Reads

    @property
    def grouped(self) -> bool:
        """Whether a sample is a group of records."""

    def backward_begins(self, problem: SampleMixingError | Warning | None, roots: list[Tensor], batch: int) -> None:
        """Backward is called on these, with this problem: to be raised, or warned of, if they are of the engine."""

    def backward_was_reached(self) -> bool:
        """Whether the backward that has just ended was of the engine."""

    def backwards(self) -> int:
        """How many there were."""

    @property
    def takes_rows(self) -> bool:
        """Whether inputs have one row for each sample, along their first dimension."""

    @property
    def mean(self) -> bool:
        """Whether the loss is to be a mean over the samples, else a sum."""


ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()  # that are attached to a model


def parameters() -> set[int]:
    """Ids of the parameters of all models that have an engine."""
    return {key for engine in ENGINES for key in engine.backward.tracked.current()}


_LAST: list[Moment] = []  # of batches that loaders handed out
_TRAINED = [0]  # backwards of all engines, when the last one was


def handed_out(batch: Any, size: int) -> None:
    """A loader hands out a batch: what is made of it before the model sees it is followed, too."""
    stop()
    if _LAST and sum(engine.backwards() for engine in ENGINES) != _TRAINED[0]:
        _LAST.pop(0).alive = False  # the batch before, or, if they are fetched ahead, the one trained on since
    _TRAINED[0] = sum(engine.backwards() for engine in ENGINES)
    engines: list[Engine] = list(ENGINES)
    if not engines or not all(engine.takes_rows for engine in engines) or size <= 1:
        return
    moment = Moment(LOADERS)
    _LAST.append(moment)
    start(size, moment, engines[0], [])
    with torch._C.DisableTorchFunction():
        for tensor in nested_tensors(batch):
            if tensor.dim() and tensor.size(0) == size and not tensor.is_nested and mark_of(tensor) is None:
                tag(tensor, Layout(size))
                tensor.__dict__[INPUT] = True


sampling.tell_of_batches(handed_out)


def handed_out_in(batch: int) -> int:
    """The number of the moment in which a loader handed out the batch that a forward begins with, in this thread."""
    found = current()
    if found is None or found.over or found.batch != batch:
        return 0
    return found.moment.number if found.moment.owner is LOADERS else found.moment.before


def sweep() -> None:
    """Take away what a backward has ended."""
    if (found := current()) is not None and found.over:
        _HERE.following = None
    if _pushed():
        _remove()


def stop() -> None:
    """Follow no longer in this thread."""
    found = current()
    if found is not None:
        found.finish()
        _HERE.following = None
    if _pushed():
        _remove()


def _pushed() -> list[Following]:
    """The modes that this thread has put on its stack and not taken off yet."""
    found: list[Following] | None = getattr(_HERE, "pushed", None)
    if found is None:
        found = _HERE.pushed = []
    return found


def _insert(mode: Following) -> None:
    """To the bottom of the stack of modes, so that others may end in any order; only torch's default device, which
    insists on that place, lies beneath."""
    above = [torch.overrides._pop_mode() for _ in range(torch.overrides._len_torch_function_stack())]
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    if above and above[-1] is default:
        torch.overrides._push_mode(above.pop())
    torch.overrides._push_mode(mode)
    _pushed().append(mode)
    for other in reversed(above):
        torch.overrides._push_mode(other)


def _remove() -> None:
    """Take what is over off the stack of modes. One whose call runs just now is not there: torch puts it back after
    the call, and a later sweep takes it off."""
    if not any(mode.over for mode in _pushed()):
        return
    kept = []
    for _ in range(torch.overrides._len_torch_function_stack()):
        top = torch.overrides._pop_mode()
        if isinstance(top, Following) and top.over:
            _pushed().remove(top)
        else:
            kept.append(top)
    for mode in reversed(kept):
        torch.overrides._push_mode(mode)
