"""fastdp under its own knife.

python -m fastdp audit examples/audit/with_fastdp.py:make_step
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from by_hand import LR, RATE, data, network

import fastdp
from fastdp.audit import TorchTrainable


def accumulate(optimizer, loss, last):
    """A physical batch; the step is taken after the last."""
    loss.backward()
    if last:
        optimizer.step()


def sample(records, steps, seed):
    loader = fastdp.poisson_loader(torch.arange(records), sample_rate=RATE, steps=steps, seed=seed)
    return [batch.numpy() for batch in loader]


def make_step(clipping="local", style="flat", adam=False):
    kind, lr = (fastdp.DPAdam, 1e-3) if adam else (fastdp.DPSGD, LR)

    def make_optimizer(model, *, clipping_norm, noise_multiplier, expected_batch_size, seed):
        return kind(
            model,
            lr=lr,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clipping_norm,
            expected_batch_size=expected_batch_size,
            clipping=clipping,
            style=style,
            sample_rate=RATE,
            seed=seed,  # so that a verdict repeats; leave it out to audit the noise that is really released
        )

    return TorchTrainable(
        network,
        make_optimizer,
        F.cross_entropy,
        make_batch=data,
        loss_kind="cross_entropy",
        optimizer="adam" if adam else "sgd",
        learning_rate=lr,
        accumulate=accumulate,
        sample=sample,
        sample_rate=RATE,
        history=lambda optimizer: optimizer.history,
    )
