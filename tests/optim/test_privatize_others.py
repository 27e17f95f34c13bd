"""Optimizers that `privatize` takes, of torch and of others: a private step is the optimizer's own step on the released
gradient. docs/adapters.md has the errors as a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastdp

from ..truth import truth

STEPS = 6  # RAdam, schedule-free, moves nothing in its first four
B, D = 6, 64  # D * D weights: bitsandbytes and torchao keep states of fewer than 4096 in full
OPTIMIZERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: ("torch.optim", name, {"lr": 0.01}) for name in (
        "Muon", "Adafactor", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "ASGD", "Rprop")},
    "Adafactor of transformers": ("transformers", "Adafactor", {}),  # makes its learning rate: lr is None
    "Adafactor of transformers, lr": ("transformers", "Adafactor", {"lr": 0.01, "relative_step": False}),
    "AdamW, schedule-free": ("schedulefree", "AdamWScheduleFree", {"lr": 0.01}),
    "RAdam, schedule-free": ("schedulefree", "RAdamScheduleFree", {"lr": 0.01}),
    "SGD, schedule-free": ("schedulefree", "SGDScheduleFree", {"lr": 0.1}),
    **{f"{name} of torchao": ("torchao.optim", name, {"lr": 0.01}) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")},
    **{f"{name} of bitsandbytes": ("bitsandbytes.optim", name, {"lr": 0.01}) for name in (
        "AdamW8bit", "PagedAdamW8bit", "Lion", "Lion8bit", "AdEMAMix", "LAMB")},
}  # fmt: skip


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D, bias=False), nn.Tanh(), nn.Linear(D, 2, bias=False))  # Muon: matrices alone


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)  # type: ignore[no-any-return]


def watched(kind: Any, seen: list[list[Tensor]]) -> Any:
    """The class, with a step that notes its gradients first: some steps write to them."""

    def step(self: Any, *args: Any) -> Any:
        seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return kind.step(self, *args)

    return type(kind.__name__, (kind,), {"step": step})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_the_optimizers_own(name: str) -> None:
    """Without noise and clipping. The plain optimizer gets the very gradient that was released, once that is compared
    with single samples': in a state of 8 bits, or in Muon's bfloat16, rounding becomes a step of another size."""
    module, kind, options = OPTIMIZERS[name]
    base, plain, private = getattr(pytest.importorskip(module), kind), model_of(), model_of()
    released = list[list[Tensor]]()
    theirs, inner = base(plain.parameters(), **options), watched(base, released)(private.parameters(), **options)
    ours = fastdp.privatize(inner, private, noise_multiplier=0.0, max_grad_norm=1e4, expected_batch_size=B)
    assert ours is inner and type(ours).__name__ == f"DP{kind}" and isinstance(ours, base)
    for optimizer in (theirs, ours):
        getattr(optimizer, "train", int)()  # schedule-free ones ask for it
    before, rounding = [p.detach().clone() for p in plain.parameters()], 0.0
    for step in range(STEPS):
        x = torch.randn(B, D, generator=torch.Generator().manual_seed(step))
        exact = truth(private, x, losses)
        losses(private, x).mean().backward()
        ours.step()
        ours.zero_grad()
        for p, grad, rows in zip(plain.parameters(), released[-1], exact.values(), strict=True):
            rounding = max(rounding, float((grad - rows.mean(0)).norm() / rows.mean(0).norm()))
            p.grad = grad
        theirs.step()
    pairs = list(zip(plain.parameters(), private.parameters(), before, strict=True))
    wrong, moved = (sum(float((p - q).square().sum()) for p, q in found) ** 0.5 for found in (
        [(p, q) for p, q, _ in pairs], [(p, old) for p, _, old in pairs]))  # fmt: skip
    print(f"{name}: gradient {rounding:.0e}, step {wrong / moved:.0e}")
    assert rounding < 1e-6 and moved > 0 and wrong < 1e-7 * moved
    assert ours.history == [(0.0, None, STEPS)]


def test_a_step_out_of_train_mode_counts() -> None:
    """schedulefree refuses it after the release."""
    schedulefree, model = pytest.importorskip("schedulefree"), model_of()
    inner = schedulefree.AdamWScheduleFree(model.parameters())
    optimizer = fastdp.privatize(inner, model, noise_multiplier=1.0, expected_batch_size=B)
    losses(model, torch.randn(B, D)).mean().backward()
    with pytest.raises(Exception, match="not in train mode"):
        optimizer.step()
    assert len(optimizer.history) == 1
