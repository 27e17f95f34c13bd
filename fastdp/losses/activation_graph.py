"""Activation functions: the modules, their nodes in autograd's graph, and whether two tensors share their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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


def shared_storage(tensor: Tensor) -> tuple[Any, int]:
    """What tells whether another tensor is the same memory: a reference that keeps nothing alive, and the size."""
    try:
        return StorageWeakRef(tensor.untyped_storage()), tensor.numel()
    except (RuntimeError, NotImplementedError):  # sparse, nested and wrapped tensors have none
        return None, -1


def is_one_of(tensor: tuple[Any, int], others: Iterable[tuple[Any, int]]) -> bool:
    """Whether what `shared_storage` gave of a tensor tells that it is the same numbers as one of others."""
    ref, size = tensor
    # a reference keeps the address from being used again, so that equal addresses are the same storage
    return ref is not None and any(other is not None and ref.cdata == other.cdata and size == n for other, n in others)


def nodes_of(tensor: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph that this tensor was made by, each once."""
    waiting, met = [tensor.grad_fn], {tensor.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        for after, _ in node.next_functions:
            if after is not None and after not in met:
                met.add(after)
                waiting.append(after)


def unseen_activations(logits: Tensor, seen: Iterable[Tensor]) -> list[str]:
    """The kinds of activation functions that these logits were made with, but for those of one of `seen`."""
    known = {tensor.grad_fn for tensor in seen}
    names = ((node, node.name().partition("Backward")[0]) for node in nodes_of(logits))
    return sorted({name for node, name in names if name in NODES and not _is_seen(node, known)})


def _is_seen(node: Any, known: set[Any]) -> bool:
    """Whether the first input of this node was made by one of these, perhaps behind backward hooks of modules."""
    after, place = node.next_functions[0]
    while after is not None and after not in known and after.name().startswith("BackwardHookFunction"):
        after, place = after.next_functions[place]
    return after in known
