"""Steps of two processes with bugs that one process cannot have."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fastdp.audit import TorchTrainable

LR = 0.1


def network():
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def data(seed, size):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(size, 12, generator=draw), torch.randint(4, (size,), generator=draw)


def by_hand(noise, clip):
    """A loop by hand. noise: of this rank, by std, shape, ranks and a generator; clip: what is clipped as one."""

    def train(model, batches, *, clipping_norm, noise_multiplier, seed):
        ranks, own = dist.get_world_size(), torch.Generator().manual_seed(seed * 2 + dist.get_rank())
        parameters = list(model.parameters())
        for x, y in batches:
            sums = [torch.zeros_like(p) for p in parameters]
            for part in clip(x, y):
                if not len(part[0]):
                    continue
                model.zero_grad()
                (F.cross_entropy(model(part[0]), part[1]) * 1).backward()
                norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
                scale = min(1.0, clipping_norm / max(float(norm), 1e-30))
                for total, p in zip(sums, parameters, strict=True):
                    total += scale * p.grad if torch.isfinite(norm) else 0
            for total, p in zip(sums, parameters, strict=True):
                total += noise(clipping_norm * noise_multiplier, total.shape, ranks, own)
                dist.all_reduce(total)
                with torch.no_grad():
                    p -= LR / 8 * total

    return TorchTrainable(
        network, train=train, loss=F.cross_entropy, make_batch=data, loss_kind="cross_entropy", learning_rate=LR,
        expected_batch_size=8,
    )  # fmt: skip


def each_sample(x, y):
    return [(x[k : k + 1], y[k : k + 1]) for k in range(len(x))]


def whole_share(x, y):
    return [(x, y)]


def shared_out(std, shape, ranks, draw):
    return std / ranks**0.5 * torch.randn(shape, generator=draw)


def too_little(std, shape, ranks, draw):
    return std / ranks * torch.randn(shape, generator=draw)


def right():
    return by_hand(shared_out, each_sample)


def quiet_noise():
    return by_hand(too_little, each_sample)


def clips_shares():
    return by_hand(shared_out, whole_share)


def drifts_apart():
    step = right()
    train = step.train

    def apart(model, batches, **given):
        train(model, batches, **given)
        with torch.no_grad():
            next(model.parameters()).add_(1e-3 * dist.get_rank())

    step.train = apart
    return step
