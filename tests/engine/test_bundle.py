"""Small kept gradients side by side in one matrix: what users get as `.grad` does not show it."""

import io

import pytest
import torch
from torch import nn

import fastdp
from fastdp.engine import foreach


def trained(monkeypatch: pytest.MonkeyPatch, together: bool = True, base: str = "DPSGD") -> nn.Module:
    """A model after one step, its `.grad`s in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.GroupNorm(1, 3))
    optimizer = getattr(fastdp, base)(
        model, lr=0.1, noise_multiplier=0.5, max_grad_norm=0.3, expected_batch_size=4, seed=1
    )
    with monkeypatch.context() as patch:
        if not together:
            patch.setattr("fastdp.engine.foreach.is_small", lambda use, parameter: False)
        model(torch.randn(4, 5)).square().sum(1).mean().backward()
        optimizer.step()
    optimizer.detach()
    return model


def test_together_or_alone_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    build = foreach.Bundle.__init__
    monkeypatch.setattr(
        foreach.Bundle, "__init__", lambda self, *given: (made.append(len(given[0])), build(self, *given))[1]
    )
    one, other = trained(monkeypatch), trained(monkeypatch, together=False)
    assert made == [6], "two biases and two norm layers, once"
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("base", ["DPSGD", "DPAdamW", "DPRMSprop"])
def test_each_gradient_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    """DPRMSprop takes the way of two passes, the others the fused one."""
    parameters = list(trained(monkeypatch, base=base).parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    assert len(grads) == len(parameters) == 8
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)
    for number, grad in enumerate(grads):
        file = io.BytesIO()
        torch.save(grad, file)
        assert grad.untyped_storage().nbytes() == 4 * grad.numel(), "torch.save writes the whole storage"
        others = [g.clone() for g in grads]
        grad.resize_(1000).fill_(7.0)
        assert all(torch.equal(g, o) for k, (g, o) in enumerate(zip(grads, others, strict=True)) if k != number)
        grad.set_(torch.zeros(3))
        file.seek(0)
        assert torch.equal(torch.load(file), others[number])
