"""The three ways to make a replayed step: as one call, by its backward, or by a loss with a `backward()` of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import GraphError, StepError
from ..utils.pytree import tensors_in

Begun = tuple[Tensor, Callable[[], None] | None]  # losses [B], and what hands their gradients over; None: autograd does


class _Replayed(torch.autograd.Function):
    """A loss whose backward was replayed already: what it found waits until somebody asks for it."""

    @staticmethod
    def forward(node: Any, token: Tensor, loss: Tensor, hand_over: Callable[[], None]) -> Tensor:
        node.hand_over, node.spent = hand_over, False
        return loss.clone()

    @staticmethod
    def backward(node: Any, grad: Tensor) -> Any:
        if node.spent:
            raise GraphError("a second backward through a replayed step: its samples would contribute twice")
        if torch.is_grad_enabled():
            raise GraphError("backward with create_graph=True: a replayed step has no gradient of a gradient")
        if grad.numel() != 1 or float(grad) != 1:
            raise GraphError(_ALONE.format("a gradient that is not 1"))
        node.spent = True
        node.hand_over()
        return None, None, None


_ALONE = (
    "the loss of a replayed step was scaled, or added up with others, before backward(), by {}: its gradients are "
    "known of itself alone. Call backward() on the loss as it is, and detach() it for sums and logs"
)
_SCALING = {Tensor.mul, Tensor.div, Tensor.true_divide, torch.mul, torch.div, torch.true_divide, Tensor.__rmul__}
_BACKWARDS = {Tensor.backward, torch.autograd.backward}


class ReplayedLoss(Tensor):
    """The loss of a replayed step. It can be looked at, and `backward()` called on it alone: a sum with another loss
    would hand over its gradients, and lose, or add to them, those of the other."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in _SCALING and len(args) == 2 and not kwargs and any(type(x) in (int, float) and x == 1 for x in args):
            if isinstance(args[0], cls):
                return args[0]
        if func is torch.autograd.backward and len(tensors_in((args[:1], kwargs.get("tensors")))) != 1:
            raise GraphError(_ALONE.format("one backward() of several losses"))
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__format__:
                return format(args[0].as_subclass(Tensor), *args[1:])
            version = args[0]._version if args and isinstance(args[0], Tensor) else 0
            out = func(*args, **kwargs)
            if func in _BACKWARDS or name == "__get__" or (out is args[0] and out._version == version):
                return out
            if any(tensor.requires_grad for tensor in tensors_in(out)):
                raise GraphError(_ALONE.format(f"{name}()"))
            return out


class ReplayedSteps:
    """What recorded steps can be asked for. `optimizer` is that of the steps, whose loss is a mean or a sum.

    losses: of the last batch, one per sample [B], detached. On CUDA, they stand until the next replay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mean: bool) -> None:
        self._optimizer, self._mean = optimizer, mean
        self.losses = torch.zeros(0)

    def __call__(self, *batch: Any) -> Tensor:
        """Make one private step on a batch.

        Args:
            batch: as the example; any number of samples. More than the largest size, or rows of another shape, go the
                way of every other step.

        Returns:
            The loss of the batch, detached; 0 if it has no sample.

        Raises:
            What `step` raises, and GraphError if the step changes again and again.
        """
        loss = self.backward(*batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def backward(self, *batch: Any) -> Tensor:
        """Run forward, loss and backward: the clipped sums wait for the optimizer's `step`, as after any backward.

        Args, result and errors are those of a call.
        """
        loss, hand_over = self._begin_loss(batch)
        if hand_over is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            hand_over()
        return loss.detach()

    def loss(self, *batch: Any) -> Tensor:
        """Return the loss of a batch, for loops that call `backward()` on it, and `step` (Lightning's, Accelerate's).

        It must not be scaled or added to anything before (GraphError), nor the batch or a parameter written to
        (StepError). Args and other errors are those of a call.
        """
        loss, hand_over = self._begin_loss(batch)
        if hand_over is None:
            return loss
        read = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        read += [p for group in self._optimizer.param_groups for p in group["params"]]
        before = [leaf._version for leaf in read]

        def unchanged() -> None:
            if [leaf._version for leaf in read] != before:
                raise StepError(
                    "the parameters, or the batch, were written to between a replayed step's loss and its backward: "
                    "its gradients are of what they were. Make a step before the next loss, and load batches into "
                    "memory of their own"
                )
            hand_over()

        made = _Replayed.apply(torch.zeros((), requires_grad=True), loss, unchanged)  # type: ignore[no-untyped-call]
        return made.as_subclass(ReplayedLoss)  # type: ignore[no-any-return]

    def _begin_loss(self, batch: tuple[Any, ...]) -> Begun:
        losses, hand_over = self._begin(batch)
        self.losses = losses.detach()
        return (losses.mean() if self._mean and len(losses) else losses.sum()), hand_over

    def _begin(self, batch: tuple[Any, ...]) -> Begun:
        raise NotImplementedError
