"""Records the inputs of a model's activation functions by forward hooks, and sums their squares by sample."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import nested_tensors
from ..batch_axis.layout import tag_of
from ..errors import SampleMixingError, StepError
from ..utils.autograd_graph import graph_nodes

ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.PReLU, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink,
    nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
# names of autograd's nodes up to "Backward"; a clamp is not among them, as data is clamped, too
NODES = frozenset((
    "Celu", "Elu", "Gelu", "Glu", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "LogSigmoid",
    "Mish", "PreluKernel", "Relu", "RreluWithNoise", "Sigmoid", "Silu", "Softplus", "Softshrink", "Tanh", "Threshold",
))  # fmt: skip


class Noted(NamedTuple):
    """A pre-activation: its layer, the tensor, and the tensor's version when it was noted."""

    layer: str
    tensor: Tensor
    version: int

    def per_sample(self, batch: int) -> Tensor:
        """The mean square of each sample's part, [B].

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
            rows, owners = _row_sums(wide.movedim(layout.dim, 0)), layout.owners(x.device)
            sums = rows.new_zeros(batch).index_add(0, owners, rows)
            sizes = rows.new_zeros(batch).index_add(0, owners, torch.full_like(rows, x.numel() / max(len(rows), 1)))
            return sums / sizes.clamp(min=1)  # a sample may have no row
        if batch == 1:  # of one sample all rows are its own, wherever they lie
            return (wide.square().sum() / max(x.numel(), 1))[None]
        if not x.dim() or x.size(0) != batch or layout is not None:
            raise StepError(
                f"the pre-activation of '{self.layer}' has the shape {tuple(x.shape)}: its first dimension is not the "
                f"batch of {batch} logits, so its rows cannot be assigned to samples. Name the other layers in layers="
            )
        return _row_sums(wide) / max(x.numel() // max(batch, 1), 1)


def _row_sums(x: Tensor) -> Tensor:
    """Sums of the squares of x[i], [len(x)]."""
    return x.square().flatten(1).sum(1) if x.dim() > 1 else x.square()


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


def hook_layers(owner: Any, modules: Mapping[str, nn.Module]) -> list[Any]:
    """Have the owner's `_input` called with each input of an activation function among these, and its `_output` with
    each output of another module."""
    return [
        module.register_forward_pre_hook(Hook(owner, "_input", name).run)
        if isinstance(module, ACTIVATIONS)
        else module.register_forward_hook(Hook(owner, "_output", name).run)
        for name, module in modules.items()
    ]


class PreActivations:
    """Notes the inputs of a model's activation functions in every forward, until `take` or the next forward.

    Args:
        model: nothing of it changes but for forward hooks; they are gone after `remove()`.
        layers: names of modules. Of an activation function the input is noted, of any other module the output (for
            `F.relu(self.conv(x))` name `conv`). None: all activation functions of `torch.nn` that are modules.

    The logits are no pre-activation that counts: they are left out, whoever names their layer. Raises ValueError where
    a name is not the model's, no activation function is found, or the model has recurrent layers and layers is None.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str] | None = None) -> None:
        modules = chosen_layers(model, layers)
        hidden = [n for n, m in model.named_modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase)]
        if layers is None and hidden:
            raise ValueError(
                f"the pre-activations of '{hidden[0]}' lie inside of it (its gates) and are not seen: name the "
                "layers that are to count, layers=['fc1', ...]"
            )
        if not modules:
            raise ValueError(
                "the model has no activation function that is a module (torch.tanh and F.relu within a forward are not "
                "seen): name the modules whose outputs are the pre-activations, layers=['conv1', ...]"
            )
        self.by_name, self.layers = layers is not None, list(modules)
        self._looked = self.by_name  # for activation functions that are only called
        self._noted: list[Noted] = []  # of the running forward, or the last one
        self._outputs: list[Tensor] = []  # of the last forward that no loss has taken
        self._running = self._with_gradient = False
        self._handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self, "_begin", "").run),
            # before an engine's hooks, which may put other tensors in place of the outputs
            model.register_forward_hook(Hook(self, "_end", "").run, always_call=True, prepend=True),
        ]
        self._handles += hook_layers(self, modules)

    def remove(self) -> None:
        """Take the hooks off the model, and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._noted, self._outputs, self._running = [], [], [], False

    # ------------------------------------------------------------------ while the model runs

    def _begin(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        if not runs_again():
            self._noted, self._outputs, self._running = [], [], True
            self._with_gradient = torch.is_grad_enabled()

    def _end(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        if self._running and not runs_again():  # out is None where the forward raised
            self._running, self._outputs = False, nested_tensors(out)

    def _input(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise StepError(f"'{layer}' was called without a tensor as its first argument: its input is not seen")
        if getattr(module, "inplace", False):
            raise StepError(f"'{layer}' overwrites its input, the pre-activation: set its inplace to False")
        self._note(layer, args[0])

    def _output(self, layer: str, module: nn.Module, args: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            raise StepError(f"'{layer}' returns {type(out).__name__}, not a tensor: name a module that returns one")
        if module._backward_hooks or module._backward_pre_hooks:
            raise StepError(
                f"'{layer}' has backward hooks (of Opacus, perhaps), which do not see the gradient of a penalty on its "
                "output: make the activation function a module and name that one"
            )
        self._note(layer, out)

    def _note(self, layer: str, tensor: Tensor) -> None:
        if not self._running or runs_again():
            return  # a module called alone, or a checkpointed one that is computed again
        if self._with_gradient and not torch.is_grad_enabled():
            raise StepError(
                f"'{layer}' ran without gradient within a forward that has one (reentrant checkpointing, or "
                "torch.no_grad()): use_reentrant=False, or leave it out, layers="
            )
        with torch._C.DisableTorchFunction():  # an engine's mode is on
            self._noted.append(Noted(layer, tensor, tensor._version))

    # ------------------------------------------------------------------ for a loss

    def take(self, logits: Tensor) -> Tensor:
        """Mean squares [B] of the samples' pre-activations, summed over the layers, of the forward that made logits.

        The logits themselves are left out. Raises StepError unless that is the
        model's last forward, and each of its layers was seen.
        """
        if not self._handles:
            raise StepError("this loss was removed from its model: make a new one")
        noted, outputs = self._noted, self._outputs
        self._noted, self._outputs = [], []
        with torch._C.DisableTorchFunction():
            made_by = set(graph_nodes([logits.grad_fn]))
            known = any(_shared(logits, out) or out.grad_fn in made_by for out in outputs)
            if not known or (logits.requires_grad and not self._with_gradient):
                raise StepError(
                    "the logits are not known to come from the model's last forward, whose pre-activations are "
                    "recorded: call the loss once per forward, right after it, on what that forward returned"
                )
            self._check_seen(logits, noted, outputs)
            ends = [logits, *(outputs if len(outputs) == 1 else [])]  # the logits may be a copy of it in more bits
            each = [n.per_sample(len(logits)) for n in noted if not any(_shared(n.tensor, end) for end in ends)]
            if not each:
                raise StepError(
                    "no activation function ran in the model's forward, or its only pre-activation is the logits"
                )
            return torch.stack([squares.to(each[0].dtype) for squares in each]).sum(0)

    def _check_seen(self, logits: Tensor, noted: list[Noted], outputs: list[Tensor]) -> None:
        """That every layer ran, and that no activation function escapes the hooks. Raises StepError."""
        missing = sorted(set(self.layers) - {n.layer for n in noted})
        if missing and (self.by_name or not noted):
            raise StepError(
                f"{missing[:3]} did not run in the forward of these logits. Was the model compiled so that its hooks "
                "do not run, or was its forward() called past them? Or name others, layers="
            )
        if self._looked or not logits.requires_grad:
            return
        if any(_kind(out.grad_fn) in NODES for out in outputs):
            raise StepError(
                "the model ends in an activation function: its output is no logits, and its input, the last layer's "
                "pre-activation, must not be in the penalty. Leave the function out (the loss takes logits), or name "
                "the layers that are to count, layers="
            )
        known = {n.tensor.grad_fn for n in noted}
        unseen = {
            _kind(node) for node in graph_nodes([logits.grad_fn]) if _kind(node) in NODES and not _is_seen(node, known)
        }
        if unseen:
            raise StepError(
                f"the logits were made with activation functions that are no modules ({', '.join(sorted(unseen))}, "
                "called within a forward), so their inputs would be missing from the penalty: name all the layers that "
                "are to count, layers=['conv1', ...]"
            )
        self._looked = True


def _kind(node: Any) -> str:
    return "" if node is None else node.name().partition("Backward")[0]


def _is_seen(node: Any, known: set[Any]) -> bool:
    """Whether the first input of this node was made by one of these, perhaps behind backward hooks of modules."""
    after, place = node.next_functions[0]
    while after is not None and after not in known and after.name().startswith("BackwardHookFunction"):
        after, place = after.next_functions[place]
    return after in known


def _shared(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same memory."""
    return one is other or (
        one.layout == other.layout == torch.strided
        and one.numel() == other.numel() > 0
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def runs_again() -> bool:
    """Whether a backward is on: a checkpointed block is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)
