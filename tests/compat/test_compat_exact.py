"""Steps where Opacus's are wrong: each is the sum of clipped gradients of one sample at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compat_runs import clipped_sum, private, weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(7, 2, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids.flatten(), torch.arange(0, ids.numel(), 3))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.both = nn.Linear(4, 2), nn.Linear(4, 2), True

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.unused(x) if self.both else self.used(x)


def convolution(**options) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, **options), nn.Flatten(), nn.Linear(48, 2))


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(5, 2, 4, 4)
IDS = torch.tensor([[1, 1, 2], [3, 3, 3], [0, 1, 2], [4, 4, 0], [5, 6, 0]])
MODELS = {
    "channels_last": (convolution, IMAGES.contiguous(memory_format=torch.channels_last)),
    "circular padding": (lambda: convolution(padding_mode="circular"), IMAGES),
    "an id twice in a bag": (Bag, IDS),
    "padding_idx": (lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2)), IDS),
    "LayerNorm without bias": (lambda: nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 2)), X),
    "a layer not used in the second step": (Unused, X),
}


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, mode):
    build, x = MODELS[name]
    torch.manual_seed(1)
    net, y = build(), torch.tensor([0, 1, 1, 0, 1])
    data = torch.utils.data.TensorDataset(x, y)
    _, module, optimizer, _, _ = private(mode, module=net, data=data, batch_size=5, lr=0.1)
    for both in (True, False):
        net.both = both
        plain = build()
        plain.load_state_dict(net.state_dict())
        plain.both = both
        want = weights(net) - 0.1 * clipped_sum(plain, x, y, 0.5) / 5
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # in mode "ghost" any loss is clipped, not only the criterion's
        optimizer.step()
        torch.testing.assert_close(weights(net), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 3])
def test_losses_of_several_columns_in_mode_ghost(columns):
    """Opacus multiplies losses [B, 1] by factors [B] to [B, B]: nothing is clipped."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, columns), torch.randn(6, 4), 100 * torch.randn(6, columns)
    data = torch.utils.data.TensorDataset(x, y)
    _, module, _, criterion, _ = private("ghost", module=net, data=data, batch_size=6, criterion=nn.MSELoss())
    criterion(module(x), y).backward()
    found = torch.cat([p.grad.flatten() for p in net.parameters()])
    total, plain = torch.zeros_like(found), nn.Linear(4, columns)
    plain.load_state_dict(net.state_dict())
    for a, b in zip(x, y, strict=True):
        grads = torch.autograd.grad(F.mse_loss(plain(a[None]), b[None]), list(plain.parameters()))
        flat = torch.cat([g.flatten() for g in grads])
        total += flat * (0.5 / flat.norm()).clamp(max=1)
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-6)


def test_norms_under_autocast_stay_within_the_bound():
    for seed in range(20):
        torch.manual_seed(seed)
        net, x = nn.Linear(64, 64), torch.randn(1, 16, 64)
        _, module, optimizer, _, _ = private("hooks", module=net, data=[x[0]], batch_size=1)
        before = weights(net)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        out.float().square().sum().backward()
        optimizer.step()
        assert (before - weights(net)).norm() <= 0.5 * (1 + 1e-5)
