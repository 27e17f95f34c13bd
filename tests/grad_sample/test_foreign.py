"""Functions of other libraries are registered once, and what a user says of them stays."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdp.grad_sample import custom_rules
from fastdp.grad_sample.custom_rules import is_registered, register_rule, unregister_rule


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grads[0] @ b.T, a.T @ grads[0]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library with the function, which was not imported so far."""
    monkeypatch.setattr(custom_rules, "FUNCTIONS", {"another_library": ("Product", "OfALaterVersion")})
    monkeypatch.setattr(custom_rules, "_seen", set())
    yield lambda: monkeypatch.setitem(sys.modules, "another_library", types.SimpleNamespace(Product=Product))
    unregister_rule(Product)


def test_it_is_seen_once_the_library_is_there(library: Any) -> None:
    custom_rules.see_foreign()
    assert not is_registered(Product)
    library()
    custom_rules.see_foreign()
    assert is_registered(Product) and is_registered(Product.apply)
    unregister_rule(Product)
    custom_rules.see_foreign()
    assert not is_registered(Product)  # the user's word


def test_a_users_rule_stays(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    register_rule(Product)(None)

    def refuse(*functions: Any) -> Any:
        raise AssertionError("the user's rule was replaced")

    monkeypatch.setattr(custom_rules, "register_rule", refuse)
    custom_rules.see_foreign()
    assert is_registered(Product)
