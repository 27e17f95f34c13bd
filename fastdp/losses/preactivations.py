"""Records the inputs of a model's activation functions by forward hooks, and sums their squares by sample."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import nested_tensors
from ..batch_axis.layout import tag_of
from ..errors import SampleMixingError, StepError
from .activation_graph import ACTIVATIONS as ACTIVATIONS
from .activation_graph import is_one_of, nodes_of, shared_storage, unseen_activations

KEPT = 4  # forwards that no loss has taken yet: those before are forgotten


class Noted(NamedTuple):
    """A pre-activation: its layer, the tensor, and the tensor's version when it was noted."""

    layer: str
    tensor: Tensor
    version: int

    def per_sample(self, batch: int, mean: bool) -> Tensor:
        """The squared norm of each sample's part, [B]; mean: divided by how many numbers that part has.

        Raises StepError, SampleMixingError.
        """
        x = self.tensor
        if x._version != self.version:
            raise StepError(
                f"the pre-activation of '{self.layer}' was written to in place after it was noted (an activation "
                "function with inplace=True, perhaps): use the ones that return a new tensor"
            )
        wide = x if x.dtype == torch.float64 else x.float()
        layout = tag_of(x, batch)  # there where a fastdp engine follows the model's samples
        if layout is not None and layout.mixed:
            raise SampleMixingError(f"the pre-activation of '{self.layer}' depends on several samples: {layout.mixed}")
        followed = layout is not None and layout.alone < 0 and not layout.is_row_index
        if layout is not None and followed and x.dim() and x.size(layout.dim) == layout.rows:
            rows = _row_sums(wide.movedim(layout.dim, 0))
            size = x.numel() // max(len(rows), 1)
            if layout.plain:
                return rows / max(size, 1) if mean else rows
            owners = layout.owners(x.device)
            sums = rows.new_zeros(batch).index_add(0, owners, rows)
            if not mean:
                return sums
            counts = rows.new_zeros(batch).index_add(0, owners, torch.ones_like(rows.detach()))
            return sums / (counts * size).clamp(min=1)  # a sample may have no row
        if batch == 1:  # of one sample all rows are its own, wherever they lie
            return (wide.square().mean() if mean and x.numel() else wide.square().sum())[None]
        if not x.dim() or x.size(0) != batch or layout is not None:
            raise StepError(
                f"the pre-activation of '{self.layer}' has the shape {tuple(x.shape)}: its first dimension is not the "
                f"batch of {batch} logits, so its rows cannot be assigned to samples. Name the other layers in layers="
            )
        return _row_sums(wide) / (max(x.numel() // max(batch, 1), 1) if mean else 1)


def _row_sums(x: Tensor) -> Tensor:
    """Sums of the squares of x[i], [len(x)]."""
    return x.square().flatten(1).sum(1) if x.dim() > 1 else x.square()


class Forward:
    """One forward: what was noted, and the tensors that it returned."""

    def __init__(self, with_gradient: bool) -> None:
        self.with_gradient = with_gradient
        self.noted: list[Noted] = []
        self.results: list[tuple[str, Any]] = []  # activation functions and the storages of their outputs
        self.unasked: list[str] = []  # layers that ran without gradient in a forward with one
        self.squares: list[tuple[Any, Tensor]] | None = None  # storages and [B]s, of a forward without gradient
        self.problem: Exception | None = None
        self.outputs: list[weakref.ref[Tensor]] = []


class Hook:
    """Calls a method of its owner. Copies and pickles of a model carry one that does nothing."""

    def __init__(self, owner: Any, kind: str, layer: str) -> None:
        self.owner, self.kind, self.layer = owner, kind, layer

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook(None, self.kind, self.layer)

    def __reduce__(self) -> Any:
        return (Hook, (None, self.kind, self.layer))

    def run(self, module: nn.Module, args: Any, out: Any = None) -> None:
        if self.owner is not None:
            note = getattr(self.owner, self.kind)
            if (dynamo := sys.modules.get("torch._dynamo")) is not None:
                note = dynamo.disable(note)
            note(self.layer, module, args, out)


# what torch.compiler.disable does to a function, but for importing a compiler
Hook.run._torchdynamo_disable = True  # type: ignore[attr-defined]
Hook.run._torchdynamo_disable_msg = None  # type: ignore[attr-defined]


def chosen_layers(model: nn.Module, layers: Iterable[str] | None) -> dict[str, nn.Module]:
    """The modules of these names; None: all activation functions of `torch.nn` that are modules, perhaps none."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(layers, str):
        raise ValueError(f"layers is a list of names: [{layers!r}]")
    modules = dict(model.named_modules())
    if layers is None:
        return {name: module for name, module in modules.items() if isinstance(module, ACTIVATIONS)}
    wanted = list(layers)
    unknown = [name for name in wanted if name not in modules]
    if unknown or not wanted:
        raise ValueError(f"the model has no module named {unknown[:3]}" if unknown else "layers names no module")
    return {name: modules[name] for name in wanted}


class PreActivations:
    """Notes the inputs of a model's activation functions in every forward, until `take` or `remove`.

    Args:
        model: nothing of it changes but for forward hooks; they are gone after `remove()`.
        layers: names of modules. Of an activation function the input is noted, of any other module the output (for
            `F.relu(self.conv(x))` name `conv`). None: all activation functions of `torch.nn` that are modules.
        mean: divide each layer's part by its size, as equation 7 does.

    The logits are no pre-activation that counts: they are left out, whoever names their layer. Raises ValueError where
    a name is not the model's, no activation function is found, or the model has recurrent layers and layers is None.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str] | None = None, mean: bool = True) -> None:
        modules = chosen_layers(model, layers)
        if layers is None:
            hidden = [n for n, m in model.named_modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase)]
            if hidden:
                raise ValueError(
                    f"the pre-activations of '{hidden[0]}' lie inside of it (its gates) and are not seen: name the "
                    "layers that are to count, layers=['fc1', ...]"
                )
        if not modules:
            raise ValueError(
                "the model has no activation function that is a module (torch.tanh and F.relu within a forward are not "
                "seen): name the modules whose outputs are the pre-activations, layers=['conv1', ...]"
            )
        self.by_name, self.mean = layers is not None, mean
        self.layers = list(modules)
        self._looked = self.by_name  # for activation functions that are only called
        self.forwards: list[Forward] = []  # that no loss has taken yet: one without gradient, any number with
        self._skipped = 0  # forwards without gradient since the last take, but for the last
        self._running: Forward | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self, "_begin", "").run),
            # before an engine's hooks, which may put other tensors in place of the outputs
            model.register_forward_hook(Hook(self, "_end", "").run, always_call=True, prepend=True),
        ]
        for name, module in modules.items():
            if isinstance(module, ACTIVATIONS):
                self._handles.append(module.register_forward_pre_hook(Hook(self, "_input", name).run))
                if not self.by_name:
                    self._handles.append(module.register_forward_hook(Hook(self, "_result", name).run))
            else:
                self._handles.append(module.register_forward_hook(Hook(self, "_output", name).run))

    def remove(self) -> None:
        """Take the hooks off the model, and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.forwards, self._running = [], [], None

    @property
    def removed(self) -> bool:
        return not self._handles

    # ------------------------------------------------------------------ while the model runs

    def _begin(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        if runs_again():
            return
        self._running = Forward(torch.is_grad_enabled())
        kept = [old for old in self.forwards if old.with_gradient][-KEPT:]
        self.forwards = [old for old in self.forwards if not old.with_gradient or old in kept]
        if not self._running.with_gradient:
            self._skipped += any(not old.with_gradient for old in self.forwards)
            self.forwards = [old for old in self.forwards if old.with_gradient]

    def _end(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        found, self._running = self._running, None
        if runs_again() or found is None or out is None:  # out is None where the forward raised
            return
        tensors = nested_tensors(out)
        found.outputs = [weakref.ref(t) for t in tensors]
        if not found.with_gradient:  # its numbers are all that is kept
            with torch._C.DisableTorchFunction():
                batch = next((t.size(0) for t in tensors if t.dim()), 0)
                try:
                    found.squares = [(shared_storage(n.tensor), n.per_sample(batch, self.mean)) for n in found.noted]
                except RuntimeError as problem:  # told when a loss asks for it
                    found.problem = problem
            found.noted = []
        self.forwards.append(found)

    def _input(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise StepError(f"'{layer}' was called without a tensor as its first argument: its input is not seen")
        if getattr(module, "inplace", False):
            raise StepError(f"'{layer}' overwrites its input, the pre-activation: set its inplace to False")
        self._note(layer, module, args[0])

    def _result(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        if self._running is not None and not runs_again() and isinstance(out, Tensor):
            with torch._C.DisableTorchFunction():
                self._running.results.append((layer, shared_storage(out)))

    def _output(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            raise StepError(f"'{layer}' returns {type(out).__name__}, not a tensor: name a module that returns one")
        if module._backward_hooks or module._backward_pre_hooks:
            raise StepError(
                f"'{layer}' has backward hooks (of Opacus, perhaps), which do not see the gradient of a penalty on its "
                "output: make the activation function a module and name that one"
            )
        self._note(layer, module, out)

    def _note(self, layer: str, module: nn.Module, tensor: Tensor) -> None:
        found = self._running
        if found is None or runs_again():
            return  # a module called alone, or a checkpointed one that is computed again
        if found.with_gradient and not torch.is_grad_enabled():
            found.unasked.append(layer)
            return
        with torch._C.DisableTorchFunction():  # an engine's mode is on
            found.noted.append(Noted(layer, tensor, tensor._version))

    # ------------------------------------------------------------------ for a loss

    def take(self, logits: Tensor) -> Tensor:
        """Squared norms [B] of the samples' pre-activations, all layers together, of the forward that made logits.

        mean: each layer's divided by its size. The logits themselves are left out. Raises StepError where that forward
        is not known, a layer was not seen in it, or it ended in an activation function.
        """
        if self.removed:
            raise StepError("this loss was removed from its model: make a new one")
        found = self._forward_of(logits)
        if found.problem is not None:
            raise found.problem
        if found.unasked:
            raise StepError(
                f"{sorted(set(found.unasked))[:3]} ran without gradient within a forward that has one (reentrant "
                "checkpointing, or torch.no_grad()): use_reentrant=False, or leave them out, layers="
            )
        with torch._C.DisableTorchFunction():
            ends = [shared_storage(logits)]
            if len(found.outputs) == 1 and (out := found.outputs[0]()) is not None:
                ends.append(shared_storage(out))  # the logits may be a copy of it in more bits
            if found.squares is not None:
                each = [squares for noted, squares in found.squares if not is_one_of(noted, ends)]
                if any(squares.shape != logits.shape[:1] for squares in each):
                    raise StepError(f"{len(logits)} logits, but the model's last forward was of {len(each[0])}")
            else:
                self._check_seen(logits, found)
                noted = [n for n in found.noted if not is_one_of(shared_storage(n.tensor), ends)]
                each = [n.per_sample(len(logits), self.mean) for n in noted]
        for layer, result in found.results:
            if is_one_of(result, ends):
                raise StepError(
                    f"the model ends in the activation function '{layer}': its output is no logits, and its input, the "
                    "last layer's pre-activation, must not be in the penalty. Leave the function out (the loss takes "
                    "logits), or name the layers that are to count, layers="
                )
        return _total(each)

    def _check_seen(self, logits: Tensor, found: Forward) -> None:
        """That every layer ran, and, once, that no activation function escapes the hooks. Raises StepError."""
        missing = sorted(set(self.layers) - {noted.layer for noted in found.noted})
        if missing and (self.by_name or not found.noted):
            raise StepError(
                f"{missing[:3]} did not run in the forward of these logits. Was the model compiled so that its hooks "
                "do not run, or was its forward() called past them? Or name others, layers="
            )
        if self._looked or not logits.requires_grad:
            return
        unseen = unseen_activations(logits, [noted.tensor for noted in found.noted])
        if unseen:
            raise StepError(
                f"the logits were made with activation functions that are no modules ({', '.join(unseen)}, called "
                "within a forward), so their inputs would be missing from the penalty: name all the layers that are to "
                "count, layers=['conv1', ...]"
            )
        self._looked = True

    def _forward_of(self, logits: Tensor) -> Forward:
        with_gradient = [f for f in self.forwards if f.with_gradient]
        if logits.requires_grad:
            reached = _reached(logits, with_gradient)
            if len(reached) != 1:
                many = f"{len(reached)} forwards" if reached else "no forward"
                raise StepError(
                    f"the logits come from {many} of the model whose pre-activations are recorded: call the loss once "
                    "per forward, on what that forward returned, and not twice"
                )
            self.forwards = [f for f in self.forwards if f is not reached[0]]
            return reached[0]
        without = [f for f in self.forwards if not f.with_gradient]
        if without and (not self._skipped or _is_output(logits, without[0])):
            self.forwards, self._skipped = [f for f in self.forwards if f.with_gradient], 0
            return without[0]
        raise StepError(
            "the logits have no gradient, and the model's last forward without gradient is not known to have made "
            "them: call the loss once, right after the forward, on its output (detach() its result, not the logits)"
        )


def _total(each: list[Tensor]) -> Tensor:
    """Sum over the layers, [B]."""
    if not each:
        raise StepError("no activation function ran in the model's forward, or its only pre-activation is the logits")
    return torch.stack([squares.to(each[0].dtype) for squares in each]).sum(0)


def _reached(logits: Tensor, forwards: list[Forward]) -> list[Forward]:
    """The forwards one of whose pre-activations these logits were made of, by autograd's graph."""
    owners: dict[Any, Forward] = {}
    for forward in forwards:
        owners.update({n.tensor.grad_fn: forward for n in forward.noted if n.tensor.grad_fn is not None})
        for ref in forward.outputs:  # of a forward whose layers are all frozen
            if (out := ref()) is not None and out.grad_fn is not None:
                owners.setdefault(out.grad_fn, forward)
    return list(dict.fromkeys(owners[node] for node in nodes_of(logits) if node in owners))


def _is_output(logits: Tensor, forward: Forward) -> bool:
    made = [ref() for ref in forward.outputs]
    kept = {t.untyped_storage().data_ptr() for t in made if t is not None}
    return logits.untyped_storage().data_ptr() in kept


def runs_again() -> bool:
    """Whether a backward is on: a checkpointed block is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)
