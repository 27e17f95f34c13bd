"""Modules within a captured forward: which one runs is known, whether C++ calls it or torch goes through its hooks."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

import fastdp
from fastdp.errors import SampleMixingError
from fastdp.ops.registry import native

from ..truth import assert_step

needs_extension = pytest.mark.skipif(isinstance(native(), str), reason=str(native()))


class Layer(nn.Module):
    """A linear layer that may raise, or mix the batch's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fails, self.mixes = nn.Linear(4, 4), False, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.fails:
            raise ValueError("not today")
        return h - h.mean(0) if self.mixes else h.tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.first(x)
        except ValueError:
            x = x.sin()
        return self.second(x)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().sum(1)


@needs_extension
def test_inner_modules_are_called_past_their_hooks_while_a_forward_is_captured() -> None:
    model, found = Model(), list[Any]()
    engine = fastdp.PerSampleGradients(model)
    handle = model.first.register_forward_hook(lambda *_: found.extend(m._compiled_call_impl for m in model.modules()))
    losses(model, X).mean().backward()
    handle.remove()
    assert found[0] is None and all(map(inspect.isbuiltin, found[1:]))
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert_step(engine, X, losses)
    engine.detach()
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("fails", [False, True])
def test_what_compiles_or_copies_a_model_finds_no_calls(fails: bool) -> None:
    model = nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), Model())
    fastdp.PerSampleGradients(model)
    model[1].second.fails = fails
    with contextlib.suppress(ValueError):
        losses(model, X).mean().backward()
    model[1].second.fails = False
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(X), model(X))
    torch.save(model, io.BytesIO())
    torch.compiler.reset()


def copied_by_dict(module: nn.Module) -> nn.Module:
    """As libraries of meta-learning clone models."""
    found = module.__new__(type(module))
    found.__dict__ = module.__dict__.copy()
    found._parameters = {name: nn.Parameter(2 * p) for name, p in module._parameters.items() if p is not None}
    found._modules = {name: copied_by_dict(each) for name, each in module._modules.items() if each is not None}
    return found


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep": copy.deepcopy,
    "pickled": lambda module: pickle.loads(pickle.dumps(module)),
    "by dict": copied_by_dict,
}


def keep_copy(copies: list[nn.Module], how: str, model: nn.Module, *_: Any) -> None:
    if not copies:
        copies.append(COPIES[how](model))


@pytest.mark.parametrize("how", COPIES)
def test_copies_call_their_own_modules(how: str) -> None:
    """Also of torch's recurrent layers, which are copied in a way of their own."""
    model, copies = nn.Sequential(Layer(), nn.GRU(4, 4, batch_first=True)), list[nn.Module]()
    engine = fastdp.PerSampleGradients(model)
    handle = model[0].register_forward_hook(functools.partial(keep_copy, copies, how, model))  # in a captured forward
    model(X[:, None])
    handle.remove()
    engine.detach()
    (found,) = copies
    found[0]._forward_hooks.clear()
    with torch.no_grad():
        for module in found.modules():  # the copy's own forward
            if isinstance(module, nn.Linear):
                module.forward = lambda x: torch.full_like(x, 0.5)  # type: ignore[method-assign]
        for module in (found, model):
            out = module(X[:, None])[0]
            assert torch.equal(out, module[1](torch.full((5, 1, 4), 0.5).tanh())[0]) == (module is found)


def test_a_copy_is_quantized() -> None:
    """By tools that register a module's hooks anew."""
    engine = fastdp.PerSampleGradients(model := Model())
    quantization = pytest.importorskip("torch.ao.quantization")
    found = quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    assert torch.isfinite(found(X)).all()
    engine.detach()


@pytest.mark.parametrize("plain", [False, True])
def test_a_module_that_raises_and_one_that_mixes_samples(plain: bool) -> None:
    model = Model()
    engine = fastdp.PerSampleGradients(model)
    if plain:  # as torch calls them
        model.first.register_forward_hook(lambda *_: None)
        model.second.register_forward_hook(lambda *_: None)
    for model.first.fails in (False, True, False):
        assert_step(engine, X, losses)
    model.second.mixes = True
    with pytest.raises(SampleMixingError, match="module 'second'"):
        losses(model, X).mean().backward()
    model.second.mixes, model.first.fails = False, True
    assert_step(engine, X, losses)


HOOKS: dict[str, Callable[[nn.Module, list[int]], object]] = {
    "after": lambda module, seen: module.register_forward_hook(lambda *_: seen.append(1)),
    "before": lambda module, seen: module.register_forward_pre_hook(lambda *_: seen.append(1)),
    "backward": lambda module, seen: module.register_full_backward_hook(lambda *_: seen.append(1)),
    "before backward": lambda module, seen: module.register_full_backward_pre_hook(lambda *_: seen.append(1)),
    "every module": lambda module, seen: register_module_forward_hook(lambda *_: seen.append(1)),
    "every backward": lambda module, seen: register_module_full_backward_hook(lambda *_: seen.append(1)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_users_are_called(name: str) -> None:
    model, seen = Model(), list[int]()
    engine = fastdp.PerSampleGradients(model)
    handle = HOOKS[name](model.first, seen)
    try:
        losses(model, X).mean().backward()
        assert seen and len(engine.norms()) == len(X)
    finally:
        handle.remove()  # type: ignore[attr-defined]
    count = len(seen)
    assert_step(engine, X, losses)
    assert len(seen) == count
