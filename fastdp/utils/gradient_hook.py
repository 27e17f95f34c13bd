"""Hooks on the gradients of tensors."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def on_gradient(tensor: Tensor, hook: Callable[..., None]) -> None:
    """Call a function with the gradient that arrives at a tensor.

    If another view of the same memory was written to in place, torch makes a view's node anew when it is asked for, and
    `register_hook` does not ask: it ends the process (torch 2.13).
    """
    _ = tensor.grad_fn
    tensor.register_hook(hook)
