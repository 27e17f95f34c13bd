"""The three ways to make a replayed step: as one call, by its backward, or by a loss with a `backward()` of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphError

Begun = tuple[Tensor, Callable[[], None] | None]  # a loss, and what hands its gradients over; None: autograd does


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
        if grad.numel() != 1 or float(grad) != 1:
            raise GraphError(
                "the loss of a replayed step was scaled, or added up with others, before backward(): its gradients are "
                "known of itself alone. Call backward() on the loss as it is"
            )
        node.spent = True
        node.hand_over()
        return None, None, None


class ReplayedSteps:
    """What recorded steps can be asked for. `optimizer` is that of the steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

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
        loss, hand_over = self._begin(batch)
        if hand_over is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            hand_over()
        return loss.detach()

    def loss(self, *batch: Any) -> Tensor:
        """Return the loss of a batch, for loops that call `backward()` on it, and `step` (Lightning's, Accelerate's).

        It must not be scaled before. Args and errors are those of a call.
        """
        loss, hand_over = self._begin(batch)
        if hand_over is None:
            return loss
        return _Replayed.apply(torch.zeros((), requires_grad=True), loss, hand_over)  # type: ignore[no-any-return, no-untyped-call]

    def _begin(self, batch: tuple[Any, ...]) -> Begun:
        raise NotImplementedError
