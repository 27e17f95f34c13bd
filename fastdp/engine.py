"""The per-sample gradient engine: one ordinary backward, exact norms, clipped sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from . import uses as _rules  # noqa: F401  (registers the rules)
from .capture import ModuleHook, Pass, batch_of, nested_tensors, tag_inputs, tag_packed
from .compiled import Switches
from .errors import BatchLayoutError, FastDPError, ParameterError, SampleMixingError, StepError, UncapturedUseError
from .explain import Plan, table
from .gradients import Gradients
from .layouts.layout import Layout, tag_of
from .memo import Memo
from .ops.common import exactly
from .planner import Planner
from .replay import Block, Replays
from .uses.base import Use

LOSS_REDUCTIONS = ("mean", "sum")


class _Tape:
    """What one backward records."""

    def __init__(self, number: int) -> None:
        self.number, self.uses = number, list[Use]()
        self.batch: int | None = None
        self.failed = False
        self.recomputed = False  # went through forwards that reentrant checkpointing repeated


class PerSampleGradients:
    """Exact per-sample gradients of a model from an ordinary `loss.backward()`.

    Args:
        model: any nn.Module; nothing of it is replaced.
        params: the parameters to track (default: all that require grad). They get no `.grad`.
        loss_reduction: "mean" or "sum": how the loss combines the samples' losses.
        batch_first: whether the samples lie along the first dimension of the model's inputs, else the second.
        batch_size: number of samples, where the inputs do not show it: inputs then hold batch_size * k rows,
            k consecutive ones of each sample.
        rows_per_sample: k consecutive rows of the inputs are one sample (augmentations), whatever the batch.
        memory_budget: bytes that may be held from the begin of backward to its end for norms and clipped sums (see
            `fastdp.planner`); None: what is fastest.
        on_backward: called with the `Gradients` at the end of every backward; they are then not kept.

    After a backward: `norms()`, `clipped_sum(factors)`, `materialize()`. `detach()` restores the model.

    >>> model = torch.nn.Linear(3, 2)
    >>> engine = PerSampleGradients(model)
    >>> model(torch.ones(5, 3)).square().sum(1).mean().backward()
    >>> engine.norms().shape
    torch.Size([5])
    >>> engine.detach()

    Source: book-keeping of inputs and output gradients, Bu et al. 2023 (arXiv 2210.00038); here by use of a
    parameter instead of by layer.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Tensor] | None = None,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        batch_size: int | None = None,
        rows_per_sample: int = 1,
        memory_budget: int | None = None,
        on_backward: Callable[[Gradients], None] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ParameterError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if loss_reduction not in LOSS_REDUCTIONS:
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
        self.model, self.loss_reduction = model, loss_reduction
        self.batch_dim, self.batch_size, self.on_backward = (0 if batch_first else 1), batch_size, on_backward
        self.rows_per_sample = rows_per_sample
        self.token = torch.zeros((), requires_grad=True)
        self.memo, self.planner, self.profile = Memo(), Planner(memory_budget), False
        self.collect: Callable[[Use], None] | None = None  # takes the uses of a block that runs again
        self.uses_of: dict[int, int] = {}  # captured calls of each parameter since the last backward
        self._replays = Replays(self)
        self._open_forwards = 0  # that no backward has gone through yet
        self._recording = ""  # the module of the call that is recorded
        self.last_use_of: dict[int, str] = {}  # where parameters were last used by way of derived tensors
        self._slots: list[tuple[nn.Module, str, str]] = []
        self._chosen: set[str] | None = None
        self._gradients: Gradients | None = None
        self._tape: _Tape | None = None
        self._backwards = 0
        self._entered: list[Pass | Block | None] = []
        self._active: Pass | None = None
        self._batch = 0
        self._argument_layouts: dict[str, list[Layout | None]] = {}
        self._grads_before: dict[int, tuple[Tensor, int]] = {}
        self._check_unattached()
        self.track(params)
        self._handles = self._attach()
        self._switches = Switches(self)

    # ------------------------------------------------------------------ parameters

    def track(self, params: Iterable[Tensor] | None = None) -> None:
        """Choose the parameters again (default: all of the model)."""
        slots: list[tuple[nn.Module, str, str]] = []
        seen: dict[int, str] = {}
        for path, module in self.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen[id(parameter)] = f"{path}.{name}" if path else name
                    slots.append((module, name, seen[id(parameter)]))
        selected = None
        if params is not None:
            chosen = list(params)
            foreign = [tuple(p.shape) for p in chosen if id(p) not in seen]
            if foreign:
                raise ParameterError(
                    f"{len(foreign)} parameter(s) of shape {', '.join(map(str, foreign[:3]))} are not the model's. "
                    "Give the optimizer parameters of this very model (and build it after the model is complete)."
                )
            selected = {seen[id(p)] for p in chosen}
        self._slots, self._chosen = slots, selected
        odd = [name for name, p in self.named_parameters().items() if not p.is_floating_point()]
        if odd:
            raise ParameterError(
                f"complex parameters are not supported: {odd[:3]}; hold their real and imaginary parts"
            )
        if not self.parameters():
            raise ParameterError("no trainable parameter: set requires_grad=True on what is to be trained")

    def named_parameters(self) -> dict[str, Tensor]:
        """The tracked parameters that require grad now, by name."""
        found: dict[str, Tensor] = {}
        for module, name, full in self._slots:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad and (self._chosen is None or full in self._chosen):
                found[full] = parameter
        return found

    def offsets(self) -> dict[str, int]:
        """Where each parameter begins among all the model's elements, frozen ones counted."""
        found, total = {}, 0
        for module, name, full in self._slots:
            parameter = module._parameters.get(name)
            found[full] = total
            total += 0 if parameter is None else parameter.numel()
        return found

    def parameters(self) -> list[Tensor]:
        return list(self.named_parameters().values())

    # ------------------------------------------------------------------ attaching

    def _check_unattached(self) -> None:
        for module in self.model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ParameterError(f"{type(module).__name__} is not supported: attach fastdp to the plain model")
            for hook in module._forward_pre_hooks.values():
                owner = getattr(hook, "__self__", None)
                if isinstance(owner, ModuleHook) and owner.engine is not None:
                    raise ParameterError(
                        "the model already has a fastdp engine (an optimizer or PerSampleGradients); call its "
                        "detach() first, two would clip the same gradients twice"
                    )

    def _attach(self) -> list[Any]:
        handles = []
        for path, module in self.model.named_modules():
            hook = ModuleHook(self, path)
            handles.append(module.register_forward_pre_hook(hook.enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(hook.leave, with_kwargs=True, always_call=True))
        return handles

    def detach(self) -> None:
        """Take every hook off the model."""
        self._drop_interrupted()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._switches.remove()
        self._gradients, self._tape = None, None

    # ------------------------------------------------------------------ forward

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module's forward begins."""
        if not path:
            self._drop_interrupted()
        self._entered.append(None)
        if self._active is not None:
            self._active.stack.append(path)
            if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
                return  # no checkpointing around this call: nothing will be computed again
            if self._begins_block():
                self._entered[-1] = self._replays.entered(path, module)
            with torch._C.DisableTorchFunction():  # the mode is on
                self._remember_layouts(path, [tag_of(t, self._batch) for t in nested_tensors((args, kwargs))])
            return
        if not torch.is_grad_enabled():
            return
        recomputing = self.runs_again()
        if not recomputing or not path:
            self._batch = self.batch_size if self.batch_size is not None else self._batch_of(args, kwargs)
        if not recomputing:
            self._open_forwards += 1
            self._tape = None  # of a backward that failed
            self._grads_before = {id(p): (p.grad, p.grad._version) for p in self.parameters() if p.grad is not None}
        tracked = {id(p): name for name, p in self.named_parameters().items()}
        if recomputing and self.collect is None and path in self._replays.blocks:
            self._replays.blocks[path].computed_again(args, kwargs)
        active = Pass(self, self._batch, tracked, count=not recomputing or not path)
        active.stack.append(path)
        known = self._argument_layouts.get(path) if recomputing and path else None
        tag_inputs(
            (args, kwargs), self._batch, self.batch_dim, known, self.batch_size is not None or self.rows_per_sample > 1
        )
        tag_packed((args, kwargs), self._batch)
        active.mode.__enter__()
        self._entered[-1] = self._active = active

    def active(self) -> Pass | None:
        """The pass that is on."""
        return self._active

    def runs_again(self) -> bool:
        """Whether a forward is computed again, by checkpointing or for a second backward of a block."""
        return torch._C._current_graph_task_id() != -1 or self.collect is not None

    def open_forwards(self, number: int | None = None) -> int:
        """Forwards that no backward has gone through yet; number: what it was before one that was given up."""
        if number is not None:
            self._open_forwards = number
        return self._open_forwards

    def _begins_block(self) -> bool:
        """Whether a checkpointed region begins that a budget may want to run again."""
        if self.planner.memory_budget is None or self._active is None or not self._active.count:
            return False
        return torch.is_grad_enabled() and not any(isinstance(e, Block) for e in self._entered)

    def _batch_of(self, args: Any, kwargs: Any) -> int:
        rows = batch_of((args, kwargs), self.batch_dim, self.rows_per_sample)
        if rows % self.rows_per_sample:
            raise BatchLayoutError(f"{rows} rows are no multiple of rows_per_sample={self.rows_per_sample}")
        return rows // self.rows_per_sample

    def _drop_interrupted(self) -> None:
        """The root is entered (or left for good) while a pass is on: Ctrl-C ended the forward before."""
        if self._active is None or "" not in self._active.stack:
            return
        while self._active.mode in torch.overrides._get_current_function_mode_stack():
            torch.overrides._pop_mode()
        self._active, self._entered = None, []

    def _remember_layouts(self, path: str, layouts: list[Layout | None]) -> None:
        """For recomputation under checkpointing, which calls inner modules on tensors without layouts."""
        assert self._active is not None
        before = self._argument_layouts.get(path)
        if path in self._active.called and before is not None and _differ(before, layouts):
            layouts = [None] * len(layouts)  # called in two ways: which is recomputed cannot be told
        self._active.called.add(path)
        self._argument_layouts[path] = layouts

    def leave(self, path: str, module: nn.Module, out: Any) -> None:
        """A module's forward ends, also by an exception."""
        if not self._entered:
            return
        started = self._entered.pop()
        if not isinstance(started, Pass):
            if self._active is not None and self._active.stack:
                self._active.stack.pop()
            if isinstance(started, Block):
                started.watch(nested_tensors(out))
            return
        started.mode.__exit__(None, None, None)
        self._active = None
        if self.collect is not None:
            return
        for tensor in nested_tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._backward_reached, tag_of(tensor, self._batch)))

    # ------------------------------------------------------------------ backward

    def _backward_reached(self, layout: Layout | None, grad: Tensor) -> None:
        """A gradient arrives at an output of the model."""
        tape = self._begin_backward()
        if layout is not None and layout.mixed and grad.dim():
            tape.failed = True
            raise SampleMixingError(
                f"the model's output depends on several samples: {layout.mixed}. Per-sample gradients do not exist "
                "for such a model; remove the operation, or use one that works on each sample alone."
            )

    def _begin_backward(self) -> _Tape:
        if self._tape is None:
            self._backwards += 1
            self._tape = _Tape(self._backwards)
            self._gradients = None  # of the backward before, should this one be refused
            self.planner.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]
        return self._tape

    def begin_record(self, recorder: Pass, path: str) -> None:
        """A captured call's backward begins: check that it means what it should."""
        if self.collect is not None:
            return  # a block runs again
        self._recording = path
        tape = self._begin_backward()
        problem: FastDPError | None = None
        if torch.is_grad_enabled():
            problem = StepError(
                "backward with create_graph=True: the gradient of a gradient is not of one sample each. Call "
                "loss.backward() without it."
            )
        elif recorder.backward_id not in (0, tape.number) or self._repeats(recorder, tape):
            problem = StepError(
                "backward twice through one forward: each would be clipped on its own, so one sample could "
                "contribute twice the clipping norm. Add the losses and call backward once."
            )
        elif tape.batch not in (None, recorder.batch):
            problem = BatchLayoutError(
                f"one backward through forwards of {tape.batch} and of {recorder.batch} samples. Call backward for "
                "each forward, or give the model batches of one size."
            )
        if problem is not None:
            tape.failed = True
            raise problem
        recorder.backward_id, tape.batch = tape.number, recorder.batch

    def _repeats(self, recorder: Pass, tape: _Tape) -> bool:
        """Whether a forward that reentrant checkpointing repeats was gone through before (each time it is new)."""
        first = not recorder.count and not tape.recomputed
        tape.recomputed = tape.recomputed or first
        return first and self._open_forwards < 1

    def record(self, use: Use) -> None:
        """Keep a use until the end of backward."""
        if self.collect is not None:
            with torch.no_grad():
                self.collect(use)
            return
        assert self._tape is not None
        size = use.held_bytes()
        if self.planner.exceeds(size):
            use = self._replays.drop_data(use, self._recording, self.uses_of)
            size = use.held_bytes()
        self._tape.uses.append(use)
        self.planner.hold(size)

    def _end_backward(self) -> None:
        tape, self._tape = self._tape, None
        self._replays, self.uses_of = Replays(self), {}
        self._open_forwards = max(0, self._open_forwards - 1)
        if tape is None or tape.failed:
            return
        self._check_uncaptured()
        if tape.batch is None:
            return  # a backward that met no tracked parameter
        scale = float(tape.batch) if self.loss_reduction == "mean" else 1.0
        device = tape.uses[0].operand.device if tape.uses else self.parameters()[0].device
        with torch.no_grad(), exactly():
            gradients = Gradients(tape.uses, tape.batch, scale, device, self.planner, self.profile)
            if self.on_backward is not None:
                self.on_backward(gradients)
            else:
                self._gradients = gradients

    def _check_uncaptured(self) -> None:
        """Captured uses are detached: what autograd wrote into `.grad` came by a way that no rule saw."""
        missed = []
        for name, parameter in self.named_parameters().items():
            grad = parameter.grad
            if grad is None:
                continue
            before, version = self._grads_before.get(id(parameter), (None, 0))
            if grad is not before or grad._version != version:
                parameter.grad = None  # not private
                where = self.last_use_of.get(id(parameter), "outside of the model's forward, in the loss perhaps")
                missed.append(f"'{name}' ({where})")
        if missed:
            raise UncapturedUseError(
                f"{len(missed)} parameter(s) were used where no per-sample rule applies: {', '.join(missed[:5])}. "
                "Their per-sample gradients are unknown, so nothing was clipped and no step is possible. Use the "
                "parameter within the model's forward, combined with the data, or freeze it."
            )

    # ------------------------------------------------------------------ results

    def _last(self) -> Gradients:
        if self._gradients is None:
            raise StepError("no backward yet: call loss.backward() on the model's output first")
        return self._gradients

    def norms(self) -> Tensor:
        """Norms of the per-sample gradients of the last backward, all tracked parameters together: [B]."""
        with torch.no_grad(), exactly():
            return self._last().norm_sq(self.parameters()).sqrt().float()

    def clipped_sum(self, factors: Tensor) -> dict[str, Tensor]:
        """sum_b factors_b gradient_b by parameter name; samples whose factor is 0 are not read as numbers.

        Args: factors [B]. Raises ValueError on another shape.
        """
        gradients = self._last()
        if factors.shape != (gradients.batch,):
            raise ValueError(f"factors must have shape ({gradients.batch},), not {tuple(factors.shape)}")
        named = self.named_parameters()
        with torch.no_grad(), exactly():
            sums = gradients.clipped_sum(factors, list(named.values()))
        return {name: sums.get(id(p), torch.zeros_like(p, dtype=_sum_type(p))) for name, p in named.items()}

    def materialize(self) -> dict[str, Tensor]:
        """The per-sample gradients themselves, {name: [B, *shape]}: for small models."""
        gradients = self._last()
        with torch.no_grad(), exactly():
            return {name: gradients.per_sample(p) for name, p in self.named_parameters().items()}

    def explain(self, profile: bool = False) -> str:
        """The plan of the last backward: per use its parameter, shape, route, memory held and predicted time.

        profile: also the time that its norms and its clipped sum took, where these have been asked for (on a
        device from the next backward on, as it is not measured unasked).
        """
        self.profile = self.profile or profile
        return table(Plan(self._last()).rows(self.named_parameters()), profile)


def _differ(a: list[Layout | None], b: list[Layout | None]) -> bool:
    plain = [[None if layout is None else layout._replace(owner=None) for layout in items] for items in (a, b)]
    routed = any(layout is not None and layout.owner is not None for layout in (*a, *b))
    return routed or plain[0] != plain[1]


def _sum_type(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
