"""A recorded forward, and its backward from the gradients of its outputs: replayed apart, with the user's loss between.

The step that is recorded is forward, a weighted sum of the outputs as each sample's loss, and backward; all that is
checked of whole steps is checked of it. What is replayed of it are two parts: the forward, and what the backward makes
of the outputs' gradients. The weights, and the loss, are no part of either.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..batch_axis import tensor_notes
from ..batch_axis.generations import Generation
from ..batch_axis.inputs import marked
from ..batch_axis.layout import Layout, generation_of, tag_of
from ..engine.gradients import Gradients
from ..engine.per_sample import PerSampleGradients
from ..engine.repeated_backward import Lasting, Repeated
from ..errors import GraphError
from ..ops.common import exactly
from ..utils.autograd_graph import on_gradient
from ..utils.pytree import tensors_of
from ..utils.rng_state import set_random_states
from . import _RECORDING
from .batches import Batch, odd_leaf
from .cuda_graph import Pool
from .guards import Guards
from .halves import Halves, captured
from .recorder import Seam, memory_of
from .steps import StepProgram

_NOTES = tensor_notes.NUMBER, tensor_notes.NUMBER_OF, tensor_notes.MADE  # of constants
_WEIGHT = 0.75  # of a loss that the model computes


class StaleExample(GraphError):
    """What a forward gave before is no example of what it gives now."""


class Outputs:
    """What a forward gave for these inputs: how it is made, and the layout of each tensor. batch: its samples; begin:
    the number of a node of autograd's that was made before.

    kinds: shape, type and device of each tensor; reached: the numbers of those that a backward has come to; passed:
    whether one has come to none; inner: whether one has come to the forward past them; hooked: whether one had a hook
    of the user's then.

    Raises GraphError where a replay cannot make it.
    """

    def __init__(self, out: Any, batch: int, inputs: Sequence[Tensor], begin: int) -> None:
        self._leaves, self._spec = tree_flatten(out)
        self.batch, self.reached, self._begin = batch, set[int](), begin
        self.passed = self.inner = self.hooked = False
        self._places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        tensors = [self._leaves[place] for place in self._places]
        for place in self._places:
            self._leaves[place] = None
        if any(type(tensor) is not Tensor for tensor in tensors):
            raise GraphError("the forward gives a tensor of a class of its own")
        if odd := odd_leaf(self._leaves):
            remedy = " (set model.config.use_cache = False)" if "Cache" in odd else ": give tensors, in dicts or tuples"
            raise GraphError(f"the forward gives a {odd}, which a replay cannot make{remedy}")
        memory = [memory_of(tensor) for tensor in (*inputs, *tensors)]
        if len(set(memory)) < len(set(map(memory_of, inputs))) + len(tensors):
            raise GraphError("the forward gives tensors that share memory with each other, or with its arguments")
        self.kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self.requires_grad = [tensor.requires_grad for tensor in tensors]
        self.layouts = [_layout_of(tensor, batch) for tensor in tensors]
        self.notes = [{name: t.__dict__[name] for name in _NOTES if name in t.__dict__} for t in tensors]
        self._nodes = [(_number_of(tensor.grad_fn), tensor.output_nr) for tensor in tensors]
        self._tensors = [tensor for tensor in tensors if tensor.requires_grad]  # until a backward

    def dim(self, number: int) -> int | None:
        """The dimension of a tensor along which the samples lie; None of a loss that the model computes."""
        layout = self.layouts[number]
        assert layout is not None
        return None if layout.mixed else layout.dim

    def look(self, roots: Sequence[Tensor]) -> None:
        """A backward begins: which tensors it comes to from without (the model may have gone on with what it gives)."""
        last = max((number for number, _ in self._nodes), default=-1)
        edges: list[Any] = [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
        seen = set[Any]()
        while edges:
            node, place = edges.pop()
            if node is None or node in seen:
                continue
            if (number := node._sequence_nr()) <= last:  # of the forward, or of what was before it
                found = [k for k, own in enumerate(self._nodes) if own == (number, place)]
                self.reached.update(found)
                self.inner = self.inner or (not found and number > self._begin)
            else:
                seen.add(node)
                edges += node.next_functions
        self.let_go()

    def let_go(self) -> None:
        """Hold no tensor, after a look at its hooks."""
        hooked = (t.retains_grad or len(t._backward_hooks or ()) > 1 for t in self._tensors)  # (one is the engine's)
        self.hooked, self._tensors = self.hooked or any(hooked), []

    def is_like(self, out: Any, batch: int) -> bool:
        """Whether a forward of so many samples gives the same tensors, of which the same require grad, with rows of the
        same samples. Raises GraphError where a replay cannot make them."""
        leaves, spec = tree_flatten(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if spec != self._spec or [tensor.requires_grad for tensor in tensors] != self.requires_grad:
            return False
        with torch._C.DisableTorchFunction():
            layouts = [_layout_of(tensor, batch) for tensor in tensors]
        known = [layout if layout is None else layout._replace(batch=batch) for layout in self.layouts]
        return layouts == known and [tensor.dtype for tensor in tensors] == [dtype for _, dtype, _ in self.kinds]

    def tree(self, tensors: Sequence[Tensor], leaves: Sequence[Any]) -> Any:
        """What a forward gives whose tensors are these. leaves: numbers and words beside them, in the tensors' places
        None."""
        leaves = list(leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._spec)


def _number_of(node: Any) -> int:
    """Autograd numbers a thread's nodes as they are made, so that what leads to a node has larger numbers."""
    return -1 if node is None else node._sequence_nr()


def node_number() -> int:
    """The number of a node that is made now."""
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        return _number_of(torch.zeros((), requires_grad=True).view(()).grad_fn)


class Leftovers:
    """Finds the tensors that carry samples of forwards after it was made, but those that the user marked before: every
    forward takes these for its own, whichever model it is of (`batch_axis.inputs.tag_marked`)."""

    def __init__(self) -> None:
        self._begin, self._marked = Generation().number, [tensor for tensor, _ in marked()]

    def found(self) -> list[Tensor]:
        # (isinstance would ask each object for its __class__, which may be code of others)
        living = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
        made = [each for each in living if (of := generation_of(each)) is not None and of.number > self._begin]
        return [each for each in made if not any(each is known for known in self._marked)]


def _layout_of(tensor: Tensor, batch: int) -> Layout | None:
    """The layout of an output, None if it is of no sample."""
    layout = tag_of(tensor, batch)
    if layout is None and not tensor.requires_grad:
        if not _is_alike(tensor, batch):
            raise GraphError(
                f"the forward gives constants of shape {tuple(tensor.shape)}, which may go by the samples' places: "
                "leave them out of what it returns"
            )
        return None
    if layout is not None and layout.total and not tensor.dim():
        return layout  # a loss
    if layout is None or layout._replace(dim=0, inner=1) != Layout(batch):
        why = "whose rows lie in no order of the samples" if layout is None or not layout.mixed else layout.mixed
        raise GraphError(f"the forward gives a tensor of shape {tuple(tensor.shape)}: {why}")
    return layout


def _is_alike(constants: Tensor, batch: int) -> bool:
    """Whether constants would be the same for every sample, whichever dimension were the samples'."""
    constants = constants.detach()
    for dim, size in enumerate(constants.shape):
        if size and size % batch == 0:
            orders = ((batch, -1), dim), ((-1, batch), dim + 1)
            rows = [constants.unflatten(dim, sizes).movedim(place, 0) for sizes, place in orders]
            if not any(torch.equal(each, each[:1].expand_as(each)) for each in rows):
                return False
    return True


class ForwardProgram(StepProgram):
    """A recorded forward of one size.

    module: what is called; example: what it gave; batch, leaves: an example of its arguments, (args, kwargs); pool:
    capture the two halves as CUDA graphs. Where that does not go, a warning says why.

    Raises GraphError, by name, where the forward is not a function of its arguments and the parameters alone.
    """

    writes_nothing = True

    def __init__(
        self, engine: PerSampleGradients, module: Callable[..., Any], example: Outputs, batch: Batch,
        leaves: Sequence[Any], mean: bool, pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self._module, self.example, self.arguments = module, example, batch
        self.reached = sorted(example.reached)
        generator, weights = torch.Generator().manual_seed(0), []
        for number in self.reached:
            if example.dim(number) is not None:
                shape, dtype, device = example.kinds[number]
                rows = torch.randn(batch.size, shape.numel() // example.batch, generator=generator)
                weights.append(rows.to(device, dtype))
        spec = tree_flatten((batch.tree(leaves), weights))[1]
        whole = Batch(spec, (*batch.by_sample, *[True] * len(weights)), batch.size)
        self.count = 0  # of its forwards
        self._told: dict[int, Any] = {}  # what the forward gives beside numbers in tensors, by the number of samples
        self._given = sum(isinstance(leaf, Tensor) for leaf in leaves)  # tensors among the arguments
        super().__init__(engine, module, whole, [*leaves, *weights], mean, pool=pool)
        told = self._told.pop(batch.size)
        self.leaves = told[0]
        if any(other != told for other in self._told.values()) or None in example.layouts:
            self.only = self.only or "what it gives beside rows of samples may be another for other numbers of samples"
        if self.program.draws:
            self.only = self.only or "it draws random numbers, and would draw more"
        constants = {memory_of(self.program.held[number]) for number in self.program.constants}
        self.guards = Guards(engine.model, constants, read=self.read)

    def _choose_way(self, compile: bool, pool: Pool | None) -> None:
        gradients = [(number, *self.example.kinds[number][1:]) for number in self.reached]
        self.halves = Halves(self.program, gradients, self._given)
        if not self._gives_the_same(self.halves.forward, self.halves.backward):
            raise GraphError("a replay of its halves does not give what the recorded forward and backward gave")
        self.captured = captured(self.halves, self.examples[0].inputs, pool)
        if self.captured is not None and not self._gives_the_same(self.captured.checked, self.captured.backward):
            warnings.warn("a forward is replayed, but not as a CUDA graph: launched, it is another", stacklevel=9)
            self.captured = None

    def _losses(self, leaves: Sequence[Any]) -> Tensor:
        """Each sample's weighted sum of the outputs (else that of the model's losses), after its backward, which knows
        no autocast."""
        (args, kwargs), weights = self.batch.tree(leaves)
        given = self._module(*args, **kwargs)
        out = tensors_of(given)
        if not self.example.is_like(given, self.batch.size):
            raise StaleExample("the forward gives other outputs than before")
        told = leaves_of(given), [self._shape(number, tensor) for number, tensor in enumerate(out)]
        if self._told.setdefault(self.batch.size, told) != told:
            raise GraphError("the forward gives other numbers each time, or tensors of other shapes")
        seam = _RECORDING[-1].begin_backward(out) if _RECORDING else None
        with exactly():
            apart = {number: out[number].view_as(out[number]) for number in self.reached}
            if seam is not None:
                for number, tensor in apart.items():
                    _note(tensor, seam, number)  # the gradient of the loss alone
            losses, loss = self._weighted(apart, weights)
            loss.backward()  # type: ignore[no-untyped-call]
        return losses

    def _shape(self, number: int, tensor: Tensor) -> list[int]:
        """The shape of an output, but for the samples' dimension."""
        layout, shape = self.example.layouts[number], list(tensor.shape)
        if layout is not None and not layout.mixed:
            del shape[layout.dim]
        return shape

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """What the forward gives whose tensors are these."""
        return self.example.tree(tensors, self.leaves)

    def _weighted(self, outputs: dict[int, Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The samples' losses, and what the backward begins with."""
        parts: list[Tensor] = []
        totals: list[Tensor] = []
        for number, output in outputs.items():
            if (dim := self.example.dim(number)) is None:
                totals.append(output * _WEIGHT)
            else:
                weight = weights[len(parts)]
                parts.append((output.movedim(dim, 0).reshape(weight.shape) * weight).sum(1))
        if parts:
            losses = sum(parts[1:], parts[0])
            totals.append(losses.mean() if self.mean else losses.sum())
        loss = sum(totals[1:], totals[0])
        return losses if parts else loss, loss

    def _differs_padded(self, leaves: Sequence[Any], samples: int) -> str:
        if any(self.example.dim(number) is None for number in self.reached):
            return "the model computes a loss of all samples"
        return super()._differs_padded(leaves, samples)

    def _gives_the_same(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> bool:
        """Whether two halves give what the recorded steps gave."""
        for inputs, wanted, random in self.examples:
            set_random_states(random)
            outputs, saved, same = forward(inputs[: self.halves.inputs])
            weights = inputs[self.halves.inputs :]
            apart = {number: outputs[number].clone().requires_grad_() for number in self.reached}
            with torch.enable_grad():
                loss = self._weighted(apart, weights)[1]
            given = torch.autograd.grad(loss, list(apart.values()))
            own = [self.halves.laid(number, grad) for number, grad in zip(self.reached, given, strict=True)]
            if not same or not self._is_same([*backward(own, saved), *outputs], wanted[1:]):
                return False
        return True

    def of_backward(self, data: Sequence[Tensor], samples: int, lasting: Lasting | None) -> Gradients:
        """The gradients of the first samples, from what the backward gave for a loss of so many samples."""
        scale = float(samples) if self.mean else 1.0
        found = Repeated(self.templates, data, samples, self.batch.size, scale, self._of, self._arranged, lasting)
        found.plan = self.plan
        return found


def leaves_of(out: Any) -> list[Any]:
    """What a forward gives, with None in the places of tensors."""
    return [None if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(out)]


def _note(tensor: Tensor, seam: Seam, number: int) -> None:
    """Note the gradient that comes to a tensor."""

    def arrived(grad: Tensor) -> None:
        seam.gradients[number] = grad

    with torch._C.DisableTorchFunction():
        on_gradient(tensor, arrived)
