"""Autograd's graph: hooks on the gradients of tensors, and a walk over the nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


def on_gradient(tensor: Tensor, hook: Callable[..., None]) -> None:
    """Call a function with the gradient that arrives at a tensor.

    If another view of the same memory was written to in place, torch makes a view's node anew when it is asked for, and
    `register_hook` does not ask: it ends the process (torch 2.13).
    """
    _ = tensor.grad_fn
    tensor.register_hook(hook)


def graph_nodes(begin: Iterable[Any]) -> Iterator[Any]:
    """These nodes of autograd's graph, and those behind them, each once, the nearest first. None stands for no node."""
    waiting = [node for node in dict.fromkeys(begin) if node is not None]
    met = {None, *waiting}
    for node in waiting:  # which grows
        yield node
        for after, _ in node.next_functions:
            if after not in met:
                met.add(after)
                waiting.append(after)
