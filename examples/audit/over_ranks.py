"""A step of several processes under audit: the tests see the step on the union of the ranks' batches.

torchrun --nproc-per-node 2 -m fastdp audit examples/audit/over_ranks.py:make_step
"""

from __future__ import annotations

import torch.nn.functional as F
from by_hand import LR, RATE, data, network
from torch.nn.parallel import DistributedDataParallel
from with_fastdp import accumulate, sample

import fastdp
from fastdp.audit import TorchTrainable


def make_optimizer(model, *, clipping_norm, noise_multiplier, expected_batch_size, seed):
    wrapped = DistributedDataParallel(model)
    return wrapped, fastdp.DPSGD(
        wrapped,
        lr=LR,
        noise_multiplier=noise_multiplier,
        max_grad_norm=clipping_norm,
        expected_batch_size=expected_batch_size,  # over all ranks
        sample_rate=RATE,
        seed=seed,
    )


def make_step():
    return TorchTrainable(
        network, make_optimizer, F.cross_entropy, make_batch=data, loss_kind="cross_entropy", learning_rate=LR,
        accumulate=accumulate, sample=sample, sample_rate=RATE, history=lambda optimizer: optimizer.history,
    )  # fmt: skip
