"""Opacus (per-sample gradients by hooks), and how it is audited.

    pip install opacus
    python -m fastdp audit examples/audit/with_opacus.py:make_step

Opacus has no remedy for a sample with NaN, which destroys the model: the audit says so (--skip nan_sample).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from by_hand import LR, RATE, data, network
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from fastdp.audit import TorchTrainable


def make_optimizer(model, *, clipping_norm, noise_multiplier, expected_batch_size, **_):
    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        noise_multiplier=noise_multiplier,
        max_grad_norm=clipping_norm,
        expected_batch_size=expected_batch_size,
    )
    optimizer.accountant = RDPAccountant()
    optimizer.attach_step_hook(optimizer.accountant.get_optimizer_hook_fn(sample_rate=RATE))
    return wrapped, optimizer


def accumulate(optimizer, loss, last):
    """What BatchMemoryManager does with every physical batch."""
    loss.backward()
    optimizer.signal_skip_step(do_skip=not last)
    optimizer.step()
    optimizer.zero_grad()


def sample(records, steps, seed):
    draw = torch.Generator().manual_seed(seed)
    sampler = UniformWithReplacementSampler(num_samples=records, sample_rate=RATE, generator=draw, steps=steps)
    return list(sampler)


def make_step():
    return TorchTrainable(
        network,
        make_optimizer,
        F.cross_entropy,
        make_batch=data,
        loss_kind="cross_entropy",
        learning_rate=LR,
        accumulate=accumulate,
        sample=sample,
        sample_rate=RATE,
        history=lambda optimizer: optimizer.accountant.history,
    )
