"""What each fault of Opacus comes to, measured: functions of the package that is tried, Opacus or fastdp's."""

from __future__ import annotations

import importlib
import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

OURS, THEIRS = "fastdp.compat.opacus", "opacus"


class Package:
    """A package and its modules: package("schedulers").StepNoise."""

    def __init__(self, name: str) -> None:
        self.name, self.theirs = name, name == THEIRS

    def __call__(self, path: str = "") -> Any:
        return importlib.import_module(f"{self.name}.{path}" if path else self.name)

    def private(self, net: nn.Module, *tensors: Tensor, mode: str = "hooks", batch: int = 0, **options: Any) -> Any:
        loader = DataLoader(TensorDataset(*tensors), batch_size=batch or len(tensors[0]))
        settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False, **options}
        engine = self("").PrivacyEngine(accountant="rdp")
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        return engine.make_private(
            module=net, optimizer=optimizer, data_loader=loader, grad_sample_mode=mode, **settings
        )


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1).double() for t in tensors])


def truth(net: nn.Module, x: Tensor, bound: float, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """The clipped mean of gradients, one sample at a time."""
    total = 0.0
    for i in range(len(x)):
        grads = torch.autograd.grad(loss(net(x[i : i + 1])), list(net.parameters()), allow_unused=True)
        one = flat(torch.zeros_like(p) if g is None else g for g, p in zip(grads, net.parameters(), strict=True))
        total = total + one * min(1.0, bound / one.norm().item())
    return total / len(x)  # type: ignore[return-value]


def square(out: Tensor) -> Tensor:
    return out.flatten(1).square().sum(1).mean()


def error(package: Package, net: nn.Module, x: Tensor, mode: str = "hooks", bound: float = 1.0) -> float:
    """Of one step on any loss, relative to the truth."""
    want = truth(net, x, bound, square)
    before = flat(net.parameters())
    module, optimizer = package.private(net, x, mode=mode, max_grad_norm=bound)[:2]
    square(module(x)).backward()
    optimizer.step()
    return ((before - flat(net.parameters())) - want).norm().item() / want.norm().item()


# ------------------------------------------------------------------ mode ghost


def own_criterion(package: Package) -> float:
    torch.manual_seed(0)
    return error(package, nn.Linear(3, 2), 10 * torch.randn(6, 3), "ghost")


def column_of_losses(package: Package) -> float:
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 1), 10 * torch.randn(6, 3), torch.randn(6, 1)
    total = 0.0
    for i in range(6):
        one = flat(torch.autograd.grad((net(x[i : i + 1]) - y[i]).square().sum(), list(net.parameters())))
        total = total + one * min(1.0, 1 / one.norm().item())
    want, before = total / 6, flat(net.parameters())
    module, optimizer, criterion, _ = package.private(net, x, y, mode="ghost", criterion=nn.MSELoss())
    criterion(module(x), y).backward()
    optimizer.step()
    return ((before - flat(net.parameters())) - want).norm().item() / want.norm().item()  # type: ignore[union-attr]


def two_backwards(package: Package) -> float:
    """Share of the first batch's gradient that is lost."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.randint(0, 2, (8,))
    before = flat(net.parameters())
    want = flat(torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters())))
    module, optimizer, criterion, _ = package.private(net, x, y, mode="ghost", max_grad_norm=100.0, batch=4)
    for part in (slice(0, 4), slice(4, 8)):
        criterion(module(x[part]), y[part]).backward()
    optimizer.step()
    moved = before - flat(net.parameters())
    return min((moved - k * want).norm().item() / (k * want).norm().item() for k in (1, 2))


def unused_layer(package: Package) -> float:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.use = nn.Linear(3, 3), nn.Linear(3, 3), True

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(x) if self.use else x

    torch.manual_seed(0)
    net, x, y = Two(), torch.randn(6, 3), torch.randint(0, 3, (6,))
    module, optimizer, criterion, _ = package.private(net, x, y, mode="ghost", max_grad_norm=0.5)
    criterion(module(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.use, plain = False, nn.Linear(3, 3)
    plain.load_state_dict(net.a.state_dict())
    total = 0.0
    for i in range(6):
        grads = torch.autograd.grad(F.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]), list(plain.parameters()))
        total = total + flat(grads) * min(1.0, 0.5 / flat(grads).norm().item())
    before = flat(net.a.parameters())
    criterion(module(x), y).backward()
    optimizer.step()
    return ((before - flat(net.a.parameters())) - total / 6).norm().item() / (total / 6).norm().item()  # type: ignore


def clip_scheduler(package: Package) -> float:
    """Norm of one sample's step over the scheduled clipping norm, minus 1."""
    net, x, y = nn.Linear(3, 2), 100 * torch.ones(1, 3), torch.zeros(1, dtype=torch.long)
    nn.init.zeros_(net.weight)
    module, optimizer, criterion, _ = package.private(net, x, y, mode="ghost")
    package("schedulers").LambdaGradClip(optimizer, scheduler_function=lambda epoch: 0.1)
    before = flat(net.parameters())
    criterion(module(x), y).backward()
    optimizer.step()
    return (before - flat(net.parameters())).norm().item() / 0.1 - 1


def adaptive_clipping(package: Package) -> float:
    """Sum of clipped gradients over the most that it may be, minus 1; negative where within."""
    torch.manual_seed(0)
    x, y, net = torch.randn(40, 3), torch.randn(40, 1), nn.Linear(3, 1)
    x[0] *= 1000
    engine = package("utils.adaptive_clipping").PrivacyEngineAdaptiveClipping()
    module, optimizer, criterion, _ = engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), criterion=nn.MSELoss(), noise_multiplier=0.0,
        data_loader=DataLoader(TensorDataset(x, y), 40), max_grad_norm=1.0, grad_sample_mode="ghost",
        poisson_sampling=False, min_clipbound=0.5, max_clipbound=2.0,
    )  # fmt: skip
    before = flat(net.parameters())
    criterion(module(x), y).backward()
    optimizer.step()
    return (before - flat(net.parameters())).norm().item() / 2.0 - 1


# ------------------------------------------------------------------ layers


def channels_last(package: Package) -> float:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    return error(package, net, torch.randn(5, 3, 8, 8).to(memory_format=torch.channels_last))


def circular_padding(package: Package) -> float:
    torch.manual_seed(0)
    return error(package, nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), torch.randn(5, 2, 6, 6))


def repeated_ids(package: Package) -> float:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(5, 3, mode="sum")

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids.flatten(), torch.arange(0, ids.numel(), 3))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return error(package, Bag(), torch.tensor([[1, 1, 2], [3, 3, 3], [0, 1, 2]]))


def attention_batch_first(package: Package) -> float:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, batch_first=True)
    found = package("layers").DPMultiheadAttention(8, 2, batch_first=True)
    found.load_state_dict(plain.state_dict())
    x = torch.randn(3, 5, 8)
    want = plain(x, x, x)[0]
    return ((found(x, x, x)[0] - want).norm() / want.norm()).item()


def recurrent_dropout(package: Package) -> float:
    """Share of the last layer's outputs that dropout has zeroed; torch: none."""
    torch.manual_seed(0)
    layer = package("layers").DPLSTM(3, 64, num_layers=2, dropout=0.5)
    return (layer(torch.randn(5, 4, 3))[0] == 0).float().mean().item()


# ------------------------------------------------------------------ numbers


def bf16_norms(package: Package) -> float:
    """Norm of a clipped sample over the clipping norm, minus 1, under autocast to bfloat16."""
    worst = -1.0
    for seed in range(20):
        torch.manual_seed(seed)
        net, x = nn.Linear(64, 64), torch.randn(1, 16, 64)
        module, optimizer = package.private(net, x)[:2]
        before = flat(net.parameters())
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        square(out.float()).backward()
        optimizer.step()
        worst = max(worst, (before - flat(net.parameters())).norm().item() - 1)
    return worst


def one_nan(package: Package) -> float:
    """Share of the weights that are NaN after a step with one bad sample."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2), torch.randn(6, 3)
    x[2, 1] = math.nan
    module, optimizer = package.private(net, x)[:2]
    square(module(x)).backward()
    optimizer.step()
    return flat(net.parameters()).isnan().double().mean().item()


def expected_batch_size(package: Package) -> float:
    """|expected batch size - 1| for 49 records in batches of 1."""
    net = nn.Linear(2, 2)
    return abs(package.private(net, torch.randn(49, 2), batch=1)[1].expected_batch_size - 1)


def batches_of_an_epoch(package: Package) -> float:
    """Batches that 93 records at a rate of 1/93 fall short of."""
    sampler = package("utils.uniform_sampler").UniformWithReplacementSampler
    return 93 - len(sampler(num_samples=93, sample_rate=1 / 93))


def sampling_rate(package: Package) -> float:
    """How much more often than accounted a record is drawn at a rate of 1e-6, by who joins in the cell of a tie."""
    rate, cell, real = 1e-6, 2.0**-24, torch.rand

    def rand(*args: Any, **kwargs: Any) -> Tensor:
        found = real(*args, **kwargs)
        return found.fill_(16 * cell) if found.dtype == torch.float32 else found

    kind = package("utils.uniform_sampler").UniformWithReplacementSampler
    sampler = kind(num_samples=1_000_000, sample_rate=rate, generator=torch.Generator().manual_seed(0))
    torch.rand = rand  # type: ignore[assignment]
    try:
        share = len(next(iter(sampler))) / 1_000_000
    finally:
        torch.rand = real
    return (16 + share) * cell / rate - 1


def noise_for_epochs(package: Package) -> float:
    """Steps of 3 epochs at a rate of 1/75 that the noise multiplier is not made for."""
    told: list[int] = []

    class Telling(package("accountants").RDPAccountant):  # type: ignore[misc]
        def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
            told.append(self.history[0][2])
            return float(super().get_epsilon(delta, *args, **kwargs))

    registry = package("accountants.registry")._ACCOUNTANTS
    kept = registry["rdp"]
    try:
        registry["rdp"] = Telling
        package("accountants.utils").get_noise_multiplier(
            target_epsilon=2.0, target_delta=1e-5, sample_rate=1 / 75, epochs=3, accountant="rdp"
        )
    finally:
        registry["rdp"] = kept
    return 225 - told[0]


# ------------------------------------------------------------------ modules


def running_statistics(package: Package) -> float:
    """How far a fixed InstanceNorm's running mean moves in a forward on data of mean 3."""
    net = package("validators").ModuleValidator.fix(nn.InstanceNorm2d(3, affine=True, track_running_stats=True))
    net(torch.randn(4, 3, 5, 5) + 3)
    return 0.0 if net.running_mean is None else net.running_mean.abs().max().item()


def _coupled(package: Package, norm: nn.Module) -> float:
    """1 where a model that mixes samples trains without a word."""
    net = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2))
    try:
        module, optimizer = package.private(net, torch.randn(6, 3))[:2]
        square(module(torch.randn(6, 3))).backward()
        optimizer.step()
    except (ValueError, RuntimeError):
        return 0.0
    return 1.0


class DerivedNorm(nn.BatchNorm1d):
    """A batch norm of another name."""


def batch_norm_without_parameters(package: Package) -> float:
    return _coupled(package, nn.BatchNorm1d(4, affine=False))


def batch_norm_frozen(package: Package) -> float:
    return _coupled(package, nn.BatchNorm1d(4).requires_grad_(False))


# ------------------------------------------------------------------ runs


def loop_left_early(package: Package) -> float:
    """Physical batches of the second pass that step at the wrong place, after a pass left in the middle."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 2), torch.randn(16, 3), torch.randint(0, 2, (16,))
    module, optimizer, loader = package.private(net, x, y, batch=8)
    wrong = 0
    manager = package("utils.batch_memory_manager").BatchMemoryManager
    for steps in (1, 4):
        with manager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as batches:
            taken = 0
            for part, target in batches:
                optimizer.zero_grad()
                if taken == steps:
                    break
                before = flat(net.parameters())
                F.cross_entropy(module(part), target).backward()
                optimizer.step()
                moved = bool((flat(net.parameters()) != before).any())
                wrong += moved != (taken % 2 == 1)
                taken += 1
    return wrong


def schedule_after_a_checkpoint(package: Package) -> float:
    """Relative error of the noise multiplier after a checkpoint of a schedule is loaded."""
    found = []
    for _ in range(2):
        optimizer = package.private(nn.Linear(2, 2), torch.randn(4, 2), noise_multiplier=1.0)[1]
        found.append((optimizer, package("schedulers").ExponentialNoise(optimizer, gamma=0.5)))
    for _ in range(3):
        found[0][1].step()
    found[1][1].load_state_dict(found[0][1].state_dict())
    return float(found[1][0].noise_multiplier / found[0][0].noise_multiplier - 1)


def lightning_generator(package: Package) -> float:
    """1 where the generator given to DPLightningDataModule does not reach the sampler."""
    try:
        base = importlib.import_module("pytorch_lightning").LightningDataModule
    except ImportError:
        base = importlib.import_module("lightning.pytorch").LightningDataModule
    data = types.new_class("Data", (base,))()
    data.train_dataloader = lambda: DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    generator = torch.Generator()
    loader = package("lightning").DPLightningDataModule(data, generator).train_dataloader()
    return float(loader.batch_sampler.generator is not generator)
