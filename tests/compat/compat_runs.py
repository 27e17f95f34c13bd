"""What the tests of fastdp.compat.opacus train."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastdp.compat.opacus import PrivacyEngine

MODES = ("hooks", "functorch", "ew", "ghost")


def data(size: int = 32, seed: int = 0) -> TensorDataset:
    """Records of very different gradients."""
    draw = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-1, 1, size)[:, None]
    return TensorDataset(torch.randn(size, 3, generator=draw) * scale, torch.randint(0, 2, (size,), generator=draw))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def private(mode: str, engine: Any = None, **options: Any) -> tuple[Any, Any, Any, Any, Any]:
    """engine, module, optimizer, criterion, loader: 32 records, batches of 8 unless batch_size says otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine or PrivacyEngine(accountant="rdp")
    net = options.pop("module", None) or model()
    records = options.pop("data", None) or data()
    loader = options.pop("data_loader", None) or DataLoader(records, batch_size=options.pop("batch_size", 8))
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "poisson_sampling": False, **options}
    optimizer = torch.optim.SGD(net.parameters(), lr=options.pop("lr", 1.0))
    settings.pop("lr", None)
    made = engine.make_private(module=net, optimizer=optimizer, data_loader=loader, grad_sample_mode=mode, **settings)
    if mode == "ghost":
        return engine, *made
    module, optimizer, loader = made
    return engine, module, optimizer, nn.CrossEntropyLoss(), loader


def losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(x), y, reduction="none")


def clipped_sum(net: nn.Module, x: Tensor, y: Tensor, bound: float) -> Tensor:
    """One sample at a time: the sum of clipped gradients, all parameters in one vector."""
    parameters = list(net.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for i in range(len(x)):
        loss = losses(net, x[i : i + 1], y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([g.reshape(-1) for g in grads]).double()
        total += flat * min(1.0, bound / flat.norm().item())
    return total


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).double()
