"""Modules within a captured forward: which one runs is known, whether C++ calls it or torch goes through its hooks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

import fastdp
from fastdp.engine.module_hooks import is_inner
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
def test_inner_modules_are_called_past_their_hooks_until_the_engine_is_gone() -> None:
    model = Model()
    engine = fastdp.PerSampleGradients(model)
    within = [module for name, module in model.named_modules() if name]
    assert all(is_inner(module._compiled_call_impl) for module in within) and model._compiled_call_impl is None
    assert_step(engine, X, losses)
    assert all(module._compiled_call_impl is None for module in copy.deepcopy(model).modules())
    engine.detach()
    assert all(module._compiled_call_impl is None for module in within)


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


@pytest.mark.parametrize("how", COPIES)
def test_copies_call_their_own_modules(how: str) -> None:
    """Also of torch's recurrent layers, which are copied in a way of their own."""
    model = nn.Sequential(Layer(), nn.GRU(4, 4))
    engine = fastdp.PerSampleGradients(model)
    found = COPIES[how](model)
    engine.detach()
    with torch.no_grad():
        for module in found.modules():  # the copy's own forward
            if isinstance(module, nn.Linear):
                module.forward = lambda x: torch.full_like(x, 0.5)  # type: ignore[method-assign]
        for module in (found, model):
            out = module(X[:, None])[0]
            assert torch.equal(out, module[1](torch.full((5, 1, 4), 0.5).tanh())[0]) == (module is found)


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
