"""Uses taken together: small gradients side by side, products and convolutions of equal shape in one."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fastdp

from ..cases import square
from ..routes import forced
from ..truth import assert_step

B = 5


def tanh_between(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])


def shared() -> nn.Module:
    """A weight used twice, and layers of other shapes: none is taken for another's."""
    same = nn.Linear(6, 6)
    return tanh_between(same, nn.Linear(6, 6), same, nn.Linear(6, 5), nn.Linear(5, 6))


def dilated(*dilations: int, groups: int = 1) -> nn.Module:
    """Equal shapes; of several dilations, other geometries."""
    return tanh_between(*[nn.Conv1d(4, 4, 3, padding=d, dilation=d, groups=groups) for d in dilations])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: tanh_between(*[nn.Linear(6, 6) for _ in range(4)]), (6,)),
    "linear of tokens": (lambda: tanh_between(*[nn.Linear(6, 6) for _ in range(4)]), (9, 6)),
    "wide and thin": (lambda: tanh_between(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)), (3, 4)),
    "shared": (shared, (2, 6)),
    "convolutions": (lambda: tanh_between(*[nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)]), (4, 5, 6)),
    "dilated and grouped": (lambda: dilated(2, 2, 2, groups=2), (4, 9)),
    "of several dilations": (lambda: dilated(1, 2, 1, 2), (4, 9)),
    "of one dilation each": (lambda: dilated(1, 2), (4, 9)),
    "with GroupNorm": (
        lambda: tanh_between(*[m for _ in range(3) for m in (nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4))]),
        (4, 3, 3),
    ),
}


@pytest.fixture(params=MODELS)
def model_and_data(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    build, shape = MODELS[request.param]
    return build(), torch.randn(B, *shape)


@pytest.mark.parametrize("route", ["gram", "direct"])
def test_together_is_exact(model_and_data: tuple[nn.Module, Tensor], route: str) -> None:
    model, x = model_and_data
    with forced(route):
        assert_step(fastdp.PerSampleGradients(model), x, square)


def test_samples_that_are_no_numbers_are_left_out(model_and_data: tuple[nn.Module, Tensor]) -> None:
    """A sample with NaN has the factor 0 and is not read, in any of the sums."""
    model, x = model_and_data
    x.view(B, -1)[2, 0] = float("nan")
    kept, sums = x[[0, 1, 3, 4]], []
    for batch in (x, kept):
        with forced("gram"):
            optimizer = fastdp.DPSGD(model, lr=0.0, noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=B,
                                     loss_reduction="sum")  # fmt: skip
            square(model, batch).sum().backward()
            optimizer.step()
        assert optimizer.nonfinite_samples == (batch is x)
        sums.append([p.grad.clone() for p in model.parameters()])
        optimizer.detach()
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("base", ["DPSGD", "DPAdamW", "DPRMSprop"])
def test_each_gradient_has_memory_of_its_own(base: str) -> None:
    """DPRMSprop takes the way of two passes, the others the fused one."""
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.GroupNorm(1, 3))
    optimizer = getattr(fastdp, base)(model, lr=0.1, noise_multiplier=0.5, max_grad_norm=0.3, expected_batch_size=4)
    square(model, torch.randn(4, 5)).mean().backward()
    optimizer.step()
    grads = [p.grad for p in model.parameters()]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads) == 8
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
